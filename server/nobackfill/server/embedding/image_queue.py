"""Images of queries to vectors on a few threads, as many as there are cores to decode on and model
calls to wait for: batches form while a model call runs, and no call's own thread waits."""

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
from nobackfill.server.embedding.decoding import cheap
from nobackfill.server.embedding.embedding import LARGEST_BATCH, Embedding, Row, size_of
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.vectors import Vectors

Of = TypeVar("Of")

# While one batch is in the model server, another of the same release is sent once it is of
# `_ENOUGH`: a call takes the model server a millisecond, of one image as of sixteen.
_MODEL_CALLS = 2
# An idle model server waits for so many, or so long since the first, while others are decoded.
_ENOUGH, _PATIENCE_S = 16, 0.001
# Images that a thread decodes one after the other, and for how long: what is left, others may.
_DECODED_AT_ONCE, _DECODED_S = 16, 0.004


@dataclass(eq=False)
class QueuedImage(Generic[Of]):
    """An image whose vector is wanted: `of` says by whom, `deadline` is on the monotonic clock."""

    of: Of
    manifest: Manifest
    image: bytes
    deadline: float
    is_wanted: Callable[[], bool]
    pixels: Pixels | None = None
    decoded: float = 0.0


class ImageQueue(Generic[Of]):
    """Decodes what comes, embeds it together, and hands it on."""

    def __init__(
        self,
        embedding: Embedding,
        metrics: Metrics,
        answer: Callable[[Sequence[tuple[QueuedImage[Of], Vectors | None]]], None],
    ) -> None:
        """`answer` is given each image once, with its vector [1,dim]; None where there is none, or
        nobody wants it, or it is dear to decode."""
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
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"images-{number}", daemon=True)
            for number in range(self._cores + _MODEL_CALLS)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, waiting: QueuedImage[Of]) -> None:
        """Never waits. `begin` follows, once for all that came together."""
        with self._changed:
            if not self._closed:
                self._encoded.append(waiting)
                return
        self._answer([(waiting, None)])

    def begin(self) -> None:
        """Wake a thread for what was added, which wakes the next if there is more."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """What nobody has begun is answered without a vector."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        # Among them what was being decoded.
        self._answer([(waiting, None) for waiting in (*self._encoded, *self._decoded)])

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
                    if self._encoded or self._decoded:
                        self._changed.notify()
                    return turn
                self._changed.wait()
        return None

    def _turn(self) -> Callable[[], None] | None:
        """Under the lock."""
        release = self._due()
        if release is not None:
            self._embeds.append(release)
            return partial(self._embed, self._batch(release))
        if self._encoded and self._decoding < self._cores:
            self._decoding += 1
            most = min(_DECODED_AT_ONCE, len(self._encoded))
            return partial(self._decode, [self._encoded.popleft() for _ in range(most)])
        return None

    def _due(self) -> int | None:
        """The release whose images go to the model server before more are decoded."""
        if not self._decoded or len(self._embeds) == _MODEL_CALLS:
            return None
        nothing_comes = not self._encoded and not self._decoding
        since = time.monotonic() - self._decoded[0].decoded
        is_time = nothing_comes or since >= _PATIENCE_S
        for release, count in Counter(one.manifest.release for one in self._decoded).items():
            if count >= _ENOUGH or (is_time and release not in self._embeds):
                return release
        return None

    def _batch(self, release: int) -> list[QueuedImage[Of]]:
        batch: list[QueuedImage[Of]] = []
        left: deque[QueuedImage[Of]] = deque()
        for one in self._decoded:
            fits = one.manifest.release == release and len(batch) < LARGEST_BATCH
            (batch if fits else left).append(one)
        self._decoded = left
        return batch

    def _decode(self, some: Sequence[QueuedImage[Of]]) -> None:
        began, done = time.monotonic(), list[QueuedImage[Of]]()
        try:
            for one in some:
                done.append(one)
                one.pixels = self._pixels(one)
                one.decoded = time.monotonic()
                if one.decoded - began > _DECODED_S:
                    break
        finally:
            with self._changed:
                self._decoding -= 1
                self._encoded.extendleft(reversed(some[len(done) :]))
                self._decoded += [one for one in done if one.pixels is not None]
            self._answer([(one, None) for one in done if one.pixels is None])

    def _pixels(self, one: QueuedImage[Of]) -> Pixels | None:
        try:
            return cheap(one.image, size_of(one.manifest)) if one.is_wanted() else None
        except NobackfillError:
            return None  # whoever asks on a thread hears why

    def _embed(self, batch: Sequence[QueuedImage[Of]]) -> None:
        rows: dict[QueuedImage[Of], Row] = {}
        try:
            # Some have waited longer than their callers did.
            wanted = [one for one in batch if one.is_wanted()]
            pixels = [one.pixels for one in wanted if one.pixels is not None]
            if wanted:
                self._observe(len(wanted))
                with context.until(max(one.deadline for one in wanted)):
                    made = self._embedding.rows(wanted[0].manifest, pixels)
                rows.update(zip(wanted, made, strict=True))
        except NobackfillError:
            pass  # as above
        finally:
            with self._changed:
                self._embeds.remove(batch[0].manifest.release)
                if self._decoded:
                    self._changed.notify()
            found = {
                one: row for one, row in rows.items() if not isinstance(row, InvalidInputError)
            }
            self._answer([(one, found.get(one)) for one in batch])
