"""Embed images of queries on a few threads: batches form while a model call runs.

There are as many threads as cores for decoding, plus those that wait for model calls. No call's own
thread waits.
"""

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from nobackfill.errors import InvalidInputError, NobackfillError
from nobackfill.images import Pixels
from nobackfill.release.manifest import Manifest
from nobackfill.server.embedding.decoding import decode_if_cheap
from nobackfill.server.embedding.embedding import LARGEST_BATCH, Embedding, Row, size_of
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.vectors import Vectors

Of = TypeVar("Of")

# While one batch is in the model server, another of the same release is sent once it has _ENOUGH
# images: a call takes a millisecond, with one image or with sixteen.
_MODEL_CALLS = 2
# An idle model server waits for so many images, or so long (seconds) since the first, while others
# are decoded.
_FULL_BATCH, _BATCH_SECONDS = 16, 0.001
# Most images, and time (seconds), that a thread decodes in a row; it leaves the others to other
# threads.
_MAX_DECODE, _DECODE_SECONDS = 16, 0.004


@dataclass(eq=False)
class QueuedImage(Generic[Of]):
    """Hold an image to embed; `of` identifies its call, `deadline` is on the monotonic clock."""

    of: Of
    manifest: Manifest
    image: bytes
    deadline: float
    is_wanted: Callable[[], bool]
    pixels: Pixels | None = None
    decoded: float = 0.0


class ImageQueue(Generic[Of]):
    """Decode images, embed them in batches, and pass the vectors on."""

    def __init__(
        self,
        embedding: Embedding,
        metrics: Metrics,
        answer: Callable[[Sequence[tuple[QueuedImage[Of], Vectors | None]]], None],
    ) -> None:
        """Start the threads.

        Args:
            embedding: embeds the images.
            metrics: counts batches and errors.
            answer: called once for each image with its vector, float32 [1, dim]; None if it has
                none, is not wanted, or is expensive to decode.
        """
        self._embedding = embedding
        self._metrics = metrics
        self._observe = metrics.batch_size.labels("embed").observe
        self._answer = answer
        self._changed = threading.Condition()
        self._encoded: deque[QueuedImage[Of]] = deque()
        self._decoded: deque[QueuedImage[Of]] = deque()
        self._cores = len(os.sched_getaffinity(0))
        self._decoding = 0
        # The releases whose models are called now.
        self._embeds: list[int] = []
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"images-{number}", daemon=True)
            for number in range(self._cores + _MODEL_CALLS)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, waiting: QueuedImage[Of]) -> None:
        """Add an image, without waiting; `begin` follows once all images that came together were
        added.
        """
        with self._changed:
            if not self._is_closed:
                self._encoded.append(waiting)
                return
        self._answer([(waiting, None)])

    def begin(self) -> None:
        """Wake a thread, which wakes the next one if there is more."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Stop the threads; images that nobody has begun are answered without a vector."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        # Includes images that were being decoded.
        self._answer([(waiting, None) for waiting in (*self._encoded, *self._decoded)])

    def _work(self) -> None:
        while (turn := self._next()) is not None:
            with error_boundary(self._metrics, "images"):
                turn()

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next task; None once the queue is closed."""
        with self._changed:
            while not self._is_closed:
                turn = self._turn()
                if turn is not None:
                    if self._encoded or self._decoded:
                        self._changed.notify()
                    return turn
                self._changed.wait()
        return None

    def _turn(self) -> Callable[[], None] | None:
        """Return the next task, if there is one; the caller holds the lock."""
        release = self._ready_release()
        if release is not None:
            self._embeds.append(release)
            return partial(self._embed, self._batch(release))
        if self._encoded and self._decoding < self._cores:
            self._decoding += 1
            count = min(_MAX_DECODE, len(self._encoded))
            return partial(self._decode, [self._encoded.popleft() for _ in range(count)])
        return None

    def _ready_release(self) -> int | None:
        """Return the release whose images go to the model server before more are decoded; None
        without one.
        """
        if not self._decoded or len(self._embeds) == _MODEL_CALLS:
            return None
        nothing_comes = not self._encoded and not self._decoding
        since = time.monotonic() - self._decoded[0].decoded
        is_time = nothing_comes or since >= _BATCH_SECONDS
        for release, count in Counter(image.manifest.release for image in self._decoded).items():
            if count >= _FULL_BATCH or (is_time and release not in self._embeds):
                return release
        return None

    def _batch(self, release: int) -> list[QueuedImage[Of]]:
        batch: list[QueuedImage[Of]] = []
        others: deque[QueuedImage[Of]] = deque()
        for image in self._decoded:
            fits = image.manifest.release == release and len(batch) < LARGEST_BATCH
            (batch if fits else others).append(image)
        self._decoded = others
        return batch

    def _decode(self, images: Sequence[QueuedImage[Of]]) -> None:
        began, decoded = time.monotonic(), list[QueuedImage[Of]]()
        try:
            for image in images:
                decoded.append(image)
                image.pixels = self._pixels(image)
                image.decoded = time.monotonic()
                if image.decoded - began > _DECODE_SECONDS:
                    break
        finally:
            with self._changed:
                self._decoding -= 1
                self._encoded.extendleft(reversed(images[len(decoded) :]))
                self._decoded += [image for image in decoded if image.pixels is not None]
            self._answer([(image, None) for image in decoded if image.pixels is None])

    def _pixels(self, image: QueuedImage[Of]) -> Pixels | None:
        try:
            return (
                decode_if_cheap(image.image, size_of(image.manifest)) if image.is_wanted() else None
            )
        except NobackfillError:
            return None  # the call's own thread gets the error

    def _embed(self, batch: Sequence[QueuedImage[Of]]) -> None:
        rows: dict[QueuedImage[Of], Row] = {}
        try:
            # Some callers may have left by now.
            wanted = [image for image in batch if image.is_wanted()]
            pixels = [image.pixels for image in wanted if image.pixels is not None]
            if wanted:
                self._observe(len(wanted))
                with context.until(max(image.deadline for image in wanted)):
                    results = self._embedding.rows(wanted[0].manifest, pixels)
                rows.update(zip(wanted, results, strict=True))
        except NobackfillError:
            pass  # the calls' own threads get the error
        finally:
            with self._changed:
                self._embeds.remove(batch[0].manifest.release)
                if self._decoded:
                    self._changed.notify()
            vectors = {
                image: row for image, row in rows.items() if not isinstance(row, InvalidInputError)
            }
            self._answer([(image, vectors.get(image)) for image in batch])
