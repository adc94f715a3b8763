"""List and decode images in class folders.

A listing is ordered by class name, then by file name, and so is the same on every machine.
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
from nobackfill.errors import ConfigurationError, InvalidInputError, join_few
from nobackfill.framing import Fit, Frame, Interpolation, MarginRounding
from nobackfill.images import decode_file
from nobackfill.picture_files import PICTURE_SUFFIXES, is_hidden_or_system

log = logging.getLogger(__name__)

Labels = NDArray[np.int64]
Images = NDArray[np.uint8]
# Images that a thread decodes before it takes the next batch.
_AT_ONCE = 64


@dataclass(frozen=True)
class ImageListing:
    """The images of a folder of class folders.

    Attributes:
        root: The folder.
        class_names: Names of the classes, in order.
        paths: Path of each image relative to root, with forward slashes.
        labels: int64 [n], for each image an index into class_names.
    """

    root: Path
    class_names: tuple[str, ...]
    paths: tuple[str, ...]
    labels: Labels

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, rows: NDArray[np.int64]) -> "ImageListing":
        """Return a listing of some images, with the same classes and labels.

        Args:
            rows: int64 [m], indices of the n images, from 0; they may repeat, in any order.
                Negative ones count from the end.

        Returns:
            A new listing in the order of `rows`; classes without an image stay.

        Raises:
            IndexError: An index is outside the listing.
        """
        paths = tuple(self.paths[row] for row in rows)
        return ImageListing(self.root, self.class_names, paths, self.labels[rows])

    def class_of(self, row: int) -> str:
        """Return the name of the class of an image.

        Args:
            row: Index of the image, from 0; a negative one counts from the end.

        Raises:
            IndexError: There is no such image.
        """
        return self.class_names[int(self.labels[row])]


def list_images(
    root: Path, class_count: int | None = None, class_list: Path | None = None
) -> ImageListing:
    """List the images of class folders, ordered by class, then by file name.

    Folders inside a class folder belong to the class. Hidden files and folders are left out, and so
    are files in `root` itself. Links to folders and files of other kinds, HEIC and AVIF included,
    are left out, too; a warning counts them. No file is opened. A class folder itself may be a
    link.

    Args:
        root: A folder of class folders.
        class_count: Number of classes to use, from the first on, at least 1; None for all. Folders
            beyond it are not read. 0 gives an empty listing.
        class_list: A UTF-8 file with a class folder at the start of each line, which gives the
            order; empty lines are skipped. None takes all folders by name.

    Raises:
        ConfigurationError: `root` or `class_list` cannot be read.
        InvalidInputError: No class folder, fewer than `class_count`, a listed folder that is
            missing, listed twice or inside another, or a class folder without an image.
        PermissionError: `root` is a folder that this user may not read, or lies in one that this
            user may not search. A folder below it that cannot be read counts as empty.
    """
    if not root.is_dir():
        raise ConfigurationError(
            f"{root}: there is no such folder; expected a folder with one folder of images for "
            "each class"
        )
    folders = _folders(root) if class_list is None else _named_folders(root, class_list)
    if not folders:
        raise InvalidInputError(
            f"{root}: expected class folders holding images ({', '.join(PICTURE_SUFFIXES)}), got "
            "none; put each class's images into a folder of its own"
        )
    if class_count is not None and class_count > len(folders):
        raise InvalidInputError(
            f"{root}: expected at least {class_count} class folders, because the configuration has "
            f"`classes: {class_count}`, got {len(folders)}; add folders, or set `classes` lower"
        )
    files = _files(folders[:class_count])
    for folder, of_class in files.items():
        if not of_class:
            raise InvalidInputError(
                f"class folder {folder}: expected images ({', '.join(PICTURE_SUFFIXES)}), got "
                "none; remove the folder, or put images into it"
            )
    return _listing(root, files)


def _named_folders(root: Path, class_list: Path) -> list[Path]:
    try:
        lines = class_list.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"class_list {class_list}: this list of classes cannot be read ({error}); check its "
            "name and permissions"
        ) from error
    # Places365 writes "/a/airfield 0", ImageNet "n01440764 tench, Tinca tinca".
    firsts = [line.split()[0].strip("/") for line in lines if line.strip()]
    names = [PurePosixPath(name).as_posix() for name in firsts]
    inside = [name for name in names if name != "." and ".." not in name.split("/")]
    missing = [name for name in names if name not in inside or not (root / name).is_dir()]
    duplicates = [name for name, times in Counter(names).items() if times > 1]
    # Images of a nested folder would belong to both classes.
    unique = set(names)
    nested = [
        name for name in names if unique & {p.as_posix() for p in PurePosixPath(name).parents}
    ]
    for wrong, what in (
        (missing, "are no folders"),
        (duplicates, "are listed twice"),
        (nested, "lie inside another listed class"),
    ):
        if wrong:
            raise InvalidInputError(
                f"class_list {class_list}: {len(wrong)} of {len(names)} classes {what} (folders of "
                f"{root}): {join_few(wrong)}; correct the list"
            )
    return [root / name for name in names]


def list_nonempty_classes(root: Path) -> ImageListing:
    """List the class folders that hold at least one image, as `list_images` does, but refuse none.

    The listing is empty where `root` is no folder or no class folder holds an image.

    Hidden files and files in `root` itself are left out. So are links to folders and files of other
    kinds; a warning counts them.

    Args:
        root: A folder of class folders.

    Raises:
        PermissionError: `root` is a folder that this user may not read, or lies in one that this
            user may not search.
    """
    files = _files(_folders(root) if root.is_dir() else [])
    return _listing(root, {folder: of_class for folder, of_class in files.items() if of_class})


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def _files(folders: list[Path]) -> dict[Path, list[Path]]:
    """Return the images of each class folder; log a warning that counts other files."""
    files: dict[Path, list[Path]] = {}
    others: list[Path] = []
    for folder in folders:
        files[folder] = []
        for inside, folders_inside, names in os.walk(folder):
            links = [name for name in folders_inside if Path(inside, name).is_symlink()]
            folders_inside[:] = [name for name in folders_inside if not is_hidden_or_system(name)]
            for name in (*names, *links):
                if is_hidden_or_system(name):
                    continue
                is_image = name.lower().endswith(PICTURE_SUFFIXES) and name not in links
                (files[folder] if is_image else others).append(Path(inside, name))
        files[folder].sort()
    if others:
        kinds = Counter(path.suffix.lower() or "no suffix" for path in others)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        log.warning(
            "%d files are no images (%s) and are left out: %s",
            len(others),
            counts,
            join_few(others),
        )
    return files


def _listing(root: Path, files: Mapping[Path, list[Path]]) -> ImageListing:
    paths = tuple(p.relative_to(root).as_posix() for of_class in files.values() for p in of_class)
    counts = np.array([len(of_class) for of_class in files.values()], np.int64)
    labels = np.repeat(np.arange(len(files)), counts)
    return ImageListing(
        root, tuple(folder.relative_to(root).as_posix() for folder in files), paths, labels
    )


def order_rows_by_digest(listing: ImageListing, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield, for each class, its rows in the order of a seeded digest of the file names.

    The order is reproducible on every machine and does not follow the file names. The whole path
    below the root counts.

    Args:
        listing: The images.
        seed: Changes the order; any whole number.

    Yields:
        int64, rows of a class; one array for each class, in order, empty for a class without an
        image. A listing without classes gives one empty array.
    """

    def digest(row: np.int64) -> bytes:
        key = f"{seed}:{listing.paths[row]}"
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

    counts = np.bincount(listing.labels, minlength=len(listing.class_names))
    order = np.argsort(listing.labels, kind="stable")
    for rows in np.split(order, np.cumsum(counts)[:-1]):
        yield np.array(sorted(rows, key=digest), np.int64)


