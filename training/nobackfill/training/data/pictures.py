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
from nobackfill.training.data.folders import listing_digest
from nobackfill.training.data.image_files import (
    DECODER,
    ImageFiles,
    PixelCache,
    UnreadableBatch,
    reader_context,
)

# Images that are embedded at a time.
CHUNK = 256
_MIB = 2**20


@dataclass(frozen=True)
class ReadingOptions:
    """How to read images, as the keys of the same names in training/config.py.

    Attributes:
        in_memory_mib: decoded images of up to this many MiB are held in memory.
        workers: processes that read more images on demand; None: one per core; 0: this process.
        pixel_cache: folder that caches resized images read on demand; None: no cache.
    """

    in_memory_mib: int = 2048
    workers: int | None = None
    pixel_cache: Path | None = None


def reading_options(config: Config) -> ReadingOptions:
    """Return how a training reads its images, from the keys of its configuration.

    No file is opened.
    """
    return ReadingOptions(config.in_memory_mib, config.workers, config.pixel_cache)


class Pictures:
    """Images uint8 [n,size,size,3] that other processes decode on demand.

    Use one iterator at a time. The processes start with the first batch and end with this object.

    Args of the constructor:
        files: the image files.
        rows: the rows of `files` that belong to this object, int64 [n].
        workers: the number of processes; 0: this process reads.
    """

    def __init__(self, files: ImageFiles, rows: NDArray[np.int64], workers: int) -> None:
        self._files, self._rows, self._workers = files, rows, workers
        self._order = _Order()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Tensor) -> "Pictures":
        """Select images by their numbers, int64 [m], or by a mask, bool [n]; read no image.

        The result has processes of its own. Numbers may repeat, in any order.

        Raises:
            IndexError: a number is not below n, or the mask has another length.
        """
        return Pictures(self._files, self._rows[rows.numpy()], self._workers)

    def in_batches(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the images of each batch of row numbers, uint8 [b,size,size,3].

        The next batches are read ahead. The first batch of this object starts the processes. Stop
        an iterator, or read it to its end, before the next one starts.

        Args:
            batches: row numbers int64 [b] of each batch; no batches yield nothing.

        Raises:
            InvalidInputError: a file is missing or no image; raised when its batch is reached.
            IndexError: a row number is not below n; raised while batches are read ahead.
            NobackfillError: a process that reads images was killed.
        """
        self._order.rows, self._order.batches = self._rows, batches
        try:
            for batch in self._loader:
                if isinstance(batch, UnreadableBatch):
                    raise InvalidInputError(batch.reason)
                yield batch
        except (RuntimeError, EOFError, OSError) as error:
            raise NobackfillError(
                f"a process that reads training images was killed ({str(error)[:200]}): give the "
                "machine or its container more memory (also shared memory), or set the key workers "
                "to a smaller number; then run the training again to resume from the last "
                "checkpoint"
            ) from error

    def chunks(self) -> Iterator[Tensor]:
        """Yield all images in order, at most CHUNK at a time, uint8 [c,size,size,3].

        Without images, one empty chunk is yielded.

        Raises:
            InvalidInputError: a file is missing or no image.
            NobackfillError: a process that reads images was killed.
        """
        return self.in_batches(torch.split(torch.arange(len(self)), CHUNK))

    @cached_property
    def _loader(self) -> DataLoader[Tensor]:
        return DataLoader(
            self._files,
            batch_sampler=self._order,
            num_workers=self._workers,
            collate_fn=_unchanged,
            multiprocessing_context=reader_context() if self._workers else None,
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

        Raises:
            InvalidInputError: a file does not exist or cannot be read.
        """

    def __len__(self) -> int: ...

    def chunks(self) -> Iterator[Tensor]:
        """Yield uint8 [c,size,size,3], at most CHUNK images at a time.

        Raises:
            InvalidInputError: a file is missing or no image.
            CannotWriteError: a cache of pixels cannot be created.
            NobackfillError: a process that reads images was killed.
        """


@dataclass(frozen=True)
class ListedImages:
    """The images of a listing at size x size pixels, opened on first use.

    Callers that find cached features never open them. `images` and `chunks` raise the errors of
    `open_pictures`.
    """

    listing: ImageListing
    size: int
    reading_options: ReadingOptions

    def __len__(self) -> int:
        return len(self.listing)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the files' names, lengths and times, of Pillow's version and of the size.

        It is computed once, and no content is read.

        Raises:
            InvalidInputError: a file does not exist or cannot be read.
        """
        content = f"{listing_digest(self.listing)} {DECODER} {self.size}"
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def images(self) -> Images:
        """The images, uint8 [n,size,size,3]; the first use opens them.

        Raises:
            InvalidInputError: a file is missing or no image, and all are held in memory.
            CannotWriteError: the pixel cache cannot be created.
        """
        return open_pictures(self.listing, self.size, self.reading_options)

    def chunks(self) -> Iterator[Tensor]:
        """Yield all images in order, at most CHUNK at a time, uint8 [c,size,size,3].

        Raises:
            InvalidInputError: a file is missing or no image.
            CannotWriteError: the pixel cache cannot be created.
            NobackfillError: a process that reads images was killed.
        """
        return chunks(self.images)


def open_pictures(listing: ImageListing, image_size: int, reading: ReadingOptions) -> Images:
    """Open the images of a listing at size x size pixels.

    Images that fit in memory are decoded now. Others are decoded when they are read; a line on
    stderr says if the disk has no room to cache all of them. Images in memory are decoded by one
    thread per core. `Pictures` start their processes with the first batch.

    Args:
        listing: n images.
        image_size: rows and columns of the decoded images.
        reading: what fits in memory, and how others are read.

    Returns:
        uint8 [n,size,size,3]: a tensor if they fit in memory, else `Pictures`.

    Raises:
        InvalidInputError: a file is missing or no image; raised at once if the images are held in
            memory, else when it is read.
        CannotWriteError: the pixel cache cannot be created.
    """
    if not exceeds_memory(listing, image_size, reading):
        return torch.from_numpy(decode_listing(listing, image_size))
    cache = None if reading.pixel_cache is None else PixelCache(reading.pixel_cache)
    if cache is not None:
        cache.open()
        _say_room(cache, _bytes(listing, image_size))
    workers = (os.cpu_count() or 1) if reading.workers is None else reading.workers
    files = ImageFiles(listing.root, listing.paths, image_size, cache)
    return Pictures(files, np.arange(len(listing)), workers)


def exceeds_memory(listing: ImageListing, image_size: int, reading: ReadingOptions) -> bool:
    """Return whether the images at size x size are larger than reading.in_memory_mib.

    Their length is that of uint8 pixels in three colours; an equal length fits. No image is read.
    """
    return _bytes(listing, image_size) > reading.in_memory_mib * _MIB


def in_batches(images: Images, batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the images of each batch of row numbers int64 [b], uint8 [b,size,size,3].

    For a tensor of images it copies rows. Row numbers are on the CPU.

    Raises:
        InvalidInputError: a file is missing or no image.
        IndexError: a row number is beyond the last.
        NobackfillError: a process that reads images was killed.
    """
    if isinstance(images, Pictures):
        return images.in_batches(batches)
    return (images[rows] for rows in batches)


def chunks(images: Images) -> Iterator[Tensor]:
    """Yield all images in order, at most CHUNK at a time, uint8 [c,size,size,3].

    Without images, one empty chunk is yielded. Chunks of a tensor are views. Stop an iterator over
    `Pictures`, or read it to its end, before the next one starts; their processes stay until the
    object ends.

    Raises:
        InvalidInputError: a file is missing or no image.
        NobackfillError: a process that reads images was killed.
    """
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


def _unchanged(batch: Any) -> Any:
    return batch


def _bytes(listing: ImageListing, size: int) -> int:
    return len(listing) * size * size * 3


def _say_room(cache: PixelCache, needed_bytes: int) -> None:
    room = cache.writable_bytes()
    if room < needed_bytes:
        print(
            f"the pixel cache {cache.folder} has room for {room / 2**30:.1f} of the "
            f"{needed_bytes / 2**30:.1f} GiB of resized images; the other images are decoded in "
            "every epoch",
            file=sys.stderr,
        )
