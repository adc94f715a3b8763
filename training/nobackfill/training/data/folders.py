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

from nobackfill.class_folders import ImageListing, order_rows_by_digest
from nobackfill.durable import make_dir, write_file
from nobackfill.errors import ConfigurationError, InvalidInputError, join_few
from nobackfill.images import decode_file
from nobackfill.training.config import StoredVectorFiles
from nobackfill.vectors import Vectors, check_vectors

_PART = 10_000


def require_classes(listing: ImageListing, min_class_count: int = 2) -> None:
    """Raise InvalidInputError if a listing has fewer than `min_class_count` classes.

    Empty classes count. The message names the classes that are there. A classifier needs the
    default of 2.
    """
    if len(listing.class_names) < min_class_count:
        raise InvalidInputError(
            f"{listing.root}: expected at least {min_class_count} class folders of training "
            f"images, got {len(listing.class_names)} ({join_few(listing.class_names)}); add "
            "folders, or set the key classes to a larger number"
        )


def hold_out(
    listing: ImageListing, share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide images into those to train on and those to hold out.

    Within each class, the images whose name digests are lowest are held out. Their number is
    rounded down, so a class of one image is trained on. Images of one class never depend on those
    of another. A class keeps at least one image to train on.

    Args:
        listing: the images.
        share: the held-out share of each class, 0 to below 1; with 0 nothing is held out.
        seed: changes the digests, and so the choice.

    Returns:
        The rows to train on and the held-out rows, int64, ascending.
    """
    is_held_out = np.zeros(len(listing), bool)
    for rows in order_rows_by_digest(listing, seed):
        is_held_out[rows[: int(share * len(rows))]] = True
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def drop_unreadable_images(
    listing: ImageListing, cache_folder: Path
) -> tuple[ImageListing, Sequence[str]]:
    """Decode every image once, and return those that can be decoded.

    Images are decoded by one thread per core. Files that are missing are found by the digest of the
    listing, before anything is decoded.

    Args:
        listing: the images.
        cache_folder: a folder, made if missing. It stores the result, so that the next call with
            unchanged files decodes nothing. Remove it to try files again that could not be decoded.

    Returns:
        The readable images, and the paths of the others, relative to the listing's root.

    Raises:
        InvalidInputError: a class has no readable image, or a file does not exist.
        CannotWriteError: the cache cannot be written.
        ValueError: the stored result is no JSON, because the cache was changed.
        OSError: the stored result cannot be opened.
    """
    note = cache_folder / f"unreadable-{listing_digest(listing)[:32]}.json"
    if note.is_file():
        bad = np.array(json.loads(note.read_text("utf-8")), np.int64)
    else:
        bad = _unreadable(listing)
        make_dir(cache_folder)
        write_file(note, json.dumps(bad.tolist()).encode())
    good = listing.select(np.setdiff1d(np.arange(len(listing)), bad))
    counts = np.bincount(good.labels, minlength=len(listing.class_names))
    for name, count in zip(listing.class_names, counts, strict=True):
        if not count:
            raise InvalidInputError(
                f"class {name} of {listing.root} has no image that can be decoded; remove the "
                "class folder, or add images"
            )
    return good, [listing.paths[row] for row in bad]


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


def listing_digest(listing: ImageListing) -> str:
    """Return the SHA-256 of the files' folder, names, lengths and modification times, in hex.

    It reads no content, so a file that keeps its length and time is not noticed as changed. The
    order of the images counts, but not their classes.

    Raises:
        InvalidInputError: a file does not exist or cannot be read.
    """
    content = hashlib.sha256(f"{listing.root.resolve()}".encode("utf-8", "surrogateescape"))
    root = str(listing.root)
    for path in listing.paths:
        try:
            status = os.stat(f"{root}/{path}")  # noqa: PTH116 - a Path a file takes longer
        except OSError as error:
            raise InvalidInputError(
                f"the image {root}/{path} cannot be read ({error.strerror}); restore the file, or "
                "run the command again if it was removed on purpose"
            ) from error
        line = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n"
        content.update(line.encode("utf-8", "surrogateescape"))
    return content.hexdigest()


def read_stored_vectors(files: StoredVectorFiles, listing: ImageListing) -> Vectors:
    """Return the stored vectors of the listing's images, float32 [n,dim] in its order.

    The files may hold vectors of other images, too; these are checked as well. Both files are read
    into memory whole. float64 becomes float32. If an image occurs twice in the listing, its vector
    does, too.

    Args:
        files: the .npy file of vectors and the text file of image paths.
        listing: n images; their paths are looked up among those of the text file.

    Raises:
        ConfigurationError: a file is missing.
        InvalidInputError: a file cannot be read, or the .npy file is no float32 or float64 [n,dim];
            the paths do not match its rows or occur twice; a vector is zero; or an image has no
            vector.
        UnusableRowsError: a vector has NaN, infinity or a norm above 1e15.
    """
    for path in (files.vectors, files.paths):
        if not path.is_file():
            raise ConfigurationError(
                f"the file {path} does not exist; the key old names it as vectors or paths of "
                "stored vectors"
            )
    vectors = _vectors(files.vectors)
    paths = _paths(files, len(vectors))
    zero = [paths[row] for row in np.flatnonzero(~vectors.any(axis=1)).tolist()]
    if zero:
        raise InvalidInputError(
            f"{files.vectors}: {len(zero)} vectors are zero and have no direction: "
            f"{join_few(zero)}; leave their rows out"
        )
    row_of = {path: row for row, path in enumerate(paths)}
    missing = [path for path in listing.paths if path not in row_of]
    if missing:
        raise InvalidInputError(
            f"{files.paths}: no vector for {len(missing)} of {len(listing)} images of "
            f"{listing.root}, the first is {missing[0]}; add their vectors and paths to both "
            "files, or remove the images"
        )
    return vectors[[row_of[path] for path in listing.paths]]


def _vectors(path: Path) -> Vectors:
    try:
        with path.open("rb") as file:
            read = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError, TokenError, SyntaxError) as error:
        raise InvalidInputError(
            f"{path}: expected stored vectors, a .npy file of float32 [n, dim], got another file "
            f"({error}); write it with numpy.save"
        ) from error
    if read.ndim != 2 or not read.shape[1]:
        raise InvalidInputError(
            f"{path}: expected stored vectors, an array of shape [n, dim], got "
            f"{list(read.shape)}; write it again with numpy.save"
        )
    return check_vectors(read, read.shape[1], error_name=str(path))


def _paths(files: StoredVectorFiles, count: int) -> Sequence[str]:
    try:
        paths = files.paths.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{files.paths}: expected a UTF-8 text file with one image path per line ({error}); "
            "write the file again"
        ) from error
    # With a header line, each path would silently get its neighbour's vector.
    if len(paths) != count or not all(paths):
        raise InvalidInputError(
            f"{files.paths}: expected {count} lines, one image path for each row of "
            f"{files.vectors}, got {sum(map(bool, paths))}; write both files from one export"
        )
    twice = [path for path, times in Counter(paths).items() if times > 1]
    if twice:
        raise InvalidInputError(
            f"{files.paths}: {len(twice)} paths occur more than once: {join_few(twice)}; expected "
            "one vector per image; remove the other rows and lines"
        )
    return paths
