"""Decoding for all calls: a few pictures at a time, the cheap before the dear, none for nobody."""

import heapq
import itertools
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from nobackfill.errors import InvalidInputError, OverloadedError, TooLargeError
from nobackfill.images import Pixels, checked_header, decode_picture
from nobackfill.server.grpc import calls

# Costs are in pixels of a plain JPEG, see core/nobackfill/image_header.py: 7 ns each on one core.
# What the pictures of one call, or of one message of a stream, may cost together.
LARGEST_COST = 2_000_000_000
_SECONDS = 7e-9
# What may be decoded at once: memory, some 500 MB at the worst.
_AT_ONCE_COST = 200_000_000
# Calls of more than so much may hold so many of the threads that answer all calls.
_DEAR = 250_000_000
_DEAR_AT_ONCE = 3
# How often one that waits for its turn looks whether it is still wanted.
_LOOK_S = 0.25

Size = tuple[int, int]
Decoded = Mapping[Size, Pixels]


class Decoding:
    """Runs decoders on the callers' threads, in turns."""

    def __init__(self, cores: int | None = None) -> None:
        self._turns = _Turns(cores or len(os.sched_getaffinity(0)), _AT_ONCE_COST)
        self._dear = threading.BoundedSemaphore(_DEAR_AT_ONCE)

    def each(
        self, images: Sequence[bytes], sizes: Collection[Size]
    ) -> list[Decoded | InvalidInputError]:
        """Each encoded image at every size (height, width), or why it is refused, in order.

        Raises DeadlineError and CancelledError, between images and while it waits for a turn.
        """
        began, spent = time.monotonic(), 0
        found: list[Decoded | InvalidInputError] = []
        for image in images:
            calls.current().check()
            try:
                header = checked_header(image)
                spent += header.cost * len(sizes)
                with self._turns.turn(began + _SECONDS * spent, header.cost):
                    found.append({size: decode_picture(header, *size) for size in sizes})
            except InvalidInputError as error:
                found.append(error)
        return found

    @contextmanager
    def batch(self, images: Sequence[bytes]) -> Iterator[None]:
        """Admit a call that wants all its images at once, or refuse it before any is decoded.

        Raises TooLargeError beyond `LARGEST_COST`; OverloadedError while as many dear calls are
        under way as there may be.
        """
        cost = sum(_costs(images))
        if cost > LARGEST_COST:
            raise too_dear()
        if cost <= _DEAR:
            yield
            return
        if not self._dear.acquire(blocking=False):
            raise OverloadedError(
                f"{_DEAR_AT_ONCE} batches of large pictures are being decoded already; try again "
                "with a growing delay, or send smaller copies"
            )
        try:
            yield
        finally:
            self._dear.release()


def affordable(images: Sequence[bytes]) -> list[bool]:
    """Whether each image, with those before it, costs no more than `LARGEST_COST`."""
    return [spent <= LARGEST_COST for spent in itertools.accumulate(_costs(images))]


def too_dear() -> TooLargeError:
    """The one refusal of pictures that cost too much together."""
    return TooLargeError(
        f"expected pictures that cost at most {LARGEST_COST // 10**6} million pixels of a plain "
        "JPEG together (a PNG's count 3 times, a WebP's 8, a JPEG's by its scans); send fewer at a "
        "time, or smaller copies"
    )


def _costs(images: Sequence[bytes]) -> Iterator[int]:
    for image in images:
        try:
            yield checked_header(image).cost
        except InvalidInputError:
            # Refused in its turn, by itself.
            yield 0


class _Turns:
    """At most so many at once, of at most so much cost; who would end first comes first.

    A turn's key is a time, so that whoever waits long enough is before all that come later.
    """

    def __init__(self, at_once: int, most: int) -> None:
        self._free, self._left, self._most = at_once, most, most
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int]] = []
        self._numbers = itertools.count()

    @contextmanager
    def turn(self, key: float, cost: int) -> Iterator[None]:
        """Raises DeadlineError, CancelledError while waiting."""
        # One that alone costs more than there may be at once goes when nothing else does.
        cost = min(cost, self._most)
        ticket = (key, next(self._numbers))
        with self._changed:
            heapq.heappush(self._waiting, ticket)
            try:
                while self._waiting[0] != ticket or not self._free or self._left < cost:
                    calls.current().check()
                    self._changed.wait(_LOOK_S)
                self._free, self._left = self._free - 1, self._left - cost
            finally:
                self._waiting.remove(ticket)
                heapq.heapify(self._waiting)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free, self._left = self._free + 1, self._left + cost
                self._changed.notify_all()
