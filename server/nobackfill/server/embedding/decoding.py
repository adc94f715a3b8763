"""Decode pictures for all calls: a few at a time, cheap ones first, and none that nobody
waits for.
"""

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

# Costs are in pixels of a plain JPEG, 7 ns each on one core; see core/nobackfill/images.py.
# LARGEST_COST is the most for the pictures of one call, or of one message of a stream.
LARGEST_COST = 2_000_000_000
_SECONDS_PER_PIXEL = 7e-9
# Most cost that is decoded at once: about 500 MB of memory at worst.
_MAX_COST_AT_ONCE = 200_000_000
# Calls above this cost are expensive; so many of them may hold threads of calls.
_EXPENSIVE = 250_000_000
_MAX_EXPENSIVE_CALLS = 3
# Below this cost (28 ms) a picture does not wait for a turn.
CHEAP = 4_000_000
# Seconds between two checks of a waiting picture whether it is still wanted.
_CHECK_SECONDS = 0.25

Size = Frame
Decoded = Mapping[Size, Pixels]


class Decoding:
    """Decode pictures on the callers' threads, in turns."""

    def __init__(self, cores: int | None = None) -> None:
        self._turns = _DecodingTurns(cores or len(os.sched_getaffinity(0)), _MAX_COST_AT_ONCE)
        self._expensive_calls = threading.BoundedSemaphore(_MAX_EXPENSIVE_CALLS)

    def each(
        self, images: Sequence[bytes], sizes: Collection[Size]
    ) -> list[Decoded | InvalidInputError]:
        """Decode images, each in every size.

        Args:
            images: encoded images.
            sizes: the sizes.

        Returns:
            For each image its pixels by size, or why it was refused.

        Raises:
            DeadlineError: the call's time is over, between images or while waiting.
            CancelledError: the caller has cancelled the call.
        """
        began, spent = time.monotonic(), 0
        results: list[Decoded | InvalidInputError] = []
        for image in images:
            context.current().check()
            try:
                header = check_header(image)
                spent += header.cost * len(sizes)
                with self._turns.turn(began + _SECONDS_PER_PIXEL * spent, header.cost):
                    results.append({size: decode_picture(header, *size) for size in sizes})
            except InvalidInputError as error:
                results.append(error)
        return results

    @contextmanager
    def batch(self, images: Sequence[bytes]) -> Iterator[None]:
        """Admit a call whose images are all needed at once, or refuse it before any is decoded.

        Args:
            images: encoded images.

        Raises:
            TooLargeError: the images cost more than LARGEST_COST.
            OverloadedError: too many expensive calls are being decoded.
        """
        cost = sum(_costs(images))
        if cost > LARGEST_COST:
            raise too_expensive()
        if cost <= _EXPENSIVE:
            yield
            return
        if not self._expensive_calls.acquire(blocking=False):
            raise OverloadedError(
                f"{_MAX_EXPENSIVE_CALLS} batches of large pictures are being decoded; try again "
                "with a growing delay, or send smaller copies"
            )
        try:
            yield
        finally:
            self._expensive_calls.release()


def decode_if_cheap(image: bytes, size: Size) -> Pixels | None:
    """Decode an image if that takes a few milliseconds; None if it must wait for a turn.

    Raises:
        InvalidInputError: the image is not valid.
    """
    header = check_header(image)
    return decode_picture(header, *size) if header.cost <= CHEAP else None


def affordable(images: Sequence[bytes]) -> list[bool]:
    """Tell for each image whether it and those before it cost at most LARGEST_COST."""
    return [spent <= LARGEST_COST for spent in itertools.accumulate(_costs(images))]


def too_expensive() -> TooLargeError:
    """Make the error for pictures that cost too much in total."""
    return TooLargeError(
        f"expected pictures that cost at most {LARGEST_COST // 10**6} million pixels of a plain "
        "JPEG in total (a PNG's pixels count 3 times, a WebP's 8 times, a JPEG's by its scans); "
        "send fewer at a time, or smaller copies"
    )


def _costs(images: Sequence[bytes]) -> Iterator[int]:
    for image in images:
        try:
            yield check_header(image).cost
        except InvalidInputError:
            # It is refused later, on its own.
            yield 0


class _Place:
    """Hold a waiting picture; its `turn` is locked until it may be decoded."""

    __slots__ = ("cost", "turn")

    def __init__(self, cost: int) -> None:
        self.cost = cost
        self.turn = threading.Lock()
        self.turn.acquire()


class _DecodingTurns:
    """Limit the number and cost of pictures that are decoded at once; the earliest key goes first.

    A key is a time, so a picture that has waited long goes before all that come later.
    """

    def __init__(self, at_once: int, max_cost: int) -> None:
        self._free, self._free_cost, self._max_cost = at_once, max_cost, max_cost
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, int, _Place]] = []
        self._numbers = itertools.count()

    @contextmanager
    def turn(self, key: float, cost: int) -> Iterator[None]:
        """Wait for a turn, and hold it during a block.

        Raises:
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
        """
        # A picture above the limit waits until nothing else is decoded.
        place = _Place(min(cost, self._max_cost))
        waiting = key, next(self._numbers), place
        with self._lock:
            heapq.heappush(self._waiting, waiting)
            self._wake()
        self._wait(waiting)
        try:
            yield
        finally:
            self._end(place)

    def _wait(self, waiting: tuple[float, int, _Place]) -> None:
        place = waiting[2]
        try:
            while not place.turn.acquire(timeout=_CHECK_SECONDS):
                context.current().check()
        except BaseException:
            with self._lock:
                has_turn = waiting not in self._waiting
                if not has_turn:
                    self._waiting.remove(waiting)
                    heapq.heapify(self._waiting)
                    self._wake()
            if has_turn:
                self._end(place)
            raise

    def _end(self, place: _Place) -> None:
        with self._lock:
            self._free, self._free_cost = self._free + 1, self._free_cost + place.cost
            self._wake()

    def _wake(self) -> None:
        """Wake the pictures whose turn has come; the caller holds the lock."""
        while self._waiting and self._free and self._free_cost >= self._waiting[0][2].cost:
            place = heapq.heappop(self._waiting)[2]
            self._free, self._free_cost = self._free - 1, self._free_cost - place.cost
            place.turn.release()