def hash_files(listing: ImageListing) -> list[str]:
    """Compute the SHA-256 of each file, 64 hex digits each, in the listing's order.

    Returns:
        One digest for each image; empty for an empty listing.

    Raises:
        InvalidInputError: A file cannot be read; the message names it.
    """
    return [hash_file(listing.root / path) for path in listing.paths]


def hash_file(file: Path) -> str:
    """Compute the SHA-256 of a file, as 64 hex digits.

    Returns:
        Hex digits in lower case.

    Raises:
        InvalidInputError: It is missing or cannot be read.
    """
    try:
        return sha256_file(file)
    except OSError as error:
        raise InvalidInputError(
            f"{file}: this image cannot be read ({error.strerror}); check its permissions"
        ) from error


def decode_listing(
    listing: ImageListing, height: int, width: int | None = None, fit: Fit = "stretch",
    shortest: int | None = None, interpolation: Interpolation = "bilinear",
    margin: MarginRounding = "nearest",
) -> Images:  # fmt: skip
    """Decode every image of a listing in threads, one for each core.

    Args:
        listing: n images.
        height: Rows of each result, at least 1.
        width: Columns of each result; None for `height`.
        fit: As in `nobackfill.framing.Frame`.
        shortest: As in `nobackfill.framing.Frame`.
        interpolation: As in `nobackfill.framing.Frame`.
        margin: As in `nobackfill.framing.Frame`.

    Returns:
        uint8 [n, height, width, 3], in the listing's order; all of it is in memory.

    Raises:
        InvalidInputError: A file is missing or no usable image; the message names the first one.
            Files after it may be decoded before the error is raised.
        ValueError: The height or width is negative.
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
        # In batches: for small images, scheduling a thread costs as much as decoding. The loop
        # consumes the results, so that the first failure is raised here.
        for _ in pool.map(some, range(0, len(listing), _AT_ONCE)):
            pass
    return images
