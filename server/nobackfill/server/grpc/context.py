"""Hold the call that the present thread works for: its caller, its deadline, whether it still
waits.

Long work calls `current().check()` between its parts. Work on other threads takes the Call along,
because they have none of their own. This module also turns errors into gRPC statuses.
"""

import contextvars
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import structlog
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from nobackfill.errors import CancelledError, DeadlineError, NobackfillError
from nobackfill.server.grpc.access import LOCAL, Principal
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.traces import CallTrace
from nobackfill.wire.statuses import row_of

# Longest wait (seconds) of a call, whatever its caller allows: gRPC and locks refuse the 292 years
# that a call without a deadline has left.
MAX_WAIT_SECONDS = 3600.0


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Call:
    """Describe one call.

    Attributes:
        principal: the caller.
        deadline: on the monotonic clock, in seconds.
        active: tells whether the caller still waits.
        key: assigns the call in a canary: its `x-session`, else its token's name, else
            `request_id`.
        request_id: id of the request.
        trace: records its parts; None without traces.
    """

    principal: Principal
    deadline: float
    active: Callable[[], bool] = _always
    key: str = ""
    request_id: str = ""
    trace: CallTrace | None = None

    @property
    def name(self) -> str:
        """The name of the caller's token; empty without tokens."""
        return "" if self.principal is LOCAL else self.principal.name

    def check(self) -> None:
        """Check that the caller still waits.

        Raises:
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled it.
        """
        self.remaining()
        if not self.active():
            raise CancelledError("the caller has cancelled the call")

    def remaining(self) -> float:
        """Return the seconds left, above 0 and at most MAX_WAIT_SECONDS, for use as a timeout.

        Raises:
            DeadlineError: the call's time is over.
        """
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise DeadlineError("the call's deadline passed; allow more time, or ask for less")
        return min(seconds, MAX_WAIT_SECONDS)


_current: contextvars.ContextVar[Call] = contextvars.ContextVar("call")
_UNTRACED: AbstractContextManager[None] = nullcontext()


def begin(call: Call) -> None:
    """Set the call that this thread works for."""
    _current.set(call)


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Work for several calls at once during a block, until the last of their deadlines."""
    token = _current.set(Call(current().principal, deadline))
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Call:
    """Return the call that this thread works for; outside of any call, one with an hour left."""
    return _current.get(None) or Call(LOCAL, time.monotonic() + MAX_WAIT_SECONDS)


def reader() -> Call | None:
    """Return the call that a store reads for; None outside of any."""
    return _current.get(None)


def part(name: str) -> AbstractContextManager[None]:
    """Record the block as a part of the call, if it is traced."""
    call = _current.get(None)
    return _UNTRACED if call is None or call.trace is None else call.trace.part(name)


DOMAIN = "nobackfill.v1"
_FOLDERS = re.compile(r"(?<![\w/])/(?:[^\s/:]+/)+")


def code_of(error: Exception) -> StatusCode:
    """Return the gRPC status code of an error; INTERNAL for an unexpected one."""
    row = row_of(type(error))
    if row is not None:
        return row.code
    # A full or failing disk, or a locked file, below the errors of our own.
    storage = isinstance(error, OSError | sqlite3.OperationalError)
    return StatusCode.UNAVAILABLE if storage else StatusCode.INTERNAL


def status_of(error: Exception, request_id: str) -> Status:
    """Make the gRPC status of an error: code, message, and ErrorInfo with a reason for machines.

    Only our own errors are shown: they have no vectors and no tokens. Folders of this machine are
    cut from paths.

    Args:
        error: the error.
        request_id: id of the request, named in the message of other errors.
    """
    code = code_of(error)
    is_own = isinstance(error, NobackfillError)
    message = without_folders(str(error)) if is_own else _generic_message(code, request_id)
    status = Status(code=code.value[0], message=message)
    row = row_of(type(error))
    if row is not None and row.reason:
        detail = Any()
        detail.Pack(ErrorInfo(reason=row.reason, domain=DOMAIN))
        status.details.append(detail)
    return status


def without_folders(sentence: str) -> str:
    """Cut the folders from all paths in a sentence, for clients."""
    return _FOLDERS.sub("", sentence)


def _generic_message(code: StatusCode, request_id: str) -> str:
    if code is StatusCode.UNAVAILABLE:
        return f"the storage failed; the gateway's log has the details of request {request_id}"
    return f"unexpected failure; the gateway's log has the details of request {request_id}"


log = structlog.get_logger("server.survival")


@contextmanager
def error_boundary(metrics: Metrics, thread: str) -> Iterator[None]:
    """Log and count an unexpected error in one turn of a thread's work, so that the thread goes on.

    Args:
        metrics: counts the error.
        thread: label of nobackfill_unforeseen_errors_total: a fixed word, never a name from
            outside.
    """
    try:
        yield
    except Exception as error:
        log.exception("unexpected error, going on", thread=thread, error=type(error).__name__)
        metrics.unforeseen.labels(thread).inc()
