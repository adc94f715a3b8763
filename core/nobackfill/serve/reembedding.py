"""Hits embedded again on threads, bounded in time, bytes, concurrency and by a budget a day.

No item is embedded twice at once: within a process a second query waits for the same work, across
processes a claim in the file of natives keeps it from beginning. What is late is kept all the same.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from nobackfill.adopt.embedding.embedder import Embedder
from nobackfill.adopt.sources.source import Rows, Searchable
from nobackfill.errors import (
    BusyError,
    InvalidInputError,
    NotPermittedError,
    UnavailableError,
)
from nobackfill.serve.items import Items
from nobackfill.serve.natives import Natives, digest
from nobackfill.vectors import Vectors

# Items that wait for a thread.
_MOST_WAITING = 10_000


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


@dataclass
class _Bytes:
    """What one query may still read."""

    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, count: int) -> None:
        with self.lock:
            self.left -= count


class Reembedding:
    """Embeds items of `source` by `embedder`, reading them from `items`, into `natives`."""

    def __init__(
        self,
        source: Searchable,
        items: Items,
        embedder: Embedder,
        natives: Natives,
        limits: Limits,
    ) -> None:
        if embedder.kind not in (None, items.kind):
            raise InvalidInputError(
                f"expected items that the model reads ({embedder.kind}s), got {items.kind}s"
            )
        self._source, self._items, self._embedder = source, items, embedder
        self._natives, self.limits = natives, limits
        # Again by the same thread: work that `close` has cancelled says so at once, in `_begin`.
        self._lock = threading.RLock()
        self._under_way: dict[str, Future[None]] = {}
        self._threads = ThreadPoolExecutor(limits.concurrency, "nobackfill-embed")
        self.cost = Cost()

    def close(self) -> None:
        """End after the batches that have begun; what waits is not begun."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def ask(self, rows: Rows) -> None:
        """Embed the items of `rows` again, and return when they are kept or time is up."""
        deadline = time.monotonic() + self.limits.seconds
        started = self._begin(rows)
        wait(started, timeout=max(0.0, deadline - time.monotonic()))

    def finish(self, rows: Rows) -> None:
        """The same, however long it takes."""
        wait(self._begin(rows))

    def _begin(self, rows: Rows) -> list[Future[None]]:
        """The work on these items, that of other queries with it."""
        places = {name: row for row, name in enumerate(rows.ids)}
        bytes_ = _Bytes(self.limits.bytes_a_query)
        with self._lock:
            shared = {id(f): f for name in rows.ids if (f := self._under_way.get(name))}
            idle = {
                name: digest(rows.vectors[row])
                for name, row in places.items()
                if name not in self._under_way
            }
            try:
                # More than that is noted as wanted: a crowd shall not fill the memory.
                budget = self.limits.a_day if len(self._under_way) < _MOST_WAITING else 0
                mine = self._natives.claim(idle, today(), budget) if idle else []
            except BusyError:
                mine = []
            for first in range(0, len(mine), self.limits.batch):
                names = mine[first : first + self.limits.batch]
                vectors = rows.vectors[[places[name] for name in names]]
                future = self._threads.submit(self._work, names, vectors, bytes_)
                self._under_way |= dict.fromkeys(names, future)
                shared[id(future)] = future
                future.add_done_callback(self._done(names))
        return list(shared.values())

    def _done(self, names: list[str]) -> Callable[[Future[None]], None]:
        def done(future: Future[None]) -> None:
            if future.cancelled():
                self._natives.release(names)
            with self._lock:
                for name in names:
                    if self._under_way.get(name) is future:
                        del self._under_way[name]

        return done

    def _work(self, names: list[str], old: Vectors, bytes_: _Bytes) -> None:
        """Read, embed, keep, and look again: what went meanwhile is taken back."""
        begun = time.perf_counter()
        kept: list[str] = []
        try:
            found, gone = self._read(names, bytes_)
            vectors = self._embedded(found)
            seen = {name: digest(old[row]) for row, name in enumerate(names)}
            ids = list(vectors)
            if ids:
                new = np.stack([vectors[name] for name in ids])
                self._natives.keep(ids, [seen[name] for name in ids], new)
                kept = ids
                rows = self._source.lookup(ids)
                now = {name: digest(rows.vectors[row]) for row, name in enumerate(rows.ids)}
                self._natives.outdated({n: seen[n] for n in ids if now.get(n) != seen[n]})
            self._natives.forget(gone)
        except Exception as error:  # noqa: BLE001 - whatever it is, claims are freed
            self._failed(error)
        finally:
            lost = [name for name in names if name not in kept]
            with self._lock:
                self.cost.embedded += len(kept)
                self.cost.failed += len(lost)
                self.cost.seconds += time.perf_counter() - begun
            if lost:
                self._natives.release(lost)

    def _embedded(self, found: dict[str, str | bytes]) -> dict[str, Vectors]:
        """Vectors by id; one item that cannot be embedded takes no other along."""
        if not found:
            return {}
        try:
            made = self._embedder.embed(list(found.values()))  # type: ignore[arg-type]
            return dict(zip(found, made, strict=True))
        except (UnavailableError, BusyError, NotPermittedError):
            # No item's fault: to ask for each of them would be more of the same.
            raise
        except Exception as error:  # noqa: BLE001 - and so may a model be
            self._failed(error)
            if len(found) == 1:
                return {}
        return {
            name: vector
            for one in found
            for name, vector in self._embedded({one: found[one]}).items()
        }

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self.cost.last_failure = f"{type(error).__name__}: {error}"

    def _read(
        self, names: Sequence[str], bytes_: _Bytes
    ) -> tuple[dict[str, str | bytes], list[str]]:
        """Items by id, as many as the bytes reach for, and the ids of those that are gone."""
        found, gone = {}, []
        for name in names:
            most = min(self.limits.bytes_an_item, bytes_.left)
            if most <= 0:
                break
            try:
                item = self._items.read(name, most)
            except Exception as error:  # noqa: BLE001 - a function of the user's, as below
                self._failed(error)
                continue
            if item is None:
                gone.append(name)
                continue
            size = len(item.encode() if isinstance(item, str) else item)
            bytes_.take(size)
            with self._lock:
                self.cost.bytes += size
            found[name] = item
        return found, gone


def today() -> str:
    """The day that a budget is of."""
    return datetime.now(UTC).date().isoformat()


def without(rows: Rows, ids: set[str]) -> Rows:
    """Rows of other items than these, in their order."""
    kept = [row for row, name in enumerate(rows.ids) if name not in ids]
    return Rows([rows.ids[row] for row in kept], rows.vectors[np.asarray(kept, np.int64)])
