"""Write files and SQLite commits durably: success means on disk, failure leaves no trace.

Each file write, each rename and both sides of each SQLite commit is a step that a test can make
fail (NOBACKFILL_FAULT). Temporary files are called `.tmp-...`; `remove_temporary_files` removes
those of killed processes. Every OSError becomes CannotWriteError here, so that callers need no
handlers.
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

# Fault injection: a test can make any single durable step fail.
# `NOBACKFILL_FAULT` is `KIND@N` or `KIND@N+`: the N-th step of the process, from 1, or every step
# from the N-th on. Kinds: `kill` (SIGKILL before the step), `short` (write half of the bytes, then
# SIGKILL; a step that writes nothing is killed before it), `eio` and `enospc` (raise OSError in
# place of the step). A test raises N until a run ends without a fault; then every step has failed
# once.

VARIABLE = "NOBACKFILL_FAULT"

_SPEC = re.compile(r"^(kill|short|eio|enospc)@([1-9][0-9]*)(\+?)\Z")


@dataclass(frozen=True)
class DurableStep:
    """A durable step that has happened, for an observer.

    Attributes:
        kind: mkdir, create, write, fsync, rename, unlink, rmdir, fsync_dir, begin, before_commit or
            after_commit.
        path: The file or folder.
        rename_target: The new path of a rename.
        written_bytes: The bytes of a write.
    """

    kind: str
    path: Path
    rename_target: Path | None = None
    written_bytes: bytes | memoryview = b""


class FaultInjector:
    """The fault to inject, the number of steps so far, and the observer of a power-loss test."""

    def __init__(self, spec: str | None) -> None:
        """Arm a fault, as `arm` does.

        Args:
            spec: `KIND@N` or `KIND@N+`; None or "" for no fault.

        Raises:
            ConfigurationError: Another text.
        """
        self.observer: Callable[[DurableStep], None] | None = None
        self.arm(spec)

    def arm(self, spec: str | None) -> None:
        """Count steps from zero again, and set the fault to inject; `fired` becomes False.

        Args:
            spec: `KIND@N` or `KIND@N+`; None or "" for no fault. The observer stays.

        Raises:
            ConfigurationError: Another text; nothing changes.
        """
        match = _SPEC.match(spec) if spec else None
        if spec and match is None:
            raise ConfigurationError(
                f"{VARIABLE}: expected kill@N, short@N, eio@N or enospc@N, the fault that a test "
                f"injects at file operation N (N+: at each from N on), got {spec!r}; unset this "
                "variable outside tests"
            )
        self._kind = match[1] if match else ""
        self._at = int(match[2]) if match else 0
        self._onwards = bool(match and match[3])
        self.steps = 0
        self.fired = False

    def count_step(self) -> str:
        """Count a step, and return the kind of the fault to inject at it, or "" for none.

        `fired` becomes True at the fault. No lock is taken: steps of several threads may be lost.
        """
        self.steps += 1
        hit = self.steps >= self._at if self._onwards else self.steps == self._at
        if not self._kind or not hit:
            return ""
        self.fired = True
        return self._kind

    def inject_fault(self, kind: str, path: Path) -> None:
        """Inject a fault: kill this process, or raise OSError.

        Args:
            kind: kill, short, eio or enospc; any other text counts as enospc.
            path: The file, for the message of the OSError.

        Raises:
            OSError: With EIO or ENOSPC, unless the kind kills.
        """
        if kind in ("kill", "short"):
            os.kill(os.getpid(), signal.SIGKILL)
        code = errno.EIO if kind == "eio" else errno.ENOSPC
        raise OSError(code, os.strerror(code), str(path))

    def report_step(self, step: DurableStep) -> None:
        """Pass a finished step to the observer, if there is one; the observer's error reaches the
        caller."""
        if self.observer is not None:
            self.observer(step)


FAULT_INJECTOR = FaultInjector(os.environ.get(VARIABLE))


_UNWRITABLE = (
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
)  # fmt: skip
# Errors of a wrong program, never of a damaged file.
_OURS = (sqlite3.ProgrammingError, sqlite3.NotSupportedError, sqlite3.InternalError)


def error_from_sqlite(path: Path, error: sqlite3.Error) -> NobackfillError | None:
    """Translate SQLite's error for a file into an error of this project.

    The statements of this project are right for an intact file. A file that lacks a table, or has a
    value of another type, is damaged. A violated constraint and a wrong statement also give
    DamagedError.

    Args:
        path: The SQLite file, for the message.
        error: The error of the sqlite3 module.

    Returns:
        BusyError, CannotWriteError (also for a file that cannot be opened) or DamagedError, not
        raised; None for an error of a wrong program, such as sqlite3.ProgrammingError.
    """
    code = getattr(error, "sqlite_errorcode", 0)
    if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return BusyError(
            f"{path}: another process writes to this file ({error}); try again when it has ended"
        )
    if code & 0xFF in _UNWRITABLE and code != sqlite3.SQLITE_IOERR_SHORT_READ:
        return CannotWriteError(
            f"{path}: cannot be read or written ({error}); free some space, check the disk and "
            "the file's permissions"
        )
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, _OURS):
        return DamagedError(path, error)
    return None


@contextlib.contextmanager
def translate_sqlite_errors(path: Path) -> Iterator[None]:
    """Raise SQLite's errors about locks and disks as errors of this project; leave others as they
    are.

    Args:
        path: The SQLite file, for the message.

    Raises:
        BusyError: Another process holds the lock.
        CannotWriteError: The disk is full or fails, or the file cannot be opened or written.
        sqlite3.Error: Any other error of the block, such as a damaged file; `error_from_sqlite`
            translates those too.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        translation = error_from_sqlite(path, error)
        if isinstance(translation, BusyError | CannotWriteError):
            raise translation from error
        raise


