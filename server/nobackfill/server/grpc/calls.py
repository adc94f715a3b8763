"""The call that the present thread works for: who asks, until when, and whether still.

Work that takes long looks at `current().check()` between its parts; work handed to other threads
takes the Call along, as they have none of their own.
"""

import contextvars
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from nobackfill.errors import CancelledError, DeadlineError
from nobackfill.server.grpc.tokens import LOCAL, Principal
from nobackfill.server.grpc.traces import CallTrace

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
