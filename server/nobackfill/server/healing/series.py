"""What Prometheus reads of galleries that heal."""

import threading
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nobackfill.server.galleries.asked import Found
from nobackfill.server.healing.healer import Progress


class HealingSeries(Collector):
    """Of all galleries with a source together, when somebody looks."""

    def __init__(self, progress: Callable[[], Iterable[Progress]]) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._shown = {"carried": 0, "native": 0}

    def count(self, answers: Iterable[Found]) -> None:
        """Hits that are shown, by what they were ranked by."""
        hits = [hit for one in answers for hit in one.hits]
        carried = sum(hit.origin == "upgraded" for hit in hits)
        with self._lock:
            self._shown["carried"] += carried
            self._shown["native"] += len(hits) - carried

    def collect(self) -> Iterator[Metric]:
        seen = list(self._progress())
        items = GaugeMetricFamily(
            "nobackfill_healing_items",
            "Items of galleries with a source: carried by an upgrade, or embedded by the release.",
            labels=["origin"],
        )
        carried = sum(one.carried or 0 for one in seen)
        items.add_metric(["carried"], carried)
        items.add_metric(["native"], sum(one.items for one in seen) - carried)
        yield items
        shown = CounterMetricFamily(
            "nobackfill_healing_hits",
            "Hits shown by galleries with a source, by what they were ranked by.",
            labels=["origin"],
        )
        for origin, count in self._shown.items():
            shown.add_metric([origin], count)
        yield shown
        made = CounterMetricFamily(
            "nobackfill_healing_embedded",
            "Items embedded again from their source, by what became of them.",
            labels=["outcome"],
        )
        made.add_metric(["kept"], sum(one.cost.embedded for one in seen))
        made.add_metric(["failed"], sum(one.cost.failed for one in seen))
        yield made
        yield CounterMetricFamily(
            "nobackfill_healing_read_bytes", "Bytes read from sources.",
            value=sum(one.cost.bytes for one in seen),
        )  # fmt: skip
        yield CounterMetricFamily(
            "nobackfill_healing_seconds", "Seconds of threads that read and embedded again.",
            value=sum(one.cost.seconds for one in seen),
        )  # fmt: skip
        left = GaugeMetricFamily(
            "nobackfill_healing_budget_left", "Items that today's budgets have room for."
        )
        left.add_metric([], sum(max(0, one.a_day - one.today) for one in seen))
        yield left
