"""Queries answered once more by the other pair, off their callers' path."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from nobackfill.gallery.search.aside import give_way
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics

# What may wait; more is passed over, as callers come first.
_MOST_WAITING = 64
_MOST_BYTES = 64 << 20


class Mirror:
    """One thread, which lets all others go first."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._waiting = 0
        self._bytes = 0
        self._pool = ThreadPoolExecutor(1, "canary", initializer=give_way)

    def offer(self, work: Callable[[], None], size: int) -> bool:
        """Do `work`, which holds `size` bytes, some time; False: too much waits. Never waits."""
        with self._lock:
            if self._waiting >= _MOST_WAITING or self._bytes + size > _MOST_BYTES:
                return False
            self._waiting += 1
            self._bytes += size
        try:
            self._pool.submit(self._do, work, size)
        except RuntimeError:
            # No thread is to be had, or the gateway ends.
            self._left(size)
            return False
        return True

    def close(self) -> None:
        """What waits is not done any more."""
        self._pool.shutdown(cancel_futures=True)

    def _do(self, work: Callable[[], None], size: int) -> None:
        try:
            with error_boundary(self._metrics, "canary"):
                work()
        finally:
            self._left(size)

    def _left(self, size: int) -> None:
        with self._lock:
            self._waiting -= 1
            self._bytes -= size
