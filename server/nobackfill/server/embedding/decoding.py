"""Decoding for all calls: a few pictures at a time, the cheap before the dear, none for nobody."""

import heapq
import itertools
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from nobackfill.errors import InvalidInputError, OverloadedError, TooLargeError
from nobackfill.framing import Frame
from nobackfill.images import Pixels, check_header, decode_picture
from nobackfill.server.grpc import context

# Costs are in pixels of a plain JPEG, see core/nobackfill/images.py: 7 ns each on one core.
# What the pictures of one call, or of one message of a stream, may cost together.
LARGEST_COST = 2_000_000_000
_SECONDS = 7e-9
# What may be decoded at once: memory, some 500 MB at the worst.
_AT_ONCE_COST = 200_000_000
# Calls of more than so much may hold so many of the threads that answer all calls.
_DEAR = 250_000_000
_DEAR_AT_ONCE = 3
# At 28 ms and less nobody waits for a turn.
CHEAP = 4_000_000
# How often one that waits for its turn looks whether it is still wanted.
_LOOK_S = 0.25

Size = Frame
Decoded = Mapping[Size, Pixels]


class Decoding:
    """Runs decoders on the callers' threads, in turns."""

    def __init__(self, cores: int | None = None) -> None:
        self._turns = _DecodingTurns(cores or len(os.sched_getaffinity(0)), _AT_ONCE_COST)
        self._dear = threading.BoundedSemaphore(_DEAR_AT_ONCE)

    def each(
        self, images: Sequence[bytes], sizes: Collection[Size]
    ) -> list[Decoded | InvalidInputError]:
        """Each encoded image in every frame, or why it is refused, in order.

        Raises DeadlineError and CancelledError, between images and while it waits for a turn.
        """
        began, spent = time.monotonic(), 0
        found: list[Decoded | InvalidInputError] = []
        for image in images:
            context.current().check()
            try:
                header = check_header(image)
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


def cheap(image: bytes, size: Size) -> Pixels | None:
    """An encoded image at a size, where that takes a few milliseconds; None where it takes longer,
    and its turn has to come. Raises InvalidInputError."""
    header = check_header(image)
    return decode_picture(header, *size) if header.cost <= CHEAP else None


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
            yield check_header(image).cost
        except InvalidInputError:
            # Refused in its turn, by itself.
            yield 0


class _Place:
    """One that waits: its `turn` is held until it has come."""

    __slots__ = ("cost", "turn")

    def __init__(self, cost: int) -> None:
        self.cost = cost
        self.turn = threading.Lock()
        self.turn.acquire()


class _DecodingTurns:
    """At most so many at once, of at most so much cost; who would end first comes first.

    A turn's key is a time, so that whoever waits long enough is before all that come later.
    """

    def __init__(self, at_once: int, most: int) -> None:
        self._free, self._left, self._most = at_once, most, most
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, int, _Place]] = []
        self._numbers = itertools.count()

    @contextmanager
    def turn(self, key: float, cost: int) -> Iterator[None]:
        """Raises DeadlineError, CancelledError while waiting."""
        # One that alone costs more than there may be at once goes when nothing else does.
        place = _Place(min(cost, self._most))
        waiting = key, next(self._numbers), place
        with self._lock:
            heapq.heappush(self._waiting, waiting)
            self._call()
        self._wait(waiting)
        try:
            yield
        finally:
            self._end(place)

    def _wait(self, waiting: tuple[float, int, _Place]) -> None:
        place = waiting[2]
        try:
            while not place.turn.acquire(timeout=_LOOK_S):
                context.current().check()
        except BaseException:
            with self._lock:
                came = waiting not in self._waiting
                if not came:
                    self._waiting.remove(waiting)
                    heapq.heapify(self._waiting)
                    self._call()
            if came:
                self._end(place)
            raise

    def _end(self, place: _Place) -> None:
        with self._lock:
            self._free, self._left = self._free + 1, self._left + place.cost
            self._call()

    def _call(self) -> None:
        """Under the lock: wake those whose turn has come, and nobody else."""
        while self._waiting and self._free and self._left >= self._waiting[0][2].cost:
            place = heapq.heappop(self._waiting)[2]
            self._free, self._left = self._free - 1, self._left - place.cost
            place.turn.release()
