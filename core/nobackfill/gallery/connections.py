"""A gallery file from outside: how it is made, opened, locked, read and written.

A lock file beside the gallery is held shared while it is open. A process that finds nobody else
there and a write-ahead log left over knows that the last one died. It checks the pages before use.
"""

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nobackfill import durable
from nobackfill.durable import refusal, translate_sqlite_errors
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    CannotWriteError,
    DamagedError,
    NotFoundError,
)
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.tables import (
    APPLICATION,
    FORMAT,
    add_space,
    check_tables,
    format_of,
    not_a_gallery,
)

# What a gallery file can be opened for: all that is said here is found out without writing.
#
# shared: read and written beside other processes, through SQLite's shared memory (-shm);
# sole: no room for the shared memory, so by one process at a time, through one connection;
# reading: the file or its folder cannot be written, so it is read as it is.

# SQLite maps 32 KiB beside the gallery before it reads a row; where blocks are smaller than its
# pages it finds out by SIGBUS that there is no room. The rest is for the log's first pages.
LEAST_ROOM = 256 << 10
# How long a writer waits for another process before BusyError.
BUSY_TIMEOUT_MS = 5000
_BESIDE = ("-wal", "-shm", ".lock")
_EFFECTIVE = os.access in os.supports_effective_ids


@dataclass(frozen=True)
class Access:
    """How one process opens a file. `query`: of the URI that SQLite is given; `refusal`: why
    nothing can be written; `unlocked`: size and time of a file that no lock protects."""

    query: str = ""
    sole: bool = False
    refusal: str | None = None
    unlocked: tuple[int, int] | None = None

    def connect(self, path: Path) -> sqlite3.Connection:
        """A connection of this kind. Raises sqlite3.Error."""
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{self.query}", uri=True, isolation_level=None,
            check_same_thread=False, cached_statements=256,
        )  # fmt: skip
        if self.sole:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        return connection

    def check_unchanged(self, path: Path) -> None:
        """Raises BusyError if a file that is read without locks was written meanwhile."""
        if self.unlocked is not None and self.unlocked != _stamp(path):
            raise BusyError(f"{path}: its owner changed it while it was read; try again")

    def check_writable(self) -> None:
        """Raises CannotWriteError, with the reason, where nothing can be written."""
        if self.refusal is not None:
            raise CannotWriteError(self.refusal)


SHARED = Access()


def connect(path: Path, access: Access = SHARED) -> sqlite3.Connection:
    """A connection as every one of ours is set up: explicit transactions, full durability."""
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(contextlib.closing(access.connect(path)))
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        # Sorted rows hold ids; they stay out of files that outlive them.
        connection.execute("PRAGMA temp_store = MEMORY")
        undo.pop_all()
    return connection


def accesses(path: Path, alone: bool) -> Iterator[Access]:
    """The ways to open a gallery file, the best first; the next is for whoever finds no room.

    `alone`: no other process has it open. Raises CannotWriteError if it cannot even be read.
    """
    refusal = unwritable(path)
    if refusal is None:
        if not alone or has_room(path.parent):
            yield SHARED
        if alone:
            yield Access(sole=True)
        refusal = f"{path}: cannot be written, no space is left; free some space"
    yield reading(path, refusal)


def reading(path: Path, refusal: str) -> Access:
    """Access that makes no file. Raises CannotWriteError where that cannot be."""
    if not os.access(path, os.R_OK, effective_ids=_EFFECTIVE):
        raise CannotWriteError(f"{path}: this user may not read it; run it as its owner")
    log, shared = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    if log.exists() and shared.exists():
        return Access("mode=ro&readonly_shm=1", refusal=refusal)
    if log.exists() and log.stat().st_size:
        raise CannotWriteError(
            f"{path}: {log.name} holds its last changes and can be read only where files can be "
            "made; copy both to a folder that you can write to"
        )
    return Access("mode=ro&immutable=1", refusal=refusal, unlocked=_stamp(path))


def unwritable(path: Path) -> str | None:
    """Why a gallery file, what SQLite keeps beside it, or its folder cannot be written, and what to
    do; None if it can be."""
    beside = [path.with_name(path.name + end) for end in _BESIDE]
    for name in (path, *(p for p in beside if p.exists()), path.parent):
        mode = os.W_OK | (os.X_OK if name.is_dir() else os.R_OK)
        if os.access(name, mode, effective_ids=_EFFECTIVE):
            continue
        try:
            read_only = os.statvfs(name).f_flag & os.ST_RDONLY
        except FileNotFoundError:
            # Another process that closed the gallery took away what lay beside it.
            continue
        if read_only:
            return (
                f"{name}: cannot be written, its file system is read-only; copy the gallery "
                "and what lies beside it to one that is not"
            )
        return (
            f"{name}: cannot be written by this user; run it as its owner, or change its "
            "permissions"
        )
    return None


