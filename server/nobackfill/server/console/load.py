"""How searches fare, read from what Prometheus reads: between two looks, not since the start."""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

# What is looked back on.
_WINDOW_SECONDS = 10.0
# As looks come about once a second, the oldest may be so much older.
_LATE_SECONDS = 1.0
_SEARCHES = ("Search", "SearchBatch")
# Answers to mistakes of the caller.
_CALLERS = ("INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED", "PERMISSION_DENIED", "CANCELLED")


@dataclass(frozen=True)
class Load:
    """Of the last seconds: searches a second, those that failed, milliseconds; None without any."""

    rate: float
    failed: int
    p50_ms: float | None
    p99_ms: float | None
    # Share of the running upgrade that is done, 0 to 1.
    ratio: float
    # That answers; 0 without one.
    release: int


@dataclass(frozen=True)
class _Look:
    at: float
    # Searches by the upper end of their time in seconds, cumulative.
    buckets: Mapping[float, float]
    failed: float
    ratio: float
    release: int


class LoadMeter:
    """Looks when it is asked, and remembers the looks of the last seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._looks: deque[_Look] = deque()

    def now(self) -> Load:
        """The load between the oldest look of the window and now."""
        look = self._look()
        with self._lock:
            # When nobody looked for a while, it begins anew.
            while self._looks and look.at - self._looks[0].at > _WINDOW_SECONDS + _LATE_SECONDS:
                self._looks.popleft()
            self._looks.append(look)
            first = self._looks[0]
        counts = {end: look.buckets[end] - first.buckets.get(end, 0.0) for end in look.buckets}
        total = max(counts.values(), default=0.0)
        seconds = max(look.at - first.at, 1e-9)
        return Load(
            rate=total / seconds if look.at > first.at else 0.0,
            failed=round(look.failed - first.failed),
            p50_ms=_quantile(sorted(counts.items()), 0.5),
            p99_ms=_quantile(sorted(counts.items()), 0.99),
            ratio=look.ratio,
            release=look.release,
        )

    def _look(self) -> _Look:
        buckets: dict[float, float] = {}
        failed = ratio = release = 0.0
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name == "nobackfill_upgrade_ratio":
                    ratio = sample.value
                elif sample.name == "nobackfill_active_release":
                    release = sample.value
                elif sample.labels.get("grpc_method") not in _SEARCHES:
                    continue
                elif sample.name == "grpc_server_handling_seconds_bucket":
                    end = float(sample.labels["le"])
                    buckets[end] = buckets.get(end, 0.0) + sample.value
                elif sample.name == "grpc_server_handled_total":
                    ours = sample.labels["grpc_code"] not in ("OK", *_CALLERS)
                    failed += sample.value if ours else 0.0
        return _Look(time.monotonic(), buckets, failed, ratio, int(release))


def _quantile(counts: Sequence[tuple[float, float]], share: float) -> float | None:
    """Milliseconds, as Prometheus's histogram_quantile has them: linear within a bucket."""
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    below, start = 0.0, 0.0
    for end, count in counts:
        if count >= share * total:
            if end == float("inf"):
                return 1000 * start
            inside = (share * total - below) / max(count - below, 1e-9)
            return 1000 * (start + (end - start) * inside)
        below, start = count, end
    return None
