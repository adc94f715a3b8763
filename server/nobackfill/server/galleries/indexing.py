"""Indexes of live views, made in the background: loaded if good, else built; compacted if due."""

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nobackfill.gallery.search.hnsw import HnswIndex
from nobackfill.gallery.search.index import Index, give_way
from nobackfill.gallery.search.view import LiveView, Snapshot
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.hosted_file import HostedInFile, due, tuned
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics

# While a gallery is filled, that keeps its graph from being made over and over. Once nothing
# changed for so long, fewer than this lie beside it: every search compares each of them.
_QUIET_DELTA = 1_000
_QUIET_S = 1.0
# A space that an upgrade fills is searched exactly up to here.
_LARGEST_FILLING = 200_000
_EVERY_S = 0.5
# An index that could not be written, on a full disk say, is tried again after so long.
_UNWRITTEN_S = 20.0
# An index is tuned on queries once so many more were asked, at most so often, and in no more than
# one part of its time in so many.
_ENOUGH_ASKED = 32
_TUNED_EVERY_S = 30.0
_TUNED_SHARE = 50
# A gallery whose index cannot be made for a reason nobody foresaw is tried again after so long.
_REST_S = 30.0


class Indexing:
    """Looks after every view of every gallery: one thread finds what is due, and makers make it, as
    many galleries at a time as there may be threads. Those that are not many share them."""

    def __init__(
        self, galleries: Callable[[], Iterable[Hosted]], metrics: Metrics, threads: int
    ) -> None:
        """`threads`: how many cores all builds together may keep busy."""
        self._galleries = galleries
        self._metrics = metrics
        self._makers = ThreadPoolExecutor(threads, "index", initializer=self._give_way)
        self._sharing = Sharing(threads)
        # Galleries that wait for a maker, or have one.
        self._busy: weakref.WeakSet[HostedInFile] = weakref.WeakSet()
        # Views whose index is not on the disk: the snapshot last seen, and since when. Weak: a view
        # that a swap left behind must not keep its vectors and its graph here.
        self._since: weakref.WeakKeyDictionary[LiveView, tuple[weakref.ref[Snapshot], float]] = (
            weakref.WeakKeyDictionary()
        )
        # Views whose index was tuned on what was asked: how much had been by then, and from when on
        # that is worth its time again.
        self._tuned: weakref.WeakKeyDictionary[LiveView, tuple[int, float]] = (
            weakref.WeakKeyDictionary()
        )
        # Galleries that failed for a reason nobody foresaw: left alone until then.
        self._resting: weakref.WeakKeyDictionary[HostedInFile, float] = weakref.WeakKeyDictionary()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="indexing", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End; a build under way is given up."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._makers.shutdown(cancel_futures=True)

    def _give_way(self) -> None:
        with error_boundary(self._metrics, "indexing"):
            give_way()

    def _work(self) -> None:
        self._give_way()
        while not self._stopping.is_set():
            with error_boundary(self._metrics, "indexing"):
                for hosted in self._galleries():
                    if isinstance(hosted, HostedInFile):
                        self._look_at(hosted)
            self._wake.wait(_EVERY_S)

    @contextlib.contextmanager
    def _alone(self, hosted: HostedInFile) -> Iterator[None]:
        """What fails in one gallery keeps no other from its index, and is tried again later."""
        self._resting[hosted] = time.monotonic() + _REST_S
        with error_boundary(self._metrics, "indexing"):
            yield
            del self._resting[hosted]

    def _look_at(self, hosted: HostedInFile) -> None:
        if hosted in self._busy or time.monotonic() < self._resting.get(hosted, 0.0):
            return
        there_is = False
        with self._alone(hosted):
            there_is = next(self._due(hosted), None) is not None
        if there_is:
            self._busy.add(hosted)
            self._makers.submit(self._look_after, hosted)

    def _look_after(self, hosted: HostedInFile) -> None:
        """A maker's turn: all that is due in one gallery."""
        try:
            if hosted.users.enter():
                try:
                    with self._alone(hosted), contextlib.suppress(_StoppedError):
                        for work in self._due(hosted):
                            work()
                finally:
                    hosted.users.leave()
        finally:
            self._busy.discard(hosted)

    def _due(self, hosted: HostedInFile) -> Iterator[Callable[[], None]]:
        """What there is to do, one after another; asked again, the same."""
        for space, view in hosted.views().items():
            if space not in hosted.plan.alone and len(view.snapshot()) < _LARGEST_FILLING:
                # An upgrade fills it; it inherits an index when it is full.
                continue
            if due(view) or self._settled(hosted, space, view):
                yield functools.partial(self._make, hosted, space, view)
            elif self._asked_anew(view):
                yield functools.partial(self._tune, hosted, view)

    def _settled(self, hosted: HostedInFile, space: str, view: LiveView) -> bool:
        """Whether a graph has no file or much beside it, and nothing changed for a while that would
        cost it again."""
        snapshot = view.snapshot()
        base = snapshot.base.index
        behind = len(snapshot.delta) > _QUIET_DELTA
        if not isinstance(base, HnswIndex) or (hosted.index_path(space).exists() and not behind):
            self._since.pop(view, None)
            return False
        seen, since = self._since.get(view, (None, 0.0))
        if seen is None or seen() is not snapshot:
            self._since[view] = (weakref.ref(snapshot), time.monotonic())
            return False
        return time.monotonic() - since >= (_QUIET_S if behind else _UNWRITTEN_S)

    def _asked_anew(self, view: LiveView) -> bool:
        """Whether a graph was asked enough since it was tuned, and that is not long ago."""
        if not isinstance(view.snapshot().base.index, HnswIndex):
            return False
        seen, rested = self._tuned.get(view, (0, 0.0))
        return view.asked.seen - seen >= _ENOUGH_ASKED and time.monotonic() >= rested

    def _tune(self, hosted: HostedInFile, view: LiveView) -> None:
        began, seen = time.monotonic(), view.asked.seen
        view.tune(lambda base: tuned(base, view, self._giving_up(hosted)))
        ended = time.monotonic()
        rest = max(_TUNED_EVERY_S, _TUNED_SHARE * (ended - began))
        self._tuned[view] = seen, ended + rest

    def _make(self, hosted: HostedInFile, space: str, view: LiveView) -> None:
        with self._sharing.one():
            hosted.make_index(space, view, self._giving_up(hosted), self._sharing.threads)
        # A disk that is full is tried again after another while.
        self._since.pop(view, None)

    def _giving_up(self, hosted: HostedInFile) -> Callable[[], None]:
        def give_up() -> None:
            if self._stopping.is_set() or hosted.leaving:
                raise _StoppedError

        return give_up


