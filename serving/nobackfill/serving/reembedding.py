"""Re-embed items on threads, bounded in time, bytes, concurrency and by a daily budget.

No item is embedded twice at once. Within a process a second query waits for the same work; across
processes a claim keeps others from starting it. Vectors that arrive late are stored all the same.
An item that fails costs nothing of the budget, and backs off. An item that was not started stays
in the queue of wanted items.
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
# The most items whose back-off is remembered; beyond it, those with the longest back-off stay.
_MOST = 100_000


@dataclass(frozen=True)
class _Pause:
    """An item's back-off: its end on the clock, and its length in seconds."""

    end: float
    seconds: float


class Backoff(Generic[Key]):
    """Exponential back-off of items that failed; threads may share it.

    An item that fails waits `first` seconds, then twice as long each time, at most `longest`. An
    item that its source lacks waits a day. An item without failures for as long as its last
    back-off starts again at `first`.
    """

    def __init__(
        self, first: float, longest: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first, self._longest, self._clock = first, longest, clock
        self._lock = threading.Lock()
        self._pauses: dict[Key, _Pause] = {}

    def ready(self, keys: Sequence[Key]) -> list[Key]:
        """Return the items that need not wait now, in their order."""
        now = self._clock()
        with self._lock:
            return [
                key for key in keys if (rest := self._pauses.get(key)) is None or rest.end <= now
            ]

    def failed(self, keys: Collection[Key]) -> None:
        """Start or extend the back-off of items that could not be embedded."""
        now = self._clock()
        with self._lock:
            for key in keys:
                seconds = self._longer(self._pauses.get(key), now)
                self._pauses[key] = _Pause(now + seconds, seconds)
            self._forget(now)

    def _longer(self, last: _Pause | None, now: float) -> float:
        """Return the seconds of the next back-off, given the last one."""
        if last is None or now >= last.end + last.seconds:
            return self._first
        return min(2 * last.seconds, self._longest)

    def gone(self, keys: Collection[Key]) -> None:
        """Start a back-off of a day for items that their source lacks."""
        now = self._clock()
        with self._lock:
            self._pauses |= dict.fromkeys(keys, _Pause(now + _DAY_S, _DAY_S))
            self._forget(now)

    def _forget(self, now: float) -> None:
        """Drop entries beyond the limit; first those that would start again at `first`."""
        if len(self._pauses) <= _MOST:
            return
        remembered = {
            key: rest for key, rest in self._pauses.items() if now < rest.end + rest.seconds
        }
        longest = sorted(remembered.items(), key=lambda one: one[1].end, reverse=True)
        # Keep half, so that the next failure need not sort again.
        self._pauses = dict(longest[: _MOST // 2]) if len(remembered) > _MOST // 2 else remembered


# The most items that wait for a thread.
_MOST_WAITING = 10_000
# How long `close` waits for batches that have started.
_CLOSED_S = 30.0


@dataclass(frozen=True)
class Limits:
    """Limits of re-embedding.

    Attributes:
        seconds: how long a query waits.
        bytes_a_query: bytes that one query may read.
        bytes_an_item: bytes that one item may have.
        concurrency: batches at once.
        batch: items of a batch.
        a_day: items a day (UTC), over all processes.
    """

    seconds: float = 1.0
    bytes_a_query: int = 64 << 20
    bytes_an_item: int = 32 << 20
    concurrency: int = 4
    batch: int = 8
    a_day: int = 100_000


@dataclass
class EmbeddingCost:
    """Totals since the start of this process; `seconds` counts threads, `failed` items."""

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


class _BatchRead(NamedTuple, Generic[Key]):
    """A batch after reading: its items, those that are gone, those that were not started."""

    contents: dict[Key, str | bytes]
    gone: list[Key]
    unread: list[Key]


class Reembedding(ABC, Generic[Key]):
    """Reads items from a source; a subclass embeds them and stores the vectors."""

    def __init__(
        self,
        items: Items,
        limits: Limits,
        ledger: Ledger[Key],
        backoff: Backoff[Key] | None = None,
    ) -> None:
        """Prepare threads that embed `items`.

        Args:
            items: the source of the items.
            limits: bounds of time, bytes, concurrency and budget.
            ledger: the claims and the budget, shared with other processes.
            resting: the back-off of failed items; None: failed items are retried at once.
        """
        self._items, self.limits, self.ledger, self.backoff = items, limits, ledger, backoff
        # Reentrant: a batch may end before `_begin` registers its callback in the same thread.
        self._lock = threading.RLock()
        self._closed = False
        self._process = os.getpid()
        self._claiming = 0
        self._claims_ended = threading.Condition(self._lock)
        self._under_way: dict[Key, Future[None]] = {}
        # A source may hang for ever, so closing must not wait for its thread.
        self._threads = DaemonThreads(limits.concurrency, "nobackfill-embed")
        self.cost = EmbeddingCost()

    @abstractmethod
    def keep(self, contents: Mapping[Key, str | bytes], gone: Sequence[Key]) -> Collection[Key]:
        """Embed items, store their vectors durably, and settle them in the ledger.

        Args:
            found: texts or encoded images by item.
            gone: items that the source no longer has.

        Returns:
            The items that are finished. May raise any error; unfinished items then back off.
        """

    def claim(self, keys: Sequence[Key], budget: int) -> Sequence[Key]:
        """Claim items that no other process embeds, within a daily budget; queue the others.

        Raises:
            BusyError: the ledger is locked; nothing was claimed.
            CannotWriteError: the ledger cannot be written; nothing was claimed.
        """
        return self.ledger.claim(keys, today(), budget)

    def close(self, seconds: float = _CLOSED_S) -> bool:
        """Finish the batches that have started, drop those that wait, and refuse later work.

        May be called again.

        Args:
            seconds: how long to wait. A batch whose source hangs ends later by itself.

        Returns:
            Whether all batches have ended.
        """
        end = time.monotonic() + seconds
        with self._lock:
            self._closed = True
            # Threads that are claiming give their claims up while the ledger is still open.
            claims_ended = self._claims_ended.wait_for(lambda: not self._claiming, seconds)
        return self._threads.close(max(0.0, end - time.monotonic())) and claims_ended

    def ask(self, names: Mapping[Key, str], seconds: float | None = None) -> None:
        """Re-embed items; return once their vectors are stored or the time is up.

        Args:
            names: the item's name in its source, by key.
            seconds: how long to wait; at most the limit, and None means the limit.
        """
        patience = self.limits.seconds if seconds is None else min(seconds, self.limits.seconds)
        deadline = time.monotonic() + patience
        pending = self._begin(names)
        wait(pending, timeout=max(0.0, deadline - time.monotonic()))

    def finish(self, names: Mapping[Key, str], seconds: float | None = None) -> None:
        """Re-embed as `ask` does, but wait without the limit, or for `seconds`."""
        wait(self._begin(names), timeout=seconds)

    def busy(self, keys: Collection[Key]) -> bool:
        """Return whether any of these items is being embedded or waits for a thread."""
        with self._lock:
            return any(key in self._under_way for key in keys)

    def failed(self, error: Exception) -> None:
        """Record why an item could not be embedded."""
        with self._lock:
            self.cost.last_failure = f"{type(error).__name__}: {error}"

    def _begin(self, names: Mapping[Key, str]) -> list[Future[None]]:
        """Start to embed items; return their futures, and those of other queries on them."""
        if os.getpid() != self._process:
            raise ConfigurationError(
                "this re-embedder was opened before the process was forked, and its threads "
                "stayed in the parent; open it after the fork, in each process"
            )
        with self._lock:
            if self._closed:
                return []
            shared = [future for key in names if (future := self._under_way.get(key))]
            idle = [key for key in names if key not in self._under_way]
            if self.backoff is not None:
                idle = self.backoff.ready(idle)
            # Items beyond the limit are only queued in the ledger, so that memory stays bounded.
            room = max(0, _MOST_WAITING - len(self._under_way))
            idle, beyond = idle[:room], idle[room:]
            started_here = {key: Future[None]() for key in idle}
            self._under_way |= started_here
            self._claiming += 1
        claims: dict[Key, str] = {}
        try:
            # Without the lock: claiming may wait for other processes, and threads must not.
            claims = {key: names[key] for key in self._claim(idle, beyond)}
            self._submit(claims)
        finally:
            self._end([key for key in idle if key not in claims])
            with self._lock:
                self._claiming -= 1
                self._claims_ended.notify_all()
        return [*shared, *(started_here[key] for key in claims)]

    def _claim(self, idle: list[Key], beyond: list[Key]) -> Sequence[Key]:
        """Claim the items that this process will embed."""
        try:
            if beyond:
                self.claim(beyond, 0)
            return self.claim(idle, self.limits.a_day) if idle else ()
        except (BusyError, CannotWriteError) as error:
            self.failed(error)
            return ()

    def _submit(self, names: Mapping[Key, str]) -> None:
        """Start claimed items in batches; give the claims up if this is closed."""
        bytes_, keys = _Bytes(self.limits.bytes_a_query), list(names)
        with self._lock:
            closed = self._closed
            for first in range(0, 0 if closed else len(keys), self.limits.batch):
                part = {key: names[key] for key in keys[first : first + self.limits.batch]}
                future = self._threads.submit(partial(self._work, part, bytes_))
                future.add_done_callback(self._done(list(part)))
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
        """Mark items as finished, and wake the callers that wait for them."""
        with self._lock:
            ended = [self._under_way.pop(key) for key in keys]
        for future in ended:
            future.set_result(None)

    def _postpone(self, keys: Sequence[Key]) -> None:
        """Give up claims of items that were not started; they stay wanted and cost nothing."""
        try:
            self.ledger.release(keys)
            self.claim(keys, 0)
        except Exception as error:  # noqa: BLE001 - claims also expire
            self.failed(error)

    def _work(self, names: Mapping[Key, str], bytes_: _Bytes) -> None:
        begun = time.perf_counter()
        read: _BatchRead[Key] = _BatchRead({}, [], [])
        finished: Collection[Key] = ()
        try:
            read = self._read(names, bytes_)
            finished = self.keep(read.contents, read.gone)
        except Exception as error:  # noqa: BLE001 - claims are freed after any error
            self.failed(error)
        finally:
            lost = [key for key in names if key not in finished and key not in read.unread]
            with self._lock:
                self.cost.embedded += len(finished)
                self.cost.failed += len(lost)
                self.cost.seconds += time.perf_counter() - begun
            if self.backoff is not None:
                self.backoff.failed([key for key in lost if key not in read.gone])
                self.backoff.gone([key for key in lost if key in read.gone])
            if read.unread:
                self._postpone(read.unread)
            if lost:
                self.ledger.release(lost)

    def _read(self, names: Mapping[Key, str], bytes_: _Bytes) -> _BatchRead[Key]:
        """Read items until the query's bytes are used up."""
        contents: dict[Key, str | bytes] = {}
        gone, keys = list[Key](), list(names)
        item_limit = min(self.limits.bytes_an_item, self.limits.bytes_a_query)
        for number, (key, name) in enumerate(names.items()):
            most = min(item_limit, bytes_.left)
            if most <= 0 or self._closed:
                return _BatchRead(contents, gone, keys[number:])
            try:
                item = self._items.read(name, most)
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything
                if isinstance(error, TooLargeError) and most < item_limit:
                    # The item fits the limit but not the rest of the query's bytes.
                    bytes_.take(most)
                    return _BatchRead(contents, gone, keys[number:])
                self.failed(error)
                continue
            if item is None:
                gone.append(key)
                continue
            size = len(item.encode() if isinstance(item, str) else item)
            bytes_.take(size)
            with self._lock:
                self.cost.bytes += size
            contents[key] = item
        return _BatchRead(contents, gone, [])
