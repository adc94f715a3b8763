"""Where pictures lie: a folder, or a place that pyarrow knows (s3://BUCKET/PREFIX, gs://…)."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from nobackfill.class_folders import SUFFIXES
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.extras import extra
from nobackfill.images import LARGEST_BYTES, read_file


class Place(Protocol):
    """Pictures by name: the path below the place, with forward slashes."""

    def names(self) -> Iterator[str]:
        """Of every picture, by its suffix; in the order of the names within a folder."""
        ...

    def read(self, name: str) -> bytes:
        """Raises InvalidInputError for what cannot be read, or is too large for a picture."""
        ...


def open_place(address: str) -> Place:
    """Raises NotFoundError where nothing is there, InvalidInputError for an address that is none,
    ConfigurationError without the extra `export`, which brings pyarrow."""
    return ObjectStore(address) if "://" in address else Folder(Path(address))


class Folder:
    """With all below it; what is a link to a folder is not entered."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise NotFoundError(f"{root}: no such folder; give one with pictures, or s3://…")
        self._root = root

    def names(self) -> Iterator[str]:
        for folder, below, files in os.walk(self._root, onerror=_unreadable):
            below.sort()
            inside = Path(folder).relative_to(self._root)
            yield from ((inside / name).as_posix() for name in sorted(files) if _is_picture(name))

    def read(self, name: str) -> bytes:
        return read_file(self._root / name)


class ObjectStore:
    """By pyarrow's file systems; credentials are where their own tools look for them."""

    def __init__(self, uri: str) -> None:
        with extra("export"):
            from pyarrow import fs, lib

        self._fs, self._failures = fs, (OSError, lib.ArrowException)
        try:
            self._files, root = fs.FileSystem.from_uri(uri)
            kind = self._files.get_file_info(root).type
        except self._failures as error:
            raise InvalidInputError(f"{uri}: cannot be opened ({error})") from error
        if kind != fs.FileType.Directory:
            raise NotFoundError(f"{uri}: nothing is there; expected a folder or a prefix")
        self._root = root.rstrip("/") + "/"

    def names(self) -> Iterator[str]:
        found = self._files.get_file_info(self._fs.FileSelector(self._root, recursive=True))
        paths = sorted(one.path for one in found if one.type == self._fs.FileType.File)
        return (path.removeprefix(self._root) for path in paths if _is_picture(path))

    def read(self, name: str) -> bytes:
        try:
            with self._files.open_input_stream(self._root + name, compression=None) as stream:
                data = bytes(stream.read(LARGEST_BYTES + 1))
        except self._failures as error:
            raise InvalidInputError(f"cannot be read ({error})") from error
        if len(data) > LARGEST_BYTES:
            raise InvalidInputError(f"expected at most {LARGEST_BYTES} bytes, got more")
        return data


def _is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _unreadable(error: OSError) -> None:
    raise InvalidInputError(f"{error.filename}: cannot be read ({error.strerror})") from error
