"""Image files by row number, as a DataLoader's processes read them, and a cache of resized images.

The reading processes import this module and not `pictures`, so that they start fast.

The cache has one file per image, so that a large picture is decoded once. A file is valid if its
checksum matches its pixels. Therefore nothing is synced, locked or renamed. Several trainings may
fill one folder, and files that a kill, a power cut or a full disk left incomplete are ignored.
"""

import contextlib
import hashlib
import multiprocessing
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
import PIL
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nobackfill.durable import make_dir
from nobackfill.errors import InvalidInputError
from nobackfill.images import Pixels, decode_file

# Versions that affect decoded pixels, for the names of cached data.
DECODER = f"nobackfill-1 Pillow-{PIL.__version__}"
# Share of the disk that the cache leaves free, for example for checkpoints.
RESERVE = 0.05
_SUM_BYTES = 4


@dataclass(frozen=True)
class PixelCache:
    """A cache of pixels uint8 [size,size,3], in the folder `folder`."""

    folder: Path

    def open(self) -> None:
        """Create the folder. Raises CannotWriteError."""
        make_dir(self.folder)

    def room_bytes(self) -> int:
        """Return the bytes that may be written before the disk's reserve is reached."""
        usage = shutil.disk_usage(self.folder)
        return max(0, int(usage.free - RESERVE * usage.total))

    def read(self, image: Path, size: int) -> Pixels | None:
        """Return the cached pixels of an image file in its present version; None without them."""
        try:
            data = self._file(image, size).read_bytes()
        except OSError:
            return None
        pixels = memoryview(data)[:-_SUM_BYTES]
        if len(pixels) != size * size * 3 or _checksum(pixels) != data[-_SUM_BYTES:]:
            return None
        return np.frombuffer(pixels, np.uint8).reshape(size, size, 3)

    def write(self, image: Path, pixels: Pixels) -> None:
        """Cache the pixels of an image file; a full disk or missing permission is ignored."""
        # The owner may remove the folder at any time.
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
        """Return the cache file: named by the image's path, length and time of change."""
        real = image.resolve()
        status = real.stat()
        told = f"{DECODER}\0{real}\0{status.st_size}\0{status.st_mtime_ns}\0{size}"
        name = hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()[:40]
        return self.folder / name[:2] / name[2:]


def _checksum(pixels: memoryview) -> bytes:
    # Takes a quarter of CRC-32's time, and detects incomplete files.
    return zlib.adler32(pixels).to_bytes(_SUM_BYTES, "big")


@dataclass(frozen=True)
class UnreadableBatch:
    """A batch that could not be read. Not an exception, which a DataLoader would wrap."""

    why: str


def processes() -> ForkServerContext:
    """Return the context that starts reading processes.

    Forks of a process with threads may hang. The fork server imports torch once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class ImageFiles(Dataset[Tensor]):
    """Files below `root`, decoded to size x size; a list of row numbers gives one tensor."""

    def __init__(
        self, root: Path, paths: Sequence[str], size: int, cache: PixelCache | None
    ) -> None:
        self.root, self.size, self.cache = root, size, cache
        # Paths are one string. Every process would copy a million separate ones, page by page,
        # because Python counts references in them.
        encoded = [path.encode("utf-8", "surrogateescape") for path in paths]
        self._names = b"".join(encoded)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitems__(self, rows: list[int]) -> Tensor | UnreadableBatch:
        """Return images uint8 [n,size,size,3] of `rows`, or Refused."""
        images = np.empty((len(rows), self.size, self.size, 3), np.uint8)
        try:
            for place, row in enumerate(rows):
                images[place] = self._read(self.root / self.path(row))
        except InvalidInputError as error:
            return UnreadableBatch(f"{error}; remove it and run this again")
        return torch.from_numpy(images)

    def path(self, row: int) -> str:
        """Return the path of a row, relative to `root`."""
        start = 0 if row == 0 else int(self._ends[row - 1])
        return self._names[start : int(self._ends[row])].decode("utf-8", "surrogateescape")

    def _read(self, image: Path) -> Pixels:
        if self.cache is None:
            return decode_file(image, self.size, self.size)
        kept = self.cache.read(image, self.size)
        if kept is not None:
            return kept
        pixels = decode_file(image, self.size, self.size)
        self.cache.write(image, pixels)
        return pixels
