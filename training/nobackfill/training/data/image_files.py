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
    """A cache of pixels uint8 [size,size,3], in the folder `folder`, one file per image and size.

    A cached file belongs to an image's path, length and time of change, and to Pillow's version.
    """

    folder: Path

    def open(self) -> None:
        """Create the folder and its parents, unless they exist.

        Raises:
            CannotWriteError: the folder cannot be made, or a file has its name.
        """
        make_dir(self.folder)

    def writable_bytes(self) -> int:
        """Return the bytes that may be written before only 5 % of the disk are free; at least 0.

        Raises:
            OSError: the folder does not exist or cannot be looked at.
        """
        usage = shutil.disk_usage(self.folder)
        return max(0, int(usage.free - RESERVE * usage.total))

    def read(self, image_file: Path, size: int) -> Pixels | None:
        """Return the cached pixels of an image file, uint8 [size,size,3], read-only.

        Processes may read and write at once: an incomplete file counts as not cached.

        Args:
            image_file: the image file; a link counts as its target.
            size: rows and columns of the pixels.

        Returns:
            None if they are not cached, damaged, or of an earlier version of the file, or if the
            file is missing.
        """
        try:
            data = self._file(image_file, size).read_bytes()
        except OSError:
            return None
        pixels = memoryview(data)[:-_SUM_BYTES]
        if len(pixels) != size * size * 3 or _checksum(pixels) != data[-_SUM_BYTES:]:
            return None
        return np.frombuffer(pixels, np.uint8).reshape(size, size, 3)

    def write(self, image_file: Path, pixels: Pixels) -> None:
        """Cache the pixels of an image file, uint8 [size,size,3]; replace what was cached.

        Any OSError is ignored (full disk, missing folder, image file or permission): nothing is
        cached then. A write that fails half-way removes its file. Nothing is written if fewer than
        5 % of the disk would stay free. Processes may write at once.

        Args:
            image_file: the image file, of which only path, length and time are read.
            pixels: square, uint8 [size,size,3].
        """
        # The owner may remove the folder at any time.
        with contextlib.suppress(OSError):
            if self.writable_bytes() < pixels.nbytes:
                return
            file = self._file(image_file, len(pixels))
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
        content = f"{DECODER}\0{real}\0{status.st_size}\0{status.st_mtime_ns}\0{size}"
        name = hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:40]
        return self.folder / name[:2] / name[2:]


def _checksum(pixels: memoryview) -> bytes:
    # Takes a quarter of CRC-32's time, and detects incomplete files.
    return zlib.adler32(pixels).to_bytes(_SUM_BYTES, "big")


@dataclass(frozen=True)
class UnreadableBatch:
    """The reason why a batch could not be read.

    It is no exception, because a DataLoader would wrap that into one of another class.
    """

    reason: str


def reader_context() -> ForkServerContext:
    """Return the multiprocessing context that starts the processes which read images.

    It is a fork server, because forks of a process with threads may hang. The server imports torch
    once for all of them. It is the one server of this process, and what it preloads is set for all
    its users.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class ImageFiles(Dataset[Tensor]):
    """Image files below `root`, decoded to size x size pixels; rows are read as one tensor.

    Args of the constructor:
        root: the folder.
        paths: the files, relative to `root`; row i is the i-th one.
        image_size: rows and columns of the decoded images.
        cache: where resized images are cached; None: every image is decoded each time.
    """

    def __init__(
        self, root: Path, paths: Sequence[str], image_size: int, cache: PixelCache | None
    ) -> None:
        self.root, self.size, self.cache = root, image_size, cache
        # Paths are one string. Every process would copy a million separate ones, page by page,
        # because Python counts references in them.
        encoded = [path.encode("utf-8", "surrogateescape") for path in paths]
        self._names = b"".join(encoded)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitems__(self, rows: list[int]) -> Tensor | UnreadableBatch:
        """Return the images of `rows`, uint8 [n,size,size,3], or why one cannot be decoded.

        Nothing is raised for a missing or unreadable image. With a cache, decoded images are added
        to it.

        Args:
            rows: row numbers from 0; they may repeat. A number beyond the last raises IndexError.
        """
        images = np.empty((len(rows), self.size, self.size, 3), np.uint8)
        try:
            for place, row in enumerate(rows):
                images[place] = self._read(self.root / self.relative_path(row))
        except InvalidInputError as error:
            return UnreadableBatch(f"{error}; remove the file, and run the training again")
        return torch.from_numpy(images)

    def relative_path(self, row: int) -> str:
        """Return the path of a row, from 0, relative to `root`.

        Raises:
            IndexError: there is no such row.
        """
        start = 0 if row == 0 else int(self._ends[row - 1])
        return self._names[start : int(self._ends[row])].decode("utf-8", "surrogateescape")

    def _read(self, image: Path) -> Pixels:
        if self.cache is None:
            return decode_file(image, self.size, self.size)
        cached = self.cache.read(image, self.size)
        if cached is not None:
            return cached
        pixels = decode_file(image, self.size, self.size)
        self.cache.write(image, pixels)
        return pixels
