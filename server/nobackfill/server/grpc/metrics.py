"""Export metrics to Prometheus, and answer health checks over HTTP. Labels never hold ids."""

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

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BOUNDS = (*map(str, map(float, _BUCKETS)), "+Inf")


class _MethodCounts:
    """Count the ended calls of one method."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.codes = dict.fromkeys(grpc.StatusCode, 0)
        self.buckets = [0] * len(_BOUNDS)
        self.seconds = 0.0


class CallMetrics(Collector):
    """Count calls as they end, and export the open and waiting ones.

    Calls are counted here and added up at a scrape: prometheus_client's own counters take a tenth
    of a search's time.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._methods: dict[str, _MethodCounts] = {}
        # Calls of unknown methods; their names come from callers, so they are no labels.
        self._unknown = 0
        # Set by the interceptor: by lane, the numbers of open and of waiting calls.
        self.lanes: Mapping[str, tuple[Callable[[], int], Callable[[], int]]] = {}
        registry.register(self)

    def count(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """Count an ended call, under a lock of its method; any thread may call it.

        Args:
            method: /package.Service/Name; it becomes labels, so it must be a method of the gateway.
            code: its status.
            seconds: time since its arrival.
        """
        counts = self._methods.get(method)
        if counts is None:
            counts = self._methods.setdefault(method, _MethodCounts())
        with counts.lock:
            counts.codes[code] += 1
            counts.buckets[bisect_left(_BUCKETS, seconds)] += 1
            counts.seconds += seconds

    def count_unknown_method(self) -> None:
        """Count a call of an unknown method as UNIMPLEMENTED, without its name."""
        self._unknown += 1

    def _ended(self) -> Iterator[Metric]:
        labels = ["grpc_service", "grpc_method"]
        handled = CounterMetricFamily(
            "grpc_server_handled", "Calls ended.", labels=[*labels, "grpc_code"]
        )
        handling = HistogramMetricFamily(
            "grpc_server_handling_seconds", "Time from a call's arrival to its end.", labels=labels
        )
        for method, counts in list(self._methods.items()):
            service, _, name = method.strip("/").rpartition("/")
            with counts.lock:
                codes, buckets = dict(counts.codes), list(accumulate(counts.buckets))
                seconds = counts.seconds
            for code, calls in codes.items():
                handled.add_metric([service, name, code.name], calls)
            pairs = list(zip(_BOUNDS, buckets, strict=True))
            handling.add_metric([service, name], buckets=pairs, sum_value=seconds)
        if self._unknown:
            handled.add_metric(["unknown", "unknown", "UNIMPLEMENTED"], self._unknown)
        yield handled
        yield handling

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of calls at a scrape: ended calls by method and status, their
        durations, and open and waiting calls by lane.

        A method without an ended call has no series yet. An error of a lane's counter fails the
        scrape.
        """
        yield from self._ended()
        is_open = GaugeMetricFamily(
            "nobackfill_calls_open", "Calls that came and have not ended, by lane.", labels=["lane"]
        )
        waiting_calls = GaugeMetricFamily(
            "nobackfill_calls_waiting",
            "Calls that wait for a thread of their lane; in lane message, for their message.",
            labels=["lane"],
        )
        for lane, (count_open, count_waiting) in self.lanes.items():
            is_open.add_metric([lane], count_open())
            waiting_calls.add_metric([lane], count_waiting())
        yield is_open
        yield waiting_calls


# Outcomes of a device's sync, the label `failure`.
FAILURES = ("none", "probes", "refused", "no route", "left behind")


class DeviceMetrics:
    """Count the syncs that devices report on request; devices are not told apart."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.syncs = Counter(
            "nobackfill_device_syncs_total", "Syncs that devices reported, by release and failure.",
            ["release", "failure"], registry=registry,
        )  # fmt: skip
        self.sync_seconds = Histogram(
            "nobackfill_device_sync_seconds", "Seconds of devices' upgrades, by release.",
            ["release"], buckets=(1, 5, 20, 60, 300, 1200, 3600), registry=registry,
        )  # fmt: skip
        self.neighbours_kept = Histogram(
            "nobackfill_device_neighbours_kept", "Share of nearest neighbours kept, 0 to 1.",
            ["release"], buckets=(0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1), registry=registry,
        )  # fmt: skip

    def set_expected_release(self, release: int) -> None:
        """Start a release's counters at 0, so that Prometheus sees its first failed sync. Counts
        that are there already stay.
        """
        for failure in FAILURES:
            self.syncs.labels(str(release), failure)


_DAY = timedelta(days=1)


class Expiries(Collector):
    """Export the days until metadata, certificates and tokens expire.

    The gateway sets each source, which maps a label to a time.
    """

    def __init__(self) -> None:
        self.metadata_expiries: Callable[[], Mapping[str, datetime]] = dict
        self.certificate_expiries: Callable[[], Mapping[str, datetime]] = dict
        # The first token to expire, without its name.
        self.first_token_expiry: Callable[[], datetime | None] = lambda: None

    def collect(self) -> Iterator[Metric]:
        """Yield at a scrape the days until each expires; negative after that. The sources are
        called each time, and their errors fail the scrape.

        If no token expires, its metric has no value.
        """
        now = datetime.now(UTC)
        for name, subject, label, ends in (
            ("metadata", "TUF metadata of a role", "role", self.metadata_expiries()),
            ("certificate", "a TLS certificate", "certificate", self.certificate_expiries()),
        ):
            family = GaugeMetricFamily(
                f"nobackfill_{name}_expires_days",
                f"Days until {subject} expires; negative: since it did.",
                labels=[label],
            )
            for value, end in ends.items():
                family.add_metric([value], (end - now) / _DAY)
            yield family
        tokens = GaugeMetricFamily(
            "nobackfill_token_expires_days", "Days until the first of the tokens expires."
        )
        first = self.first_token_expiry()
        if first is not None:
            tokens.add_metric([], (first - now) / _DAY)
        yield tokens


