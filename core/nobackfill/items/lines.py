"""Texts of a JSONL file by id, read where they stand: the file may have millions."""

import threading
from pathlib import Path

from nobackfill.errors import InvalidInputError, TooLargeError, UnavailableError
from nobackfill.items.kind import Kind
from nobackfill.items.sources import bounded
from nobackfill.text_lines import read_line, read_texts
from nobackfill.tokenizing import LARGEST_BYTES

# Of a file as it was looked through: when it was written, how long it is, which one it is.
_Stamp = tuple[int, int, int]


class LineItems:
    """Lines with `id` and `text`; of an id that comes twice the last. The file is looked through
    again when it has changed. See Items.

    Raises NotFoundError, InvalidInputError for a line that is none.
    """

    kind: Kind = "text"

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._stamp: _Stamp | None = None
        self._places: dict[str, int] = {}
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
        one = read_line(line, repr(name))
        if one.id != name:
            # Written anew between the two looks: another's text would be this one's vector.
            raise UnavailableError(f"{name!r}: its file changes while it is read; try again")
        try:
            bounded(one.text.encode(), name, most_bytes)
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"{name!r}: expected valid Unicode") from error
        return one.text

    def _refresh(self) -> None:
        stat = self._file.stat() if self._file.exists() else None
        stamp = None if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if stamp is None or stamp != self._stamp:
            self._places = {one.id: one.start for one in read_texts(self._file)}
            self._stamp = stamp


def _longest(most_bytes: int) -> int:
    """Of a line whose text has so many bytes: JSON may write six for one, and has other keys."""
    return 6 * min(most_bytes, LARGEST_BYTES) + (1 << 16)
