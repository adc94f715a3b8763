"""Sources of items to re-embed: folders, functions, URLs and JSON Lines, bounded in bytes."""

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
    join_few,
)
from nobackfill.loopback import is_loopback
from nobackfill.pace import make_http_pool, read_paced
from nobackfill.text import LARGEST_TEXT_BYTES, parse_text_line
from nobackfill.vectors import InputKind

_PIECE = 1 << 16
# Errors that a host can cause; urllib3 passes some of other libraries on.
_TROUBLE = (urllib3.exceptions.HTTPError, http.client.HTTPException, ValueError, OSError)


class ItemSource(Protocol):
    """A source of items by id; threads may share it."""

    @property
    def kind(self) -> InputKind | None:
        """Return the kind of all its items, image or text; None if it may return either kind."""

    def read(self, item_id: str, most_bytes: int) -> str | bytes | None:
        """Read the content of one item.

        Args:
            item_id: the item's id.
            most_bytes: the largest size to accept, 0 or more; of a text, in UTF-8.

        Returns:
            A text, or an encoded image; None if there is no such item.

        Raises:
            TooLargeError: the item is larger than `most_bytes`.
            UnavailableError: the source cannot be read now.
            InvalidInputError: the id or the content is not valid.
            Exception: any error of a function that the caller gave.
        """


class FolderItems:
    """Items from files below a folder, images or texts in UTF-8.

    `read` raises InvalidInputError if an id leads out of the folder.

    Args:
        folder: the folder; a missing one has no items.
        path_pattern: the path of a file in the folder, such as {id}.jpg. By default an id is the
            path, as `nobackfill embed` names files.
        kind: image or text.
    """

    def __init__(self, folder: Path, path_pattern: str = "{id}", kind: InputKind = "image") -> None:
        self._folder, self._pattern, self.kind = folder.resolve(), path_pattern, kind

    def read(self, name: str, most_bytes: int) -> str | bytes | None:
        """Read an item's file.

        A folder or a pipe counts as no such file, and an empty id names the folder. A text loses a
        byte order mark. An empty file gives an empty content.

        Args:
            name: the item's id, which replaces {id} in the pattern.
            most_bytes: the largest size to accept, at least 0.

        Returns:
            A text, or an encoded image; None if there is no such file.

        Raises:
            TooLargeError: the file is larger than `most_bytes`.
            InvalidInputError: the id leads out of the folder, also by a link, or can name no file,
                or a text is not UTF-8.
            UnavailableError: the file cannot be read, such as by lack of permission or too long a
                name.
            RuntimeError: the file is a link that leads to itself (before Python 3.13).
        """
        try:
            path = (self._folder / PurePosixPath(self._pattern.replace("{id}", name))).resolve()
            if not path.is_relative_to(self._folder):
                raise InvalidInputError(
                    f"item {name!r}: expected an id whose file is inside the folder "
                    f"{self._folder}; rename the item"
                )
            if not path.is_file():
                return None
            with path.open("rb") as file:
                return _decode(
                    self.kind, check_item_size(file.read(most_bytes + 1), name, most_bytes), name
                )
        except OSError as error:
            raise UnavailableError(
                f"item {name!r}: its file cannot be read ({error.strerror}); check its permissions"
            ) from error
        except ValueError as error:
            raise InvalidInputError(
                f"item {name!r}: expected an id that can name a file ({error}); rename the item"
            ) from error


class FunctionItems:
    """Items from a function; its errors pass through `read`.

    Args:
        function: gets an id; returns a text, an encoded image, or None if there is no such item.
            Several threads may call it at once.
        kind: the kind of all its items, image or text; None if it may return either kind.
    """

    def __init__(
        self, function: Callable[[str], str | bytes | None], kind: InputKind | None
    ) -> None:
        self._function, self.kind = function, kind

    def read(self, name: str, most_bytes: int) -> str | bytes | None:
        """Call the function for an item.

        The content is not compared with `kind`.

        Args:
            name: the item's id.
            most_bytes: the largest size to accept; of a text, in UTF-8.

        Returns:
            A text, or an encoded image; None if there is no such item.

        Raises:
            TooLargeError: the content is larger than `most_bytes`.
            Exception: any error of the function.
            TypeError: the function returns a value without a length, such as a number.
            UnicodeEncodeError: a text has an unpaired surrogate.
        """
        content = self._function(name)
        if content is not None:
            check_item_size(
                content.encode() if isinstance(content, str) else content, name, most_bytes
            )
        return content


