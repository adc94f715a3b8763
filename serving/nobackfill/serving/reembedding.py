"""Re-embed items on threads, bounded in time, bytes, concurrency and by a daily budget.

No item is embedded twice at once. Within a process a second query waits for the same work; across
processes a claim prevents others from starting it. Vectors that arrive late are stored all the
same. An item that fails costs nothing of the budget, and backs off. An item that was not started
stays in the queue of requested items.
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
from nobackfill.serving.ledger import Key, Ledger, today_utc
from nobackfill.serving.sources import ItemSource

_DAY_S = 86_400.0
# The most items whose back-off is remembered; beyond it, those with the longest back-off stay.
_MOST = 100_000


@dataclass(frozen=True)
class _Pause:
    """An item's back-off: its end on the clock, and its length in seconds."""

    end: float
    seconds: float


class Backoff(Generic[Key]):
    """Exponential back-off of items that failed; in memory only, and threads may share it.

    An item that fails waits `first_seconds`, then twice as long each time, at most
    `longest_seconds`. An item that its source lacks waits a day. An item without failures for as
    long as its last back-off starts again at `first_seconds`. At most 100,000 items are
    remembered, those that wait longest.

    Args:
        first_seconds: the first back-off, in seconds.
        longest_seconds: the longest back-off, in seconds.
        clock: returns the time in seconds; it never goes back.
    """

    def __init__(
        self,
        first_seconds: float,
        longest_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first, self._longest, self._clock = first_seconds, longest_seconds, clock
        self._lock = threading.Lock()
        self._pauses: dict[Key, _Pause] = {}

    def filter_ready(self, keys: Sequence[Key]) -> list[Key]:
        """Return those of the given items that need not wait now, in the same order; an unknown
        item need not."""
        moment = self._clock()
        with self._lock:
            return [
                key
                for key in keys
                if (pause := self._pauses.get(key)) is None or pause.end <= moment
            ]

    def back_off(self, keys: Collection[Key]) -> None:
        """Start or double the back-off of items that could not be embedded.

        Args:
            keys: the items, perhaps none; unknown ones begin with the first back-off. After a
                back-off of a day they wait `longest_seconds`. A repeated one doubles again.
        """
        moment = self._clock()
        with self._lock:
            for key in keys:
                seconds = self._longer(self._pauses.get(key), moment)
                self._pauses[key] = _Pause(moment + seconds, seconds)
            self._forget(moment)

    def _longer(self, last: _Pause | None, moment: float) -> float:
        """Return the seconds of the next back-off, given the last one."""
        if last is None or moment >= last.end + last.seconds:
            return self._first
        return min(2 * last.seconds, self._longest)

    def back_off_a_day(self, keys: Collection[Key]) -> None:
        """Start a back-off of a day for items that their source lacks.

        It replaces any shorter back-off.
        """
        moment = self._clock()
        with self._lock:
            self._pauses |= dict.fromkeys(keys, _Pause(moment + _DAY_S, _DAY_S))
            self._forget(moment)

    def _forget(self, moment: float) -> None:
        """Drop entries beyond the limit; first those that would start again at `first_seconds`."""
        if len(self._pauses) <= _MOST:
            return
        remembered = {
            key: one for key, one in self._pauses.items() if moment < one.end + one.seconds
        }
        longest = sorted(remembered.items(), key=lambda one: one[1].end, reverse=True)
        # Keep half, so that the next failure need not sort again.
        self._pauses = dict(longest[: _MOST // 2]) if len(remembered) > _MOST // 2 else remembered


# The most items that wait for a thread.
_MOST_WAITING = 10_000
# How long `close` waits for batches that have started.
_CLOSE_S = 30.0


@dataclass(frozen=True)
class ReembeddingLimits:
    """Limits of re-embedding.

    Attributes:
        wait_seconds: how long a query waits; 0 does not wait.
        bytes_per_query: bytes that one query may read.
        bytes_per_item: bytes that one item may have.
        concurrent_batches: batches at once, 1 or more.
        batch_size: items of a batch, 1 or more.
        items_per_day: items a day (UTC), over all processes; 0 only queues them.
    """

    wait_seconds: float = 1.0
    bytes_per_query: int = 64 << 20
    bytes_per_item: int = 32 << 20
    concurrent_batches: int = 4
    batch_size: int = 8
    items_per_day: int = 100_000


@dataclass
class EmbeddingCost:
    """Totals of re-embedding in this process.

    Attributes:
        embedded_count: items that were embedded and stored.
        failed_count: items that failed or that their source lacks.
        seconds: time of all threads together.
        bytes_read: bytes read from the source.
        last_failure: class and message of the last error; empty if there was none.
    """

    embedded_count: int = 0
    failed_count: int = 0
    seconds: float = 0.0
    bytes_read: int = 0
    last_failure: str = ""


@dataclass
class _Bytes:
    """The bytes that one query may still read."""

    remaining: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, count: int) -> None:
        with self.lock:
            self.remaining -= count


class _BatchRead(NamedTuple, Generic[Key]):
    """A batch after reading: contents, items that the source lacks, items that were not started."""

    contents: dict[Key, str | bytes]
    missing: list[Key]
    unread: list[Key]


class Reembedding(ABC, Generic[Key]):
    """Reads items from a source on threads; a subclass embeds them and stores the vectors.

    Open it after a fork, in each process: its threads do not survive one.

    Attributes:
        limits: bounds of time, bytes, concurrency and budget.
        ledger: the claims and the budget.
        backoff: the back-off of failed items, or None.
        cost: totals of this process.
    """

    def __init__(
        self,
        items: ItemSource,
        limits: ReembeddingLimits,
        ledger: Ledger[Key],
        backoff: Backoff[Key] | None = None,
    ) -> None:
        """Prepare threads that read and embed items; nothing is read yet.

        Args:
            items: the source of the items.
            limits: bounds of time, bytes, concurrency and budget; they are not checked.
            ledger: the claims and the budget, shared with other processes. The caller closes it.
            backoff: the back-off of failed items; None: failed items are retried at once.
        """
        self._items, self.limits, self.ledger, self.backoff = items, limits, ledger, backoff
        # Reentrant: a batch may end before `_begin` registers its callback in the same thread.
        self._lock = threading.RLock()
        self._refuses = False
        self._process = os.getpid()
        self._claiming = 0
        self._claims_ended = threading.Condition(self._lock)
        self._under_way: dict[Key, Future[None]] = {}
        # A source may hang for ever, so closing must not wait for its thread.
        self._threads = DaemonThreads(limits.concurrent_batches, "nobackfill-embed")
        self.cost = EmbeddingCost()

    @abstractmethod
    def embed_and_store(
        self, contents: Mapping[Key, str | bytes], missing: Sequence[Key]
    ) -> Collection[Key]:
        """Embed items, store their vectors durably, and settle them in the ledger.

        Runs on a thread of this object, several calls at once.

        Args:
            contents: texts or encoded images by item; may be empty. Items that failed to be read
                are absent.
            missing: items that the source no longer has.

        Returns:
            The items that are finished; the others back off.

        Raises:
            Exception: any error; it is recorded as the last failure, and all items back off.
        """

    def claim(self, keys: Sequence[Key], budget: int) -> Sequence[Key]:
        """Claim items that no other process embeds, within a daily budget; queue the others.

        Args:
            keys: distinct items, claimed in their order.
            budget: the most items of today (UTC), over all processes; 0 only queues.

        Returns:
            The items that were claimed.

        Raises:
            BusyError: the ledger is locked; nothing was claimed.
            CannotWriteError: the ledger cannot be written; nothing was claimed.
            DamagedError: the ledger's file is damaged.
            UnavailableError: the ledger's database does not answer.
        """
        return self.ledger.claim(keys, today_utc(), budget)

    def close(self, seconds: float = _CLOSE_S) -> bool:
        """Finish the batches that have started, drop those that wait, and refuse later work.

        May be called again.

        Args:
            seconds: how long to wait, 30 by default; 0 does not wait. A batch whose source hangs
                ends later by itself.

        Returns:
            Whether all batches have ended. Claims of batches that were dropped are given up.
        """
        end = time.monotonic() + seconds
        with self._lock:
            self._refuses = True
            # Threads that are claiming give their claims up while the ledger is still open.
            claims_ended = self._claims_ended.wait_for(lambda: not self._claiming, seconds)
        return self._threads.close(max(0.0, end - time.monotonic())) and claims_ended

    def reembed_within_limit(self, names: Mapping[Key, str], seconds: float | None = None) -> None:
        """Re-embed items; return once their vectors are stored or the time is up.

        Work that has started goes on after the time is up, and its vectors are stored. Items that
        fail raise nothing: `cost` counts them. Neither do a locked or full ledger: its error is the
        last failure in `cost`, and nothing is embedded. Items that back off, and items beyond the
        day's budget, are not embedded. Items that another call embeds here are waited for. Beyond
        10,000 waiting items, more are only queued in the ledger. Nothing happens after `close`, or
        without items.

        Args:
            names: the item's name in its source, by key; may be empty.
            seconds: how long to wait; at most `limits.wait_seconds`. None: that limit; 0 or less:
                start the work and return.

        Raises:
            ConfigurationError: the process was forked after this object was made.
            DamagedError: the ledger's file is damaged.
            UnavailableError: the ledger's database does not answer.
            Exception: any other error of the ledger.
        """
        patience = (
            self.limits.wait_seconds if seconds is None else min(seconds, self.limits.wait_seconds)
        )
        deadline = time.monotonic() + patience
        pending = self._begin(names)
        wait(pending, timeout=max(0.0, deadline - time.monotonic()))

    def reembed(self, names: Mapping[Key, str], seconds: float | None = None) -> None:
        """Re-embed items as `reembed_within_limit` does, but wait longer.

        Work that has started goes on after the time is up. Items that fail, back off or are beyond
        the day's budget raise nothing.

        Args:
            names: the item's name in its source, by key; may be empty.
            seconds: how long to wait; None: until all have ended, also where a source hangs.

        Raises:
            ConfigurationError: the process was forked after this object was made.
            DamagedError: the ledger's file is damaged.
            UnavailableError: the ledger's database does not answer.
            Exception: any other error of the ledger. A locked or full ledger raises nothing:
                nothing is embedded then.
        """
        wait(self._begin(names), timeout=seconds)

    def is_embedding(self, keys: Collection[Key]) -> bool:
        """Return whether this process embeds any of these items, or has one wait for a thread;
        False for no items."""
        with self._lock:
            return any(key in self._under_way for key in keys)

    def record_failure(self, error: Exception) -> None:
        """Set the last failure of `cost` to an error's class and message; counts no item."""
        with self._lock:
            self.cost.last_failure = f"{type(error).__name__}: {error}"

    def _begin(self, names: Mapping[Key, str]) -> list[Future[None]]:
        """Start to embed items; return their futures, and those of other queries on them."""
        if os.getpid() != self._process:
            raise ConfigurationError(
                "re-embedding: this object was opened before the process was forked, and its "
                "threads stayed in the parent; open it after the fork, in each process"
            )
        with self._lock:
            if self._refuses:
                return []
            shared = [future for key in names if (future := self._under_way.get(key))]
            idle = [key for key in names if key not in self._under_way]
            if self.backoff is not None:
                idle = self.backoff.filter_ready(idle)
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
            return self.claim(idle, self.limits.items_per_day) if idle else ()
        except (BusyError, CannotWriteError) as error:
            self.record_failure(error)
            return ()

    def _submit(self, names: Mapping[Key, str]) -> None:
        """Start claimed items in batches; give up the claims of those that no thread can take."""
        bytes_, keys = _Bytes(self.limits.bytes_per_query), list(names)
        with self._lock:
            while keys and not self._refuses:
                part = {key: names[key] for key in keys[: self.limits.batch_size]}
                try:
                    future = self._threads.submit(partial(self._work, part, bytes_))
                except RuntimeError as error:
                    # The system has no thread left; the items stay queued in the ledger.
                    self.record_failure(error)
                    break
                future.add_done_callback(self._callback(list(part)))
                del keys[: self.limits.batch_size]
        if keys:
            self._postpone(keys)
            self._end(keys)

    def _callback(self, keys: list[Key]) -> Callable[[Future[None]], None]:
        def end(future: Future[None]) -> None:
            if future.cancelled():
                self._postpone(keys)
            self._end(keys)

        return end

    def _end(self, keys: Collection[Key]) -> None:
        """Mark items as finished, and wake the callers that wait for them."""
        with self._lock:
            ended = [self._under_way.pop(key) for key in keys]
        for future in ended:
            future.set_result(None)

    def _postpone(self, keys: Sequence[Key]) -> None:
        """Give up claims of items that were not started; they stay queued and cost nothing."""
        try:
            self.ledger.return_claims(keys)
            self.claim(keys, 0)
        except Exception as error:  # noqa: BLE001 - claims also expire
            self.record_failure(error)

    def _work(self, names: Mapping[Key, str], bytes_: _Bytes) -> None:
        start = time.perf_counter()
        read: _BatchRead[Key] = _BatchRead({}, [], [])
        finished: Collection[Key] = ()
        try:
            read = self._read(names, bytes_)
            finished = self.embed_and_store(read.contents, read.missing)
        except Exception as error:  # noqa: BLE001 - claims are freed after any error
            self.record_failure(error)
        finally:
            failures = [key for key in names if key not in finished and key not in read.unread]
            with self._lock:
                self.cost.embedded_count += len(finished)
                self.cost.failed_count += len(failures)
                self.cost.seconds += time.perf_counter() - start
            if self.backoff is not None:
                self.backoff.back_off([key for key in failures if key not in read.missing])
                self.backoff.back_off_a_day([key for key in failures if key in read.missing])
            if read.unread:
                self._postpone(read.unread)
            if failures:
                self.ledger.return_claims(failures)

    def _read(self, names: Mapping[Key, str], bytes_: _Bytes) -> _BatchRead[Key]:
        """Read items until the query's bytes are used up."""
        contents: dict[Key, str | bytes] = {}
        missing, keys = list[Key](), list(names)
        item_limit = min(self.limits.bytes_per_item, self.limits.bytes_per_query)
        for number, (key, name) in enumerate(names.items()):
            most = min(item_limit, bytes_.remaining)
            if most <= 0 or self._refuses:
                return _BatchRead(contents, missing, keys[number:])
            try:
                item = self._items.read(name, most)
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything
                if isinstance(error, TooLargeError) and most < item_limit:
                    # The item fits the limit but not the remaining bytes of the query.
                    bytes_.take(most)
                    return _BatchRead(contents, missing, keys[number:])
                self.record_failure(error)
                continue
            if item is None:
                missing.append(key)
                continue
            size = len(item.encode() if isinstance(item, str) else item)
            bytes_.take(size)
            with self._lock:
                self.cost.bytes_read += size
            contents[key] = item
        return _BatchRead(contents, missing, [])
