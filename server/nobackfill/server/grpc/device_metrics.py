"""What devices reported, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Histogram

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
