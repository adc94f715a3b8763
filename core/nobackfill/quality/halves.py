"""Evaluation images in two halves: one fits the calibration, the other decides the gate."""

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing, by_digest
from nobackfill.errors import InvalidInputError, few
from nobackfill.quality.text_listing import TextListing

# What a half needs, so that anything can be compared in it: classes with so many images.
CLASSES = 2
IMAGES = 2
# And of texts that are to be found again.
ITEMS = 20

Rows = NDArray[np.int64]


def halves(listing: Listing, seed: int) -> tuple[Rows, Rows]:
    """Rows [a] and [b] of two disjoint halves of every class, by digest of name and seed.

    Of a class with an odd number the halves get one more in turn, and a class of two goes to one of
    them whole: pairs are left in both. Texts that are each a class of their own are halved as one
    class. Raises InvalidInputError where a half cannot compare anything.
    """
    if isinstance(listing, TextListing) and listing.queries:
        return _of_items(listing, seed)
    second = np.zeros(len(listing), bool)
    # Classes whose pair only one of the halves can have take turns of their own.
    turns = {True: False, False: False}
    for rows in by_digest(listing, seed):
        size = len(rows) // 2
        if len(rows) % 2 or len(rows) == IMAGES:
            single = len(rows) in (IMAGES, IMAGES + 1)
            turns[single] = not turns[single]
            here = not turns[single]
            size = len(rows) * here if len(rows) == IMAGES else size + here
        second[rows[:size]] = True
    split = np.flatnonzero(~second), np.flatnonzero(second)
    for half in split:
        _check_enough(listing, half)
    return split


def _of_items(listing: TextListing, seed: int) -> tuple[Rows, Rows]:
    """Rows of two disjoint halves of texts that are each a class of their own. Raises
    InvalidInputError for fewer than can be compared."""
    if len(listing) < 2 * ITEMS:
        raise InvalidInputError(
            f"--eval-texts {listing.root}: half of them are for calibration and half for the gate; "
            f"expected at least {2 * ITEMS} texts to find again, got {len(listing)}"
        )
    one_class = Listing(listing.root, ("",), listing.paths, np.zeros(len(listing), np.int64))
    (every,) = by_digest(one_class, seed)
    return np.sort(every[::2]), np.sort(every[1::2])


def _check_enough(listing: Listing, half: Rows) -> None:
    counts = np.bincount(listing.labels[half], minlength=len(listing.class_names))
    if (counts >= IMAGES).sum() >= CLASSES:
        return
    whole = np.bincount(listing.labels, minlength=len(listing.class_names))
    examples = few(f"{n}: {count}" for n, count in zip(listing.class_names, whole, strict=True))
    raise InvalidInputError(
        f"--eval {listing.root}: half of it is for calibration and half for the gate, and each "
        f"needs {CLASSES} classes with {IMAGES} images; expected {CLASSES} classes of "
        f"{2 * IMAGES} images or {2 * CLASSES} of {IMAGES}, got {len(listing)} images in "
        f"{len(listing.class_names)} classes ({examples}); add images"
    )
