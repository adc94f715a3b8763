"""Where the items themselves are: what is embedded again comes from here, bounded in bytes."""

import http.client
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol
from urllib.parse import quote

import urllib3

from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
)
from nobackfill.loopback import is_loopback
from nobackfill.pace import pool_manager, read_paced
from nobackfill.text import LARGEST_BYTES, read_line
from nobackfill.vectors import Kind

_PIECE = 1 << 16
# Errors that a host can cause: urllib3 lets some of other libraries through.
_TROUBLE = (urllib3.exceptions.HTTPError, http.client.HTTPException, ValueError, OSError)


class Items(Protocol):
    """A source of items by id."""

    @property
    def kind(self) -> Kind | None:
        """The kind of its items; None: it may give either."""

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
    """Items by a function of the id: it returns a text, an image's bytes, or None for none."""

    def __init__(self, function: Callable[[str], str | bytes | None], kind: Kind | None) -> None:
        self._function, self.kind = function, kind

    def read(self, name: str, most_bytes: int) -> str | bytes | None:
        found = self._function(name)
        if found is not None:
            bounded(found.encode() if isinstance(found, str) else found, name, most_bytes)
        return found


class UrlItems:
    """`template` with {id} in its path, such as https://images.example/{id}.jpg.

    Only `hosts` are asked, by https:// (or on this machine), and no redirect leads elsewhere. A
    request has `timeout` seconds, from the connection to the last byte. Raises ConfigurationError.
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
        self._http = pool_manager(retries=False, timeout=timeout, maxsize=16)

    def read(self, name: str, most_bytes: int) -> str | bytes | None:
        # One part of a path: no id leads to another host or folder.
        url = self._template.replace("{id}", quote(name, safe=""))
        if name in (".", ".."):
            raise InvalidInputError(f"{name!r}: expected an id that names a file")
        data, end = bytearray(), time.monotonic() + self._timeout
        try:
            with closing(read_paced(lambda: self._pieces(url, name), end)) as pieces:
                for piece in pieces:
                    data += piece
                    if len(data) > most_bytes:
                        break
        except NotFoundError:
            return None
        except _TROUBLE as error:
            raise UnavailableError(f"{name!r}: its host does not answer ({error})") from error
        return _as(self.kind, bounded(bytes(data), name, most_bytes), name)

    def _pieces(self, url: str, name: str) -> Iterator[bytes]:
        """Raises NotFoundError, UnavailableError for another answer than the item, what urllib3
        raises."""
        got = self._http.request("GET", url, redirect=False, preload_content=False)
        whole = False
        try:
            if got.status in (404, 410):
                raise NotFoundError(f"{name!r}: its host has none")
            if got.status != 200:
                raise UnavailableError(f"{name!r}: its host answers {got.status}")
            while piece := got.read1(_PIECE):
                yield piece
            whole = True
        finally:
            if not whole:
                # The rest is in the way of the next request.
                got.close()


def _as(kind: Kind, data: bytes, name: str) -> str | bytes:
    """Raises InvalidInputError for a text that is none."""
    if kind == "image":
        return data
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{name!r}: expected a text in UTF-8") from error


def bounded(data: bytes, name: str, most_bytes: int) -> bytes:
    """`data`, where it is no larger. Raises TooLargeError."""
    if len(data) > most_bytes:
        raise TooLargeError(f"{name!r}: expected at most {most_bytes} bytes, got more")
    return data


# A file as it was looked through: when it was written, its length, its inode.
_Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class _Seen:
    """The last line that was looked at: its number, its first byte, and what it said."""

    number: int = 1
    start: int = 0
    line: bytes = b""


class LineItems:
    """Lines with `id` and `text`; of an id that comes twice the last. Where lines were added to the
    file those are looked through, where it has changed otherwise all of it. See Items.

    Raises NotFoundError, InvalidInputError for a line that is none, and for what is no file.
    """

    kind: Kind = "text"

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._stamp: _Stamp | None = None
        self._places: dict[str, int] = {}
        self._seen = _Seen()
        self._refresh()

    def read(self, name: str, most_bytes: int) -> str | None:
        with self._lock:
            try:
                self._refresh()
                place = self._places.get(name)
                if place is None:
                    return None
                with self._file.open("rb") as file:
                    file.seek(place)
                    line = file.readline(_longest(most_bytes))
            except OSError as error:
                raise UnavailableError(f"{name!r}: cannot be read ({error.strerror})") from error
        if not line.endswith(b"\n") and len(line) == _longest(most_bytes):
            raise TooLargeError(f"{name!r}: expected at most {most_bytes} bytes, got more")
        try:
            one = read_line(line, repr(name))
        except InvalidInputError:
            self._look_anew()
            raise
        if one.id != name:
            self._look_anew()
            # Written anew between the two looks: another's text would be this one's vector.
            raise UnavailableError(f"{name!r}: its file changes while it is read; try again")
        try:
            bounded(one.text.encode(), name, most_bytes)
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"{name!r}: expected valid Unicode") from error
        return one.text

    def _look_anew(self) -> None:
        """Next time at all of it: lines stand elsewhere, though the last one seen does not."""
        with self._lock:
            self._stamp = None

    def _refresh(self) -> None:
        with _opened(self._file) as file:
            found = os.fstat(file.fileno())
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp == self._stamp:
                return
            added = self._added(file, stamp)
            if not added:
                self._places, self._seen = {}, _Seen()
            self._look(file, added=added)
            self._stamp = stamp

    def _added(self, file: BinaryIO, stamp: _Stamp) -> bool:
        """Return whether the file is the one that was looked through, and longer."""
        if self._stamp is None or stamp[2] != self._stamp[2] or stamp[1] <= self._stamp[1]:
            return False
        file.seek(self._seen.start)
        return file.readline().startswith(self._seen.line)

    def _look(self, file: BinaryIO, *, added: bool) -> None:
        """Note the places of the lines from that which was seen last."""
        number, start = self._seen.number, self._seen.start
        file.seek(start)
        # Only a line feed ends a line, JSON may hold other separators of lines.
        for line in file:
            if line.strip():
                try:
                    one = read_line(line, f"{self._file}:{number}")
                except InvalidInputError:
                    if added and not line.endswith(b"\n"):
                        # Somebody is writing it: it is looked at when it is longer.
                        return
                    raise
                self._places[one.id] = start
                self._seen = _Seen(number, start, line)
            start, number = start + len(line), number + 1


def _opened(path: Path) -> BinaryIO:
    """Raises NotFoundError; InvalidInputError for a pipe, say: nobody may ever write to it."""
    try:
        # Opening a pipe waits for who writes, unless it is asked not to.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NotFoundError(f"{path}: cannot be read ({error.strerror})") from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise InvalidInputError(f"{path}: expected a file, whose lines are read where they stand")


def _longest(most_bytes: int) -> int:
    """Bound a line whose text has so many bytes: JSON may write six for one, and has other keys."""
    return 6 * min(most_bytes, LARGEST_BYTES) + (1 << 16)
