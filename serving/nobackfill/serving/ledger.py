"""The ledger of re-embedding: claims of items, requested items, and the count of each day.

Any number of processes share a ledger. A claim prevents other processes from embedding the same
item. It ends with its process or after ten minutes. An item that fails costs nothing of the budget.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from nobackfill.durable import error_from_sqlite, transaction
from nobackfill.errors import CannotWriteError

# A claim expires after this many seconds, or when its process has ended.
CLAIM_SECONDS = 600.0

Key = TypeVar("Key", bound=Hashable)


def today_utc() -> str:
    """Return the present day (UTC), YYYY-MM-DD, as a key of the budget."""
    return datetime.now(UTC).date().isoformat()


class Ledger(Protocol[Key]):
    """The re-embedding work on one gallery.

    Every change is durable. Every method may raise BusyError, CannotWriteError, and DamagedError
    (a file is damaged) or UnavailableError (a database does not answer).
    """

    def claim(self, keys: Sequence[Key], day: str, budget: int) -> list[Key]:
        """Claim items that no process embeds at present, within the day's budget.

        Items that have a vector already are neither claimed nor queued.

        Args:
            keys: distinct items, claimed in their order; may be empty.
            day: the day of the budget, YYYY-MM-DD in UTC.
            budget: the most items of this day, over all processes; 0 claims none.

        Returns:
            The items that were claimed. The others are queued as requested, once more.

        Raises:
            BusyError, CannotWriteError, DamagedError, UnavailableError: the ledger is locked,
                cannot be written, is damaged, or does not answer; nothing was claimed.
        """

    def finish_claims(self, keys: Collection[Key]) -> None:
        """End claims of items that are embedded or deleted, and remove their requests.

        Items without a claim or request are ignored. Their cost stays in the budget.

        Raises:
            BusyError, CannotWriteError, DamagedError, UnavailableError: the ledger is locked,
                cannot be written, is damaged, or does not answer; nothing was changed.
        """

    def return_claims(self, keys: Collection[Key]) -> None:
        """Give up claims of items that failed, and return their cost to the budget.

        The items stay queued, but come last until a query requests them again. Keys must be
        distinct, as a repeated one may return its cost twice. The cost goes back to the day (UTC)
        of the claim.

        Raises:
            BusyError, CannotWriteError, DamagedError, UnavailableError: the ledger is locked,
                cannot be written, is damaged, or does not answer; nothing was changed.
        """

    def count_claimed(self, day: str) -> int:
        """Return how many items were claimed on a day, without those that were given up.

        Args:
            day: YYYY-MM-DD in UTC; an unknown day gives 0.

        Raises:
            BusyError, CannotWriteError, DamagedError, UnavailableError: the ledger is locked,
                cannot be opened, is damaged, or does not answer.
        """


class LedgerFile(Generic[Key]):
    """A ledger in an SQLite file, which is made at the first use; threads may share it.

    The file has mode 0600. Methods wait up to 30 seconds for other processes, then raise BusyError.
    They raise CannotWriteError if the file cannot be written, and DamagedError if it is damaged or
    is no ledger.
    """

    # Statements to run when the file is opened.
    schema_statements = """
