"""Image files on the device: finding them, reading them, knowing them again."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.store import Item
from nobackfill.images import read_file

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
# Of one command: their names are held in memory, 0.1 GB.
MOST_FILES = 250_000


def find_images(named: Sequence[Path]) -> list[Path]:
    """The files named, and those in the folders named that have an image's suffix; absolute paths.

    A folder that cannot be read is among them, to be refused by its name. Raises InvalidInputError
    for a path that is not there, and for more than `MOST_FILES`.
    """
    found: dict[Path, None] = {}
    for path in named:
        # Not resolved: a person knows a linked folder by the link's name.
        for file in _files(path):
            found[Path(os.path.abspath(file))] = None  # noqa: PTH100
            if len(found) > MOST_FILES:
                raise InvalidInputError(
                    f"{path}: expected at most {MOST_FILES} images at a time, there are more; name "
                    "some of the files or folders below it"
                )
    return list(found)


def _files(path: Path) -> Iterator[str]:
    try:
        if not path.is_dir():
            path.stat()
            yield str(path)
            return
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise InvalidInputError(f"{path}: no such file or folder") from error
        raise InvalidInputError(f"{path}: cannot be read ({error.strerror})") from error
    unreadable: list[str] = []
    for folder, folders, files in os.walk(path, onerror=lambda e: unreadable.append(e.filename)):
        folders[:] = sorted(name for name in folders if not _small_copies(folder, name))
        for name in sorted(name for name in files if _suffix(name) in SUFFIXES):
            inside = os.path.join(folder, name)  # noqa: PTH118 - a Path each takes twice as long
            if os.path.isfile(inside):  # noqa: PTH113
                yield inside
    yield from unreadable


def _small_copies(folder: str, name: str) -> bool:
    """Whether a gallery keeps its own copies of images there (thumbnails.py)."""
    gallery, _, what = name.rpartition(".")
    return what == "thumbs" and os.path.isfile(os.path.join(folder, gallery))  # noqa: PTH113, PTH118


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122


def read_image(path: Path) -> tuple[bytes, str]:
    """An image file's bytes and their digest.

    Raises InvalidInputError, also for what is no regular file, is too large, or has a name that is
    not text.
    """
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInputError("its name is not valid text; rename it") from error
    data = read_file(path)
    return data, hashlib.sha256(data).hexdigest()


def local_image(item: Item) -> bytes | None:
    """The image an item was made from, if its file is still there and unchanged."""
    try:
        data = read_file(Path(str(item.metadata.get("path", ""))))
    except InvalidInputError:
        return None
    return data if hashlib.sha256(data).hexdigest() == item.digest else None
