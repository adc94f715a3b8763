"""Where the items themselves are: what is embedded again comes from here, bounded in bytes."""

import time
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import quote

import urllib3

from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    TooLargeError,
    UnavailableError,
)
from nobackfill.items.kind import Kind
from nobackfill.loopback import is_loopback

_PIECE = 1 << 16


class Items(Protocol):
    """A source of items by id."""

    @property
    def kind(self) -> Kind | None:
        """What it gives; None where that may be either."""

    def read(self, name: str, most_bytes: int) -> str | bytes | None:
        """A text, or an image's bytes; None where there is no such item.

        Raises TooLargeError above `most_bytes`, UnavailableError, InvalidInputError.
        """


class FolderItems:
    """Files below a folder: images, or texts. An id is a path in it, as `nobackfill embed` names
    them, or is filled into `pattern`, such as {id}.jpg."""

    def __init__(self, folder: Path, pattern: str = "{id}", kind: Kind = "image") -> None:
        self._folder, self._pattern, self.kind = folder.resolve(), pattern, kind

    def read(self, name: str, most_bytes: int) -> str | bytes | None:
        try:
            path = (self._folder / PurePosixPath(self._pattern.replace("{id}", name))).resolve()
            if not path.is_relative_to(self._folder):
                raise InvalidInputError(f"{name!r}: expected a path below the folder of images")
            if not path.is_file():
                return None
            with path.open("rb") as file:
                return _as(self.kind, bounded(file.read(most_bytes + 1), name, most_bytes), name)
        except OSError as error:
            raise UnavailableError(f"{name!r}: cannot be read ({error.strerror})") from error


class FunctionItems:
    """What a function gives for an id: a text, bytes of an image, None where it is gone."""

    def __init__(self, function: Callable[[str], str | bytes | None], kind: Kind | None) -> None:
        self._function, self.kind = function, kind

    def read(self, name: str, most_bytes: int) -> str | bytes | None:
        found = self._function(name)
        if found is not None:
            bounded(found.encode() if isinstance(found, str) else found, name, most_bytes)
        return found


class UrlItems:
    """`template` with {id} in its path, such as https://images.example/{id}.jpg.

    Only `hosts` are asked, by https:// (or on this machine), and no redirect leads elsewhere.
    Raises ConfigurationError.
    """

    def __init__(
        self, template: str, hosts: Collection[str], kind: Kind = "image", timeout: float = 10.0
    ) -> None:
        self._template, self.kind = template, kind
        try:
            parsed = urllib3.util.parse_url(template)
        except urllib3.exceptions.LocationParseError:
            parsed = urllib3.util.Url()
        local = is_loopback(parsed.host or "")
        path = template.partition("://")[2].partition("/")[2]
        if parsed.scheme != "https" and not (local and parsed.scheme == "http"):
            raise ConfigurationError("expected https://HOST/…{id}… as the items' address")
        if parsed.host not in hosts or "{id}" not in path:
            raise ConfigurationError(
                f"expected a named host and {{id}} in the path: {parsed.host!r} is not among "
                f"{sorted(hosts)}, or nothing is filled in"
            )
        self._timeout = timeout
        self._http = urllib3.PoolManager(retries=False, timeout=timeout, maxsize=16)

    def read(self, name: str, most_bytes: int) -> str | bytes | None:
        # One part of a path: no id leads to another host or folder.
        url = self._template.replace("{id}", quote(name, safe=""))
        if name in (".", ".."):
            raise InvalidInputError(f"{name!r}: expected an id that names a file")
        try:
            got = self._http.request("GET", url, redirect=False, preload_content=False)
            if got.status != 200:
                # Not read: an answer that does not end would hold a thread, and grow, for ever.
                got.close()
                if got.status in (404, 410):
                    return None
                raise UnavailableError(f"{name!r}: its host answers {got.status}")
            data, end = bytearray(), time.monotonic() + self._timeout
            while len(data) <= most_bytes and (piece := got.read1(_PIECE)):
                data += piece
                if time.monotonic() > end:
                    got.close()
                    raise urllib3.exceptions.TimeoutError("the answer does not end")
            if len(data) > most_bytes:
                got.close()
        except urllib3.exceptions.HTTPError as error:
            raise UnavailableError(f"{name!r}: its host does not answer ({error})") from error
        return _as(self.kind, bounded(bytes(data), name, most_bytes), name)


def _as(kind: Kind, data: bytes, name: str) -> str | bytes:
    """Raises InvalidInputError for a text that is none."""
    if kind == "image":
        return data
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{name!r}: expected a text in UTF-8") from error


def bounded(data: bytes, name: str, most_bytes: int) -> bytes:
    """`data`, where it is no larger. Raises TooLargeError."""
    if len(data) > most_bytes:
        raise TooLargeError(f"{name!r}: expected at most {most_bytes} bytes, got more")
    return data
