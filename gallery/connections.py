"""The connections to one gallery file: one that writes, and a pool of those that read.

A lock file beside the gallery is held shared while it is open. Who finds nobody else there and a
write-ahead log left over knows that the last process died, and checks the pages before use.
"""

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from gallery.residents import Residents
from gallery.tables import FORMAT
from release import durable
from release.errors import BusyError, NotFoundError, VerificationError

# Marks the file as ours: "nobf".
APPLICATION = 0x6E6F6266
# How long a writer waits for another process before BusyError.
BUSY_TIMEOUT_MS = 5000
# How long closing waits for the statements under way.
_CLOSE_S = 60.0
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def lock_path(path: Path) -> Path:
    """The lock file beside a gallery file."""
    return path.with_name(path.name + ".lock")


def connect(path: Path) -> sqlite3.Connection:
    """A connection as every one of ours is set up: explicit transactions, full durability."""
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA secure_delete = ON")
    # Sorted rows hold ids; they stay out of files that outlive them.
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


class Connections:
    """Every connection that this process has to one gallery file.

    None is closed while a thread works with it: SQLite would read freed memory. After `rest` they
    are opened again when somebody asks for one; `recent` is set whenever somebody does.
    """

    def __init__(self, path: Path, residents: Residents | None = None) -> None:
        """Raises NotFoundError, VerificationError (damaged, or no gallery), BusyError.

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
        with self.using():
            pass

    def _open(self) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self._shut)
            self._lock = os.open(lock_path(self.path), _LOCK_FLAGS, 0o600)
            alone = _share(self._lock, self.path)
            wal = self.path.with_name(self.path.name + "-wal")
            unclean = alone and wal.exists() and wal.stat().st_size > 0
            self._writer = self._checked(unclean)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            undo.pop_all()

    def _checked(self, unclean: bool) -> sqlite3.Connection:
        damaged = f"{self.path}: not a whole gallery file"
        advice = "restore a backup, or make the gallery anew"
        try:
            connection = self._connect()
            if unclean:
                found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if found != "ok":
                    raise VerificationError(f"{damaged} ({found}); {advice}")
            application = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.OperationalError as error:
            raise BusyError(f"{self.path}: cannot be opened now ({error}); try again") from error
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_NOTADB:
                raise VerificationError(
                    f"{self.path}: expected a gallery, got a file of another kind; name the "
                    "gallery's file"
                ) from error
            raise VerificationError(f"{damaged} ({error}); {advice}") from error
        if application != APPLICATION:
            raise VerificationError(
                f"{self.path}: expected a gallery, got a database of another program; name the "
                "gallery's file"
            )
        if version > FORMAT:
            raise VerificationError(
                f"{self.path}: expected a gallery of format {FORMAT} or older, got format "
                f"{version}; use a newer nobackfill"
            )
        if version < FORMAT:
            from gallery.schema import migrate

            migrate(connection)
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = connect(self.path)
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
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _DAMAGED:
                raise
            raise VerificationError(
                f"{self.path}: damaged ({error}); restore a backup, or make the gallery anew"
            ) from error
        finally:
            with self._users:
                self._using -= 1
                self._users.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The writer, in a transaction of its own. Raises BusyError, CannotWriteError."""
        with self.writer() as writer, durable.transaction(writer) as connection:
            yield connection

    @contextlib.contextmanager
    def writer(self) -> Iterator[sqlite3.Connection]:
        """The writer, held but in no transaction."""
        with self.using(), self._writing:
            assert self._writer is not None, "open while it is used"
            yield self._writer

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A reader that sees one snapshot. Raises BusyError, VerificationError for a damaged file,
        NotFoundError once all are closed."""
        with self.using(), self._snapshot() as connection:
            yield connection

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[sqlite3.Connection]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
            connection.execute("PRAGMA query_only = ON")
        try:
            connection.execute("BEGIN")
            yield connection
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            raise BusyError(f"{self.path}: cannot be read now ({error}); try again") from error
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            self._idle.append(connection)

    def scrub(self) -> bool:
        """Empty the write-ahead log into the file, so that no deleted byte stays in it.

        False if a reader prevents it just now.
        """
        with self.writer() as writer:
            writer.execute("PRAGMA busy_timeout = 0")
            try:
                busy = writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            except sqlite3.OperationalError:
                return False
            finally:
                writer.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        return not busy

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


def _share(handle: int, path: Path) -> bool:
    """Lock exclusively if nobody else has the gallery open, else shared; whether alone."""
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        for kind, alone in ((fcntl.LOCK_EX, True), (fcntl.LOCK_SH, False)):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, kind | fcntl.LOCK_NB)
                return alone
        if time.monotonic() >= deadline:
            raise BusyError(f"{path}: another process is checking the gallery; try again")
        time.sleep(0.02)
