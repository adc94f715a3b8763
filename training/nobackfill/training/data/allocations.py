"""UniBCT's five divisions of images between the old and the new training set (unibct.txt 3.1).

Each function takes the labels of all images, int64 [n], the old set's share, and the seed of the
random choice. It returns the rows of both sets. Divisions of data work class by class, so that both
sets contain every class: the old set gets at least one image of each class and leaves at least one.
The share is rounded to whole images or classes.

All raise ConfigurationError if the share is not above 0 and below 1, or if there are fewer than two
images of a class, or two classes, to divide.
"""

from collections.abc import Callable
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


def extended_data(labels: Rows, share: float, seed: int) -> Allocation:
    """Put `share` of each class's images into the old set, and all images into the new one.

    The number of old images of a class is rounded; at least one image of a class is not old.

    Args:
        labels: the class of each image, int64 [n], n at least 1.
        share: above 0 and below 1; at least one image of a class is old.
        seed: of the random choice.

    Raises:
        ConfigurationError: the share is out of range, or a class has fewer than two images.
    """
    return Allocation(_share_of_data(labels, share, seed), np.arange(len(labels)))


def open_data(labels: Rows, share: float, seed: int) -> Allocation:
    """Put `share` of each class's images into the old set, and the others into the new one.

    Both sets contain every class and share no image.

    Args:
        labels: the class of each image, int64 [n], n at least 1.
        share: above 0 and below 1; at least one image of a class is old.
        seed: of the random choice.

    Raises:
        ConfigurationError: the share is out of range, or a class has fewer than two images.
    """
    old = _share_of_data(labels, share, seed)
    return Allocation(old, np.setdiff1d(np.arange(len(labels)), old))


def extended_class(labels: Rows, share: float, seed: int) -> Allocation:
    """Put the images of `share` of the classes into the old set, all images into the new one.

    The number of old classes is rounded; at least one class is not old. The seed draws which.

    Args:
        labels: the class of each image, int64 [n].
        share: above 0 and below 1; at least one class is old.
        seed: of the random choice.

    Raises:
        ConfigurationError: the share is out of range, or there are fewer than two classes.
    """
    return Allocation(_share_of_classes(labels, share, seed), np.arange(len(labels)))


def open_class(labels: Rows, share: float, seed: int) -> Allocation:
    """Put the images of `share` of the classes into the old set, the others into the new one.

    The two sets share no class. The seed draws which classes are old.

    Args:
        labels: the class of each image, int64 [n].
        share: above 0 and below 1; at least one class is old.
        seed: of the random choice.

    Raises:
        ConfigurationError: the share is out of range, or there are fewer than two classes.
    """
    old = _share_of_classes(labels, share, seed)
    return Allocation(old, np.setdiff1d(np.arange(len(labels)), old))


def identical_data(labels: Rows, share: float, seed: int) -> Allocation:
    """Put the same `share` of each class's images into both sets.

    At least one image of a class is in neither set.

    Args:
        labels: the class of each image, int64 [n], n at least 1.
        share: above 0 and below 1; at least one image of a class is old.
        seed: of the random choice.

    Raises:
        ConfigurationError: the share is out of range, or a class has fewer than two images.
    """
    old = _share_of_data(labels, share, seed)
    return Allocation(old, old)


ALLOCATIONS: dict[str, Callable[[Rows, float, int], Allocation]] = {
    "extended-data": extended_data,
    "open-data": open_data,
    "extended-class": extended_class,
    "open-class": open_class,
    "identical-data": identical_data,
}


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


def allocate_images(name: str, labels: Rows, share: float = SHARE, seed: int = 666) -> Allocation:
    """Divide images by the allocation of this name; defaults are the paper's.

    It draws from a generator of its own. Row numbers of both sets increase.

    Args:
        name: a key of ALLOCATIONS.
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
    return ALLOCATIONS[name](labels, share, seed)


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
