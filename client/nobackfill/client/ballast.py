"""A ballast file holds room on the disk, so that `gc` can begin where there is none."""

import contextlib
import os
from pathlib import Path

from nobackfill.client.gallery_file import beside
from nobackfill.gallery.access import has_room

# What dropping a small space and shortening the file write to the log.
BYTES = 2 << 20
# It is taken only from a disk that does not miss it.
_PLENTY = 4 * BYTES


def keep(gallery: Path) -> None:
    """Hold room for a gallery, unless it is held already or the disk has little."""
    path = beside(gallery, "reserve")
    with contextlib.suppress(OSError):
        # Not urgent, and no data: where it cannot be made, a later command tries again.
        if has_room(gallery.parent, _PLENTY):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(handle, 0, BYTES)
            finally:
                os.close(handle)


def give_back(gallery: Path) -> None:
    """Free it where the disk has less."""
    with contextlib.suppress(OSError):
        if not has_room(gallery.parent, BYTES):
            beside(gallery, "reserve").unlink(missing_ok=True)
