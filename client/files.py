"""Image files on the device: finding them, reading them, knowing them again."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from gallery.store import Item
from release.errors import InvalidInputError
from release.images import LARGEST_BYTES

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})


def find_images(named: Sequence[Path]) -> list[Path]:
    """The files named, and those in the folders named that have an image's suffix; absolute paths.

    Raises InvalidInputError for a path that is not there.
    """
    found: dict[Path, None] = {}
    for path in named:
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
            files = sorted(p for p in inside if p.is_file())
        elif path.exists():
            files = [path]
        else:
            raise InvalidInputError(f"{path}: no such file or folder")
        # Not resolved: a person knows a linked folder by the link's name.
        found.update((Path(os.path.abspath(file)), None) for file in files)  # noqa: PTH100
    return list(found)


def read_image(path: Path) -> tuple[bytes, str]:
    """An image file's bytes and their digest. Raises InvalidInputError."""
    try:
        str(path).encode("utf-8")
        size = path.stat().st_size
        if size > LARGEST_BYTES:
            raise InvalidInputError(f"expected at most {LARGEST_BYTES} bytes, got {size}")
        data = path.read_bytes()
    except UnicodeEncodeError as error:
        raise InvalidInputError("its name is not valid text; rename it") from error
    except OSError as error:
        raise InvalidInputError(f"cannot be read ({error.strerror})") from error
    return data, hashlib.sha256(data).hexdigest()


def local_image(item: Item) -> bytes | None:
    """The image an item was made from, if its file is still there and unchanged."""
    path = Path(str(item.metadata.get("path", "")))
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_BYTES:
            return None
        data = path.read_bytes()
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest() == item.digest else None
