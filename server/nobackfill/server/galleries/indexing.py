"""Keep the index of every view: build, renew, tune and save it in the background."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet, ref

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nobackfill.errors import UnavailableError
from nobackfill.gallery.search.hnsw import HnswIndex
from nobackfill.gallery.search.index import Index, lower_thread_priority
from nobackfill.gallery.search.view import LiveView, Snapshot
from nobackfill.server.galleries.hosted import UNUSABLE_GALLERY_ERRORS, HostedGallery
from nobackfill.server.galleries.hosted_file import HostedInFile, needs_index, tune_graph
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics

# A gallery that is being filled is not indexed over and over. Once nothing has changed for _QUIET_S
# seconds, its graph is renewed if more than _QUIET_DELTA vectors are outside it, which every search
# compares.
_QUIET_DELTA = 1_000
_QUIET_S = 1.0
# A space that an upgrade fills is searched exactly up to so many vectors.
_MAX_FILLING = 200_000
_POLL_SECONDS = 0.5
# An index that could not be saved, as on a full disk, is saved again after so many seconds.
_SAVE_RETRY_SECONDS = 20.0
# An index is tuned after so many more queries, at most once in so many seconds, and for at most one
# part in so many of the time.
_MIN_QUERIES = 32
_TUNE_SECONDS = 30.0
_TUNE_SHARE = 50
# A gallery whose index failed with an unexpected error is tried again after so many seconds.
_FAILURE_PAUSE_SECONDS = 30.0


class IndexMaintenance:
    """Keep the indexes of all galleries.

    One thread looks for work, and other threads do it, each for one gallery at a time. They share
    the given number of threads.
    """

    def __init__(
        self,
        list_galleries: Callable[[], Iterable[HostedGallery]],
        metrics: Metrics,
        thread_count: int,
    ) -> None:
        """Prepare the threads.

        Args:
            list_galleries: yields all galleries, each as used until the next one; those in a
                database are ignored.
            metrics: counts unexpected errors.
            thread_count: number of cores that all builds together may use, at least 1.

        Raises:
            ValueError: `thread_count` is below 1.
        """
        self._galleries = list_galleries
        self._metrics = metrics
        self._makers = ThreadPoolExecutor(thread_count, "index", initializer=self._lower_priority)
        self._budget = ThreadBudget(thread_count)
        # Galleries that wait for a thread, or have one.
        self._busy: WeakSet[HostedInFile] = WeakSet()
        # For views whose index is not saved: the snapshot last seen, and since when. The references
        # are weak, so that a freed view does not keep its vectors and its graph in memory.
        self._since: WeakKeyDictionary[LiveView, tuple[ref[Snapshot], float]] = WeakKeyDictionary()
        # For tuned views: the number of queries by then, and the time from which to tune again.
        self._tuned: WeakKeyDictionary[LiveView, tuple[int, float]] = WeakKeyDictionary()
        # Galleries that failed with an unexpected error, and the time until which they are left
        # alone.
        self._paused_until: WeakKeyDictionary[HostedInFile, float] = WeakKeyDictionary()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="indexing", daemon=True)

    def start(self) -> None:
        """Start the thread that looks for work.

        Call it once. It looks at all galleries in files every 0.5 s. An error in one gallery is
        logged and counted, and the gallery is tried again after 30 s.

        Raises:
            RuntimeError: a second call, or the system has no thread left.
        """
        self._thread.start()

    def close(self) -> None:
        """Stop; a build that is running is given up at its next check, which the call waits for.

        Work that waits is dropped. A second call does nothing. Without `start` it only ends the
        pool.
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._makers.shutdown(cancel_futures=True)

    def _lower_priority(self) -> None:
        with error_boundary(self._metrics, "indexing"):
            lower_thread_priority()

    def _work(self) -> None:
        self._lower_priority()
        while not self._stopping.is_set():
            with error_boundary(self._metrics, "indexing"):
                for hosted in self._galleries():
                    if isinstance(hosted, HostedInFile):
                        self._queue_if_due(hosted)
            self._stopping.wait(_POLL_SECONDS)

    @contextlib.contextmanager
    def _isolate(self, hosted: HostedInFile) -> Iterator[None]:
        """Keep an error in one gallery from the others; the gallery is tried again later."""
        self._paused_until[hosted] = time.monotonic() + _FAILURE_PAUSE_SECONDS
        with error_boundary(self._metrics, "indexing"):
            yield
            del self._paused_until[hosted]

    def _queue_if_due(self, hosted: HostedInFile) -> None:
        if hosted in self._busy or time.monotonic() < self._paused_until.get(hosted, 0.0):
            return
        has_work = False
        with self._isolate(hosted):
            has_work = next(self._pending_work(hosted), None) is not None
        if has_work:
            self._busy.add(hosted)
            try:
                self._makers.submit(self._look_after, hosted)
            except RuntimeError:
                # The system has no thread left; otherwise the gallery would count as busy for ever.
                self._busy.discard(hosted)
                raise

    def _look_after(self, hosted: HostedInFile) -> None:
        """Do all the work of one gallery, on a thread of the pool."""
        try:
            if hosted.use_counter.enter():
                try:
                    with self._isolate(hosted), contextlib.suppress(_StoppedError):
                        for work in self._pending_work(hosted):
                            work()
                finally:
                    hosted.use_counter.leave()
        finally:
            self._busy.discard(hosted)

    def _pending_work(self, hosted: HostedInFile) -> Iterator[Callable[[], None]]:
        """Yield the work that a gallery needs."""
        for space, view in hosted.views().items():
            if space not in hosted.plan.single_parts and len(view.snapshot()) < _MAX_FILLING:
                # An upgrade fills this space; it inherits an index when it is complete.
                continue
            if needs_index(view) or self._is_settled(hosted, space, view):
                yield functools.partial(self._build_index, hosted, space, view)
            elif self._needs_tuning(view):
                yield functools.partial(self._tune_index, hosted, view)

    def _is_settled(self, hosted: HostedInFile, space: str, view: LiveView) -> bool:
        """Tell whether a graph is unsaved, or much is outside it, while nothing has changed for a
        while.
        """
        snapshot = view.snapshot()
        base = snapshot.base.index
        has_delta = len(snapshot.delta) > _QUIET_DELTA
        if not isinstance(base, HnswIndex) or (hosted.index_path(space).exists() and not has_delta):
            self._since.pop(view, None)
            return False
        last_snapshot, since = self._since.get(view, (None, 0.0))
        if last_snapshot is None or last_snapshot() is not snapshot:
            self._since[view] = (ref(snapshot), time.monotonic())
            return False
        return time.monotonic() - since >= (_QUIET_S if has_delta else _SAVE_RETRY_SECONDS)

    def _needs_tuning(self, view: LiveView) -> bool:
        """Tell whether a graph got enough queries since it was tuned, and may be tuned again by
        now.
        """
        if not isinstance(view.snapshot().base.index, HnswIndex):
            return False
        tuned_queries, next_time = self._tuned.get(view, (0, 0.0))
        new_queries = view.query_sample.count - tuned_queries
        return new_queries >= _MIN_QUERIES and time.monotonic() >= next_time

    def _tune_index(self, hosted: HostedInFile, view: LiveView) -> None:
        began, queries = time.monotonic(), view.query_sample.count
        view.tune(lambda base: tune_graph(base, view, self._stop_check(hosted)))
        ended = time.monotonic()
        pause = max(_TUNE_SECONDS, _TUNE_SHARE * (ended - began))
        self._tuned[view] = queries, ended + pause

    def _build_index(self, hosted: HostedInFile, space: str, view: LiveView) -> None:
        with self._budget.build():
            hosted.build_index(space, view, self._stop_check(hosted), self._budget.threads)
        # A full disk is tried again after a while.
        self._since.pop(view, None)

    def _stop_check(self, hosted: HostedInFile) -> Callable[[], None]:
        def give_up() -> None:
            if self._stopping.is_set() or hosted.is_closing:
                raise _StoppedError

        return give_up


