"""One call's way through the interceptor: authorised, bounded, answered, counted once."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import grpc
import structlog
from grpc import _server
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_status import rpc_status

from nobackfill.errors import DeadlineError, NobackfillError
from nobackfill.server.grpc import context as calls
from nobackfill.server.grpc.access import LOCAL, Principal, check_gallery
from nobackfill.server.grpc.admission import Lane, OpenStream, Stalls
from nobackfill.server.grpc.context import code_of, status_of
from nobackfill.server.grpc.logs import Sparing
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.traces import CallTrace
from nobackfill.v1 import search_pb2
from nobackfill.wire.connection import WATCH_AGAIN

log = structlog.get_logger("server.interceptor")
# For refusals that cost their callers nothing: not let in, or shed.
_unworked = Sparing(10)
# More of a session's name is not looked at.
_LONGEST_KEY = 256
# A stream's caller that sets no deadline has this one.
_LONGEST_STREAM_S = 24 * 3600.0

Behavior = Callable[[Any, grpc.ServicerContext], Any]


def _nothing() -> None:
    """Without tokens nobody is shut out."""


class Unanswered(NamedTuple):
    """A call that threads of others answer. `deadline` is on the monotonic clock; `done` is told
    the answer once; None: a thread of its own has to."""

    deadline: float
    is_wanted: Callable[[], bool]
    done: Callable[[bytes | None], None]


class Later(NamedTuple):
    """What answers a call on threads of others. `add` is given the call, and never waits; `begin`
    is called once all that came together were given."""

    add: Callable[[Unanswered], None]
    begin: Callable[[], None]


# Requests' bytes, and who sent them, to their answers', where nothing has to be waited for, or to
# what answers later; None: on a thread, then.
AtOnce = Callable[[Sequence[tuple[bytes, Principal]]], Sequence[bytes | Later | None]]


class _Status(
    NamedTuple("_Fields", [("code", Any), ("details", Any), ("trailing_metadata", Any)]),
    grpc.Status,
):
    """A status with its error details and the request's id."""


@dataclass(frozen=True)
class Kind:
    """What the calls of one method have in common."""

    method: str
    behavior: Behavior
    # Bytes to the method's message; raises InvalidInputError, TooLargeError.
    read: Callable[[bytes], Any]
    # What the behavior answers to bytes.
    write: Callable[[Any], bytes]
    reads_stream: bool
    sends_stream: bool
    lane: Lane
    stalls: Stalls
    metrics: Metrics
    max_call_seconds: float
    # Whether searches of a gallery of that name take long.
    slow: Callable[[str], bool]
    # Answers some calls where they arrive: handing them on would cost more than they do.
    at_once: AtOnce | None = None

    @property
    def streams(self) -> bool:
        """Whether it may go on for as long as its client likes."""
        return self.reads_stream or self.sends_stream