class UrlItems:
    """Items from a web host; redirects are not followed.

    The statuses 404 and 410 mean that there is no such item.

    Args:
        url_template: an address such as https://images.example/{id}.jpg; http only on this machine.
        allowed_hosts: the hosts that may be requested.
        kind: image or text in UTF-8.
        timeout_seconds: the longest duration of one request, in seconds.

    Raises:
        ConfigurationError: the template has another scheme or host, or no {id} in its path.
    """

    def __init__(
        self,
        url_template: str,
        allowed_hosts: Collection[str],
        kind: InputKind = "image",
        timeout_seconds: float = 10.0,
    ) -> None:
        self._template, self.kind = url_template, kind
        try:
            parsed = urllib3.util.parse_url(url_template)
        except urllib3.exceptions.LocationParseError:
            parsed = urllib3.util.Url()
        local = is_loopback(parsed.host or "")
        path = url_template.partition("://")[2].partition("/")[2]
        if parsed.scheme != "https" and not (local and parsed.scheme == "http"):
            raise ConfigurationError(
                "address of items: expected https://HOST/…{id}…, or http:// on this machine, got "
                f"{url_template!r}; correct the address"
            )
        if parsed.host not in allowed_hosts or "{id}" not in path:
            raise ConfigurationError(
                "address of items: expected one of the allowed hosts "
                f"({join_few(sorted(allowed_hosts)) or 'none'}) and {{id}} in the path, got "
                f"{url_template!r}; correct the address, or allow its host"
            )
        self._timeout = timeout_seconds
        self._http = make_http_pool(retries=False, timeout=timeout_seconds, maxsize=16)

    def read(self, name: str, most_bytes: int) -> str | bytes | None:
        """Request an item from its host, and stop after `most_bytes`.

        Any thread may call it. A text loses a byte order mark.

        Args:
            name: the item's id; it is quoted, so that it cannot lead to another folder.
            most_bytes: the largest size to accept; reading stops after it.

        Returns:
            A text, or an encoded image; None if the host answers 404 or 410.

        Raises:
            TooLargeError: the answer is larger than `most_bytes`.
            InvalidInputError: the id is "." or "..", or no valid Unicode, or a text is not UTF-8.
            UnavailableError: the host does not answer within `timeout_seconds`, sends too
                slowly, or answers with another status, a redirect included.
        """
        if name in (".", ".."):
            raise InvalidInputError(
                f"item {name!r}: its id cannot name a file; rename the item, or use another source"
            )
        try:
            # Quoted as one segment, an id cannot lead to another host or folder.
            url = self._template.replace("{id}", quote(name, safe=""))
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"item {name!r}: expected an id of valid Unicode, got an unpaired surrogate; "
                "rename the item"
            ) from error
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
            raise UnavailableError(
                f"item {name!r}: the host of the source does not answer ({error}); check the "
                "address of the source"
            ) from error
        return _decode(self.kind, check_item_size(bytes(data), name, most_bytes), name)

    def _pieces(self, url: str, name: str) -> Iterator[bytes]:
        """Yield the body. Raises NotFoundError, UnavailableError for another status, or any error
        of urllib3."""
        response = self._http.request("GET", url, redirect=False, preload_content=False)
        complete = False
        try:
            if response.status in (404, 410):
                raise NotFoundError(
                    f"item {name!r}: the host of the source has no file for it; correct its id, or "
                    "restore the file"
                )
            if response.status != 200:
                raise UnavailableError(
                    f"item {name!r}: the host of the source answers with the HTTP status "
                    f"{response.status}, expected 200; check the address of the source"
                )
            while piece := response.read1(_PIECE):
                yield piece
            complete = True
        finally:
            if not complete:
                # Unread bytes would spoil the connection for the next request.
                response.close()


def _decode(kind: InputKind, data: bytes, name: str) -> str | bytes:
    """Decode a text; return an image unchanged. Raises InvalidInputError for bad UTF-8."""
    if kind == "image":
        return data
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"item {name!r}: expected a text in UTF-8, got other bytes; save the text as UTF-8"
        ) from error


def check_item_size(data: bytes, name: str, most_bytes: int) -> bytes:
    """Check the size of an item, and return it unchanged.

    Args:
        data: the content.
        name: the item's id, for the error.
        most_bytes: the largest size to accept.

    Returns:
        `data`.

    Raises:
        TooLargeError: `data` has more bytes.
    """
    if len(data) > most_bytes:
        raise TooLargeError(
            f"item {name!r}: expected at most {most_bytes} bytes, got more; make the item smaller, "
            "or leave it out"
        )
    return data


# Identifies a version of a file: modification time, length, inode.
_Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class _LastLine:
    """The last line that was indexed: its number, its first byte, and its content."""

    number: int = 1
    start: int = 0
    line: bytes = b""


