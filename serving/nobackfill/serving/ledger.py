"""The ledger of re-embedding: who embeds which item, what is wanted, and what a day has cost.

Any number of processes share a ledger. A claim keeps others from embedding the same item. It ends
with its process, or after a while. An item that could not be embedded costs its day nothing.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from nobackfill.durable import refusal, transaction, translate_sqlite_errors
from nobackfill.errors import CannotWriteError

# A claim is another's after this many seconds, or when its process has ended.
CLAIM_SECONDS = 600.0

Key = TypeVar("Key", bound=Hashable)


def today() -> str:
    """Return the day (UTC) that a budget is of."""
    return datetime.now(UTC).date().isoformat()


class Ledger(Protocol[Key]):
    """The work on one gallery's items. Each change is durable. All raise BusyError,
    CannotWriteError, UnavailableError."""

    def claim(self, keys: Sequence[Key], day: str, budget: int) -> list[Key]:
        """Claim items, in their order, that nobody embeds at present and that the day's `budget`
        has room for. The others are noted as wanted."""
        ...

    def settle(self, keys: Collection[Key]) -> None:
        """Note that items are embedded, or gone: nobody claims or wants them any more."""
        ...

    def release(self, keys: Collection[Key]) -> None:
        """Give up claims of items that could not be embedded, and give back what they cost their
        day. They are wanted last, until they are asked for again."""
        ...

    def spent(self, day: str) -> int:
        """Count the items that were claimed on a day, without those that were given up."""
        ...


class LedgerFile(Generic[Key]):
    """A ledger in an SQLite file; see Ledger. Threads may share it.

    Raises DamagedError for another file, CannotWriteError, BusyError.
    """

    # Statements that are run when the file is opened.
    opening = """
CREATE TABLE IF NOT EXISTS claim (
    id TEXT PRIMARY KEY, process INTEGER NOT NULL, until REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS wanted (id TEXT PRIMARY KEY, times INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (day TEXT PRIMARY KEY, items INTEGER NOT NULL) WITHOUT ROWID;
"""
    synchronous = "FULL"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._opened: sqlite3.Connection | None = None

    def claim(self, keys: Sequence[Key], day: str, budget: int) -> list[Key]:
        with self._writing() as connection:
            now, mine = time.time(), list[Key]()
            _free(connection, now)
            room = budget - _spent(connection, day)
            for key in self._lacking(connection, keys):
                row = (self._name(key), os.getpid(), now + CLAIM_SECONDS)
                insert = "INSERT OR IGNORE INTO claim VALUES (?, ?, ?)"
                if room > len(mine) and connection.execute(insert, row).rowcount:
                    mine.append(key)
                    continue
                connection.execute(
                    "INSERT INTO wanted VALUES (?, 1) "
                    "ON CONFLICT (id) DO UPDATE SET times = times + 1",
                    row[:1],
                )
            connection.execute(
                "INSERT INTO spent VALUES (?, ?) "
                "ON CONFLICT (day) DO UPDATE SET items = items + excluded.items",
                (day, len(mine)),
            )
            return mine

    def settle(self, keys: Collection[Key]) -> None:
        with self._writing() as connection:
            self._settle(connection, keys)

    def _settle(self, connection: sqlite3.Connection, keys: Collection[Key]) -> None:
        rows = [(self._name(key),) for key in keys]
        connection.executemany("DELETE FROM claim WHERE id = ?", rows)
        connection.executemany("DELETE FROM wanted WHERE id = ?", rows)

    def release(self, keys: Collection[Key]) -> None:
        rows = [(self._name(key),) for key in keys]
        with self._writing() as connection:
            # A claim says when it was made. One that is another's by now was paid by that one.
            connection.executemany(
                "UPDATE spent SET items = items - 1 WHERE items > 0 AND day = "
                "(SELECT date(until - ?, 'unixepoch') FROM claim WHERE id = ? AND process = ?)",
                [(CLAIM_SECONDS, name, os.getpid()) for (name,) in rows],
            )
            connection.executemany("DELETE FROM claim WHERE id = ?", rows)
            connection.executemany(
                "INSERT INTO wanted VALUES (?, 0) ON CONFLICT (id) DO UPDATE SET times = 0", rows
            )

    def names_wanted(self, count: int, where: str = "times > 0") -> list[str]:
        """Return the names of items that were asked for in vain and for which `where` holds, most
        often first."""
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT id FROM wanted WHERE {where} ORDER BY times DESC, id LIMIT ?",  # noqa: S608
                (count,),
            )
            return [name for (name,) in rows]

    def spent(self, day: str) -> int:
        with self._reading() as connection:
            return _spent(connection, day)

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    def _name(self, key: Key) -> str:
        """The name of an item in the file."""
        return str(key)

    def _lacking(self, connection: sqlite3.Connection, keys: Sequence[Key]) -> Sequence[Key]:
        """Items without a vector; another process may have kept one since it was looked for."""
        del connection
        return keys

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, translate_sqlite_errors(self._path):
            yield self._connection

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, transaction(self._connection) as connection:
            yield connection

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> sqlite3.Connection:
        connection = None
        try:
            # Vectors and wishes are private: no other user reads the file.
            self._path.touch(0o600)
            connection = sqlite3.connect(
                self._path, timeout=30, isolation_level=None, check_same_thread=False
            )
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA synchronous={self.synchronous}")
            for statement in self.opening.split(";")[:-1]:
                connection.execute(statement)
            return connection
        except OSError as error:
            raise CannotWriteError(f"{self._path}: cannot be written ({error.strerror})") from error
        except sqlite3.Error as error:
            if connection is not None:
                connection.close()
            raise refusal(self._path, error) or error from error


def _spent(connection: sqlite3.Connection, day: str) -> int:
    row = connection.execute("SELECT items FROM spent WHERE day = ?", (day,)).fetchone()
    return int(row[0]) if row else 0


def _free(connection: sqlite3.Connection, now: float) -> None:
    """End claims that are too old, and those of processes that were killed."""
    connection.execute("DELETE FROM claim WHERE until < ?", (now,))
    holders = connection.execute("SELECT DISTINCT process FROM claim").fetchall()
    for (process,) in holders:
        if process != os.getpid() and not Path(f"/proc/{process}").exists():
            connection.execute("DELETE FROM claim WHERE process = ?", (process,))
