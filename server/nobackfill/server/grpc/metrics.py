"""What Prometheus reads. No ids in labels."""

import threading
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from nobackfill.errors import BusyError
from nobackfill.server.grpc import health_pages
from nobackfill.server.grpc.call_metrics import CallMetrics
from nobackfill.server.grpc.device_metrics import DeviceMetrics
from nobackfill.server.grpc.expiry import Expiries
from nobackfill.server.settings import split_address

# Threads of work whose unforeseen errors are counted (`error_boundary`). A series starts at 0, or
# Prometheus' `increase` misses its first error.
THREADS = (
    "activation", "at once", "canary", "catalog", "connections", "executor", "first", "following",
    "healing", "images", "indexing", "stalls", "succession", "triton",
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
            self._server = health_pages.serve(host, port, self.registry, lambda: self.ready())
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
