"""The one module of durable writes: what returns has reached the disk, what fails left no trace.

Every write of a file, every rename and both sides of every SQLite commit is a step that a test can
make fail (NOBACKFILL_FAULT). Temporary files are called `.tmp-…`; `sweep` removes those of killed
processes. OSError becomes CannotWriteError here, so callers need no handling of their own.
"""

import contextlib
import errno
import fcntl
import glob
import os
import re
import signal
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    CannotWriteError,
    ConfigurationError,
    DamagedError,
    NobackfillError,
)

# Fault hooks of the durable writes: a test can make any single step fail.
#
# `NOBACKFILL_FAULT` holds `KIND@N` or `KIND@N+`: the N-th durable step of the process (from 1), or
# every one from the N-th on. Kinds: `kill` (SIGKILL before the step), `short` (half of the bytes
# are written, then SIGKILL; a step that writes nothing is killed before it), `eio` and `enospc`
# (the step raises OSError instead of happening). A driver raises N until a run ends without firing;
# then every step has failed once.

VARIABLE = "NOBACKFILL_FAULT"

_SPEC = re.compile(r"^(kill|short|eio|enospc)@([1-9][0-9]*)(\+?)\Z")


@dataclass(frozen=True)
class Operation:
    """One durable step, as told to an observer after it happened.

    `kind`: mkdir, create, write, fsync, rename (`path` to `target`), unlink, rmdir, fsync_dir,
    begin, before_commit, after_commit. `data` holds the bytes of a write.
    """

    kind: str
    path: Path
    target: Path | None = None
    data: bytes | memoryview = b""


class Faults:
    """The armed fault, the count of steps so far, and the observer of a power-loss test."""

    def __init__(self, spec: str | None) -> None:
        """Raises ConfigurationError for a spec that is none of the kinds above."""
        self.observer: Callable[[Operation], None] | None = None
        self.arm(spec)

    def arm(self, spec: str | None) -> None:
        """Count from zero again, with another fault or none."""
        found = _SPEC.match(spec) if spec else None
        if spec and found is None:
            raise ConfigurationError(
                f"{VARIABLE}: expected kill@N, short@N, eio@N or enospc@N (N+ for every step from "
                f"N on), got {spec!r}"
            )
        self._kind = found[1] if found else ""
        self._at = int(found[2]) if found else 0
        self._onwards = bool(found and found[3])
        self.steps = 0
        self.fired = False

    def due(self) -> str:
        """Count one step; the kind of the fault that falls on it, or ''."""
        self.steps += 1
        hit = self.steps >= self._at if self._onwards else self.steps == self._at
        if not self._kind or not hit:
            return ""
        self.fired = True
        return self._kind

    def strike(self, kind: str, path: Path) -> None:
        """Let the fault happen."""
        if kind in ("kill", "short"):
            os.kill(os.getpid(), signal.SIGKILL)
        code = errno.EIO if kind == "eio" else errno.ENOSPC
        raise OSError(code, os.strerror(code), str(path))

    def happened(self, operation: Operation) -> None:
        """Tell the observer, if there is one."""
        if self.observer is not None:
            self.observer(operation)


FAULTS = Faults(os.environ.get(VARIABLE))


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


TEMPORARY = ".tmp-"

