"""What the indexes of all galleries hold, for metrics: read from views, never from a table."""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nobackfill.gallery.search.index import Index
from nobackfill.gallery.search.view import LiveView, Snapshot
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.hosted_file import due


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
