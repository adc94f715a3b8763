"""Texts of a JSONL file by id, read where they stand: the file may have millions."""

import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nobackfill.errors import InvalidInputError, NotFoundError, TooLargeError, UnavailableError
from nobackfill.items.kind import Kind
from nobackfill.items.sources import bounded
from nobackfill.text_lines import read_line
from nobackfill.tokenizing import LARGEST_BYTES

# Of a file as it was looked through: when it was written, how long it is, which one it is.
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
        """Whether the file is the one that was looked through, and longer."""
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
    """Of a line whose text has so many bytes: JSON may write six for one, and has other keys."""
    return 6 * min(most_bytes, LARGEST_BYTES) + (1 << 16)
