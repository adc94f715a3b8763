"""What Prometheus reads. No ids in labels."""

import socket
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from nobackfill.errors import BusyError
from nobackfill.server.settings import split_address

# What Prometheus reads about calls: how many ended how, their time, how many are open and wait.
#
# Each call is counted here and each look adds up: prometheus_client's own counters take a tenth of
# a search.

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


# What devices reported, for Prometheus.

# Outcomes of a reported sync, the label `failure`.
FAILURES = ("none", "probes", "refused", "no route", "left behind")


class DeviceMetrics:
    """Of the syncs that devices report on request: counts, and no device is told apart."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.syncs = Counter(
            "nobackfill_device_syncs_total", "Syncs that devices reported, by release and failure.",
            ["release", "failure"], registry=registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "nobackfill_device_sync_seconds", "Their upgrades' durations, by release.",
            ["release"], buckets=(1, 5, 20, 60, 300, 1200, 3600), registry=registry,
        )  # fmt: skip
        self.neighbours_kept = Histogram(
            "nobackfill_device_neighbours_kept", "Share of nearest neighbours they kept, 0 to 1.",
            ["release"], buckets=(0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1), registry=registry,
        )  # fmt: skip

    def expect(self, release: int) -> None:
        """Start the counters of a release at 0, so that Prometheus sees its first failed sync."""
        for failure in FAILURES:
            self.syncs.labels(str(release), failure)


# Days until what lets people in or releases be believed expires, for Prometheus.

_DAY = timedelta(days=1)


def _none() -> Mapping[str, datetime]:
    return {}


class Expiries(Collector):
    """Asked when somebody looks. Each source, set by the gateway, maps a label to a time."""

    def __init__(self) -> None:
        self.metadata: Callable[[], Mapping[str, datetime]] = _none
        self.certificates: Callable[[], Mapping[str, datetime]] = _none
        # The first token to expire; nobody's name is shown.
        self.tokens: Callable[[], datetime | None] = lambda: None

    def collect(self) -> Iterator[Metric]:
        now = datetime.now(UTC)
        for name, what, label, ends in (
            ("metadata", "TUF metadata of a role", "role", self.metadata()),
            ("certificate", "a TLS certificate", "certificate", self.certificates()),
        ):
            family = GaugeMetricFamily(
                f"nobackfill_{name}_expires_days",
                f"Days until {what} expires; negative: since it did.",
                labels=[label],
            )
            for value, end in ends.items():
                family.add_metric([value], (end - now) / _DAY)
            yield family
        tokens = GaugeMetricFamily(
            "nobackfill_token_expires_days", "Days until the first of the tokens expires."
        )
        first = self.tokens()
        if first is not None:
            tokens.add_metric([], (first - now) / _DAY)
        yield tokens


# HTTP of the metrics port: /metrics, and what a kubelet asks, /healthz and /readyz.
#
# In the clear, so that probes work where gRPC is behind TLS and tokens; nothing private is told.

_TEXT = [("Content-Type", "text/plain; charset=utf-8")]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Silent(WSGIRequestHandler):
    # Seconds that a request may take to come.
    timeout = 10

    def log_message(self, format: str, *args: object) -> None:
        """Every probe would be a line."""


def serve(
    host: str, port: int, registry: CollectorRegistry, ready: Callable[[], bool]
) -> WSGIServer:
    """A server that is to be run with serve_forever. /healthz: the process answers; /readyz: 503
    until `ready` holds, and once it holds no more. Raises OSError."""
    metrics: Any = make_wsgi_app(registry)

    def answer(environ: Any, start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == "/healthz" or (path == "/readyz" and ready()):
            start_response("200 OK", _TEXT)
            return [b"ok\n"]
        if path == "/readyz":
            start_response("503 Service Unavailable", _TEXT)
            return [b"starting, or draining\n"]
        if path in ("/metrics", "/"):
            return metrics(environ, start_response)  # type: ignore[no-any-return]
        start_response("404 Not Found", _TEXT)
        return [b"expected /metrics, /healthz or /readyz\n"]

    kind = _Server6 if ":" in host else _Server
    return make_server(host, port, answer, kind, _Silent)


# Threads of work whose unforeseen errors are counted (`error_boundary`). A series starts at 0, or
# Prometheus' `increase` misses its first error.
THREADS = (
    "activation", "at once", "canary", "catalog", "connections", "executor", "first", "following",
    "healing", "images", "indexing", "stalls", "succession", "triton", "watches",
)  # fmt: skip


class Metrics:
    """All series of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.calls = CallMetrics(self.registry)
        self.active_release = Gauge(
            "nobackfill_active_release", "Number of the release that answers; 0 when none does.",
            registry=self.registry,
        )  # fmt: skip
        # Set by the gateway: vectors of all galleries by (release, state of space), when asked.
        self.gallery_items: Callable[[], Mapping[tuple[int, str], int]] = dict
        self.registry.register(_GalleryItems(self))
        # Set by the gateway: whether calls are answered, and not only until it has drained.
        self.ready: Callable[[], bool] = lambda: False
        # Its sources are set by the gateway.
        self.expiries = Expiries()
        self.registry.register(self.expiries)
        self.upgrade_ratio = Gauge(
            "nobackfill_upgrade_ratio",
            "Share of the running upgrade that is done, 0 to 1; 1 while it waits for an index or a "
            "canary, 0 while none runs.",
            registry=self.registry,
        )  # fmt: skip
        self.swap_seconds = Histogram(
            "nobackfill_swap_seconds", "Time from ActivateRelease to its last phase.",
            ["outcome"], buckets=(0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200),
            registry=self.registry,
        )  # fmt: skip
        for outcome in ("done", "failed"):
            self.swap_seconds.labels(outcome)
        self.batch_size = Histogram(
            "nobackfill_batch_size", "Queries answered by one index or model call.", ["stage"],
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256), registry=self.registry,
        )  # fmt: skip
        self.neighbours_kept = Gauge(
            "nobackfill_upgrade_neighbours_kept",
            "Share of nearest neighbours that the last finished upgrade kept, 0 to 1, by release.",
            ["release"], registry=self.registry,
        )  # fmt: skip
        self.unforeseen = Counter(
            "nobackfill_unforeseen_errors_total", "Errors that nobody foresaw, by thread of work.",
            ["thread"], registry=self.registry,
        )  # fmt: skip
        for thread in THREADS:
            self.unforeseen.labels(thread)
        self.searches = Counter(
            "nobackfill_searches_total", "Queries answered, by how their space is searched.",
            ["searched"], registry=self.registry,
        )  # fmt: skip
        self.devices = DeviceMetrics(self.registry)
        self.disk_free = Gauge(
            "nobackfill_disk_free_bytes", "Free bytes where the data folder is.",
            registry=self.registry,
        )  # fmt: skip
        self.triton_restarts = Counter(
            "nobackfill_triton_restarts_total", "Times that the embedded Triton was started again.",
            registry=self.registry,
        )  # fmt: skip
        self.model_server_up = Gauge(
            "nobackfill_model_server_up", "1 while images can be embedded.",
            registry=self.registry,
        )  # fmt: skip

    def serve(self, address: str) -> str:
        """Answer HTTP GET /metrics, /healthz and /readyz on `address`; returns where. Raises
        BusyError."""
        host, port = split_address(address, "metrics_address")
        try:
            self._server = serve(host, port, self.registry, lambda: self.ready())
        except OSError as error:
            raise BusyError(
                f"metrics address {address} cannot be used ({error.strerror}); "
                "give another with --metrics-address, port 0 for any free one"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()
        return f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _GalleryItems(Collector):
    """Counts when somebody looks, not at every put."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "nobackfill_gallery_items",
            "Vectors of all galleries, by release and state of their space.",
            labels=["release", "state"],
        )
        for (release, state), count in self._metrics.gallery_items().items():
            family.add_metric([str(release), state], count)
        yield family
