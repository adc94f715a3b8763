"""The lock file beside a gallery: held shared while it is open, alone by who must be alone."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

from nobackfill.errors import BusyError
from nobackfill.gallery.access import unwritable


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
