"""UniBCT's allocations: what is shared and what is apart, as its Table 1 says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobackfill.errors import ConfigurationError
from nobackfill.training.data.allocations import ALLOCATIONS, NEW_SHARES, SHARE, allocate_images

LABELS = np.repeat(np.arange(10), np.arange(4, 14))


def classes(rows: np.ndarray) -> set[int]:
    return set(LABELS[rows].tolist())


# Whether the two sets share classes, share images, and whether the new set holds all images.
TABLE_1 = {
    "extended-data": (True, True, True),
    "open-data": (True, False, False),
    "extended-class": (True, True, True),
    "open-class": (False, False, False),
    "identical-data": (True, True, False),
}


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_allocations_are_those_of_table_1(name: str) -> None:
    shares_classes, shares_images, holds_all = TABLE_1[name]
    found = allocate_images(name, LABELS)
    assert bool(classes(found.old_rows) & classes(found.new_rows)) == shares_classes
    assert bool(set(found.old_rows) & set(found.new_rows)) == shares_images
    assert (len(found.new_rows) == len(LABELS)) == holds_all
    if name.endswith("data"):
        assert classes(found.old_rows) == classes(found.new_rows) == set(range(10))
        for label in range(10):
            kept = np.sum(LABELS[found.old_rows] == label)
            assert abs(kept - 0.3 * np.sum(label == LABELS)) <= 0.5
    else:
        assert len(classes(found.old_rows)) == 3
    if name == "identical-data":
        assert found.old_rows.tolist() == found.new_rows.tolist()
    if name.startswith("open"):
        assert sorted([*found.old_rows, *found.new_rows]) == list(range(len(LABELS)))


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_the_seed_alone_decides(name: str) -> None:
    again = [allocate_images(name, LABELS, seed=seed).old_rows.tolist() for seed in (1, 1, 2, 3, 4)]
    assert again[0] == again[1]
    assert len({tuple(rows) for rows in again[1:]}) > 1


@given(st.sampled_from(sorted(ALLOCATIONS)), st.floats(0.001, 0.999), st.integers(0, 99))
def test_no_set_is_ever_empty(name: str, share: float, seed: int) -> None:
    found = allocate_images(name, LABELS, share, seed)
    assert len(found.old_rows) and len(found.new_rows)
    assert (np.diff(found.old_rows) > 0).all() and (np.diff(found.new_rows) > 0).all()


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected one of extended-data, open-data"):
        allocate_images("closed-data", LABELS)
    with pytest.raises(ConfigurationError, match="at least 2 images of class 1"):
        allocate_images("open-data", np.array([0, 0, 1]))
    with pytest.raises(ConfigurationError, match="expected above 0 and below 1, got 1"):
        allocate_images("open-data", LABELS, share=1)


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_shares_say_how_large_the_sets_are(name: str) -> None:
    labels = np.repeat(np.arange(10), 20)
    found = allocate_images(name, labels)
    assert len(found.old_rows) == SHARE * len(labels)
    assert len(found.new_rows) == pytest.approx(NEW_SHARES[name] * len(labels))