class JsonLinesItems:
    """Texts from a JSON Lines file with `id` and `text`; the last line of an id wins.

    The constructor reads the file once and remembers the place of each line, not the texts. Lines
    appended to the file are indexed at the next read; any other change indexes the whole file
    again.

    Args:
        file: the file.

    Raises:
        NotFoundError: there is no such file, or it cannot be read.
        InvalidInputError: a line is malformed, or `file` is no regular file.
        OSError: the disk fails.
    """

    kind: InputKind = "text"

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._stamp: _Stamp | None = None
        self._offsets: dict[str, int] = {}
        self._last_line = _LastLine()
        self._refresh()

    def read(self, name: str, most_bytes: int) -> str | None:
        """Read an item's text from its line; index new lines first.

        The last line of an id counts. Threads wait for each other while the file is read.

        Args:
            name: the item's id.
            most_bytes: the largest size to accept, in UTF-8. Lines that are much longer than it, or
                than 64 KiB, count as larger.

        Returns:
            The text; None if no line has this id.

        Raises:
            TooLargeError: the text is larger than `most_bytes`.
            InvalidInputError: a line is malformed, the text has an unpaired surrogate, or the file
                is no regular file any more.
            NotFoundError: the file does not exist any more, or cannot be opened.
            UnavailableError: the file cannot be read, or changes while it is read.
        """
        with self._lock:
            try:
                self._refresh()
                offset = self._offsets.get(name)
                if offset is None:
                    return None
                with self._file.open("rb") as file:
                    file.seek(offset)
                    line = file.readline(_longest(most_bytes))
            except OSError as error:
                raise UnavailableError(
                    f"item {name!r}: {self._file} cannot be read ({error.strerror}); check its "
                    "permissions"
                ) from error
        if not line.endswith(b"\n") and len(line) == _longest(most_bytes):
            raise TooLargeError(
                f"item {name!r}: expected at most {most_bytes} bytes, got more; make the item "
                "smaller, or leave it out"
            )
        try:
            entry = parse_text_line(line, repr(name))
        except InvalidInputError:
            self._index_again()
            raise
        if entry.id != name:
            self._index_again()
            # The file was rewritten between index and read: this line belongs to another item.
            raise UnavailableError(
                f"item {name!r}: {self._file} changed while it was read; try again"
            )
        try:
            check_item_size(entry.text.encode(), name, most_bytes)
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"item {name!r}: expected a text of valid Unicode, got an unpaired surrogate; "
                "correct this line"
            ) from error
        return entry.text

    def _index_again(self) -> None:
        """Index the whole file at the next read: lines have moved, though the last one has not."""
        with self._lock:
            self._stamp = None

    def _refresh(self) -> None:
        with _open_file(self._file) as file:
            content = os.fstat(file.fileno())
            stamp = (content.st_mtime_ns, content.st_size, content.st_ino)
            if stamp == self._stamp:
                return
            appended = self._has_grown(file, stamp)
            if not appended:
                self._offsets, self._last_line = {}, _LastLine()
            self._index(file, appended=appended)
            self._stamp = stamp

    def _has_grown(self, file: BinaryIO, stamp: _Stamp) -> bool:
        """Return whether the file is the indexed one with appended lines."""
        if self._stamp is None or stamp[2] != self._stamp[2] or stamp[1] <= self._stamp[1]:
            return False
        file.seek(self._last_line.start)
        return file.readline().startswith(self._last_line.line)

    def _index(self, file: BinaryIO, *, appended: bool) -> None:
        """Index the lines from the last indexed one on."""
        number, start = self._last_line.number, self._last_line.start
        file.seek(start)
        # Only a line feed ends a line; JSON may contain other line separators.
        for line in file:
            if line.strip():
                try:
                    entry = parse_text_line(line, f"{self._file}:{number}")
                except InvalidInputError:
                    if appended and not line.endswith(b"\n"):
                        # A writer is still appending: index this line when it is complete.
                        return
                    raise
                self._offsets[entry.id] = start
                self._last_line = _LastLine(number, start, line)
            start, number = start + len(line), number + 1


def _open_file(path: Path) -> BinaryIO:
    """Open a regular file. Raises NotFoundError; InvalidInputError for a pipe or a folder."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NotFoundError(
            f"{path}: this file of texts cannot be read ({error.strerror}); check its name and "
            "permissions"
        ) from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise InvalidInputError(
        f"{path}: expected a regular file, because its lines are read by offset, got a folder, "
        "pipe or device; store the lines in a file"
    )


def _longest(most_bytes: int) -> int:
    """Bound the length of a line by its text's bytes: JSON may write six bytes for one."""
    return 6 * min(most_bytes, LARGEST_TEXT_BYTES) + (1 << 16)
