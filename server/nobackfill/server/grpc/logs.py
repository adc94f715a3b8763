"""JSON logs, one object a line on stderr, with the id of the request they belong to."""

import contextvars
import logging
import sys
import time
from collections.abc import MutableMapping
from typing import Any

import structlog
from structlog.tracebacks import ExceptionDictTransformer

# Id of the request that this thread, or context, works for; empty outside of any.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


def configure_logging() -> None:
    """Send structlog's lines from INFO on, and the standard library's warnings, to stderr as JSON.

    Replaces the handlers of the root logger, for the whole process. Lines of a request have its id.
    A later change of sys.stderr is not followed. A second call does not reach loggers that were
    used since the first.
    """
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add_request_id,
            # Values of local variables are left out: they may be vectors, or private metadata.
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_ToStructlog()], force=True)


def _add_request_id(
    _logger: Any, _name: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    if name := request_id.get():
        event["request_id"] = name
    return event


class LogLimit:
    """Limit the number of log lines a second, so that strangers cannot fill a disk.

    Metrics still count everything.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._second = 0
        self._lines = 0

    def allows(self) -> bool:
        """Count a line, and tell whether it may be written in this second; two threads at once may
        get one line too many.

        A line that is refused counts, too.
        """
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        return self._lines <= self._limit


class _ToStructlog(logging.Handler):
    """Pass records of libraries to structlog, message only: their arguments may hold
    private data.
    """

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger(record.name)
        log.log(record.levelno, "library", message=record.getMessage(), exc_info=record.exc_info)