TEMPORARY_PREFIX = ".tmp-"

_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EACCES: "check its permissions",
    errno.EROFS: "copy it to a file system that is not read-only",
    errno.EISDIR: "move the folder of this name away",
}


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace the content of a file atomically, or create the file.

    It is durable when this returns. After a crash, the file has either its old or its new content.
    A link is replaced by a file. A killed process may leave a temporary file, which
    `remove_temporary_files` removes.

    Args:
        path: The file; its folder must exist. Its name has at most 217 bytes, so that the temporary
            file can have a longer one.
        data: The new content; it may be empty.
        mode: Permissions of the new file, less the umask; those of the old file are not preserved.

    Raises:
        CannotWriteError: The write failed, the folder is missing, or `path` is a folder. The file
            has its old content, or the new one if only the folder could not be synced. No temporary
            file stays.
    """
    temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex}"
    with _translate_os_errors(path):
        try:
            _create(temporary, mode)
            _write(temporary, data)
            _fsync(temporary)
            _rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _fsync_dir(path.parent)


def write_file_over_spare(spare: Path, path: Path, data: bytes) -> None:
    """Replace a file atomically, reusing the disk blocks of a spare file.

    Works on a full disk, too, as long as the data needs no more blocks than the spare file has. It
    is durable when this returns. After a crash, `path` has either its old or its new content, and
    `spare` may have a part of it.

    Args:
        spare: An existing file in the same file system; it is renamed to `path` and keeps its
            permissions.
        path: The file; it need not exist.
        data: The new content.

    Raises:
        CannotWriteError: The write failed, or `spare` is missing. `path` has its old content, or
            the new one if only the folder could not be synced; `spare` may be overwritten.
    """
    with _translate_os_errors(path):
        with _step("write", spare), spare.open("r+b") as file:
            file.write(data)
            file.truncate()
        _fsync(spare)
        _rename(spare, path)
        _fsync_dir(path.parent)


def append_bytes(path: Path, data: bytes | memoryview, mode: int = 0o644) -> None:
    """Add bytes at the end of a file; create it if it is missing.

    They are durable when this returns. After a crash, a part of the bytes may be there. A link to
    an existing file is followed. No lock is taken.

    Args:
        path: The file; its folder must exist.
        data: Bytes, or a view of bytes; without any, a missing file is created empty.
        mode: Permissions of a new file, less the umask; an existing file keeps its own.

    Raises:
        CannotWriteError: The write failed; a part of the bytes may be there. Or the folder is
            missing, or `path` is a folder or a dangling link.
    """
    with _translate_os_errors(path):
        new = not path.exists()
        if new:
            _create(path, mode)
        _write(path, data)
        _fsync(path)
        if new:
            _fsync_dir(path.parent)


def make_dir(path: Path, mode: int = 0o755) -> None:
    """Make a folder and its parents, unless they exist. They are durable when this returns.

    Args:
        path: The folder; a link to a folder counts as one.
        mode: Permissions of new folders, less the umask; existing folders keep theirs.

    Raises:
        CannotWriteError: A folder cannot be made, or a file or a dangling link has its name.
            Parents that were made stay.
    """
    with _translate_os_errors(path):
        if path.is_dir():
            return
        if not path.parent.is_dir():
            make_dir(path.parent, mode)
        with _step("mkdir", path):
            path.mkdir(mode=mode, exist_ok=True)
        _fsync_dir(path.parent)


def refuse_copy_into_itself(target: Path, source: Path) -> None:
    """Check that a copy of the folder `source` to `target` does not land in what it copies.

    Links are followed, also those at the top of `source`. A path that does not exist yet counts by
    the folders above it.

    Args:
        target: Where the copy will be; it need not exist.
        source: The folder; a missing one is never refused.

    Raises:
        ConfigurationError: `target` is `source` or lies below it.
        OSError: This user may not search a folder above one of them.
        RuntimeError: `target` is a loop of links.
    """
    place = target.resolve()
    folders = [source, *(path for path in source.glob("*") if path.is_symlink())]
    for folder in folders:
        for above in (place, *place.parents):
            if above.exists() and folder.exists() and above.samefile(folder):
                raise ConfigurationError(
                    f"{target}: lies inside {folder}, which is to be copied; name a folder outside "
                    f"{source}"
                )


def replace_file(source: Path, target: Path) -> None:
    """Move a finished file to a new name, in place of any file there.

    The move is durable when this returns. After a crash, `target` is either the old or the new
    file.

    Args:
        source: The file; its content is synced first.
        target: The new name, in the same file system; its folder must exist.

    Raises:
        CannotWriteError: The file is missing or cannot be moved, `target` is a folder, or it was
            moved and a folder cannot be synced.
    """
    with _translate_os_errors(target):
        _fsync(source)
        _rename(source, target)
        _fsync_dir(target.parent)
        if source.parent != target.parent:
            _fsync_dir(source.parent)


def publish_dir(source: Path, target: Path) -> None:
    """Rename a finished folder to its final name, after syncing all its content.

    It is durable when this returns. After a crash, `target` is complete or missing. Hold a lock: an
    empty folder that another process makes at `target` meanwhile is replaced.

    Args:
        source: The folder; a file is moved, too, but not synced.
        target: The new name, in the same file system; its folder must exist.

    Raises:
        AlreadyExistsError: `target` exists, also as a broken link; nothing was moved.
        CannotWriteError: The disk fails, `source` is missing, or it has a broken link. It was moved
            if only a folder could not be synced.
    """
    with _translate_os_errors(target):
        if target.exists() or target.is_symlink():
            raise AlreadyExistsError(
                f"{target}: exists already, and a published folder is never replaced; use another "
                "name"
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
    """Remove a file, a link or a folder with its content; do nothing if it is missing. Links are
    not followed.

    After a crash or an error, a part of a folder's content may be gone. A path that is a socket or
    a pipe stays; one inside a folder is removed with it.

    Args:
        path: The file, link or folder.

    Raises:
        CannotWriteError: A file or folder cannot be removed, or another process removes it
            meanwhile.
    """
    with _translate_os_errors(path):
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


def remove_temporary_files(folder: Path, name: str = "") -> list[Path]:
    """Remove the temporary files that killed processes left in a folder. Call it under the lock.

    Without a lock it would also remove files that another process is writing at that moment.

    Args:
        folder: The folder; a missing one has no temporary files. Folders below it are not searched.
        name: Remove only temporary files of files whose name begins with this; "" for all.

    Returns:
        The removed paths, sorted; empty if there were none.

    Raises:
        CannotWriteError: One cannot be removed; those before it are gone.
    """
    stale = sorted(folder.glob(f"{TEMPORARY_PREFIX}{glob.escape(name)}*"))
    for path in stale:
        remove_tree(path)
    return stale


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Run the block in one SQLite transaction (BEGIN IMMEDIATE); roll back on any error.

    The block runs under the write lock. Do not nest transactions. The connection must have
    `isolation_level=None`, and no other thread may use it during the block.

    COMMIT runs at the end of the block. The lock is waited for as long as the connection's
    busy_timeout.

    Yields:
        The same connection.

    Raises:
        BusyError: Another process held the lock for longer than busy_timeout.
        CannotWriteError: The disk is full or fails, or the file is read-only. The transaction was
            rolled back, unless only a step after the commit failed.
        sqlite3.Error: Any other error of SQLite, such as a damaged file, or a transaction that is
            open already.
    """
    name = connection.execute("PRAGMA database_list").fetchone()[2]
    path = Path(name or ":memory:")
    with _translate_os_errors(path), translate_sqlite_errors(path), _step("begin", path):
        connection.execute("BEGIN IMMEDIATE")
    try:
        with translate_sqlite_errors(path):
            yield connection
        with _translate_os_errors(path), translate_sqlite_errors(path):
            with _step("before_commit", path):
                pass
            connection.execute("COMMIT")
    except BaseException:
        # SQLite may have rolled back on its own, as it does on a full disk.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    with _translate_os_errors(path), _step("after_commit", path):
        pass


