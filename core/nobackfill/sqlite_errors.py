"""What an error of SQLite means to who asked: busy, no room or right to write, or damage."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from nobackfill.errors import BusyError, CannotWriteError, DamagedError, NobackfillError

_UNWRITABLE = (
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
)  # fmt: skip
# What a wrong program meets, never a damaged file.
_OURS = (sqlite3.ProgrammingError, sqlite3.NotSupportedError, sqlite3.InternalError)


def refusal(path: Path, error: sqlite3.Error) -> NobackfillError | None:
    """What SQLite's error means for the file at `path`; None where it is a mistake of ours.

    Our statements are right for a whole file: one that misses a table or meets a value of another
    kind is damage.
    """
    code = getattr(error, "sqlite_errorcode", 0)
    if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return BusyError(f"{path}: another process is writing ({error}); try again")
    if code & 0xFF in _UNWRITABLE and code != sqlite3.SQLITE_IOERR_SHORT_READ:
        return CannotWriteError(
            f"{path}: cannot be read or written ({error}); free some space, check the disk and "
            "the file's permissions"
        )
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, _OURS):
        return DamagedError(path, error)
    return None


@contextlib.contextmanager
def refusing_sqlite(path: Path) -> Iterator[None]:
    """SQLite's errors about a lock or the disk as ours. Raises BusyError, CannotWriteError."""
    try:
        yield
    except sqlite3.OperationalError as error:
        found = refusal(path, error)
        if isinstance(found, BusyError | CannotWriteError):
            raise found from error
        raise
