"""Images in class folders: listed by name, decoded as everywhere.

A listing is ordered by class name, then file name, and so is the same on any machine.
"""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from nobackfill.digests import sha256_file
from nobackfill.errors import ConfigurationError, InvalidInputError, few
from nobackfill.framing import Fit, Frame, Interpolation, Margin
from nobackfill.images import decode_file
from nobackfill.picture_files import SUFFIXES, is_clutter

log = logging.getLogger(__name__)

Labels = NDArray[np.int64]
Images = NDArray[np.uint8]
# Images that a thread decodes in its turn.
_AT_ONCE = 64


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

    def class_of(self, row: int) -> str:
        """The name of an image's class."""
        return self.class_names[int(self.labels[row])]


def list_images(root: Path, classes: int | None = None, class_list: Path | None = None) -> Listing:
    """List the first `classes` class folders (all when None), by name or as `class_list` has them.

    Raises ConfigurationError for no such folder or list, InvalidInputError for no class folder,
    fewer class folders than asked for, one that is listed and not there, or a class folder without
    an image (named).
    """
    if not root.is_dir():
        raise ConfigurationError(
            f"no image folder {root}; expected a folder of class folders of images"
        )
    folders = _folders(root) if class_list is None else _named_folders(root, class_list)
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
    files = _files(folders[:classes])
    for folder, of_class in files.items():
        if not of_class:
            raise InvalidInputError(f"class folder {folder} holds no image; remove or fill it")
    return _listed(root, files)


def _named_folders(root: Path, class_list: Path) -> list[Path]:
    try:
        lines = class_list.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"class_list {class_list}: cannot be read ({error})") from error
    # Places365 writes "/a/airfield 0", ImageNet "n01440764 tench, Tinca tinca".
    firsts = [line.split()[0].strip("/") for line in lines if line.strip()]
    names = [PurePosixPath(name).as_posix() for name in firsts]
    inside = [name for name in names if name != "." and ".." not in name.split("/")]
    missing = [name for name in names if name not in inside or not (root / name).is_dir()]
    twice = [name for name, times in Counter(names).items() if times > 1]
    # Its images would be of both classes.
    known = set(names)
    nested = [name for name in names if known & {p.as_posix() for p in PurePosixPath(name).parents}]
    for wrong, what in (
        (missing, "are no folders"),
        (twice, "are listed twice"),
        (nested, "lie in another of the list"),
    ):
        if wrong:
            raise InvalidInputError(
                f"class_list {class_list}: {len(wrong)} of {len(names)} classes {what} in {root}: "
                f"{few(wrong)}"
            )
    return [root / name for name in names]


def list_filled(root: Path) -> Listing:
    """List the class folders that hold an image; of none where `root` is no folder."""
    files = _files(_folders(root) if root.is_dir() else [])
    return _listed(root, {folder: of_class for folder, of_class in files.items() if of_class})


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def _files(folders: list[Path]) -> dict[Path, list[Path]]:
    """The images of each class folder; what else is there is named in the log."""
    files: dict[Path, list[Path]] = {}
    others: list[Path] = []
    for folder in folders:
        files[folder] = []
        for at, below, names in os.walk(folder):
            links = [name for name in below if Path(at, name).is_symlink()]
            below[:] = [name for name in below if not is_clutter(name)]
            for name in (*names, *links):
                if is_clutter(name):
                    continue
                taken = name.lower().endswith(SUFFIXES) and name not in links
                (files[folder] if taken else others).append(Path(at, name))
        files[folder].sort()
    if others:
        kinds = Counter(path.suffix.lower() or "no suffix" for path in others)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        log.warning(
            "%d files are no images (%s) and are left out: %s", len(others), counts, few(others)
        )
    return files


def _listed(root: Path, files: Mapping[Path, list[Path]]) -> Listing:
    paths = tuple(p.relative_to(root).as_posix() for of_class in files.values() for p in of_class)
    counts = np.array([len(of_class) for of_class in files.values()], np.int64)
    labels = np.repeat(np.arange(len(files)), counts)
    return Listing(
        root, tuple(folder.relative_to(root).as_posix() for folder in files), paths, labels
    )


def by_digest(listing: Listing, seed: int) -> Iterator[NDArray[np.int64]]:
    """The rows of each class, by the digest of the seed and each file's name."""

    def digest(row: np.int64) -> bytes:
        named = f"{seed}:{listing.paths[row]}"
        return hashlib.sha256(named.encode("utf-8", "surrogateescape")).digest()

    counts = np.bincount(listing.labels, minlength=len(listing.class_names))
    together = np.argsort(listing.labels, kind="stable")
    for rows in np.split(together, np.cumsum(counts)[:-1]):
        yield np.array(sorted(rows, key=digest), np.int64)


def digests(listing: Listing) -> list[str]:
    """SHA-256 of each file. Raises InvalidInputError naming one that cannot be read."""
    return [digest(listing.root / path) for path in listing.paths]


def digest(file: Path) -> str:
    """SHA-256 of a file. Raises InvalidInputError where it cannot be read."""
    try:
        return sha256_file(file)
    except OSError as error:
        raise InvalidInputError(f"{file}: cannot be read ({error.strerror})") from error


def decode(
    listing: Listing, height: int, width: int | None = None, fit: Fit = "stretch",
    shortest: int | None = None, interpolation: Interpolation = "bilinear",
    margin: Margin = "nearest",
) -> Images:  # fmt: skip
    """Decode every image to uint8 [n,height,width,3], square where no width is given; `fit`,
    `shortest`, `interpolation` and `margin` as in `nobackfill.framing.Frame`.

    Raises InvalidInputError naming the first file that is no image.
    """
    frame = Frame(height, width or height, fit, shortest, interpolation, margin)
    images = np.empty((len(listing), frame.height, frame.width, 3), np.uint8)

    def one(row: int) -> None:
        try:
            images[row] = decode_file(listing.root / listing.paths[row], *frame)
        except InvalidInputError as error:
            raise InvalidInputError(
                f"{error}; remove {listing.paths[row]}, or train with skip_corrupt: true, which "
                "leaves such files out"
            ) from error

    def some(first: int) -> None:
        for row in range(first, min(first + _AT_ONCE, len(listing))):
            one(row)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        # Some at a time: of small images a thread's turn costs as much as one. Consumed, so that
        # the first failure is raised here.
        for _ in pool.map(some, range(0, len(listing), _AT_ONCE)):
            pass
    return images
