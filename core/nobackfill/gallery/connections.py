"""Create, open, lock, read and write a gallery file.

A lock file beside the gallery is held in shared mode while the gallery is open. A process that is
alone and finds a write-ahead log knows that the last process died, and checks the pages before use.
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

# Ways to open a gallery file; they are tried without writing.
# shared: read and write beside other processes, through SQLite's shared memory (-shm). sole: no
# space for the shared memory, so only one process with one connection. reading: the file or its
# folder cannot be written.

# SQLite maps 32 KiB beside the gallery before it reads a row. Where blocks are smaller than its
# pages, a lack of space ends the process by SIGBUS. The rest is for the first pages of the log.
LEAST_ROOM = 256 << 10
# How long a writer waits for another process before BusyError, in milliseconds.
BUSY_TIMEOUT_MS = 5000
_SUFFIXES = ("-wal", "-shm", ".lock")
_EFFECTIVE = os.access in os.supports_effective_ids


@dataclass(frozen=True)
class Access:
    """A way to open a file.

    Attributes:
        query: Query of the URI for SQLite.
        sole: Whether one connection has the file to itself.
        refusal: Why nothing can be written; None if it can.
        unlocked: Size and time of a file that no lock protects.
    """

    query: str = ""
    sole: bool = False
    refusal: str | None = None
    unlocked: tuple[int, int] | None = None

    def connect(self, path: Path) -> sqlite3.Connection:
        """Open a connection.

        Raises:
            sqlite3.Error: It cannot be opened.
        """
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{self.query}", uri=True, isolation_level=None,
            check_same_thread=False, cached_statements=256,
        )  # fmt: skip
        if self.sole:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        return connection

    def check_unchanged(self, path: Path) -> None:
        """Check that a file without a lock did not change while it was read.

        Raises:
            BusyError: It changed.
        """
        if self.unlocked is not None and self.unlocked != _stamp(path):
            raise BusyError(f"{path}: its owner changed it while it was read; try again")

    def check_writable(self) -> None:
        """Check that the file can be written.

        Raises:
            CannotWriteError: It cannot; the message has the reason.
        """
        if self.refusal is not None:
            raise CannotWriteError(self.refusal)


SHARED = Access()


def connect(path: Path, access: Access = SHARED) -> sqlite3.Connection:
    """Open a connection with the settings of this project: explicit transactions, full durability.

    Args:
        path: The file; SQLite creates a missing one.
        access: The way to open it.

    Raises:
        sqlite3.Error: It cannot be opened.
    """
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(contextlib.closing(access.connect(path)))
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        # Sorted rows contain ids, which must not end up in files that outlive them.
        connection.execute("PRAGMA temp_store = MEMORY")
        undo.pop_all()
    return connection


def accesses(path: Path, exclusive: bool) -> Iterator[Access]:
    """Yield the ways to open a gallery file, the best first; take the next one if there is no
    space.

    Args:
        path: The file.
        exclusive: No other process has it open.

    Raises:
        CannotWriteError: It cannot even be read.
    """
    refusal = unwritable(path)
    if refusal is None:
        if not exclusive or has_room(path.parent):
            yield SHARED
        if exclusive:
            yield Access(sole=True)
        refusal = f"{path}: cannot be written, the disk is full; free some space"
    yield reading(path, refusal)


def reading(path: Path, refusal: str) -> Access:
    """Return a way to read a file without creating another.

    Args:
        path: The file.
        refusal: Why it cannot be written.

    Raises:
        CannotWriteError: It cannot be read, or only after its log was written into it.
    """
    if not os.access(path, os.R_OK, effective_ids=_EFFECTIVE):
        raise CannotWriteError(f"{path}: this user may not read it; run it as its owner")
    log, shared = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    if log.exists() and shared.exists():
        return Access("mode=ro&readonly_shm=1", refusal=refusal)
    if log.exists() and log.stat().st_size:
        raise CannotWriteError(
            f"{path}: {log.name} holds its last changes, and reading it needs a writable folder; "
            "copy both files to a folder that you can write to"
        )
    return Access("mode=ro&immutable=1", refusal=refusal, unlocked=_stamp(path))


def unwritable(path: Path) -> str | None:
    """Explain why a gallery file, its log or its folder cannot be written; None if they can."""
    companions = [path.with_name(path.name + end) for end in _SUFFIXES]
    for name in (path, *(p for p in companions if p.exists()), path.parent):
        mode = os.W_OK | (os.X_OK if name.is_dir() else os.R_OK)
        if os.access(name, mode, effective_ids=_EFFECTIVE):
            continue
        try:
            read_only = os.statvfs(name).f_flag & os.ST_RDONLY
        except FileNotFoundError:
            # Another process closed the gallery and removed the file.
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
    """Tell whether the file system of a folder has at least `least` bytes free for this user."""
    return room(folder) >= least


def room(folder: Path) -> int:
    """Return the number of bytes that the file system of a folder has free for this user."""
    status = os.statvfs(folder)
    return (status.f_bavail if os.geteuid() else status.f_bfree) * status.f_frsize


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


# The lock file beside a gallery: shared while the gallery is open, exclusive for a process that
# must be alone.


def lock_path(path: Path) -> Path:
    """Return the path of a gallery's lock file: the gallery's own path with the suffix .lock."""
    return path.with_name(path.name + ".lock")


def open_lock(path: Path, gallery: Path) -> int:
    """Open the lock file of a gallery, and create it if this user may write the gallery.

    A lock file of another user would block the gallery's owner.

    Returns:
        A file descriptor; -1 if there is no lock file and none can be created.
    """
    ways = [os.O_RDONLY] if unwritable(gallery) else [os.O_RDWR | os.O_CREAT, os.O_RDONLY]
    for flags in ways:
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_CLOEXEC, 0o600)
    return -1


def share(handle: int, path: Path, timeout_s: float) -> bool:
    """Lock a gallery exclusively if no other process has it open, otherwise in shared mode.

    Args:
        handle: The lock file.
        path: The gallery, for the message.
        timeout_s: How long to wait for an exclusive holder, in seconds.

    Returns:
        Whether no other process has the gallery open.

    Raises:
        BusyError: Another process holds it exclusively for longer.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        for kind, exclusive in ((fcntl.LOCK_EX, True), (fcntl.LOCK_SH, False)):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, kind | fcntl.LOCK_NB)
                return exclusive
        if time.monotonic() >= deadline:
            raise BusyError(f"{path}: another process has the gallery to itself; try again")
        time.sleep(0.02)


