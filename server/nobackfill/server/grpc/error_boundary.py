"""What nobody foresaw does not end a thread that must go on: it is counted and logged."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from nobackfill.server.grpc.metrics import Metrics

log = structlog.get_logger("server.survival")


@contextmanager
def error_boundary(metrics: Metrics, thread: str) -> Iterator[None]:
    """One turn of a thread's work. `thread` is a label of nobackfill_unforeseen_errors_total: a
    fixed word, never a name from outside."""
    try:
        yield
    except Exception as error:
        log.exception("unforeseen, going on", thread=thread, error=type(error).__name__)
        metrics.unforeseen.labels(thread).inc()