def has_room(folder: Path, least: int = LEAST_ROOM) -> bool:
    """Whether the file system has `least` bytes free for this user."""
    return room(folder) >= least


def room(folder: Path) -> int:
    """Bytes that the file system has free for this user."""
    found = os.statvfs(folder)
    return (found.f_bavail if os.geteuid() else found.f_bfree) * found.f_frsize


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


# The lock file beside a gallery: held shared while it is open, alone by who must be alone.


def lock_path(path: Path) -> Path:
    """The lock file beside a gallery file."""
    return path.with_name(path.name + ".lock")


def open_lock(path: Path, gallery: Path) -> int:
    """A handle of the lock file, -1 where there is none to be had; made beside a gallery only that
    this user may write, as it would be in its owner's way."""
    ways = [os.O_RDONLY] if unwritable(gallery) else [os.O_RDWR | os.O_CREAT, os.O_RDONLY]
    for flags in ways:
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_CLOEXEC, 0o600)
    return -1


def share(handle: int, path: Path, timeout_s: float) -> bool:
    """Lock exclusively if nobody else has the gallery open, else shared; whether alone.

    Raises BusyError when another process holds it exclusively for longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        for kind, alone in ((fcntl.LOCK_EX, True), (fcntl.LOCK_SH, False)):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, kind | fcntl.LOCK_NB)
                return alone
        if time.monotonic() >= deadline:
            raise BusyError(f"{path}: another process has the gallery to itself; try again")
        time.sleep(0.02)


# Which gallery files of a process are open: a bound, as each takes about six file descriptors.


class Resident(Protocol):
    """What can be closed for a while; nobackfill.gallery.connections.FileConnections is one."""

    recent: bool

    def rest(self) -> bool:
        """Close it until it is asked for again; False if it is in use just now. Never waits."""
        ...


class Residents:
    """Keeps about `most` of them open; what was not used for long is closed first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._open: deque[Resident] = deque()

    def opened(self, resident: Resident) -> None:
        """Tell that one more is open. Closes others, twice round at most: what was used since it
        was last looked at is passed over once."""
        with self._lock:
            self._open.append(resident)
            for _ in range(2 * len(self._open)):
                if len(self._open) <= self._most:
                    return
                oldest = self._open.popleft()
                if oldest.recent or not oldest.rest():
                    oldest.recent = False
                    self._open.append(oldest)


# How long closing waits for the statements under way.
_CLOSE_S = 60.0
# Where shared memory or the log's file could not be made after all.
_NO_ROOM = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN)


class _NoRoomError(Exception):
    """What SQLite makes beside the gallery could not be made."""


class FileConnections:
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
        with self.writer() as writer, translate_sqlite_errors(self.path):
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


# Bulk writes are twice as fast as with SQLite's 4 KiB, of which a vector row leaves much empty.
PAGE_BYTES = 16384


def create_file(path: Path, spec: SpaceSpec) -> None:
    """Make an empty gallery, which appears as the last step. Raises like `Store.create`."""
    durable.make_dir(path.parent, mode=0o700)
    with durable.lock(lock_path(path)):
        if path.exists():
            raise AlreadyExistsError(f"{path}: exists already; choose another name or open it")
        refuse_leftovers(path)
        for stale in path.parent.glob(f"{durable.TEMPORARY}{path.name}-*"):
            durable.remove_tree(stale)
        temporary = path.parent / f"{durable.TEMPORARY}{path.name}-{uuid.uuid4().hex}"
        try:
            make_empty(temporary, spec)
            durable.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def refuse_leftovers(path: Path) -> None:
    """Raises AlreadyExistsError where a log lies beside `path` and its gallery does not: SQLite
    would write that gallery's last changes into whatever is put there.
    """
    for end in ("-wal", "-journal"):
        log = path.with_name(path.name + end)
        if log.exists() and log.stat().st_size:
            raise AlreadyExistsError(
                f"{log}: holds the last changes of a gallery that was called {path.name}; put it "
                "back beside that gallery, remove it, or choose another name"
            )


def make_empty(path: Path, spec: SpaceSpec | None) -> None:
    """Make a gallery file whose active space is `spec`; without, it has none yet.

    Raises CannotWriteError, and leaves what there is of it.
    """
    # Imported here because it costs the edge a large part of a search's start.
    from nobackfill.gallery.schema import migrate

    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise CannotWriteError(f"{path.parent}: cannot write there ({error.strerror})") from error
    if not has_room(path.parent):
        raise CannotWriteError(f"{path.parent}: no room for a gallery; free some space")
    with translate_sqlite_errors(path), contextlib.closing(connect(path)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        # Free pages can be given back a few at a time, where VACUUM would copy the file.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise CannotWriteError(f"{path}: no write-ahead log possible here; use a local disk")
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        migrate(connection)
        if spec is not None:
            with durable.transaction(connection):
                add_space(connection, spec, "active")
