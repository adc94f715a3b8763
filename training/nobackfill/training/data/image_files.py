"""Image files by number, as a DataLoader's processes read them."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nobackfill.errors import InvalidInputError
from nobackfill.images import Pixels, decode_file
from nobackfill.training.data.pixel_cache import PixelCache


@dataclass(frozen=True)
class Refused:
    """A batch that could not be read. Not raised: a DataLoader would wrap it in a traceback."""

    why: str


def processes() -> ForkServerContext:
    """How reading processes start: not as forks of a process with threads, which may hang, and
    after one import of torch for all of them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class ImageFiles(Dataset[Tensor]):
    """Files below `root`, decoded to size x size; a batch of row numbers gives one tensor."""

    def __init__(
        self, root: Path, paths: Sequence[str], size: int, cache: PixelCache | None
    ) -> None:
        self.root, self.size, self.cache = root, size, cache
        # One string: a million of them would be copied into every process, page by page, as it
        # counts its references.
        encoded = [path.encode("utf-8", "surrogateescape") for path in paths]
        self._names = b"".join(encoded)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitems__(self, rows: list[int]) -> Tensor | Refused:
        """Images uint8 [n,size,size,3] of `rows`."""
        images = np.empty((len(rows), self.size, self.size, 3), np.uint8)
        try:
            for place, row in enumerate(rows):
                images[place] = self._read(self.root / self.path(row))
        except InvalidInputError as error:
            return Refused(f"{error}; remove it and run this again")
        return torch.from_numpy(images)

    def path(self, row: int) -> str:
        """Relative to `root`."""
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
