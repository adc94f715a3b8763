"""UniBCT's five divisions of images between the old and the new training set (unibct.txt 3.1).

| allocation | old set | new set |
|---|---|---|
| extended-data | a share of each class's images | all images |
| open-data | the same | the other images |
| extended-class | all images of a share of the classes | all images |
| open-class | the same | the images of the other classes |
| identical-data | a share of each class's images | the same images |

Divisions of data work class by class, so that both sets contain every class: the old set gets at
least one image of each class and leaves at least one. The share is rounded to whole images or
classes, of which at least one is not old.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import ConfigurationError

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Allocation:
    """Rows of the old and of the new training set, ascending, int64."""

    old_rows: Rows
    new_rows: Rows


# The paper's share of the old set.
SHARE = 0.3
# The new set's share of all images, by allocation, if the old set has SHARE of them.
NEW_SHARES = {
    "extended-data": 1.0,
    "open-data": 1 - SHARE,
    "extended-class": 1.0,
    "open-class": 1 - SHARE,
    "identical-data": SHARE,
}
ALLOCATIONS = tuple(NEW_SHARES)


def allocate_images(name: str, labels: Rows, share: float = SHARE, seed: int = 666) -> Allocation:
    """Divide images by the allocation of this name; defaults are the paper's.

    It draws from a generator of its own. Row numbers of both sets increase.

    Args:
        name: a name of ALLOCATIONS.
        labels: the class of each image, int64 [n], n at least 1.
        share: the old set's share of the images or classes, above 0 and below 1.
        seed: of the random choice.

    Raises:
        ConfigurationError: the name is unknown (the known ones are listed), or the share is not
            above 0 and below 1; or fewer than two images of a class, or two classes, are there to
            divide.
    """
    if name not in ALLOCATIONS:
        raise ConfigurationError(
            f"there is no allocation {name!r} of images to an old and a new training set; "
            f"expected one of {', '.join(ALLOCATIONS)}"
        )
    way, _, kind = name.partition("-")
    old = (_share_of_data if kind == "data" else _share_of_classes)(labels, share, seed)
    every = np.arange(len(labels))
    new = {"extended": every, "open": np.setdiff1d(every, old), "identical": old}[way]
    return Allocation(old, new)


def _share_of_data(labels: Rows, share: float, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    picked = []
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        count = _count(share, len(rows), f"images of class {label}")
        picked.append(rows[:count])
    return np.sort(np.concatenate(picked))


def _share_of_classes(labels: Rows, share: float, seed: int) -> Rows:
    classes = np.unique(labels)
    count = _count(share, len(classes), "classes")
    drawn = np.random.default_rng(seed).permutation(classes)[:count]
    return np.flatnonzero(np.isin(labels, drawn))


def _count(share: float, total: int, what: str) -> int:
    if not 0 < share < 1:
        raise ConfigurationError(
            f"share of the old training set: expected above 0 and below 1, got {share}; correct "
            "the share"
        )
    if total < 2:
        raise ConfigurationError(
            f"expected at least 2 {what} to divide between old and new training set, got {total}; "
            "add images or classes"
        )
    return min(max(1, round(share * total)), total - 1)
