"""The connections to one gallery file: one that writes, and a pool of those that read.

A lock file beside the gallery is held shared while it is open. Who finds nobody else there and a
write-ahead log left over knows that the last process died, and checks the pages before use.
"""

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from nobackfill import durable
from nobackfill.errors import (
    BusyError,
    CannotWriteError,
    DamagedError,
    NotFoundError,
)
from nobackfill.gallery.access import BUSY_TIMEOUT_MS, SHARED, accesses, connect
from nobackfill.gallery.file_format import FORMAT, check_tables, format_of, not_a_gallery
from nobackfill.gallery.file_lock import lock_path, open_lock, share
from nobackfill.gallery.residents import Residents
from nobackfill.sqlite_errors import refusal, refusing_sqlite

# How long closing waits for the statements under way.
_CLOSE_S = 60.0
# Where shared memory or the log's file could not be made after all.
_NO_ROOM = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN)


class _NoRoomError(Exception):
    """What SQLite makes beside the gallery could not be made."""


class Connections:
    """Every connection that this process has to one gallery file.

    None is closed while a thread works with it: SQLite would read freed memory. After `rest` they
    are opened again when somebody asks for one; `recent` is set whenever somebody does.
    """

    def __init__(self, path: Path, residents: Residents | None = None) -> None:
        """Raises NotFoundError, VerificationError (damaged, or no gallery), BusyError,
        CannotWriteError (cannot even be read).

        `residents` may close them while nobody uses them.
        """
        if not path.is_file():
            raise NotFoundError(f"{path}: no gallery there; create or initialise one first")
        self.path = path
        self._writing = threading.RLock()
        self._users = threading.Condition()
        self._using = 0
        self._closed = False
        self.recent = True
        self._residents = residents
        self._idle: deque[sqlite3.Connection] = deque()
        self._all: list[sqlite3.Connection] = []
        self._writer: sqlite3.Connection | None = None
        self._lock = -1
        self._access = SHARED
        with self.using():
            pass

    def _open(self) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self._shut)
            self._lock = open_lock(lock_path(self.path), self.path)
            alone = self._lock >= 0 and share(self._lock, self.path, BUSY_TIMEOUT_MS / 1000)
            wal = self.path.with_name(self.path.name + "-wal")
            unclean = alone and wal.exists() and wal.stat().st_size > 0
            for access in accesses(self.path, alone):
                self._access = access
                try:
                    self._writer = self._checked(unclean)
                    break
                except _NoRoomError:
                    while self._all:
                        self._all.pop().close()
            else:
                raise CannotWriteError(f"{self.path}: cannot be opened; free some space")
            # Who is sole keeps all others out: they would need the shared memory.
            if self._lock >= 0 and not self._access.sole:
                fcntl.flock(self._lock, fcntl.LOCK_SH)
            undo.pop_all()

    def _checked(self, unclean: bool) -> sqlite3.Connection:
        try:
            connection = self._connect()
            if unclean:
                check_pages(connection, self.path)
            version = format_of(connection, self.path)
            if version < FORMAT:
                from nobackfill.gallery.schema import migrate

                self._access.check_writable()
                migrate(connection)
            check_tables(connection, self.path)
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0)
            if code & 0xFF in _NO_ROOM and code != sqlite3.SQLITE_IOERR_SHORT_READ:
                raise _NoRoomError from error
            if code == sqlite3.SQLITE_NOTADB:
                raise not_a_gallery(self.path, "a file of another kind") from error
            found = refusal(self.path, error)
            if found is None:
                raise
            raise found from error
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = connect(self.path, self._access)
        self._all.append(connection)
        return connection

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Keep all open to the end of the block, opened and checked where they are not.

        Raises NotFoundError once they are closed, VerificationError, BusyError.
        """
        with self._users:
            if self._closed:
                raise NotFoundError(f"{self.path}: the gallery was closed or deleted")
            fresh = self._writer is None
            if fresh:
                self._open()
            self._using += 1
        self.recent = True
        try:
            if fresh and self._residents is not None:
                self._residents.opened(self)
            yield
        except sqlite3.DatabaseError as error:
            found = refusal(self.path, error)
            if found is None:
                raise
            raise found from error
        finally:
            with self._users:
                self._using -= 1
                self._users.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The writer, in a transaction of its own. Raises BusyError, CannotWriteError."""
        with self.writer() as writer:
            self._access.check_writable()
            with durable.transaction(writer) as connection:
                yield connection

    @contextlib.contextmanager
    def writer(self) -> Iterator[sqlite3.Connection]:
        """The writer, held but in no transaction."""
        with self.using(), self._writing:
            assert self._writer is not None, "open while it is used"
            yield self._writer

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A reader that sees one snapshot. Raises BusyError, DamagedError for a damaged file,
        NotFoundError once all are closed."""
        with self.using():
            if self._access.sole:
                # There is no other connection to be had.
                with self.writer() as connection, _snapshot(connection):
                    yield connection
                return
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
                connection.execute("PRAGMA query_only = ON")
            try:
                with _snapshot(connection):
                    yield connection
                self._access.check_unchanged(self.path)
            finally:
                self._idle.append(connection)

    def scrub(self) -> bool:
        """Empty the write-ahead log into the file, so that no deleted byte stays in it.

        False if a reader prevents it just now. Raises CannotWriteError.
        """
        with self.writer() as writer:
            self._access.check_writable()
            writer.execute("PRAGMA busy_timeout = 0")
            try:
                busy = writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            except sqlite3.OperationalError:
                return False
            finally:
                writer.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        return not busy

    def compact(self, pages: int) -> None:
        """Give free pages back to the file system, so many a transaction. Raises BusyError,
        CannotWriteError."""
        with self.writer() as writer, refusing_sqlite(self.path):
            self._access.check_writable()
            free = writer.execute("PRAGMA freelist_count").fetchone()[0]
            for _ in range(0, free, pages):
                # executescript runs the statement to its end; execute would free a single page.
                writer.executescript(f"PRAGMA incremental_vacuum({pages})")
            writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close them all, once nobody works with one; the last process to close leaves no
        write-ahead log. Raises BusyError when a statement does not end; they then stay open.
        """
        with self._users:
            if not self._users.wait_for(lambda: not self._using, _CLOSE_S):
                raise BusyError(f"{self.path}: still in use after {_CLOSE_S:.0f} s")
            self._closed = True
            self._shut()

    def rest(self) -> bool:
        """Close them until one is asked for again; False if somebody works with one just now."""
        if not self._users.acquire(blocking=False):
            return False
        try:
            if not self._using:
                self._shut()
            return not self._using
        finally:
            self._users.release()

    def _shut(self) -> None:
        self._idle.clear()
        self._writer = None
        while self._all:
            self._all.pop().close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def check_pages(connection: sqlite3.Connection, path: Path) -> None:
    """Read every page. Raises DamagedError."""
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise DamagedError(path, verdict.splitlines()[-1])


@contextlib.contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    if connection.in_transaction:
        # The sole connection, asked for by who has it already.
        yield
        return
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
