"""What Prometheus reads about calls: how many ended how, their time, how many are open and wait.

Each call is counted here and each look adds up: prometheus_client's own counters take a tenth of a
search.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

import grpc
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BOUNDS = (*map(str, map(float, _BUCKETS)), "+Inf")


class _Ended:
    """Calls of one method."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.codes = dict.fromkeys(grpc.StatusCode, 0)
        self.buckets = [0] * len(_BOUNDS)
        self.seconds = 0.0


class CallMetrics(Collector):
    """Counts calls as they end, and those that are there when somebody looks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._methods: dict[str, _Ended] = {}
        # Of methods that do not exist; their names are the callers', so no labels.
        self._unknown = 0
        # Set by the interceptor: calls that are open and those that wait, by lane, when asked.
        self.lanes: Mapping[str, tuple[Callable[[], int], Callable[[], int]]] = {}
        registry.register(self)

    def count(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """A call of `method` (/package.Service/Name) ended, so long after it arrived."""
        ended = self._methods.get(method)
        if ended is None:
            ended = self._methods.setdefault(method, _Ended())
        with ended.lock:
            ended.codes[code] += 1
            ended.buckets[bisect_left(_BUCKETS, seconds)] += 1
            ended.seconds += seconds

    def count_unknown(self) -> None:
        """A call of a method that does not exist."""
        self._unknown += 1

    def _ended(self) -> Iterator[Metric]:
        labels = ["grpc_service", "grpc_method"]
        handled = CounterMetricFamily(
            "grpc_server_handled", "Calls ended.", labels=[*labels, "grpc_code"]
        )
        handling = HistogramMetricFamily(
            "grpc_server_handling_seconds", "Time from a call's arrival to its end.", labels=labels
        )
        for method, ended in list(self._methods.items()):
            service, _, name = method.strip("/").rpartition("/")
            with ended.lock:
                codes, buckets = dict(ended.codes), list(accumulate(ended.buckets))
                seconds = ended.seconds
            for code, calls in codes.items():
                handled.add_metric([service, name, code.name], calls)
            pairs = list(zip(_BOUNDS, buckets, strict=True))
            handling.add_metric([service, name], buckets=pairs, sum_value=seconds)
        if self._unknown:
            handled.add_metric(["unknown", "unknown", "UNIMPLEMENTED"], self._unknown)
        yield handled
        yield handling

    def collect(self) -> Iterator[Metric]:
        yield from self._ended()
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
