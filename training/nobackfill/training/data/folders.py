"""Select images of a training: require classes, hold a part out, skip unreadable files, and read
stored vectors.

The held-out images of a class depend only on its file names and on the split seed. Models trained
on the first N and on the first M classes therefore hold out the same images.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tokenize import TokenError

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import ImageListing, order_by_digest
from nobackfill.durable import make_dir, write_file
from nobackfill.errors import ConfigurationError, InvalidInputError, join_few
from nobackfill.images import decode_file
from nobackfill.training.config import StoredVectorFiles
from nobackfill.vectors import Vectors, check_vectors

_PART = 10_000


def require_classes(listing: ImageListing, least: int = 2) -> None:
    """Raise InvalidInputError if there are fewer than `least` classes."""
    if len(listing.class_names) < least:
        raise InvalidInputError(
            f"{listing.root}: expected at least {least} class folders, got "
            f"{len(listing.class_names)} ({join_few(listing.class_names)})"
        )


def hold_out(
    listing: ImageListing, share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows to train on and the rows to hold out, int64.

    Of each class, the `share` of images whose name digests are lowest is held out. The number is
    rounded down, so a class of one image is trained on.
    """
    held = np.zeros(len(listing), bool)
    for rows in order_by_digest(listing, seed):
        held[rows[: int(share * len(rows))]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def readable(listing: ImageListing, remembered: Path) -> tuple[ImageListing, Sequence[str]]:
    """Return the images that can be decoded, and the paths of the others.

    The folder `remembered` caches the result for unchanged files.

    Raises:
        InvalidInputError: a class has no readable image.
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


def _unreadable(listing: ImageListing) -> NDArray[np.int64]:
    def can(path: str) -> bool:
        try:
            decode_file(listing.root / path, 8, 8)
        except InvalidInputError:
            return False
        return True

    good = np.ones(len(listing), bool)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        # In parts, because the pool makes an object of each waiting call.
        for at in range(0, len(listing), _PART):
            good[at : at + _PART] = list(pool.map(can, listing.paths[at : at + _PART]))
    return np.flatnonzero(~good)


def identity(listing: ImageListing) -> str:
    """Return a digest of the files' folder, names, lengths and modification times.

    Raises:
        InvalidInputError: a file does not exist.
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


def read_stored(stored: StoredVectorFiles, listing: ImageListing) -> Vectors:
    """Return the stored vectors of the listing's images, float32 [n,dim] in its order.

    Raises:
        ConfigurationError: a file is missing. InvalidInputError: the .npy file is not [n,dim], the
        paths do not match its rows, a vector is
            zero, or an image has no vector.
    """
    for path in (stored.vectors, stored.paths):
        if not path.is_file():
            raise ConfigurationError(f"there are no stored vectors at {path}")
    vectors = _vectors(stored.vectors)
    paths = _paths(stored, len(vectors))
    zero = [paths[row] for row in np.flatnonzero(~vectors.any(axis=1)).tolist()]
    if zero:
        raise InvalidInputError(
            f"{stored.vectors}: {len(zero)} vectors are zero and have no direction: "
            f"{join_few(zero)}; leave their rows out"
        )
    row_of = {path: row for row, path in enumerate(paths)}
    missing = [path for path in listing.paths if path not in row_of]
    if missing:
        raise InvalidInputError(
            f"{stored.paths}: no vector for {len(missing)} of {len(listing)} images of "
            f"{listing.root}, first {missing[0]}"
        )
    return vectors[[row_of[path] for path in listing.paths]]


def _vectors(path: Path) -> Vectors:
    try:
        with path.open("rb") as file:
            read = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError, TokenError, SyntaxError) as error:
        raise InvalidInputError(
            f"{path}: expected a .npy file of float32 [n, dim] ({error})"
        ) from error
    if read.ndim != 2 or not read.shape[1]:
        raise InvalidInputError(
            f"{path}: expected an array of shape [n, dim], got {list(read.shape)}"
        )
    return check_vectors(read, read.shape[1], what=str(path))


def _paths(stored: StoredVectorFiles, count: int) -> Sequence[str]:
    try:
        paths = stored.paths.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{stored.paths}: cannot be read as UTF-8 ({error})") from error
    # With a header line, each path would silently get its neighbour's vector.
    if len(paths) != count or not all(paths):
        raise InvalidInputError(
            f"{stored.paths}: expected {count} lines, one image path a row of {stored.vectors}, "
            f"got {sum(map(bool, paths))}"
        )
    twice = [path for path, times in Counter(paths).items() if times > 1]
    if twice:
        raise InvalidInputError(
            f"{stored.paths}: {len(twice)} paths occur more than once: {join_few(twice)}; expected "
            "one vector per image"
        )
    return paths
