"""Resized images kept on disk, a file each, so that a large picture is decoded once.

A cache only: a file counts if its checksum fits its pixels. So nothing is synced, locked or
renamed; two trainings may fill one folder, and what a killed one, a power cut or a full disk left
half-written is decoded again.
"""

import contextlib
import hashlib
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL

from nobackfill.durable import make_dir
from nobackfill.images import Pixels

# What may change an image's pixels beside the file: in the name of all that is kept of them.
DECODER = f"nobackfill-1 Pillow-{PIL.__version__}"
# Share of the disk that is left to others, checkpoints among them.
RESERVE = 0.05
_SUM_BYTES = 4


@dataclass(frozen=True)
class PixelCache:
    """Pixels uint8 [size,size,3] of image files, below `folder`."""

    folder: Path

    def open(self) -> None:
        """Make the folder. Raises CannotWriteError."""
        make_dir(self.folder)

    def room_bytes(self) -> int:
        """What may still be written before the disk's reserve."""
        usage = shutil.disk_usage(self.folder)
        return max(0, int(usage.free - RESERVE * usage.total))

    def read(self, image: Path, size: int) -> Pixels | None:
        """The pixels of an image file as it is now; None where they are not kept."""
        try:
            data = self._file(image, size).read_bytes()
        except OSError:
            return None
        pixels = memoryview(data)[:-_SUM_BYTES]
        if len(pixels) != size * size * 3 or _checksum(pixels) != data[-_SUM_BYTES:]:
            return None
        return np.frombuffer(pixels, np.uint8).reshape(size, size, 3)

    def write(self, image: Path, pixels: Pixels) -> None:
        """Keep the pixels of an image file, unless the disk or its owner does not allow it."""
        # Its owner may remove the folder at any time.
        with contextlib.suppress(OSError):
            if self.room_bytes() < pixels.nbytes:
                return
            file = self._file(image, len(pixels))
            file.parent.mkdir(exist_ok=True)
            data = np.ascontiguousarray(pixels).data.cast("B")
            try:
                with file.open("wb") as opened:
                    opened.write(data)
                    opened.write(_checksum(data))
            except OSError:
                file.unlink(missing_ok=True)

    def _file(self, image: Path, size: int) -> Path:
        """Named by the file's place, length and time of change: what was replaced is not found."""
        real = image.resolve()
        status = real.stat()
        told = f"{DECODER}\0{real}\0{status.st_size}\0{status.st_mtime_ns}\0{size}"
        name = hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()[:40]
        return self.folder / name[:2] / name[2:]


def _checksum(pixels: memoryview) -> bytes:
    # A quarter of CRC-32's time, and enough to tell a half-written file.
    return zlib.adler32(pixels).to_bytes(_SUM_BYTES, "big")