# A bound on open gallery files: each takes about six file descriptors.


class Resident(Protocol):
    """Something that can be closed for a while, such as FileConnections."""

    recent: bool

    def suspend(self) -> bool:
        """Close the resident until it is needed; return False if it is in use. Never waits."""
        ...


class Residents:
    """Keep about `most` residents open, and close those that are unused for longest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._open: deque[Resident] = deque()

    def register(self, resident: Resident) -> None:
        """Record that one more is open, and close others.

        Goes round at most twice: one that was used since the last look is skipped once.
        """
        with self._lock:
            self._open.append(resident)
            for _ in range(2 * len(self._open)):
                if len(self._open) <= self._most:
                    return
                oldest = self._open.popleft()
                if oldest.recent or not oldest.suspend():
                    oldest.recent = False
                    self._open.append(oldest)


# How long closing waits for running statements, in seconds.
_CLOSE_S = 60.0
# Errors of SQLite if the shared memory or the log cannot be created.
_NO_ROOM = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN)


class _NoRoomError(Exception):
    """SQLite could not create its files beside the gallery."""


class FileConnections:
    """Every connection of this process to one gallery file.

    No connection is closed while a thread uses it: SQLite would read freed memory. After `suspend`,
    they are opened again on demand.

    Attributes:
        path: The file.
        recent: Set whenever a connection is used.
    """

    def __init__(self, path: Path, residents: Residents | None = None) -> None:
        """Open the file's connections; after an unclean end, check its pages first.

        Args:
            path: The file.
            residents: May close the connections while no thread uses them; None keeps them open.

        Raises:
            NotFoundError: No such file.
            VerificationError: The file is damaged, no gallery, or has a newer format.
            BusyError: Another process has it for itself.
            CannotWriteError: It cannot even be read, or has no room for SQLite's files.
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
            exclusive = self._lock >= 0 and share(self._lock, self.path, BUSY_TIMEOUT_MS / 1000)
            wal = self.path.with_name(self.path.name + "-wal")
            unclean = exclusive and wal.exists() and wal.stat().st_size > 0
            for access in accesses(self.path, exclusive):
                self._access = access
                try:
                    self._writer = self._open_writer(unclean)
                    break
                except _NoRoomError:
                    while self._all:
                        self._all.pop().close()
            else:
                raise CannotWriteError(f"{self.path}: cannot be opened; free some space")
            # A sole process locks others out: they would need the shared memory.
            if self._lock >= 0 and not self._access.sole:
                fcntl.flock(self._lock, fcntl.LOCK_SH)
            undo.pop_all()

    def _open_writer(self, unclean: bool) -> sqlite3.Connection:
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
            translation = refusal(self.path, error)
            if translation is None:
                raise
            raise translation from error
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = connect(self.path, self._access)
        self._all.append(connection)
        return connection

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Keep the connections open during the block; open and check them if they are closed.

        Raises:
            NotFoundError: They were closed for good.
            VerificationError: The file is damaged, or an SQLite error in the block says so.
            BusyError: Another process has the file for itself, or holds the lock.
            CannotWriteError: The file cannot be opened, or the disk fails during the block.
        """
        with self._users:
            if self._closed:
                raise NotFoundError(f"{self.path}: the gallery was closed or deleted")
            opens = self._writer is None
            if opens:
                self._open()
            self._using += 1
        self.recent = True
        try:
            if opens and self._residents is not None:
                self._residents.register(self)
            yield
        except sqlite3.DatabaseError as error:
            translation = refusal(self.path, error)
            if translation is None:
                raise
            raise translation from error
        finally:
            with self._users:
                self._using -= 1
                self._users.notify_all()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block in a transaction of the writer.

        Raises:
            BusyError: Another writer holds the gallery.
            CannotWriteError: The file cannot be written.
            NotFoundError: The connections were closed for good.
            VerificationError: The file is damaged.
        """
        with self.writer() as writer:
            self._access.check_writable()
            with durable.transaction(writer) as connection:
                yield connection

    @contextlib.contextmanager
    def writer(self) -> Iterator[sqlite3.Connection]:
        """Provide the connection that writes, without a transaction; other threads wait for it.

        Raises:
            NotFoundError: The connections were closed for good.
            VerificationError: The file is damaged.
            BusyError: Another process has the file for itself, or holds the lock.
            CannotWriteError: The file cannot be opened, or the disk fails during the block.
        """
        with self.using(), self._writing:
            assert self._writer is not None, "open while it is used"
            yield self._writer

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Provide a connection that reads one snapshot.

        Raises:
            BusyError: Another process has the file for itself, or its owner changed it while it was
                read without a lock.
            CannotWriteError: The file cannot be read.
            VerificationError: The file is damaged.
            NotFoundError: The connections were closed for good.
        """
        with self.using():
            if self._access.sole:
                # A sole process has no other connection.
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
        """Move the write-ahead log into the file, so that no deleted byte stays in it.

        Returns:
            False if a reader prevents it.

        Raises:
            CannotWriteError: The file cannot be written.
            NotFoundError: The connections were closed for good.
            VerificationError: The file is damaged.
            BusyError: Another process has the file for itself.
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
        """Return free pages to the file system.

        Args:
            pages: Pages that one transaction returns; other writers may commit between two.

        Raises:
            BusyError: Another writer holds the gallery.
            CannotWriteError: The file cannot be written.
            NotFoundError: The connections were closed for good.
            VerificationError: The file is damaged.
        """
        with self.writer() as writer, translate_sqlite_errors(self.path):
            self._access.check_writable()
            free = writer.execute("PRAGMA freelist_count").fetchone()[0]
            for _ in range(0, free, pages):
                # executescript runs the statement to its end; execute would free only one page.
                writer.executescript(f"PRAGMA incremental_vacuum({pages})")
            writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close all connections for good, once no thread uses one. The last process to close leaves
        no log.

        Raises:
            BusyError: A thread still uses a connection after 60 seconds; the connections stay open.
        """
        with self._users:
            if not self._users.wait_for(lambda: not self._using, _CLOSE_S):
                raise BusyError(f"{self.path}: still in use after {_CLOSE_S:.0f} s")
            self._closed = True
            self._shut()

    def suspend(self) -> bool:
        """Close the connections until one is needed. Never waits.

        Returns:
            False if a thread uses one; they stay open.
        """
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
    """Read every page of a file, which takes as long as reading the file.

    Raises:
        DamagedError: A page is damaged.
    """
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise DamagedError(path, verdict.splitlines()[-1])


@contextlib.contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    if connection.in_transaction:
        # The thread that holds the sole connection asks for it again.
        yield
        return
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


# Bulk writes are twice as fast as with SQLite's pages of 4 KiB, of which a vector leaves much
# empty.
PAGE_BYTES = 16384


def create_file(path: Path, spec: SpaceSpec) -> None:
    """Create an empty gallery file; it appears in its place as the last step.

    Raises:
        AlreadyExistsError: The file exists, or a log of an earlier gallery lies beside it.
        CannotWriteError: The file cannot be written.
        BusyError: Another process creates it.
    """
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
    """Refuse a path beside which the log of a missing gallery lies.

    SQLite would write that gallery's last changes into the new file.

    Raises:
        AlreadyExistsError: There is such a log.
    """
    for end in ("-wal", "-journal"):
        log = path.with_name(path.name + end)
        if log.exists() and log.stat().st_size:
            raise AlreadyExistsError(
                f"{log}: holds the last changes of a gallery named {path.name}; move it back "
                "beside that gallery, remove it, or choose another name"
            )


def make_empty(path: Path, spec: SpaceSpec | None) -> None:
    """Create a gallery file in place; after an error, its parts stay.

    Args:
        path: The file.
        spec: Its active space; None for no space yet.

    Raises:
        CannotWriteError: The file cannot be written.
    """
    # Imported here: the import takes a large part of the time of a search on a device.
    from nobackfill.gallery.schema import migrate

    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise CannotWriteError(f"{path.parent}: cannot write there ({error.strerror})") from error
    if not has_room(path.parent):
        raise CannotWriteError(f"{path.parent}: no room for a gallery; free some space")
    with translate_sqlite_errors(path), contextlib.closing(connect(path)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        # So that free pages can be returned a few at a time; VACUUM would copy the file.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise CannotWriteError(f"{path}: no write-ahead log possible here; use a local disk")
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        migrate(connection)
        if spec is not None:
            with durable.transaction(connection):
                add_space(connection, spec, "active")