@contextlib.contextmanager
def lock_file(path: Path, timeout_s: float = 0.0) -> Iterator[None]:
    """Hold a lock file during the block; the death of the holder frees it.

    A missing file is made with mode 0600, and so is its folder; it stays, unless its holder removes
    it. The lock is not reentrant: a second call for the same path waits, too, in the same thread.

    A waiting caller tries again every 20 ms.

    Args:
        path: The lock file; its content is not touched.
        timeout_s: How long to wait for another holder, in seconds; 0 tries once.

    Raises:
        BusyError: Another holder has it for longer than the timeout, or `path` is a link into a
            missing folder.
        CannotWriteError: The file or its folder cannot be made, or the file system has no locks
            (flock).
    """
    deadline = time.monotonic() + timeout_s
    while (handle := _lock_file(path)) < 0:
        if time.monotonic() >= deadline:
            raise BusyError(
                f"{path}: another process holds this lock file; wait for it to end, then try again"
            )
        time.sleep(0.02)
    try:
        yield
    finally:
        os.close(handle)


def _lock_file(path: Path) -> int:
    """Return a handle that holds the lock, -1 where another process has or has just removed it."""
    make_dir(path.parent)
    with contextlib.ExitStack() as undo:
        with _translate_os_errors(path):
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                return -1
        undo.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A holder may have removed the file, with its folder, after it was opened here.
            if not os.path.samestat(os.fstat(handle), path.stat()):
                return -1
        except (BlockingIOError, FileNotFoundError):
            return -1
        except OSError as error:
            raise lock_refused_error(path, error) from error
        undo.pop_all()
        return handle


