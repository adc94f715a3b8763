"""The call that the present thread works for: who asks, until when, and whether still.

Work that takes long looks at `current().check()` between its parts; work handed to other threads
takes the Call along, as they have none of their own.
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

# No wait of a call takes longer, whatever its caller allows: gRPC and locks refuse the 292 years
# that a call without a deadline has left.
LONGEST_WAIT_S = 3600.0


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Call:
    """One call. `deadline` is on the monotonic clock, in seconds; `active` says whether the
    caller still waits. `key`: whose call it is, where that decides: its `x-session`, else its
    token's name, else `request_id`. `trace`: where traces are asked for."""

    principal: Principal
    deadline: float
    active: Callable[[], bool] = _always
    key: str = ""
    request_id: str = ""
    trace: CallTrace | None = None

    @property
    def name(self) -> str:
        """Whose the call is, by its token; empty where there are no tokens."""
        return "" if self.principal is LOCAL else self.principal.name

    def check(self) -> None:
        """Raises DeadlineError or CancelledError once nobody waits for the answer."""
        self.remaining()
        if not self.active():
            raise CancelledError("the caller has given the call up")

    def remaining(self) -> float:
        """Seconds left, more than 0 and at most LONGEST_WAIT_S: a timeout of whatever waits.
        Raises DeadlineError when there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError("the call's deadline passed; allow more time, or ask for less")
        return min(left, LONGEST_WAIT_S)


_current: contextvars.ContextVar[Call] = contextvars.ContextVar("call")
_UNTRACED: AbstractContextManager[None] = nullcontext()


def begin(call: Call) -> None:
    """Make `call` the one that this thread works for."""
    _current.set(call)


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Work for several calls at once: until the last of their deadlines."""
    token = _current.set(Call(current().principal, deadline))
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Call:
    """The call under way; outside of any (start, background jobs) one that may take an hour."""
    return _current.get(None) or Call(LOCAL, time.monotonic() + LONGEST_WAIT_S)


def reader() -> Call | None:
    """The call that a store reads for; None outside of any."""
    return _current.get(None)


def part(name: str) -> AbstractContextManager[None]:
    """The block is a part of the call under way, for whoever traces it."""
    call = _current.get(None)
    return _UNTRACED if call is None or call.trace is None else call.trace.part(name)


# Every refusal as a gRPC status: the table of nobackfill.wire.statuses, read by the gateway.

DOMAIN = "nobackfill.v1"
_FOLDERS = re.compile(r"(?<![\w/])/(?:[^\s/:]+/)+")


def code_of(error: Exception) -> StatusCode:
    """The table's status code; INTERNAL for what nobody foresaw."""
    row = row_of(type(error))
    if row is not None:
        return row.code
    # A full or failing disk, or a locked file, met below the rooms' own errors.
    storage = isinstance(error, OSError | sqlite3.OperationalError)
    return StatusCode.UNAVAILABLE if storage else StatusCode.INTERNAL


def status_of(error: Exception, request_id: str) -> Status:
    """The whole status: code, sentence, and ErrorInfo with a reason machines can read.

    Only our own errors speak for themselves: they hold no vectors and no tokens. Folders of this
    machine are cut off the paths they name.
    """
    code = code_of(error)
    own = isinstance(error, NobackfillError)
    message = without_folders(str(error)) if own else _unspoken(code, request_id)
    status = Status(code=code.value[0], message=message)
    row = row_of(type(error))
    if row is not None and row.reason:
        detail = Any()
        detail.Pack(ErrorInfo(reason=row.reason, domain=DOMAIN))
        status.details.append(detail)
    return status


def without_folders(sentence: str) -> str:
    """A sentence as clients may read it: files without the folders of this machine."""
    return _FOLDERS.sub("", sentence)


def _unspoken(code: StatusCode, request_id: str) -> str:
    if code is StatusCode.UNAVAILABLE:
        return f"storage does not answer as it should; the gateway's log knows request {request_id}"
    return f"unexpected failure; the gateway's log knows request {request_id}"


# What nobody foresaw does not end a thread that must go on: it is counted and logged.

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
