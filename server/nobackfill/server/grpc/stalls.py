"""Streams that stand still because of their client, or are too old, are ended, so that they
hold no thread."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import structlog

from nobackfill.server.grpc.error_boundary import error_boundary
from nobackfill.server.grpc.metrics import Metrics

log = structlog.get_logger("server.stalls")

# A client that neither sends nor reads for so long has gone, or means harm.
PATIENCE_S = 60.0
_EVERY_S = 1.0


class Stalls:
    """Watches streams from one thread. Time that the gateway itself takes does not count."""

    def __init__(self, metrics: Metrics, patience_s: float = PATIENCE_S) -> None:
        self._metrics = metrics
        self._patience_s = patience_s
        self._lock = threading.Lock()
        # When each began to wait for its client.
        self._waiting: dict[grpc.ServicerContext, float] = {}
        # When those that may not last for ever have to end.
        self._ends: dict[grpc.ServicerContext, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)
        self._thread.start()

    def requests(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """The client's messages; waiting for each is watched."""
        while True:
            self._begin(context)
            try:
                request = next(requests)
            except StopIteration:
                return
            finally:
                self._end(context)
            yield request

    def responses(self, responses: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Our messages; until the client takes each is watched."""
        for response in responses:
            self._begin(context)
            try:
                yield response
            finally:
                self._end(context)

    def end_after(self, seconds: float, context: grpc.ServicerContext) -> Callable[[], None]:
        """End a stream after so long; returns what to call once it has ended."""
        with self._lock:
            self._ends[context] = time.monotonic() + seconds
        return lambda: self._forget(context)

    def end_all(self) -> None:
        """End the streams that may not last for ever, now."""
        with self._lock:
            contexts = list(self._ends)
        for context in contexts:
            context.cancel()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _begin(self, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._waiting[context] = time.monotonic()

    def _end(self, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._waiting.pop(context, None)

    def _forget(self, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._ends.pop(context, None)

    def _watch(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            with error_boundary(self._metrics, "stalls"):
                self._end_stalled()

    def _end_stalled(self) -> None:
        now = time.monotonic()
        limit = now - self._patience_s
        with self._lock:
            stalled = [context for context, since in self._waiting.items() if since < limit]
            old = [context for context, end in self._ends.items() if end < now]
        for context in old:
            context.cancel()
        for context in stalled:
            log.warning("transfer ended, its client stands still")
            context.cancel()
