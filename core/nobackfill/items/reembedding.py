"""Items embedded again on threads, bounded in time, bytes, concurrency and by a budget a day.

No item is embedded twice at once: within a process a second query waits for the same work, across
processes a claim keeps it from beginning. What is late is kept all the same.
"""

import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Generic, Protocol, TypeVar

from nobackfill.errors import BusyError, CannotWriteError
from nobackfill.items.sources import Items

# Items that wait for a thread.
_MOST_WAITING = 10_000

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Limits:
    """`seconds`: what a query waits. `bytes_a_query`, `bytes_an_item`: what is read of items.
    `concurrency`: batches at once. `a_day`: items of a day (UTC), of all processes."""

    seconds: float = 1.0
    bytes_a_query: int = 64 << 20
    bytes_an_item: int = 32 << 20
    concurrency: int = 4
    batch: int = 8
    a_day: int = 100_000


@dataclass
class Cost:
    """Since the start of this process."""

    embedded: int = 0
    failed: int = 0
    seconds: float = 0.0
    bytes: int = 0
    last_failure: str = ""


class Work(Protocol[Key]):
    """What becomes of the items that one query asks for."""

    def claim(self, keys: Sequence[Key], budget: int) -> Sequence[Key]:
        """Those that nobody else embeds, of at most `budget` a day. Raises BusyError,
        CannotWriteError: nothing is embedded then."""
        ...

    def keep(self, found: Mapping[Key, str | bytes], gone: Sequence[Key]) -> Collection[Key]:
        """Embed what was `found` and keep it, durably; which were kept. `gone`: there is no such
        item any more. May raise anything."""
        ...

    def release(self, keys: Collection[Key]) -> None:
        """Give up claims of items that were not kept."""
        ...


@dataclass
class _Bytes:
    """What one query may still read."""

    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, count: int) -> None:
        with self.lock:
            self.left -= count


class Reembedding(Generic[Key]):
    """Reads items and has them embedded."""

    def __init__(self, items: Items, limits: Limits) -> None:
        self._items, self.limits = items, limits
        # Again by the same thread: work that `close` has cancelled says so at once, in `_begin`.
        self._lock = threading.RLock()
        self._closed = False
        self._under_way: dict[Key, Future[None]] = {}
        self._threads = ThreadPoolExecutor(limits.concurrency, "nobackfill-embed")
        self.cost = Cost()

    def close(self) -> None:
        """End after the items that are being read, and keep what was: what waits is not begun, and
        who asks from now on gets nothing."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)

    def ask(self, names: Mapping[Key, str], work: Work[Key], seconds: float | None = None) -> None:
        """Embed items again by their names in the source; return when they are kept or time is up:
        that of the limits, and no more than `seconds`."""
        patience = self.limits.seconds if seconds is None else min(seconds, self.limits.seconds)
        deadline = time.monotonic() + patience
        started = self._begin(names, work)
        wait(started, timeout=max(0.0, deadline - time.monotonic()))

    def finish(self, names: Mapping[Key, str], work: Work[Key]) -> None:
        """The same, however long it takes."""
        wait(self._begin(names, work))

    def failed(self, error: Exception) -> None:
        """Remember why an item could not be embedded."""
        with self._lock:
            self.cost.last_failure = f"{type(error).__name__}: {error}"

    def _begin(self, names: Mapping[Key, str], work: Work[Key]) -> list[Future[None]]:
        """The work on these items, that of other queries with it."""
        bytes_ = _Bytes(self.limits.bytes_a_query)
        with self._lock:
            if self._closed:
                return []
            shared = {id(f): f for key in names if (f := self._under_way.get(key))}
            idle = [key for key in names if key not in self._under_way]
            try:
                # More than that is noted as wanted: a crowd shall not fill the memory.
                budget = self.limits.a_day if len(self._under_way) < _MOST_WAITING else 0
                mine = work.claim(idle, budget) if idle else []
            except (BusyError, CannotWriteError) as error:
                self.failed(error)
                mine = []
            for first in range(0, len(mine), self.limits.batch):
                some = {key: names[key] for key in mine[first : first + self.limits.batch]}
                future = self._threads.submit(self._work, some, work, bytes_)
                self._under_way |= dict.fromkeys(some, future)
                shared[id(future)] = future
                future.add_done_callback(self._done(list(some), work))
        return list(shared.values())

    def _done(self, keys: list[Key], work: Work[Key]) -> Callable[[Future[None]], None]:
        def done(future: Future[None]) -> None:
            if future.cancelled():
                work.release(keys)
            with self._lock:
                for key in keys:
                    if self._under_way.get(key) is future:
                        del self._under_way[key]

        return done

    def _work(self, names: Mapping[Key, str], work: Work[Key], bytes_: _Bytes) -> None:
        begun = time.perf_counter()
        kept: Collection[Key] = ()
        try:
            found, gone = self._read(names, bytes_)
            kept = work.keep(found, gone)
        except Exception as error:  # noqa: BLE001 - whatever it is, claims are freed
            self.failed(error)
        finally:
            lost = [key for key in names if key not in kept]
            with self._lock:
                self.cost.embedded += len(kept)
                self.cost.failed += len(lost)
                self.cost.seconds += time.perf_counter() - begun
            if lost:
                work.release(lost)

    def _read(
        self, names: Mapping[Key, str], bytes_: _Bytes
    ) -> tuple[dict[Key, str | bytes], list[Key]]:
        """Items, as many as the bytes reach for, and those that are gone."""
        found: dict[Key, str | bytes] = {}
        gone = []
        for key, name in names.items():
            most = min(self.limits.bytes_an_item, bytes_.left)
            if most <= 0 or self._closed:
                break
            try:
                item = self._items.read(name, most)
            except Exception as error:  # noqa: BLE001 - a function of the user's, perhaps
                self.failed(error)
                continue
            if item is None:
                gone.append(key)
                continue
            size = len(item.encode() if isinstance(item, str) else item)
            bytes_.take(size)
            with self._lock:
                self.cost.bytes += size
            found[key] = item
        return found, gone


def today() -> str:
    """The day that a budget is of."""
    return datetime.now(UTC).date().isoformat()