# HTTP on the metrics port: /metrics, and a kubelet's /healthz and /readyz. It is not encrypted, so
# that probes work while gRPC needs TLS and tokens; it shows nothing private.

_TEXT = [("Content-Type", "text/plain; charset=utf-8")]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


class _SilentRequestHandler(WSGIRequestHandler):
    # Longest time (seconds) for a request to arrive.
    timeout = 10

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: every probe would be a line."""


def make_metrics_server(
    host: str, port: int, registry: CollectorRegistry, is_ready: Callable[[], bool]
) -> WSGIServer:
    """Make an HTTP server that listens at once; run it with serve_forever, and close it with
    server_close.

    Each request has a thread, and 10 s to arrive.

    Args:
        host: host to listen on.
        port: port to listen on; 0 means any free one.
        registry: metrics of /metrics.
        is_ready: tells whether /readyz answers 200 instead of 503; called at each request.

    Raises:
        OSError: the port cannot be used, or the host is unknown.
        OverflowError: the port is below 0 or above 65535.
    """
    metrics: Any = make_wsgi_app(registry)

    def answer(environ: Any, start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == "/healthz" or (path == "/readyz" and is_ready()):
            start_response("200 OK", _TEXT)
            return [b"ok\n"]
        if path == "/readyz":
            start_response("503 Service Unavailable", _TEXT)
            return [b"starting or stopping\n"]
        if path in ("/metrics", "/"):
            return metrics(environ, start_response)  # type: ignore[no-any-return]
        start_response("404 Not Found", _TEXT)
        return [b"expected /metrics, /healthz or /readyz\n"]

    kind = _Ipv6Server if ":" in host else _Server
    return make_server(host, port, answer, kind, _SilentRequestHandler)


# Labels of threads whose unexpected errors are counted (`error_boundary`). Each series starts at 0,
# or Prometheus' `increase` would miss its first error.
THREADS = (
    "activation", "at once", "canary", "catalog", "connections", "executor", "first", "following",
    "healing", "images", "indexing", "stalls", "succession", "triton", "watches",
)  # fmt: skip


class Metrics:
    """Hold all metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.calls = CallMetrics(self.registry)
        self.active_release = Gauge(
            "nobackfill_active_release", "Number of the release that answers; 0 when none does.",
            registry=self.registry,
        )  # fmt: skip
        # Set by the gateway: vectors of all galleries by release and state of their space.
        self.count_gallery_items: Callable[[], Mapping[tuple[int, str], int]] = dict
        self.registry.register(_GalleryItems(self))
        # Set by the gateway: whether calls are answered, and the gateway is not stopping.
        self.is_ready: Callable[[], bool] = lambda: False
        # The gateway sets its sources.
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
        self.unexpected_errors = Counter(
            "nobackfill_unforeseen_errors_total", "Unexpected errors, by thread of work.",
            ["thread"], registry=self.registry,
        )  # fmt: skip
        for thread in THREADS:
            self.unexpected_errors.labels(thread)
        self.searches = Counter(
            "nobackfill_searches_total", "Queries answered, by how their space is searched.",
            ["searched"], registry=self.registry,
        )  # fmt: skip
        self.devices = DeviceMetrics(self.registry)
        self.free_disk_bytes = Gauge(
            "nobackfill_disk_free_bytes", "Free bytes where the data folder is.",
            registry=self.registry,
        )  # fmt: skip
        self.triton_restarts = Counter(
            "nobackfill_triton_restarts_total", "Restarts of the gateway's own Triton.",
            registry=self.registry,
        )  # fmt: skip
        self.model_server_up = Gauge(
            "nobackfill_model_server_up", "1 while images can be embedded.",
            registry=self.registry,
        )  # fmt: skip

    def serve(self, address: str) -> str:
        """Serve HTTP GET /metrics, /healthz and /readyz on a daemon thread until `close`; call it
        once.

        Args:
            address: HOST:PORT; port 0 means any free one.

        Returns:
            HOST:PORT with the port that is used; an IPv6 host without brackets.

        Raises:
            BusyError: the address cannot be used.
            ValueError: it is not HOST:PORT.
        """
        host, port = split_address(address, "metrics_address")
        try:
            self._server = make_metrics_server(host, port, self.registry, lambda: self.is_ready())
        except OSError as error:
            raise BusyError(
                f"metrics address {address} cannot be used ({error.strerror}): another program may "
                "listen there; set another with --metrics-address (port 0 takes any free one)"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()
        return f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop the HTTP server, and wait for its thread; only after `serve`.

        Requests in progress are not waited for. A second call does nothing; without `serve` it
        raises AttributeError.
        """
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _GalleryItems(Collector):
    """Count vectors at each scrape, not at each put."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "nobackfill_gallery_items",
            "Vectors of all galleries, by release and state of their space.",
            labels=["release", "state"],
        )
        for (release, state), count in self._metrics.count_gallery_items().items():
            family.add_metric([str(release), state], count)
        yield family