class Sharing:
    """Threads that builds have together."""

    def __init__(self, threads: int) -> None:
        self._all = threads
        self._lock = threading.Lock()
        self._builds = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One more build, to the end of the block."""
        with self._lock:
            self._builds += 1
        try:
            yield
        finally:
            with self._lock:
                self._builds -= 1

    def threads(self) -> int:
        """How many each of the builds may use now: hnsw.Threads."""
        return max(1, self._all // max(1, self._builds))


class _StoppedError(Exception):
    """The gateway ends, and the index is made at the next start; or the gallery is deleted."""


# What the indexes of all galleries hold, for metrics: read from views, never from a table.


@dataclass(frozen=True)
class Searched:
    """Vectors of a space by how a search meets them; `due`: a graph of them all is to be made."""

    graph: int
    exact: int
    delta: int
    due: bool = False


def searched(view: LiveView) -> Searched:
    """Of one space, as it is now."""
    return replace(_counts(view.snapshot()), due=due(view))


def _counts(snapshot: Snapshot) -> Searched:
    base = len(snapshot.base)
    graph = base if snapshot.graphed else 0
    return Searched(graph, base - graph, len(snapshot.delta))


class IndexSizes(Collector):
    """Vectors by how they are searched, and the age of the oldest graph."""

    def __init__(self, galleries: Callable[[], Iterable[Hosted]]) -> None:
        self._galleries = galleries
        self._lock = threading.Lock()
        # When each graph was first seen. Weak: looking must not keep one in memory.
        self._seen: weakref.WeakKeyDictionary[Index, float] = weakref.WeakKeyDictionary()

    def collect(self) -> Iterator[Metric]:
        vectors = {"graph": 0, "exact": 0, "delta": 0}
        oldest = now = time.monotonic()
        for hosted in self._galleries():
            for view in hosted.views().values():
                snapshot = view.snapshot()
                counts = _counts(snapshot)
                for searched in vectors:
                    vectors[searched] += getattr(counts, searched)
                if snapshot.graphed:
                    with self._lock:
                        oldest = min(oldest, self._seen.setdefault(snapshot.base.index, now))
        family = GaugeMetricFamily(
            "nobackfill_index_vectors",
            "Vectors that are searched: by a graph, exactly, or exactly beside a graph (delta).",
            labels=["searched"],
        )
        for searched, count in vectors.items():
            family.add_metric([searched], count)
        yield family
        yield GaugeMetricFamily(
            "nobackfill_index_age_seconds",
            "Seconds since the oldest graph in use was first seen by a scrape.",
            value=now - oldest,
        )


def vectors(galleries: Iterable[Hosted]) -> Mapping[tuple[int, str], int]:
    """Vectors of all galleries, by release and state of their space."""
    sizes: dict[tuple[int, str], int] = {}
    for hosted in galleries:
        if hosted.leaving:
            continue
        counts = hosted.sizes()
        for info in hosted.spaces():
            key = (info.spec.release, info.state)
            sizes[key] = sizes.get(key, 0) + counts.get(info.spec.space, 0)
    return sizes