def lock_refused_error(path: Path, error: OSError) -> CannotWriteError:
    """Return, without raising it, the error for a file whose file system refuses a lock (flock)."""
    return CannotWriteError(
        f"{path}: cannot be locked ({error.strerror}); put the folder on a file system that has "
        "locks, such as a local disk"
    )


@contextlib.contextmanager
def _translate_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotWriteError(
            f"{path}: cannot be written ({error.strerror}); "
            f"{_ADVICE.get(error.errno or 0, 'check the disk')}, and run the command again"
        ) from error


@contextlib.contextmanager
def _step(kind: str, path: Path, target: Path | None = None) -> Iterator[None]:
    if fault := FAULT_INJECTOR.count_step():
        FAULT_INJECTOR.inject_fault(fault, path)
    yield
    FAULT_INJECTOR.report_step(DurableStep(kind, path, target))


def _create(path: Path, mode: int) -> None:
    with _step("create", path):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))


def _write(path: Path, data: bytes | memoryview) -> None:
    fault = FAULT_INJECTOR.count_step()
    if fault and fault != "short":
        FAULT_INJECTOR.inject_fault(fault, path)
    with path.open("ab", buffering=0) as file:
        remainder = memoryview(data)[: len(data) // 2 if fault else len(data)]
        while remainder:
            remainder = remainder[file.write(remainder) :]
    if fault:
        FAULT_INJECTOR.inject_fault(fault, path)
    FAULT_INJECTOR.report_step(DurableStep("write", path, written_bytes=data))


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
