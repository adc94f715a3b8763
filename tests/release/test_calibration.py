"""Calibration: distances to probabilities, against a slow loop."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobackfill.release.calibration import Scorer, find_curve, match_probabilities
from nobackfill.release.manifest import Calibration
from tests.support.releases import draft

SPACE = "sp-" + "0" * 64


def slow(distances: tuple[float, ...], probabilities: tuple[float, ...], x: float) -> float:
    if x <= distances[0]:
        return probabilities[0]
    for i in range(1, len(distances)):
        if x <= distances[i]:
            share = (x - distances[i - 1]) / (distances[i] - distances[i - 1])
            return probabilities[i - 1] + share * (probabilities[i] - probabilities[i - 1])
    return probabilities[-1]


@given(
    steps=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 100)), min_size=1, max_size=9),
    at=st.lists(st.floats(-10, 1000), max_size=20),
)
def test_scores_follow_the_curve(steps: list[tuple[int, int]], at: list[float]) -> None:
    distances = tuple(np.cumsum([0, *(d for d, _ in steps)]) / 7)
    falls = np.cumsum([0, *(p for _, p in steps)])
    probabilities = tuple(1 - falls / falls[-1])
    curve = Calibration(
        query_space=SPACE, gallery_space=SPACE, origin="native", items=3,
        distances=distances, probabilities=probabilities,
    )  # fmt: skip
    got = match_probabilities(curve, at)
    assert got.shape == (len(at),)
    np.testing.assert_allclose(got, [slow(distances, probabilities, x) for x in at], atol=1e-9)
    assert (np.diff(match_probabilities(curve, sorted(at))) <= 1e-12).all()


def test_distances_outside_of_the_curve_are_flagged() -> None:
    """Of earlier releases as of later ones: the manifest is the same."""
    curve = Calibration(
        query_space=SPACE, gallery_space=SPACE, origin="native", items=3,
        distances=(0.5, 1, 2), probabilities=(0.98, 0.5, 0.02),
    )  # fmt: skip
    at = [0, 0.49, 0.5, 1.5, 2, 2.01, np.nan]
    assert Scorer(curve).is_beyond_calibration(at).tolist() == [
        True,
        True,
        False,
        False,
        False,
        True,
        False,
    ]
    np.testing.assert_allclose(
        match_probabilities(curve, at[:-1]), [0.98, 0.98, 0.98, 0.26, 0.02, 0.02]
    )


def test_no_number_is_no_match() -> None:
    curve = Calibration(
        query_space=SPACE, gallery_space=SPACE, origin="native", items=3,
        distances=(0, 1), probabilities=(1, 0),
    )  # fmt: skip
    assert np.isnan(match_probabilities(curve, [np.nan])).all()
    assert match_probabilities(curve, [[np.inf]]) == [[0]]


@pytest.mark.parametrize(
    ("distances", "probabilities"),
    [((0, 1), (0, 1)), ((0, 1), (1, 1)), ((1, 1), (1, 0)), ((0, 1, 2), (1, 0)), ((0,), (1,)),
     ((0, 1), (1.5, 0))],
)  # fmt: skip
def test_curves_that_do_not_fall_are_refused(
    distances: tuple[float, ...], probabilities: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match=r"expected|validation"):
        Calibration(
            query_space=SPACE, gallery_space=SPACE, origin="native", items=3,
            distances=distances, probabilities=probabilities,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("origin", "scale", "why"),
    [("native", (1.5, 0.1), "upgraded vectors"), ("upgraded", (0, 0.1), "greater than 0"),
     ("upgraded", (-1, 0.1), "greater than 0"), ("upgraded", (np.nan, 0.1), "finite"),
     ("upgraded", (1.5, np.inf), "finite")],
)  # fmt: skip
def test_a_scale_that_orders_nothing_is_refused(
    origin: str, scale: tuple[float, float], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Calibration.model_validate(
            {"query_space": SPACE, "gallery_space": SPACE, "origin": origin, "items": 3,
             "distances": (0, 1), "probabilities": (1, 0), "scale": scale}
        )  # fmt: skip


def test_a_curve_is_found_by_its_pair_and_origin(tmp_path: Path) -> None:
    first = draft(tmp_path, 1).manifest
    second = draft(tmp_path, 2, [first]).manifest
    found = find_curve(second, first.space, first.space, "old-model")
    assert found is not None
    assert (found.query_space, found.origin) == (first.space, "old-model")
    assert find_curve(second, second.space, first.space, "old-model") is None
    assert find_curve(second, second.space, second.space, "re-embedded") is None
