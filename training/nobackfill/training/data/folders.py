"""Which images of a listing are trained on: enough classes, a part held out, those that decode.

The held-out images of a class depend on its file names and the split seed alone: models trained on
the first N and the first M classes hold out the same images.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing, by_digest
from nobackfill.errors import InvalidInputError, few
from nobackfill.images import decode_file


def require_classes(listing: Listing, least: int = 2) -> None:
    """Raise InvalidInputError where there are fewer classes than a classifier needs."""
    if len(listing.class_names) < least:
        raise InvalidInputError(
            f"{listing.root}: expected at least {least} class folders, got "
            f"{len(listing.class_names)} ({few(listing.class_names)})"
        )


def hold_out(
    listing: Listing, share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to train on and rows held out: of each class the `share` whose names' digests are
    lowest.

    Rounded down for small classes, so a class of one image is trained on.
    """
    held = np.zeros(len(listing), bool)
    for label in range(len(listing.class_names)):
        rows = by_digest(listing, label, seed)
        held[rows[: int(share * len(rows))]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def readable(listing: Listing) -> tuple[Listing, Sequence[str]]:
    """The images that can be decoded, and the paths of those that cannot.

    Raises InvalidInputError where a class is left without images.
    """

    def can(row: int) -> bool:
        try:
            decode_file(listing.root / listing.paths[row], 8, 8)
        except InvalidInputError:
            return False
        return True

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        good = np.array(list(pool.map(can, range(len(listing)), chunksize=64)))
    left = listing.select(np.flatnonzero(good))
    for label, name in enumerate(listing.class_names):
        if not (left.labels == label).any():
            raise InvalidInputError(f"class {name} of {listing.root} has no readable image")
    return left, [listing.paths[row] for row in np.flatnonzero(~good)]