class ThreadBudget:
    """Divide threads among the builds that run."""

    def __init__(self, thread_count: int) -> None:
        self._total = thread_count
        self._lock = threading.Lock()
        self._builds = 0

    @contextlib.contextmanager
    def build(self) -> Iterator[None]:
        """Count one more build during a block.

        It does not wait, also if more builds run than there are threads.
        """
        with self._lock:
            self._builds += 1
        try:
            yield
        finally:
            with self._lock:
                self._builds -= 1

    def threads(self) -> int:
        """Return how many threads each build may use now, at least 1.

        Outside of `build` it counts as one build. The number may change between two calls.
        """
        return max(1, self._total // max(1, self._builds))


class _StoppedError(Exception):
    """The gateway stops, or the gallery is deleted; the index is built at the next start."""


@dataclass(frozen=True)
class IndexCounts:
    """Count the vectors of a space by how they are searched.

    Attributes:
        graph: vectors in a graph.
        exact: vectors that every search compares, in a space without a graph.
        delta: vectors outside the graph, which every search compares.
        needs_graph: a new graph of all vectors will be built in the background.
    """

    graph: int
    exact: int
    delta: int
    needs_graph: bool


def count_index(view: LiveView) -> IndexCounts:
    """Count the vectors of a view by how they are searched, and tell whether a new graph will be
    built.

    Both are of the present moment, but not of one snapshot.
    """
    snapshot = view.snapshot()
    base = len(snapshot.base)
    graph = base if snapshot.is_graph else 0
    return IndexCounts(graph, base - graph, len(snapshot.delta), needs_index(view))


class IndexMetrics(Collector):
    """Export to Prometheus the vectors by how they are searched, and the age of the oldest
    graph.
    """

    def __init__(self, list_galleries: Callable[[], Iterable[HostedGallery]]) -> None:
        self._galleries = list_galleries
        self._lock = threading.Lock()
        # When each graph was first seen; weak, so that this keeps no graph in memory.
        self._first_seen: WeakKeyDictionary[Index, float] = WeakKeyDictionary()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, from the views.

        Galleries without views in this process count nothing. Without a graph the age is 0.

        Yields:
            The vectors by kind, then the age in seconds of the oldest graph that a scrape has seen.
        """
        vectors = {"graph": 0, "exact": 0, "delta": 0}
        oldest = now = time.monotonic()
        for hosted in self._galleries():
            for view in hosted.views().values():
                snapshot = view.snapshot()
                counts = count_index(view)
                for kind in vectors:
                    vectors[kind] += getattr(counts, kind)
                if snapshot.is_graph:
                    with self._lock:
                        oldest = min(oldest, self._first_seen.setdefault(snapshot.base.index, now))
        family = GaugeMetricFamily(
            "nobackfill_index_vectors",
            "Vectors that are searched: by a graph, exactly, or exactly beside a graph (delta).",
            labels=["searched"],
        )
        for kind, count in vectors.items():
            family.add_metric([kind], count)
        yield family
        yield GaugeMetricFamily(
            "nobackfill_index_age_seconds",
            "Seconds since the oldest graph in use was first seen by a scrape.",
            value=now - oldest,
        )


def count_vectors(galleries: Iterable[HostedGallery]) -> Mapping[tuple[int, str], int]:
    """Count the vectors of all galleries, by release and state of their space.

    Galleries that are being deleted, and those that cannot be read, are left out: one damaged file
    must not end a scrape of all metrics.

    Returns:
        The sum by release and state (active, staging, previous); no key without a space, or if the
        database does not answer.
    """
    sizes: dict[tuple[int, str], int] = {}
    for hosted in galleries:
        if hosted.is_closing:
            continue
        try:
            counts, spaces = hosted.vector_counts(), hosted.spaces()
        except UnavailableError:
            # Each further gallery would wait for the same database.
            return {}
        except UNUSABLE_GALLERY_ERRORS:
            continue
        for info in spaces:
            key = (info.spec.release, info.state)
            sizes[key] = sizes.get(key, 0) + counts.get(info.spec.space, 0)
    return sizes
