"""Items embedded again on threads, bounded in time, bytes, concurrency and by a budget a day.

No item is embedded twice at once: within a process a second query waits for the same work, across
processes a claim keeps it from beginning. Late items are kept all the same. An item that could not
be embedded costs its day nothing, and backs off. An item that was not begun stays wanted.
"""

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple

from nobackfill.errors import BusyError, CannotWriteError, ConfigurationError, TooLargeError
from nobackfill.processes import DaemonThreads
from nobackfill.serving.ledger import Key, Ledger, today
from nobackfill.serving.sources import Items

_DAY_S = 86_400.0
# Items that back off and are known at most: of more, those whose rest is longest.
_MOST = 100_000


@dataclass(frozen=True)
class _Rest:
    """The end of an item's rest on the clock, and its length in seconds."""

    end: float
    seconds: float


class Resting(Generic[Key]):
    """Back-off: an item that fails rests `first` seconds, twice as long each time, and `longest` at
    most; one that the source lacks rests a day. An item that has not failed again for as long as
    it had rested begins anew. Threads may share it."""

    def __init__(
        self, first: float, longest: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first, self._longest, self._clock = first, longest, clock
        self._lock = threading.Lock()
        self._rests: dict[Key, _Rest] = {}

    def ready(self, keys: Sequence[Key]) -> list[Key]:
        """Return the items that do not rest, in their order."""
        now = self._clock()
        with self._lock:
            return [
                key for key in keys if (rest := self._rests.get(key)) is None or rest.end <= now
            ]

    def failed(self, keys: Collection[Key]) -> None:
        """Let items rest that could not be embedded."""
        now = self._clock()
        with self._lock:
            for key in keys:
                seconds = self._longer(self._rests.get(key), now)
                self._rests[key] = _Rest(now + seconds, seconds)
            self._forget(now)

    def _longer(self, last: _Rest | None, now: float) -> float:
        """Return how long an item rests after its last rest."""
        if last is None or now >= last.end + last.seconds:
            return self._first
        return min(2 * last.seconds, self._longest)

    def gone(self, keys: Collection[Key]) -> None:
        """Let items rest that the source lacks."""
        now = self._clock()
        with self._lock:
            self._rests |= dict.fromkeys(keys, _Rest(now + _DAY_S, _DAY_S))
            self._forget(now)

    def _forget(self, now: float) -> None:
        """Drop items where there are too many: first those that begin anew."""
        if len(self._rests) <= _MOST:
            return
        known = {key: rest for key, rest in self._rests.items() if now < rest.end + rest.seconds}
        longest = sorted(known.items(), key=lambda one: one[1].end, reverse=True)
        # Half, so that it is not sorted again at the next one.
        self._rests = dict(longest[: _MOST // 2]) if len(known) > _MOST // 2 else known


# Items that wait for a thread.
_MOST_WAITING = 10_000
# So long an end waits for batches that have begun.
_CLOSED_S = 30.0


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
class EmbeddingCost:
    """Since the start of this process."""

    embedded: int = 0
    failed: int = 0
    seconds: float = 0.0
    bytes: int = 0
    last_failure: str = ""


@dataclass
class _Bytes:
    """The bytes that one query may still read."""

    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, count: int) -> None:
        with self.lock:
            self.left -= count


class _Read(NamedTuple, Generic[Key]):
    """Items of a batch, those that are gone, and those that were not begun."""

    found: dict[Key, str | bytes]
    gone: list[Key]
    unread: list[Key]


class Reembedding(ABC, Generic[Key]):
    """Reads items from a source; a subclass embeds them and keeps the vectors."""

    def __init__(
        self,
        items: Items,
        limits: Limits,
        ledger: Ledger[Key],
        resting: Resting[Key] | None = None,
    ) -> None:
        """`resting`: items that failed a while ago are not begun; None: all may be tried again."""
        self._items, self.limits, self.ledger, self.resting = items, limits, ledger, resting
        # Again by the same thread: a batch may have ended before `_begin` asks to be told.
        self._lock = threading.RLock()
        self._closed = False
        self._process = os.getpid()
        self._claiming = 0
        self._claimed = threading.Condition(self._lock)
        self._under_way: dict[Key, Future[None]] = {}
        # A source may hang for ever: no stop waits for it.
        self._threads = DaemonThreads(limits.concurrency, "nobackfill-embed")
        self.cost = EmbeddingCost()

    @abstractmethod
    def keep(self, found: Mapping[Key, str | bytes], gone: Sequence[Key]) -> Collection[Key]:
        """Embed what was `found`, keep the vectors durably and settle their items; return the items
        that are done with. `gone`: there is no such item any more. May raise anything."""

    def claim(self, keys: Sequence[Key], budget: int) -> Sequence[Key]:
        """Claim items that nobody else embeds, at most `budget` a day; the others are noted as
        wanted. Raises BusyError, CannotWriteError: then nothing is embedded."""
        return self.ledger.claim(keys, today(), budget)

    def close(self, seconds: float = _CLOSED_S) -> bool:
        """End after the items that are being read, and keep what was: what waits is not begun, and
        calls from now on begin nothing. Returns whether all has ended within `seconds`; what has
        not, as a source hangs, ends by itself or with the process. May be called again."""
        end = time.monotonic() + seconds
        with self._lock:
            self._closed = True
            # Whoever claims gives it up, as long as claims can be written.
            claimed = self._claimed.wait_for(lambda: not self._claiming, seconds)
        return self._threads.close(max(0.0, end - time.monotonic())) and claimed

    def ask(self, names: Mapping[Key, str], seconds: float | None = None) -> None:
        """Embed items again by their names in the source; return when they are kept or time is up:
        that of the limits, and no more than `seconds`."""
        patience = self.limits.seconds if seconds is None else min(seconds, self.limits.seconds)
        deadline = time.monotonic() + patience
        started = self._begin(names)
        wait(started, timeout=max(0.0, deadline - time.monotonic()))

    def finish(self, names: Mapping[Key, str], seconds: float | None = None) -> None:
        """Embed as `ask` does, however long it takes, or for `seconds` whatever the limits say."""
        wait(self._begin(names), timeout=seconds)

    def busy(self, keys: Collection[Key]) -> bool:
        """Return whether any of these is under way still."""
        with self._lock:
            return any(key in self._under_way for key in keys)

    def failed(self, error: Exception) -> None:
        """Remember why an item could not be embedded."""
        with self._lock:
            self.cost.last_failure = f"{type(error).__name__}: {error}"

    def _begin(self, names: Mapping[Key, str]) -> list[Future[None]]:
        """Begin to embed items; return their work, and that of other queries on them."""
        if os.getpid() != self._process:
            raise ConfigurationError(
                "what embeds items again was opened before this process was forked, and its "
                "threads stayed in the parent; open it after the fork, in each process"
            )
        with self._lock:
            if self._closed:
                return []
            shared = [future for key in names if (future := self._under_way.get(key))]
            idle = [key for key in names if key not in self._under_way]
            if self.resting is not None:
                idle = self.resting.ready(idle)
            # More than that is noted as wanted: a crowd shall not fill the memory.
            room = max(0, _MOST_WAITING - len(self._under_way))
            idle, beyond = idle[:room], idle[room:]
            own = {key: Future[None]() for key in idle}
            self._under_way |= own
            self._claiming += 1
        mine: dict[Key, str] = {}
        try:
            # Not under the lock: it may wait for other processes, and nobody else here shall.
            mine = {key: names[key] for key in self._claim(idle, beyond)}
            self._submit(mine)
        finally:
            self._end([key for key in idle if key not in mine])
            with self._lock:
                self._claiming -= 1
                self._claimed.notify_all()
        return [*shared, *(own[key] for key in mine)]

    def _claim(self, idle: list[Key], beyond: list[Key]) -> Sequence[Key]:
        """Claim the items that are to be embedded here."""
        try:
            if beyond:
                self.claim(beyond, 0)
            return self.claim(idle, self.limits.a_day) if idle else ()
        except (BusyError, CannotWriteError) as error:
            self.failed(error)
            return ()

    def _submit(self, names: Mapping[Key, str]) -> None:
        """Start claimed items in batches; give them up once it is closed."""
        bytes_, keys = _Bytes(self.limits.bytes_a_query), list(names)
        with self._lock:
            closed = self._closed
            for first in range(0, 0 if closed else len(keys), self.limits.batch):
                some = {key: names[key] for key in keys[first : first + self.limits.batch]}
                future = self._threads.submit(partial(self._work, some, bytes_))
                future.add_done_callback(self._done(list(some)))
        if closed and keys:
            self._postpone(keys)
            self._end(keys)

    def _done(self, keys: list[Key]) -> Callable[[Future[None]], None]:
        def done(future: Future[None]) -> None:
            if future.cancelled():
                self._postpone(keys)
            self._end(keys)

        return done

    def _end(self, keys: Collection[Key]) -> None:
        """Note that items are under way no more, and tell the callers that wait for them."""
        with self._lock:
            ended = [self._under_way.pop(key) for key in keys]
        for future in ended:
            future.set_result(None)

    def _postpone(self, keys: Sequence[Key]) -> None:
        """Give up items that were not begun: they cost nothing, and stay wanted."""
        try:
            self.ledger.release(keys)
            self.claim(keys, 0)
        except Exception as error:  # noqa: BLE001 - claims end by themselves
            self.failed(error)

    def _work(self, names: Mapping[Key, str], bytes_: _Bytes) -> None:
        begun = time.perf_counter()
        read: _Read[Key] = _Read({}, [], [])
        kept: Collection[Key] = ()
        try:
            read = self._read(names, bytes_)
            kept = self.keep(read.found, read.gone)
        except Exception as error:  # noqa: BLE001 - whatever it is, claims are freed
            self.failed(error)
        finally:
            lost = [key for key in names if key not in kept and key not in read.unread]
            with self._lock:
                self.cost.embedded += len(kept)
                self.cost.failed += len(lost)
                self.cost.seconds += time.perf_counter() - begun
            if self.resting is not None:
                self.resting.failed([key for key in lost if key not in read.gone])
                self.resting.gone([key for key in lost if key in read.gone])
            if read.unread:
                self._postpone(read.unread)
            if lost:
                self.ledger.release(lost)

    def _read(self, names: Mapping[Key, str], bytes_: _Bytes) -> _Read[Key]:
        """Read as many items as the bytes reach for."""
        found: dict[Key, str | bytes] = {}
        gone, keys = list[Key](), list(names)
        whole = min(self.limits.bytes_an_item, self.limits.bytes_a_query)
        for number, (key, name) in enumerate(names.items()):
            most = min(whole, bytes_.left)
            if most <= 0 or self._closed:
                return _Read(found, gone, keys[number:])
            try:
                item = self._items.read(name, most)
            except Exception as error:  # noqa: BLE001 - a function of the user's, perhaps
                if isinstance(error, TooLargeError) and most < whole:
                    # Not too large but last: what was left of the query's bytes went for it.
                    bytes_.take(most)
                    return _Read(found, gone, keys[number:])
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
        return _Read(found, gone, [])
