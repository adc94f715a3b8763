"""The check that every vector passes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from nobackfill.errors import InvalidInputError
from nobackfill.vectors import check_vectors, vector_from_bytes

DIM = 3


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64]),
        st.tuples(st.integers(0, 5), st.integers(1, 5)),
        elements=st.floats(width=32) | st.sampled_from([0.0, 1e15, -1e30, float("nan")]),
    )
)
def test_vectors_pass_only_if_every_row_is_sound(values: NDArray[np.float32]) -> None:
    rows = values.astype(np.float64)
    sound = values.shape[1] == DIM
    for row in rows:
        norm = float(np.sqrt(sum(float(x) ** 2 for x in row)))
        sound = sound and bool(np.isfinite(row).all()) and norm <= 1e15 * (1 + 1e-6)
    try:
        got = check_vectors(values, DIM, error_name="test")
    except InvalidInputError:
        borderline = np.isclose(np.linalg.norm(rows, axis=1), 1e15, rtol=1e-5).any()
        assert not sound or borderline
        return
    assert sound
    assert got.dtype == np.float32
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, values.astype(np.float32))


@pytest.mark.parametrize(
    "values",
    [np.zeros(3, np.float32), np.zeros((1, 3), np.int64), np.zeros((1, 3), bool),
     np.zeros((1, 1, 3), np.float32), np.zeros((2, 4), np.float32), "text", [["a", "b", "c"]]],
    ids=str,
)  # fmt: skip
def test_other_shapes_and_types_are_refused(values: object) -> None:
    with pytest.raises(InvalidInputError, match="query"):
        check_vectors(values, DIM, error_name="query")  # type: ignore[arg-type]


def test_unit_vectors_have_norm_one() -> None:
    good = np.array([[1, 0, 0], [0.6, 0.8, 0]], np.float32)
    check_vectors(good, DIM, error_name="test", unit_norm=True)
    for bad in (good * 1.01, good * 0.99, good * 0):
        with pytest.raises(InvalidInputError, match="norm 1"):
            check_vectors(bad, DIM, error_name="test", unit_norm=True)


def test_views_become_contiguous() -> None:
    wide = np.arange(12, dtype=np.float32).reshape(2, 6)
    assert check_vectors(wide[:, ::2], DIM, error_name="test").flags.c_contiguous


def test_refusals_hold_no_values() -> None:
    secret = np.array([[1.234567, np.nan, 0]], np.float32)
    with pytest.raises(InvalidInputError) as caught:
        check_vectors(secret, DIM, error_name="test")
    assert "1.23" not in str(caught.value)


def test_bytes_are_little_endian_floats_of_the_right_number() -> None:
    values = np.array([1.5, -2, 3], "<f4")
    np.testing.assert_array_equal(
        vector_from_bytes(values.tobytes(), DIM, error_name="test"), [values]
    )
    for wrong in (b"", values.tobytes()[:-1], values.tobytes() + b"\0" * 4):
        with pytest.raises(InvalidInputError, match="12 bytes"):
            vector_from_bytes(wrong, DIM, error_name="test")
