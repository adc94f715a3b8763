"""Where pictures lie: a folder, or a place that pyarrow knows (s3://BUCKET/PREFIX, gs://…)."""

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from nobackfill.errors import InvalidInputError, NotFoundError, UnavailableError
from nobackfill.extras import extra
from nobackfill.images import LARGEST_BYTES, read_file
from nobackfill.picture_files import is_clutter

# `scheme://KEY:SECRET@…`, also where nobody has escaped what SECRET is made of.
_SECRET = re.compile(r"://[^/@]*:.*@")
# Of an address, as it stands; spaces, letters beyond ASCII and the like are escaped here.
_SPELT = "%:/?@!$&'()*+,;=~"


class Place(Protocol):
    """Files by name: the path below the place, with forward slashes."""

    def names(self) -> Iterator[str]:
        """Of every file that is not hidden or a system's own, also of those that are no pictures;
        in the order of the names within a folder."""
        ...

    def read(self, name: str) -> bytes:
        """Raises InvalidInputError for what cannot be read, or is too large for a picture."""
        ...


def open_place(address: str) -> Place:
    """Raises NotFoundError where nothing is there, InvalidInputError for an address that is none or
    holds a secret, UnavailableError where a store does not answer or refuses, ConfigurationError
    without the extra `export`, which brings pyarrow."""
    return ObjectStore(address) if "://" in address else Folder(Path(address))


class Folder:
    """With all below it; a link to a folder is not entered, but named."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise NotFoundError(f"{root}: no such folder; give one with pictures, or s3://…")
        self._root = root

    def names(self) -> Iterator[str]:
        for folder, below, files in os.walk(self._root, onerror=_unreadable):
            links = [name for name in below if Path(folder, name).is_symlink()]
            below[:] = sorted(name for name in below if not is_clutter(name))
            inside = Path(folder).relative_to(self._root)
            names = sorted(name for name in (*files, *links) if not is_clutter(name))
            yield from ((inside / name).as_posix() for name in names)

    def read(self, name: str) -> bytes:
        return read_file(self._root / name)


class ObjectStore:
    """By pyarrow's file systems; credentials are where their own tools look for them."""

    def __init__(self, uri: str) -> None:
        with extra("export"):
            from pyarrow import fs, lib

        if _SECRET.search(uri):
            raise InvalidInputError(
                f"{_SECRET.sub('://…@', uri)}: expected an address without a secret, which every "
                "process of this machine could read; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY instead"
            )
        self._fs, self._failures = fs, (OSError, lib.ArrowException)
        self._shown = uri
        try:
            self._files, self._root = fs.FileSystem.from_uri(quote(uri, _SPELT, errors="replace"))
        except lib.ArrowException as error:
            raise InvalidInputError(
                f"{uri}: cannot be opened ({error}); write % and ? of a name as %25 and %3F"
            ) from error
        except OSError as error:
            raise self._failed(error) from error
        if not self._root:
            raise InvalidInputError(f"{uri}: expected a bucket, as in s3://BUCKET/PREFIX")
        kind = self._look()
        if kind == fs.FileType.File:
            raise InvalidInputError(f"{uri}: expected a bucket or a prefix, got one object")
        if kind != fs.FileType.Directory:
            raise NotFoundError(
                f"{uri}: nothing is there; look at the names of bucket and prefix, and at endpoint "
                "and region"
            )
        self._below = self._root.rstrip("/") + "/"

    def names(self) -> Iterator[str]:
        try:
            found = self._files.get_file_info(self._fs.FileSelector(self._below, recursive=True))
        except self._failures as error:
            raise self._failed(error) from error
        paths = sorted(one.path for one in found if one.type == self._fs.FileType.File)
        names = (path.removeprefix(self._below) for path in paths)
        return (name for name in names if not any(map(is_clutter, name.split("/"))))

    def read(self, name: str) -> bytes:
        """Raises UnavailableError, too, where nothing can be read there any more."""
        try:
            with self._files.open_input_stream(self._below + name, compression=None) as stream:
                data = bytes(stream.read(LARGEST_BYTES + 1))
        except FileNotFoundError as error:
            raise InvalidInputError("it is no longer there") from error
        except self._failures as error:
            # Of one picture, or of all that are left?
            self._look()
            raise InvalidInputError(f"cannot be read ({error})") from error
        if len(data) > LARGEST_BYTES:
            raise InvalidInputError(f"expected at most {LARGEST_BYTES} bytes, got more")
        return data

    def _look(self) -> object:
        """What kind of thing the place is. Raises UnavailableError."""
        try:
            return self._files.get_file_info(self._root).type
        except self._failures as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self._shown}: cannot be read by {socket.gethostname()} ({error}); look at its "
            "address, and at that machine's network and credentials (AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY, ~/.aws), then put again"
        )


def _unreadable(error: OSError) -> None:
    raise InvalidInputError(f"{error.filename}: cannot be read ({error.strerror})") from error