CREATE TABLE IF NOT EXISTS claim (
    id TEXT PRIMARY KEY, process INTEGER NOT NULL, until REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS wanted (id TEXT PRIMARY KEY, times INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (day TEXT PRIMARY KEY, items INTEGER NOT NULL) WITHOUT ROWID;
"""
    synchronous = "FULL"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._file: sqlite3.Connection | None = None

    def claim(self, keys: Sequence[Key], day: str, budget: int) -> list[Key]:
        """Claim items for this process within a day's budget, and queue the others.

        Claims of processes that have ended, and claims older than ten minutes, are ended first.

        Args:
            keys: distinct items, claimed in their order; may be empty. A repeated one is queued as
                requested.
            day: the day of the budget, YYYY-MM-DD in UTC.
            budget: the most items of this day, over all processes; 0 claims none.

        Returns:
            The items that were claimed, in order; items that this process claimed before are not
            among them. Every other item is queued as requested, once more, unless the file has a
            vector of it.

        Raises:
            BusyError, CannotWriteError, DamagedError: the file is locked for 30 s, cannot be made
                or written, or is damaged; nothing was claimed.
        """
        with self._transaction() as connection:
            moment, claims = time.time(), list[Key]()
            _free(connection, moment)
            room = budget - _spent(connection, day)
            for key in self._lacking(connection, keys):
                row = (self._name(key), os.getpid(), moment + CLAIM_SECONDS)
                insert = "INSERT OR IGNORE INTO claim VALUES (?, ?, ?)"
                if room > len(claims) and connection.execute(insert, row).rowcount:
                    claims.append(key)
                    continue
                connection.execute(
                    "INSERT INTO wanted VALUES (?, 1) "
                    "ON CONFLICT (id) DO UPDATE SET times = times + 1",
                    row[:1],
                )
            connection.execute(
                "INSERT INTO spent VALUES (?, ?) "
                "ON CONFLICT (day) DO UPDATE SET items = items + excluded.items",
                (day, len(claims)),
            )
            return claims

    def finish_claims(self, keys: Collection[Key]) -> None:
        """End claims of items that are embedded or deleted, and remove them from the queue.

        Claims of other processes on these items end, too. Items without a claim are ignored. Their
        cost stays in the budget.

        Raises:
            BusyError, CannotWriteError, DamagedError: the file is locked for 30 s, cannot be made
                or written, or is damaged; nothing was changed.
        """
        with self._transaction() as connection:
            self._settle(connection, keys)

    def _settle(self, connection: sqlite3.Connection, keys: Collection[Key]) -> None:
        rows = [(self._name(key),) for key in keys]
        connection.executemany("DELETE FROM claim WHERE id = ?", rows)
        connection.executemany("DELETE FROM wanted WHERE id = ?", rows)

    def return_claims(self, keys: Collection[Key]) -> None:
        """Give up claims of items that failed, and return their cost to the day's budget.

        The items stay queued, but come last until a query requests them again; an item without a
        claim is queued, too. Claims of other processes on these items end, too, but their cost is
        not returned. Keys must be distinct, as a repeated one returns its cost twice. The cost goes
        back to the day (UTC) of the claim.

        Raises:
            BusyError, CannotWriteError, DamagedError: the file is locked for 30 s, cannot be made
                or written, or is damaged; nothing was changed.
        """
        rows = [(self._name(key),) for key in keys]
        with self._transaction() as connection:
            # Refund only our own claim: a claim that another process took over was refunded there.
            connection.executemany(
                "UPDATE spent SET items = items - 1 WHERE items > 0 AND day = "
                "(SELECT date(until - ?, 'unixepoch') FROM claim WHERE id = ? AND process = ?)",
                [(CLAIM_SECONDS, name, os.getpid()) for (name,) in rows],
            )
            connection.executemany("DELETE FROM claim WHERE id = ?", rows)
            connection.executemany(
                "INSERT INTO wanted VALUES (?, 0) ON CONFLICT (id) DO UPDATE SET times = 0", rows
            )

    def requested_keys(self, count: int, where: str = "times > 0") -> list[str]:
        """Return the names of queued items, the most requested first.

        Queued items that a process has claimed are among them.

        Args:
            count: the most names to return; 0 gives none, a negative number all.
            where: an SQL condition on the columns `id` and `times` of the queue; never build it
                from a caller's text. The default leaves out items that failed and were not
                requested since.

        Returns:
            Names, the most requested first, equal ones by name.

        Raises:
            BusyError, CannotWriteError, DamagedError: the file is locked, cannot be read or made,
                or is damaged. A wrong `where` looks like damage.
        """
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT id FROM wanted WHERE {where} ORDER BY times DESC, id LIMIT ?",  # noqa: S608
                (count,),
            )
            return [name for (name,) in rows]

    def count_claimed(self, day: str) -> int:
        """Return how many items were claimed on a day, YYYY-MM-DD, without those given up.

        Args:
            day: YYYY-MM-DD in UTC; an unknown day gives 0.

        Raises:
            BusyError, CannotWriteError, DamagedError: the file is locked, cannot be read or made,
                or is damaged.
        """
        with self._reading() as connection:
            return _spent(connection, day)

    def close(self) -> None:
        """Close the file, if it is open; the next call of another method opens it again.

        Claims of this process stay until it ends. The call waits for a method that another thread
        runs.
        """
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _name(self, key: Key) -> str:
        """Return the name of an item in the file."""
        return str(key)

    def _lacking(self, connection: sqlite3.Connection, keys: Sequence[Key]) -> Sequence[Key]:
        """Return the items without a vector; another process may have stored one since."""
        del connection
        return keys

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._translate_errors():
            yield self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._translate_errors(), transaction(self._connection) as connection:
            yield connection

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CannotWriteError(
                f"{self._path}: this file, which records re-embedded items, cannot be written "
                f"({error.strerror}); check its folder and permissions"
            ) from error
        except sqlite3.Error as error:
            raise error_from_sqlite(self._path, error) or error from error

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._file is None:
            self._file = self._open()
        return self._file

    def _open(self) -> sqlite3.Connection:
        # Vectors and queries are private: no other user may read the file.
        self._path.touch(0o600)
        connection = sqlite3.connect(
            self._path, timeout=30, isolation_level=None, check_same_thread=False
        )
        with ExitStack() as undo:
            undo.callback(connection.close)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA synchronous={self.synchronous}")
            for statement in self.schema_statements.split(";")[:-1]:
                connection.execute(statement)
            undo.pop_all()
        return connection


def _spent(connection: sqlite3.Connection, day: str) -> int:
    row = connection.execute("SELECT items FROM spent WHERE day = ?", (day,)).fetchone()
    return int(row[0]) if row else 0


def _free(connection: sqlite3.Connection, moment: float) -> None:
    """End claims that have expired, and claims of processes that have ended."""
    connection.execute("DELETE FROM claim WHERE until < ?", (moment,))
    holders = connection.execute("SELECT DISTINCT process FROM claim").fetchall()
    for (process,) in holders:
        if process != os.getpid() and not Path(f"/proc/{process}").exists():
            connection.execute("DELETE FROM claim WHERE process = ?", (process,))