_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EACCES: "check its permissions",
    errno.EROFS: "copy it to a file system that is not read-only",
}


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Put `data` at `path`, wholly or not at all, whatever was there. Raises CannotWriteError."""
    temporary = path.parent / f"{TEMPORARY}{path.name}-{uuid.uuid4().hex}"
    with _refusing(path):
        try:
            _create(temporary, mode)
            _write(temporary, data)
            _fsync(temporary)
            _rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _fsync_dir(path.parent)


def write_into(spare: Path, path: Path, data: bytes) -> None:
    """Put `data` at `path` as `write_file` does, in the blocks that file `spare` has: on a full
    disk, too, where no more than those are needed. Raises CannotWriteError."""
    with _refusing(path):
        with _step("write", spare), spare.open("r+b") as file:
            file.write(data)
            file.truncate()
        _fsync(spare)
        _rename(spare, path)
        _fsync_dir(path.parent)


def append(path: Path, data: bytes | memoryview, mode: int = 0o644) -> None:
    """Add `data` (bytes, or a view of some) at the end of a file, made if missing. After a crash
    part of it may be there.

    Raises CannotWriteError.
    """
    with _refusing(path):
        new = not path.exists()
        if new:
            _create(path, mode)
        _write(path, data)
        _fsync(path)
        if new:
            _fsync_dir(path.parent)


def make_dir(path: Path, mode: int = 0o755) -> None:
    """Make a folder and those above it, unless they exist. Raises CannotWriteError."""
    with _refusing(path):
        if path.is_dir():
            return
        if not path.parent.is_dir():
            make_dir(path.parent, mode)
        with _step("mkdir", path):
            path.mkdir(mode=mode, exist_ok=True)
        _fsync_dir(path.parent)


def replace(source: Path, target: Path) -> None:
    """Move a finished file over `target`, on the same file system. Raises CannotWriteError."""
    with _refusing(target):
        _fsync(source)
        _rename(source, target)
        _fsync_dir(target.parent)
        if source.parent != target.parent:
            _fsync_dir(source.parent)


def publish_dir(source: Path, target: Path) -> None:
    """Make a finished folder visible under its name, its content first brought to the disk.

    Raises AlreadyExistsError if something has that name, CannotWriteError.
    """
    with _refusing(target):
        if target.exists() or target.is_symlink():
            raise AlreadyExistsError(
                f"{target}: exists already; published folders stay as they are"
            )
        for folder, _, files in os.walk(source, topdown=False):
            for name in files:
                _fsync(Path(folder, name))
            _fsync_dir(Path(folder))
        _rename(source, target)
        _fsync_dir(target.parent)
        if source.parent != target.parent:
            _fsync_dir(source.parent)


def remove_tree(path: Path) -> None:
    """Remove a file or a folder with all that is in it, if it is there. Raises CannotWriteError."""
    with _refusing(path):
        if path.is_symlink() or path.is_file():
            _unlink(path)
        elif path.is_dir():
            for folder, folders, files in os.walk(path, topdown=False):
                for name in files:
                    _unlink(Path(folder, name))
                for name in folders:
                    _remove_folder(Path(folder, name))
            _remove_folder(path)
        else:
            return
        _fsync_dir(path.parent)


def sweep(folder: Path, name: str = "") -> list[Path]:
    """Remove the temporary files that killed processes left in `folder`; call it under the lock.

    With `name`, only those that were to become this file. Returns what was removed. Raises
    CannotWriteError.
    """
    stale = sorted(folder.glob(f"{TEMPORARY}{glob.escape(name)}*"))
    for path in stale:
        remove_tree(path)
    return stale


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """`BEGIN IMMEDIATE` … `COMMIT`, rolled back on any error. Not to be nested.

    The connection must have `isolation_level=None`. Raises BusyError when another process keeps the
    database for longer than its busy_timeout, CannotWriteError on a full disk or an I/O error.
    """
    name = connection.execute("PRAGMA database_list").fetchone()[2]
    path = Path(name or ":memory:")
    with _refusing(path), refusing_sqlite(path), _step("begin", path):
        connection.execute("BEGIN IMMEDIATE")
    try:
        with refusing_sqlite(path):
            yield connection
        with _refusing(path), refusing_sqlite(path):
            with _step("before_commit", path):
                pass
            connection.execute("COMMIT")
    except BaseException:
        # SQLite may have rolled back on its own, as it does on a full disk.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    with _refusing(path), _step("after_commit", path):
        pass


@contextlib.contextmanager
def lock(path: Path, timeout_s: float = 0.0) -> Iterator[None]:
    """Hold `path` as a lock; its holder's death frees it. The file stays, unless its holder removes
    it.

    Raises BusyError if another holder has it for longer than `timeout_s` seconds, CannotWriteError.
    """
    deadline = time.monotonic() + timeout_s
    while (handle := _lock_file(path)) < 0:
        if time.monotonic() >= deadline:
            raise BusyError(f"{path}: another process holds the lock; try again later")
        time.sleep(0.02)
    try:
        yield
    finally:
        os.close(handle)


def _lock_file(path: Path) -> int:
    """A handle that holds the lock, -1 where another process has it or has just removed it."""
    make_dir(path.parent)
    with contextlib.ExitStack() as undo:
        with _refusing(path):
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                return -1
        undo.callback(os.close, handle)
        try:
            # A file system without locks raises an OSError, which the caller judges.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A holder may have removed the file, with its folder, after it was opened here.
            if not os.path.samestat(os.fstat(handle), path.stat()):
                return -1
        except (BlockingIOError, FileNotFoundError):
            return -1
        undo.pop_all()
        return handle


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotWriteError(
            f"{path}: cannot be written ({error.strerror}); "
            f"{_ADVICE.get(error.errno or 0, 'check the disk')} and run it again"
        ) from error


@contextlib.contextmanager
def _step(kind: str, path: Path, target: Path | None = None) -> Iterator[None]:
    if fault := FAULTS.due():
        FAULTS.strike(fault, path)
    yield
    FAULTS.happened(Operation(kind, path, target))


def _create(path: Path, mode: int) -> None:
    with _step("create", path):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))


def _write(path: Path, data: bytes | memoryview) -> None:
    fault = FAULTS.due()
    if fault and fault != "short":
        FAULTS.strike(fault, path)
    with path.open("ab", buffering=0) as file:
        rest = memoryview(data)[: len(data) // 2 if fault else len(data)]
        while rest:
            rest = rest[file.write(rest) :]
    if fault:
        FAULTS.strike(fault, path)
    FAULTS.happened(Operation("write", path, data=data))


def _fsync(path: Path) -> None:
    with _step("fsync", path), path.open("rb") as file:
        os.fsync(file.fileno())


def _fsync_dir(path: Path) -> None:
    with _step("fsync_dir", path):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _rename(source: Path, target: Path) -> None:
    with _step("rename", source, target):
        source.rename(target)


def _unlink(path: Path) -> None:
    with _step("unlink", path):
        path.unlink()


def _remove_folder(path: Path) -> None:
    with _step("rmdir", path):
        if path.is_symlink():
            path.unlink()
        else:
            path.rmdir()
