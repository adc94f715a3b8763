"""Images of queries to vectors on a few threads, as many as there are cores to decode on and model
calls to wait for: batches form while a model call runs, and no call's own thread waits."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from nobackfill.errors import InvalidInputError, NobackfillError
from nobackfill.images import Pixels, checked_header
from nobackfill.release.manifest import Manifest
from nobackfill.server.embedding.embedding import LARGEST_BATCH, Embedding, Row
from nobackfill.server.grpc import calls
from nobackfill.server.grpc.error_boundary import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.vectors import Vectors

Of = TypeVar("Of")

# While one batch is in the model server, the next is on its way once nothing is left to decode.
_MODEL_CALLS = 2
# In pixels of a plain JPEG: dearer ones are decoded on threads of their own, in turns.
_CHEAP = 4_000_000


@dataclass(eq=False)
class Waiting(Generic[Of]):
    """An image whose vector is wanted: `of` says by whom, `deadline` is on the monotonic clock."""

    of: Of
    manifest: Manifest
    image: bytes
    deadline: float
    is_wanted: Callable[[], bool]
    pixels: Pixels | None = None


class ImageQueue(Generic[Of]):
    """Decodes what comes, embeds it together, and hands it on."""

    def __init__(
        self,
        embedding: Embedding,
        metrics: Metrics,
        answer: Callable[[Sequence[tuple[Waiting[Of], Vectors | None]]], None],
    ) -> None:
        """`answer` is given each image once, with its vector [1,dim]; None where there is none, or
        nobody wants it, or it is dear to decode."""
        self._embedding = embedding
        self._metrics = metrics
        self._observe = metrics.batch_size.labels("embed").observe
        self._answer = answer
        self._changed = threading.Condition()
        self._encoded: deque[Waiting[Of]] = deque()
        self._decoded: deque[Waiting[Of]] = deque()
        self._cores = len(os.sched_getaffinity(0))
        self._decoding = self._embeds = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"images-{number}", daemon=True)
            for number in range(self._cores + _MODEL_CALLS)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, waiting: Waiting[Of]) -> None:
        """Never waits."""
        with self._changed:
            if not self._closed:
                self._encoded.append(waiting)
                self._changed.notify()
                return
        self._answer([(waiting, None)])

    def close(self) -> None:
        """What nobody has begun is answered without a vector."""
        with self._changed:
            self._closed = True
            left = [*self._encoded, *self._decoded]
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._answer([(waiting, None) for waiting in left])

    def _work(self) -> None:
        while (turn := self._next()) is not None:
            with error_boundary(self._metrics, "images"):
                turn()

    def _next(self) -> Callable[[], None] | None:
        """The next thing to do, waited for; None at the end."""
        with self._changed:
            while not self._closed:
                turn = self._turn()
                if turn is not None:
                    if self._encoded:
                        self._changed.notify()
                    return turn
                self._changed.wait()
        return None

    def _turn(self) -> Callable[[], None] | None:
        """Under the lock. An idle model server comes before what is to be decoded."""
        if self._decoded and self._embeds < (1 if self._encoded else _MODEL_CALLS):
            self._embeds += 1
            return partial(self._embed, self._batch())
        if self._encoded and self._decoding < self._cores:
            self._decoding += 1
            return partial(self._decode, self._encoded.popleft())
        return None

    def _batch(self) -> list[Waiting[Of]]:
        release = self._decoded[0].manifest.release
        batch: list[Waiting[Of]] = []
        left: deque[Waiting[Of]] = deque()
        for one in self._decoded:
            fits = one.manifest.release == release and len(batch) < LARGEST_BATCH
            (batch if fits else left).append(one)
        self._decoded = left
        return batch

    def _decode(self, waiting: Waiting[Of]) -> None:
        try:
            if waiting.is_wanted() and checked_header(waiting.image).cost <= _CHEAP:
                with calls.until(waiting.deadline):
                    waiting.pixels = self._embedding.decode(waiting.manifest, waiting.image)
        except NobackfillError:
            pass  # whoever asks on a thread hears why
        finally:
            with self._changed:
                self._decoding -= 1
                if waiting.pixels is not None:
                    self._decoded.append(waiting)
        if waiting.pixels is None:
            self._answer([(waiting, None)])

    def _embed(self, batch: Sequence[Waiting[Of]]) -> None:
        rows: Sequence[Row | None] = [None] * len(batch)
        try:
            self._observe(len(batch))
            pixels = [one.pixels for one in batch if one.pixels is not None]
            with calls.until(max(one.deadline for one in batch)):
                rows = self._embedding.rows(batch[0].manifest, pixels)
        except NobackfillError:
            pass  # as above
        finally:
            with self._changed:
                self._embeds -= 1
                if self._decoded:
                    self._changed.notify()
            found = [None if isinstance(row, InvalidInputError) else row for row in rows]
            self._answer(list(zip(batch, found, strict=True)))
