"""What a gallery file can be opened for: all that is said here is found out without writing.

shared   read and written beside other processes, through SQLite's shared memory (-shm)
sole     no room for the shared memory: by one process at a time, through one connection
reading  file or folder cannot be written: read as it is, and nothing is made beside it
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nobackfill.errors import BusyError, CannotWriteError

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
