"""Image files on the device: finding them, reading them, knowing them again."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.store import Item
from nobackfill.images import read_file
from nobackfill.picture_files import is_clutter, is_picture, not_taken

# Of one command: their names are held in memory, 0.1 GB.
MOST_FILES = 250_000


@dataclass
class Found:
    """Absolute paths of images, why other files were not taken, and what belongs to the system, to
    programs or to a gallery, and was passed over."""

    files: list[Path] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def find_images(named: Sequence[Path], gallery: Path | None = None) -> Found:
    """Find the files named, and those in the folders named that have an image's suffix.

    A folder that cannot be read is among them, to be refused by its name. `gallery`: its own files
    are passed over. Raises InvalidInputError for a path that is not there, and for more than
    `MOST_FILES`.
    """
    found = Found()
    files: dict[Path, None] = {}
    for path in named:
        # Not resolved: a person knows a linked folder by the link's name.
        for file in _files(path, found, gallery):
            files[Path(os.path.abspath(file))] = None  # noqa: PTH100
            if len(files) > MOST_FILES:
                raise InvalidInputError(
                    f"{path}: expected at most {MOST_FILES} images at a time, there are more; name "
                    "some of the files or folders below it"
                )
    found.files = list(files)
    return found


def _files(path: Path, found: Found, gallery: Path | None) -> Iterator[str]:
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
        enter = []
        for name in sorted(folders):
            # A Path each takes twice as long.
            inside = os.path.join(folder, name)  # noqa: PTH118
            if is_clutter(name) or _is_own(folder, name, gallery):
                found.skipped.append(inside)
            elif os.path.islink(inside):  # noqa: PTH114
                found.refused[inside] = "a link to a folder; name it to add what is in it"
            else:
                enter.append(name)
        folders[:] = enter
        for name in sorted(files):
            inside = os.path.join(folder, name)  # noqa: PTH118
            if is_clutter(name) or _is_own(folder, name, gallery):
                found.skipped.append(inside)
            elif not is_picture(name):
                found.refused[inside] = not_taken(name)
            else:
                yield inside
    yield from unreadable


def _is_own(folder: str, name: str, gallery: Path | None) -> bool:
    """Whether it is of the gallery's own files, or small copies of images that one keeps."""
    if gallery is not None and name.startswith(gallery.name):
        return os.path.abspath(folder) == os.path.abspath(gallery.parent)  # noqa: PTH100
    owner, _, what = name.rpartition(".")
    return what == "thumbs" and os.path.isfile(os.path.join(folder, owner))  # noqa: PTH113, PTH118


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