class Rpc:
    """One call, from its arrival. gRPC calls it as the method's behavior, at most once."""

    def __init__(self, kind: Kind, request_id: str) -> None:
        self._kind = kind
        self.request_id = request_id
        self._arrived = time.monotonic()
        self._endings: list[Callable[[], None]] = []
        self.principal = LOCAL
        self.read = kind.read
        self.at_once = kind.at_once
        self.lane = kind.lane
        self.reads_stream = kind.reads_stream
        # Whose share of a lane it takes; empty: its address says.
        self.caller = ""
        # What the caller says of its session, if anything.
        self.session: str | None = None
        # Why it is not let in.
        self.refusal: NobackfillError | None = None
        # What is noted of it, where traces are asked for.
        self.trace: CallTrace | None = None
        # Why it was ended before its message came.
        self.code: grpc.StatusCode | None = None
        # Raises once its caller may not go on.
        self._confirm: Callable[[], None] = _nothing
        self._open: OpenStream | None = None

    def seconds(self) -> float:
        """That its answer may take."""
        return self._kind.max_call_seconds

    def let_in(self, principal: Principal, confirm: Callable[[], None] | None) -> None:
        """`confirm` raises once the principal's token is no longer good; None: without one."""
        self.principal = principal
        if confirm is not None:
            self.caller, self._confirm = principal.name, confirm

    def on_end(self, ending: Callable[[], None]) -> None:
        """Do this when the call has ended, whatever becomes of it."""
        self._endings.append(ending)

    def end(self, code: grpc.StatusCode) -> None:
        """Count the call, and give back what it held."""
        for ending in self._endings:
            ending()
        self._kind.metrics.calls.count(self._kind.method, code, time.monotonic() - self._arrived)
        if self.trace is not None:
            self.trace.end(code, self.request_id)

    def is_heavy(self, request: Any) -> bool:
        """Whether a small request asks for much: a model has to look at an image."""
        if isinstance(request, search_pb2.SearchRequest):
            return request.query.HasField("image")
        if isinstance(request, search_pb2.SearchBatchRequest):
            return any(query.HasField("image") for query in request.queries)
        return False

    def is_slow(self, request: Any) -> bool:
        """Whether it asks for a search that takes long, or of a gallery in which they do now."""
        searches = hasattr(request, "query") or hasattr(request, "queries")
        return searches and (request.HasField("accuracy") or self._kind.slow(request.gallery))

    def __call__(self, argument: Any, context: grpc.ServicerContext) -> Any:
        if self._kind.sends_stream:
            return self._stream(argument, context)
        return self._unary(argument, context)

    def _unary(self, argument: Any, context: grpc.ServicerContext) -> Any:
        code = grpc.StatusCode.OK
        try:
            return self._kind.behavior(self._enter(argument, context), context)
        except Exception as error:  # noqa: BLE001 - with `_stream`, the one place that may
            code = self._code(error, context)
            self._refuse(context, error, code)
        finally:
            self.end(code)

    def _stream(self, argument: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        code = grpc.StatusCode.OK
        try:
            request = self._enter(argument, context)
            stream = self._open
            assert stream is not None, "it was entered"
            yield from self._kind.stalls.responses(self._kind.behavior(request, context), stream)
            if stream.reason is not None:
                raise stream.reason
            if stream.is_old:
                context.set_trailing_metadata(((WATCH_AGAIN, "1"),))
        except GeneratorExit:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:  # noqa: BLE001
            code = self._code(error, context)
            self._refuse(context, error, code)
        finally:
            self.end(code)

    def _enter(self, argument: Any, context: grpc.ServicerContext) -> Any:
        """What the behavior is given: the message, or an iterator over those to come."""
        if self.trace is not None:
            self.trace.queued()
        if self.refusal is not None:
            raise self.refusal
        most = _LONGEST_STREAM_S if self._kind.streams else self._kind.max_call_seconds
        left = min(context.time_remaining(), self._arrived + most - time.monotonic())
        if not context.is_active() or left <= 0:
            raise DeadlineError("the call ended before its turn came; allow more time")
        active = self._watch(context).active if self._kind.streams else context.is_active
        key = (self.session or self.caller or self.request_id)[:_LONGEST_KEY]
        call = calls.Call(
            self.principal, time.monotonic() + left, active, key, self.request_id, self.trace
        )
        calls.begin(call)
        if self._open is not None and self._kind.reads_stream:
            return map(self._message, self._kind.stalls.requests(argument, self._open))
        return self._message(argument)

    def _watch(self, context: grpc.ServicerContext) -> OpenStream:
        """Have the stream ended when it stands still, is too old, or its token is good no more."""
        size = self.lane.size
        # gRPC's own services do not look whether they are to end.
        hears = self._kind.method.startswith("/nobackfill.")
        stream = self._open = OpenStream(
            context, self._confirm, size.longest_s, hears=hears, drained=size.drained
        )
        self.on_end(self._kind.stalls.watch(stream))
        return stream

    def _message(self, argument: Any) -> Any:
        """A request that the caller may make. Small ones were read where they came."""
        request = self.read(argument) if isinstance(argument, bytes) else argument
        check_gallery(self._kind.method, self.principal, request)
        return request

    def _code(self, error: Exception, context: grpc.ServicerContext) -> grpc.StatusCode:
        return code_of(self._why(error)) if context.is_active() else grpc.StatusCode.CANCELLED

    def _why(self, error: Exception) -> Exception:
        """Why the stream was ended, if it was: then its work has raised that it is not wanted."""
        return self._open.reason or error if self._open is not None else error

    def _refuse(
        self, context: grpc.ServicerContext, error: Exception, code: grpc.StatusCode
    ) -> NoReturn:
        error = self._why(error)
        unforeseen = code is grpc.StatusCode.INTERNAL
        level = log.exception if unforeseen else log.warning
        if self.refusal is None or _unworked.allows():
            level("refused", method=self._kind.method, code=code.name, error=type(error).__name__)
        status = rpc_status.to_status(status_of(error, self.request_id))
        metadata = (*status.trailing_metadata, ("x-request-id", self.request_id))
        context.abort_with_status(_Status(status.code, status.details, metadata))


# One call as grpcio hands it to its pool: received, then answered, from whichever thread.


class Arrival:
    """A call as grpcio hands it to its pool."""

    def __init__(
        self, run: Callable[..., object], respond: Callable[..., object], event: Any, state: Any,
        rpc: Rpc, argument: Callable[[], Any], _read: object, write: object,
    ) -> None:  # fmt: skip
        self.rpc = rpc
        self.event = event
        self.state = state
        self.argument = argument
        self._run = run
        self._respond = respond
        self._write = write
        self._came = False
        self.began = time.monotonic()

    def whole(self) -> "Arrival":
        """As a call of grpcio's, which it is."""
        return self

    def answer(self, argument: Callable[[], Any]) -> None:
        """Call the behavior on this thread, and send what it answers."""
        self._run(self._respond, self.event, self.state, self.rpc, argument, None, self._write)

    def send(self, answer: bytes) -> None:
        """Answer with a message that is there."""
        self.rpc.end(grpc.StatusCode.OK)
        _server._status(self.event, self.state, answer)

    def is_wanted(self) -> bool:
        """Whether the caller still waits."""
        open_ = self.state.client is not _server._CANCELLED
        return open_ and self.event.call_details.deadline > time.time()

    def deadline(self) -> float:
        """Until when its answer may come, on the monotonic clock."""
        left = float(self.event.call_details.deadline) - time.time()
        return time.monotonic() + min(left, self.rpc.seconds())

    def refuse(self, error: NobackfillError) -> None:
        """Answer with a refusal, without waiting for anything."""
        self.rpc.refusal = error
        self.answer(lambda: b"")

    def receive(self, received: Callable[[bytes | None], None]) -> None:
        """Ask for the message; `received` gets it, or None when none will come."""
        take = _server._receive_message(self.state, self.event.call, None)

        def come(event: Any) -> Any:
            finished = take(event)
            with self.state.condition:
                message, self.state.request = self.state.request, None
                # With a second status a call never ends, nor the server.
                self._came = True
                if self.state.statused:
                    message = None
            received(message)
            return finished

        with self.state.condition:
            operation = cygrpc.ReceiveMessageOperation(0)
            self.event.call.start_server_batch((operation,), come)
            self.state.due.add(_server._RECEIVE_MESSAGE_TOKEN)

    def end_unread(self, code: grpc.StatusCode, sentence: str) -> None:
        """End a call whose message has not come; its receiving ends with None. Nothing, once it
        has come: whoever has it answers."""
        with self.state.condition:
            if not self._came and not self.state.statused:
                self.rpc.code = code
                number = _server._application_code(code)
                _server._abort(self.state, self.event.call, number, sentence.encode())
