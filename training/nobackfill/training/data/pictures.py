"""The images of a listing, as a training reads them: in memory if they are few, else on demand.

`open_pictures` decides by their decoded size. Both kinds support `len`, `images[rows]`,
`in_batches` and `chunks`, and give the same pixels. `Listed` opens images on first use.
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

from nobackfill.class_folders import ImageListing, decode_listing
from nobackfill.errors import InvalidInputError, NobackfillError
from nobackfill.training.config import Config
from nobackfill.training.data.folders import identity
from nobackfill.training.data.image_files import (
    DECODER,
    ImageFiles,
    PixelCache,
    UnreadableBatch,
    processes,
)

# Images that are embedded at a time.
CHUNK = 256
_MIB = 2**20


@dataclass(frozen=True)
class Reading:
    """How to read images; the keys of the same names in training/config.py."""

    in_memory_mib: int = 2048
    workers: int | None = None
    pixel_cache: Path | None = None


def reading(config: Config) -> Reading:
    """Return how a training reads its images."""
    return Reading(config.in_memory_mib, config.workers, config.pixel_cache)


class Pictures:
    """Images uint8 [n,size,size,3] that other processes decode on demand.

    Use one reader at a time. The processes start with the first batch and end with this object.
    """

    def __init__(self, files: ImageFiles, rows: NDArray[np.int64], workers: int) -> None:
        self._files, self._rows, self._workers = files, rows, workers
        self._order = _Order()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Tensor) -> "Pictures":
        """Select rows, by numbers or a mask; reads no image."""
        return Pictures(self._files, self._rows[rows.numpy()], self._workers)

    def in_batches(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the images of each batch of rows; the next batches are read ahead.

        Raises:
            InvalidInputError: a file is no image.
            NobackfillError: a reading process was killed.
        """
        self._order.rows, self._order.batches = self._rows, batches
        try:
            for found in self._loader:
                if isinstance(found, UnreadableBatch):
                    raise InvalidInputError(found.why)
                yield found
        except (RuntimeError, EOFError, OSError) as error:
            raise NobackfillError(
                f"a process that reads images was killed ({str(error)[:200]}): give the machine or "
                "its container more memory (also shared memory), or read with fewer workers; then "
                "run it again to resume from the last checkpoint"
            ) from error

    def chunks(self) -> Iterator[Tensor]:
        """Yield all images in order, at most CHUNK at a time."""
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
            # Its own generator, so that the training's random numbers stay the same.
            generator=torch.Generator(),
        )


Images = Tensor | Pictures


class ImageSource(Protocol):
    """Images that are read in order, in chunks."""

    @property
    def digest(self) -> str:
        """A digest that names these images in a cache of features.

        It may cover the files' names, lengths and times instead of their contents.
        """

    def __len__(self) -> int: ...

    def chunks(self) -> Iterator[Tensor]:
        """Yield uint8 [c,size,size,3], at most CHUNK images at a time."""


@dataclass(frozen=True)
class Listed:
    """The images of a listing at size x size, opened on first use.

    Callers that find cached features never open them. Errors are those of `open_pictures`."""

    listing: ImageListing
    size: int
    reading: Reading

    def __len__(self) -> int:
        return len(self.listing)

    @cached_property
    def digest(self) -> str:
        """A digest of the files' names, lengths and times, of the decoder and of the size."""
        told = f"{identity(self.listing)} {DECODER} {self.size}"
        return hashlib.sha256(told.encode()).hexdigest()

    @cached_property
    def opened(self) -> Images:
        """The images, opened on first use."""
        return open_pictures(self.listing, self.size, self.reading)

    def chunks(self) -> Iterator[Tensor]:
        """Yield all images in order, at most CHUNK at a time."""
        return chunks(self.opened)


def open_pictures(listing: ImageListing, size: int, reading: Reading) -> Images:
    """Open images at size x size.

    Raises:
        InvalidInputError: a file is no image; raised at once if the images are held in memory.
        CannotWriteError: the cache cannot be created.
    """
    if not streams(listing, size, reading):
        return torch.from_numpy(decode_listing(listing, size))
    cache = None if reading.pixel_cache is None else PixelCache(reading.pixel_cache)
    if cache is not None:
        cache.open()
        _say_room(cache, _bytes(listing, size))
    workers = (os.cpu_count() or 1) if reading.workers is None else reading.workers
    files = ImageFiles(listing.root, listing.paths, size, cache)
    return Pictures(files, np.arange(len(listing)), workers)


def streams(listing: ImageListing, size: int, reading: Reading) -> bool:
    """Return whether the images are too large to be held in memory."""
    return _bytes(listing, size) > reading.in_memory_mib * _MIB


def in_batches(images: Images, batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the images of each batch of rows."""
    if isinstance(images, Pictures):
        return images.in_batches(batches)
    return (images[rows] for rows in batches)


def chunks(images: Images) -> Iterator[Tensor]:
    """Yield all images in order, at most CHUNK at a time."""
    return images.chunks() if isinstance(images, Pictures) else iter(torch.split(images, CHUNK))


class _Order:
    """The batches of the present pass; the loader keeps one instance."""

    def __init__(self) -> None:
        self.rows = np.empty(0, np.int64)
        self.batches: Sequence[Tensor] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return (self.rows[batch.numpy()].tolist() for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _as_it_is(found: Any) -> Any:
    return found


def _bytes(listing: ImageListing, size: int) -> int:
    return len(listing) * size * size * 3


def _say_room(cache: PixelCache, needed_bytes: int) -> None:
    room = cache.room_bytes()
    if room < needed_bytes:
        print(
            f"{cache.folder}: room for {room / 2**30:.1f} of {needed_bytes / 2**30:.1f} GiB of "
            "resized images; the others are decoded every time",
            file=sys.stderr,
        )
