"""Which images of a listing are trained on: enough classes, a part held out, those that decode.

The held-out images of a class depend on its file names and the split seed alone: models trained on
the first N and the first M classes hold out the same images.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing, by_digest
from nobackfill.durable import make_dir, write_file
from nobackfill.errors import InvalidInputError, few
from nobackfill.images import decode_file

_PART = 10_000


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
    for rows in by_digest(listing, seed):
        held[rows[: int(share * len(rows))]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def readable(listing: Listing, remembered: Path) -> tuple[Listing, Sequence[str]]:
    """The images that can be decoded, and the paths of those that cannot.

    The folder `remembered` keeps what was found of these files as they are now. Raises
    InvalidInputError where a class is left without images.
    """
    note = remembered / f"unreadable-{identity(listing)[:32]}.json"
    if note.is_file():
        bad = np.array(json.loads(note.read_text("utf-8")), np.int64)
    else:
        bad = _unreadable(listing)
        make_dir(remembered)
        write_file(note, json.dumps(bad.tolist()).encode())
    left = listing.select(np.setdiff1d(np.arange(len(listing)), bad))
    counts = np.bincount(left.labels, minlength=len(listing.class_names))
    for name, count in zip(listing.class_names, counts, strict=True):
        if not count:
            raise InvalidInputError(f"class {name} of {listing.root} has no readable image")
    return left, [listing.paths[row] for row in bad]


def _unreadable(listing: Listing) -> NDArray[np.int64]:
    def can(path: str) -> bool:
        try:
            decode_file(listing.root / path, 8, 8)
        except InvalidInputError:
            return False
        return True

    good = np.ones(len(listing), bool)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        # In parts: the pool makes an object of each call that waits.
        for at in range(0, len(listing), _PART):
            good[at : at + _PART] = list(pool.map(can, listing.paths[at : at + _PART]))
    return np.flatnonzero(~good)


def identity(listing: Listing) -> str:
    """A digest of which files these are, as they are now: folder, names, lengths, times of change.

    Raises InvalidInputError for one that is not there.
    """
    told = hashlib.sha256(f"{listing.root.resolve()}".encode("utf-8", "surrogateescape"))
    root = str(listing.root)
    for path in listing.paths:
        try:
            status = os.stat(f"{root}/{path}")  # noqa: PTH116 - a Path a file takes longer
        except OSError as error:
            raise InvalidInputError(f"{root}/{path}: cannot be read ({error.strerror})") from error
        line = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n"
        told.update(line.encode("utf-8", "surrogateescape"))
    return told.hexdigest()
