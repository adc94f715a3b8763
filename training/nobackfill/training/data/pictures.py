"""Images of a listing as a training reads them: few are held in memory, many stay on disk.

`open_pictures` decides by their decoded size. Both answers are used alike: `len`, `images[rows]`,
`in_batches` and `chunks`; with the same rows they give the same pixels. `Listed` opens them when
they are first asked for.
"""

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from nobackfill.class_folders import Listing, decode
from nobackfill.errors import InvalidInputError, NobackfillError
from nobackfill.training.config import Config
from nobackfill.training.data.folders import identity
from nobackfill.training.data.image_files import DECODER, ImageFiles, PixelCache, Refused, processes

# Images that are embedded at a time.
CHUNK = 256
_MIB = 2**20


@dataclass(frozen=True)
class Reading:
    """How images are read: see the keys of the same names in training/config.py."""

    in_memory_mib: int = 2048
    workers: int | None = None
    pixel_cache: Path | None = None


def reading(config: Config) -> Reading:
    """How a training reads its images."""
    return Reading(config.in_memory_mib, config.workers, config.pixel_cache)


class Pictures:
    """Images uint8 [n,size,size,3] that are decoded when they are asked for, by other processes.

    One reader at a time. The processes start with the first batch and end with this object.
    """

    def __init__(self, files: ImageFiles, rows: NDArray[np.int64], workers: int) -> None:
        self._files, self._rows, self._workers = files, rows, workers
        self._order = _Order()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Tensor) -> "Pictures":
        """Those of `rows` (numbers, or a mask); nothing is read."""
        return Pictures(self._files, self._rows[rows.numpy()], self._workers)

    def in_batches(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """The images of each batch of rows, read ahead.

        Raises InvalidInputError naming a file that is no image, NobackfillError where a reading
        process was ended.
        """
        self._order.rows, self._order.batches = self._rows, batches
        try:
            for found in self._loader:
                if isinstance(found, Refused):
                    raise InvalidInputError(found.why)
                yield found
        except (RuntimeError, EOFError, OSError) as error:
            raise NobackfillError(
                f"a process that reads images was ended ({str(error)[:200]}): give the machine or "
                "its container more memory (shared memory, too), or read with fewer workers; "
                "run it again, it goes on after its last checkpoint"
            ) from error

    def chunks(self) -> Iterator[Tensor]:
        """All images in their order, at most CHUNK at a time."""
        return self.in_batches(torch.split(torch.arange(len(self)), CHUNK))

    @cached_property
    def _loader(self) -> DataLoader[Tensor]:
        return DataLoader(
            self._files,
            batch_sampler=self._order,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            multiprocessing_context=processes() if self._workers else None,
            persistent_workers=self._workers > 0,
            # A generator of its own: the training's draws stay what they are.
            generator=torch.Generator(),
        )


Images = Tensor | Pictures


class ImageSource(Protocol):
    """Images that come in order, a chunk at a time."""

    @property
    def digest(self) -> str:
        """What tells them from others."""

    def __len__(self) -> int: ...

    def chunks(self) -> Iterator[Tensor]:
        """uint8 [c,size,size,3], at most CHUNK of them."""


@dataclass(frozen=True)
class Listed:
    """The images of a listing at size x size, opened when they are first asked for: whoever finds
    what was made of them needs none. Raises what `open_pictures` does, then."""

    listing: Listing
    size: int
    reading: Reading

    def __len__(self) -> int:
        return len(self.listing)

    @cached_property
    def digest(self) -> str:
        """Of the files' names, lengths and times of change, of their decoder and the size."""
        told = f"{identity(self.listing)} {DECODER} {self.size}"
        return hashlib.sha256(told.encode()).hexdigest()

    @cached_property
    def opened(self) -> Images:
        """The images."""
        return open_pictures(self.listing, self.size, self.reading)

    def chunks(self) -> Iterator[Tensor]:
        """All images in their order, at most CHUNK at a time."""
        return chunks(self.opened)


def open_pictures(listing: Listing, size: int, reading: Reading) -> Images:
    """The images at size x size. Raises InvalidInputError naming the first file that is no image,
    at once where they are held in memory; CannotWriteError for a cache that cannot be made.
    """
    if not streams(listing, size, reading):
        return torch.from_numpy(decode(listing, size))
    cache = None if reading.pixel_cache is None else PixelCache(reading.pixel_cache)
    if cache is not None:
        cache.open()
        _say_room(cache, _bytes(listing, size))
    workers = (os.cpu_count() or 1) if reading.workers is None else reading.workers
    files = ImageFiles(listing.root, listing.paths, size, cache)
    return Pictures(files, np.arange(len(listing)), workers)


def streams(listing: Listing, size: int, reading: Reading) -> bool:
    """Whether the images are too many to be held in memory."""
    return _bytes(listing, size) > reading.in_memory_mib * _MIB


def in_batches(images: Images, batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """The images of each batch of rows."""
    if isinstance(images, Pictures):
        return images.in_batches(batches)
    return (images[rows] for rows in batches)


def chunks(images: Images) -> Iterator[Tensor]:
    """All images in their order, at most CHUNK at a time."""
    return images.chunks() if isinstance(images, Pictures) else iter(torch.split(images, CHUNK))


class _Order:
    """The rows of the batches of the pass that is going on; the loader keeps one for its life."""

    def __init__(self) -> None:
        self.rows = np.empty(0, np.int64)
        self.batches: Sequence[Tensor] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return (self.rows[batch.numpy()].tolist() for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _as_it_is(found: Any) -> Any:
    return found


def _bytes(listing: Listing, size: int) -> int:
    return len(listing) * size * size * 3


def _say_room(cache: PixelCache, wanted: int) -> None:
    room = cache.room_bytes()
    if room < wanted:
        print(
            f"{cache.folder}: room for {room / 2**30:.1f} of {wanted / 2**30:.1f} GiB of resized "
            "images; those that find none are decoded each time",
            file=sys.stderr,
        )
