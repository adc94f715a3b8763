"""What Prometheus reads about calls: how many ended how, their time, how many are open and wait."""

from collections.abc import Callable, Iterator, Mapping

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class CallMetrics(Collector):
    """Counts calls as they end, and those that are there when somebody looks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        call = ["grpc_service", "grpc_method"]
        self._handled = Counter(
            "grpc_server_handled_total", "Calls ended.", [*call, "grpc_code"], registry=registry
        )
        self._handling = Histogram(
            "grpc_server_handling_seconds", "Time from a call's arrival to its end.", call,
            buckets=_BUCKETS, registry=registry,
        )  # fmt: skip
        self._series: dict[str, tuple[Mapping[grpc.StatusCode, Counter], Histogram]] = {}
        # Set by the interceptor: calls that are open and those that wait, by lane, when asked.
        self.lanes: Mapping[str, tuple[Callable[[], int], Callable[[], int]]] = {}
        registry.register(self)

    def count(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """A call of `method` (/package.Service/Name) ended, so long after it arrived."""
        series = self._series.get(method)
        if series is None:
            service, _, name = method.strip("/").rpartition("/")
            handled = {c: self._handled.labels(service, name, c.name) for c in grpc.StatusCode}
            series = self._series[method] = handled, self._handling.labels(service, name)
        series[0][code].inc()
        series[1].observe(seconds)

    def count_unknown(self) -> None:
        """A call of a method that does not exist; its name is the caller's, so no label."""
        self._handled.labels("unknown", "unknown", grpc.StatusCode.UNIMPLEMENTED.name).inc()

    def collect(self) -> Iterator[Metric]:
        is_open = GaugeMetricFamily(
            "nobackfill_calls_open", "Calls that came and have not ended, by lane.", labels=["lane"]
        )
        waits = GaugeMetricFamily(
            "nobackfill_calls_waiting",
            "Calls that wait for a thread of their lane; in lane message, for their message.",
            labels=["lane"],
        )
        for lane, (held, waiting) in self.lanes.items():
            is_open.add_metric([lane], held())
            waits.add_metric([lane], waiting())
        yield is_open
        yield waits
