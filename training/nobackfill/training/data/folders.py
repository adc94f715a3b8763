"""Images in class folders: listed by name, split by the file's name, decoded once.

A listing is ordered by class name, then file name, and so is the same on any machine. The held-out
images of a class depend on its file names and the split seed alone: models trained on the first N
and the first M classes hold out the same images.
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import ConfigurationError, InvalidInputError, few
from nobackfill.images import decode_file

Labels = NDArray[np.int64]
Images = NDArray[np.uint8]
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class Listing:
    """The images of a folder of class folders."""

    root: Path
    class_names: tuple[str, ...]
    # Relative to root, with forward slashes.
    paths: tuple[str, ...]
    # int64 [n], an index into class_names.
    labels: Labels

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, rows: NDArray[np.int64]) -> "Listing":
        """The images of `rows`, class names and labels unchanged."""
        paths = tuple(self.paths[row] for row in rows)
        return Listing(self.root, self.class_names, paths, self.labels[rows])


def list_images(root: Path, classes: int | None = None) -> Listing:
    """List the first `classes` class folders (all when None).

    Raises ConfigurationError for no such folder, InvalidInputError for no class folder, fewer class
    folders than asked for, or a class folder without an image (named).
    """
    if not root.is_dir():
        raise ConfigurationError(
            f"no image folder {root}; expected a folder of class folders of images"
        )
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        raise InvalidInputError(
            f"{root}: expected class folders holding images ({', '.join(SUFFIXES)}), got none; "
            "put each class's images into a folder of its own"
        )
    if classes is not None and classes > len(folders):
        raise InvalidInputError(
            f"{root}: expected at least {classes} class folders (classes: {classes}), "
            f"got {len(folders)}"
        )
    paths, labels = [], []
    for label, folder in enumerate(folders[:classes]):
        files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
        if not files:
            raise InvalidInputError(f"class folder {folder} holds no image; remove or fill it")
        paths += [p.relative_to(root).as_posix() for p in files]
        labels += [label] * len(files)
    names = tuple(folder.name for folder in folders[:classes])
    return Listing(root, names, tuple(paths), np.array(labels, np.int64))


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


def by_digest(listing: Listing, label: int, seed: int) -> NDArray[np.int64]:
    """The rows of a class, by the digest of the seed and each file's name."""

    def digest(row: np.int64) -> bytes:
        return hashlib.sha256(f"{seed}:{listing.paths[row]}".encode()).digest()

    return np.array(sorted(np.flatnonzero(listing.labels == label), key=digest), np.int64)


def decode(listing: Listing, size: int) -> Images:
    """Decode every image to uint8 [n,size,size,3].

    Raises InvalidInputError naming the first file that is no image; `readable` finds them all.
    """
    images = np.empty((len(listing), size, size, 3), np.uint8)

    def one(row: int) -> None:
        try:
            images[row] = decode_file(listing.root / listing.paths[row], size, size)
        except InvalidInputError as error:
            raise InvalidInputError(
                f"{error}; remove {listing.paths[row]}, or set skip_corrupt: true to leave such "
                "files out"
            ) from error

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        # Consumed, so that the first failure is raised here.
        for _ in pool.map(one, range(len(listing)), chunksize=64):
            pass
    return images


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
