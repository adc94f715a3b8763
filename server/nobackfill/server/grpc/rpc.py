"""One call's way through the interceptor: authorised, bounded, answered, counted once."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import grpc
import structlog
from grpc_status import rpc_status

from nobackfill.errors import (
    DeadlineError,
    InvalidInputError,
    NobackfillError,
    OverloadedError,
    UnavailableError,
)
from nobackfill.server.grpc import context as calls
from nobackfill.server.grpc.access import (
    LOCAL,
    RULES,
    Confirmation,
    Principal,
    Tokens,
    authorize,
    check_gallery,
)
from nobackfill.server.grpc.admission import LARGE, LOOK_S, WATCHES, Lane, Lanes, reader
from nobackfill.server.grpc.context import code_of, error_boundary, status_of
from nobackfill.server.grpc.logs import Sparing, request_id
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.traces import CallTrace, Tracing
from nobackfill.v1 import search_pb2
from nobackfill.wire.connection import WATCH_AGAIN

log = structlog.get_logger("server.interceptor")
# For refusals that cost their callers nothing: not let in, or shed.
_unworked = Sparing(10)
# More of a session's name is not looked at.
_LONGEST_KEY = 256
# A stream's caller that sets no deadline has this one.
_LONGEST_STREAM_S = 24 * 3600.0
# A unary call may take so long to send its message.
PATIENCE_S = 20.0
# Bytes of large messages that have come and are worked on, or wait for it.
_LARGEST_HELD = 512 * 2**20

# A watch's is given no context.
Behavior = Callable[[Any, Any], Any]


def _nothing() -> None:
    """Without tokens nobody is shut out."""


# Streams end that stand still because of their client, are too old, or whose token is no longer
# good, so that they hold no thread and nobody who was shut out goes on.

# A client that neither sends nor reads for so long has gone, or means harm.
_STALLED_S = 60.0
_EVERY_S = 0.5
# A stream that was asked to end is cut off after so long.
_GRACE_S = 1.0


class StreamContext(Protocol):
    """What is used of a stream's `grpc.ServicerContext`."""

    def is_active(self) -> bool: ...

    def cancel(self) -> object: ...


class OpenStream:
    """One stream, from its first step to its end."""

    def __init__(
        self, context: StreamContext, confirm: Callable[[], None], longest_s: float, *,
        hears: bool, drained: bool,
    ) -> None:  # fmt: skip
        """`confirm` raises once the caller may not go on. `longest_s`: its age at most. `hears`:
        its work looks whether it is `active`. `drained`: the gateway's end waits for it."""
        self.context = context
        self.confirm = confirm
        self.ends = time.monotonic() + longest_s
        self.drained = drained
        # Why it was ended, if its caller is to hear that; whether it was because of its age.
        self.reason: NobackfillError | None = None
        self.is_old = False
        # Since when it waits for its client.
        self.waiting: float | None = None
        # Ends a stream that no thread works for.
        self.on_stop: Callable[[], None] | None = None
        self._grace_s = _GRACE_S if hears else 0.0
        self._stopped: float | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether it was asked to end."""
        return self._stopped is not None

    def active(self) -> bool:
        """Whether its work goes on."""
        return self._stopped is None and self.context.is_active()

    def check(self) -> None:
        """Raises UnauthenticatedError for a message of a caller who may not go on."""
        self.confirm()
        if self.reason is not None:
            raise self.reason

    def stop(self, reason: NobackfillError | None = None) -> None:
        """Ask it to end, and cut it off where it does not."""
        now = time.monotonic()
        if self._stopped is None:
            self.reason, self._stopped = reason, now
            if self.on_stop is not None:
                self.on_stop()
        if now - self._stopped >= self._grace_s:
            self.context.cancel()

    def look(self, refusal: NobackfillError | None) -> None:
        """End it where it has to end by now; `refusal`: why its caller may not go on, if so."""
        if refusal is not None:
            self.stop(refusal)
        if self._stopped is None and time.monotonic() > self.ends:
            self.is_old = True
            self.stop()
        elif self._stopped is not None:
            # It may not have heard.
            self.stop()


class Stalls:
    """Watches streams from one thread. Time that the gateway itself takes does not count as
    standing still."""

    def __init__(self, metrics: Metrics, patience_s: float = _STALLED_S) -> None:
        self._metrics = metrics
        self._patience_s = patience_s
        self._lock = threading.Lock()
        # By what confirms their callers: a token has thousands of watches, and is looked at once.
        self._streams: dict[Callable[[], None], set[OpenStream]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)
        self._thread.start()

    def watch(self, stream: OpenStream) -> Callable[[], None]:
        """Watch a stream from now on; returns what to call once it has ended."""
        with self._lock:
            self._streams.setdefault(stream.confirm, set()).add(stream)
        return lambda: self._forget(stream)

    def requests(self, requests: Iterator[Any], stream: OpenStream) -> Iterator[Any]:
        """The client's messages, each of a caller who may still send them; waiting for each is
        watched."""
        while True:
            stream.waiting = time.monotonic()
            try:
                request = next(requests)
            except StopIteration:
                return
            finally:
                stream.waiting = None
            stream.check()
            yield request

    def responses(self, responses: Iterator[Any], stream: OpenStream) -> Iterator[Any]:
        """Our messages, each to a caller who may still read them; until the client takes each is
        watched. None: nothing is new, the work is asked again in a moment."""
        for response in responses:
            if response is None:
                time.sleep(LOOK_S)
                if not stream.active():
                    return
                continue
            stream.check()
            stream.waiting = time.monotonic()
            try:
                yield response
            finally:
                stream.waiting = None

    def end_all(self) -> None:
        """End the streams that nobody waits for at the gateway's end, now."""
        for _, streams in self._all():
            for stream in streams:
                if not stream.drained:
                    stream.stop()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _all(self) -> list[tuple[Callable[[], None], list[OpenStream]]]:
        with self._lock:
            return [(confirm, list(streams)) for confirm, streams in self._streams.items()]

    def _forget(self, stream: OpenStream) -> None:
        with self._lock:
            streams = self._streams.get(stream.confirm, set())
            streams.discard(stream)
            if not streams:
                self._streams.pop(stream.confirm, None)

    def _watch(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            with error_boundary(self._metrics, "stalls"):
                for confirm, streams in self._all():
                    self._look(_refusal(confirm), streams)

    def _look(self, refusal: NobackfillError | None, streams: Sequence[OpenStream]) -> None:
        now = time.monotonic()
        for stream in streams:
            since = stream.waiting
            # Of thousands of quiet ones none takes the interpreter for longer than this line.
            if refusal is None and since is None and now <= stream.ends and not stream.is_stopped:
                continue
            stream.look(refusal)
            if since is not None and now - since > self._patience_s:
                log.warning("transfer ended, its client stands still")
                stream.context.cancel()


def _refusal(confirm: Callable[[], None]) -> NobackfillError | None:
    """Why callers may not go on; None where they may."""
    try:
        confirm()
    except NobackfillError as error:
        return error
    return None


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
    admission: "CallAdmission"
    stalls: Stalls
    metrics: Metrics
    max_call_seconds: float
    # A unary call may take so long to send its message.
    patience_s: float
    # Whether searches of a gallery of that name take long.
    slow: Callable[[str], bool]
    # Answers some calls where they arrive: handing them on would cost more than they do.
    at_once: AtOnce | None = None

    @property
    def is_watch(self) -> bool:
        """Whether it is told what changes."""
        return self.method in WATCHES

    def watch(self, request: Any) -> Iterator[bytes | None]:
        """Yield a watch's messages, and None where nothing is new."""
        for response in self.behavior(request, None):
            yield None if response is None else self.write(response)

    @property
    def streams(self) -> bool:
        """Whether it may go on for as long as its client likes."""
        return self.reads_stream or self.sends_stream


class CallAdmission:
    """Gives a call its place in a lane, and bounds what large messages take together."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        # Of a plain server: calls that it works on, and those among them whose message is awaited.
        self.working: set[PlainRpc] = set()
        self.awaited: set[PlainRpc] = set()
        self._lock = threading.Lock()
        self._held = 0

    def weigh(self, rpc: "Rpc", message: bytes) -> tuple[Lane, Any]:
        """Choose the lane of a call by its message; the lane and the request.

        Large messages are left unread: the thread that works for them reads them. Raises
        InvalidInputError, TooLargeError, and OverloadedError for one large message too many.
        """
        if len(message) > LARGE:
            self._hold(rpc, len(message))
            return self.lanes.heavier(rpc.lane), message
        request = rpc.read(message)
        if rpc.is_heavy(request):
            return self.lanes.heavier(rpc.lane), request
        return self.lanes.slower(rpc.lane) if rpc.is_slow(request) else rpc.lane, request

    def enter(self, rpc: "Rpc", lane: Lane, peer: bytes | str) -> None:
        """Take a place in `lane` until the call has ended. Raises OverloadedError."""
        caller = rpc.caller or _address(peer)
        role = rpc.principal.role
        lane.enter(caller, role)
        rpc.on_end(lambda: lane.leave(caller, role))

    def _hold(self, rpc: "Rpc", size: int) -> None:
        with self._lock:
            if self._held > 0 and self._held + size > _LARGEST_HELD:
                raise OverloadedError("too many large requests at once; try again later")
            self._held += size
        rpc.on_end(lambda: self._release(size))

    def _release(self, size: int) -> None:
        with self._lock:
            self._held -= size


class Rpc:
    """One call, from its arrival. gRPC calls it as the method's behavior, at most once."""

    # Whether gRPC calls the behavior before a unary call's message has come.
    awaits_message = False

    def __init__(self, kind: Kind, request_id: str) -> None:
        self.kind = kind
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
        self.refusal: Exception | None = None
        # What is noted of it, where traces are asked for.
        self.trace: CallTrace | None = None
        # Why it was ended before its message came.
        self.code: grpc.StatusCode | None = None
        # Raises once its caller may not go on.
        self._confirm: Callable[[], None] = _nothing
        self._open: OpenStream | None = None

    def seconds(self) -> float:
        """That its answer may take."""
        return self.kind.max_call_seconds

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
        self.kind.metrics.calls.count(self.kind.method, code, time.monotonic() - self._arrived)
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
        return searches and (request.HasField("accuracy") or self.kind.slow(request.gallery))

    def __call__(self, argument: Any, context: grpc.ServicerContext) -> Any:
        if self.kind.sends_stream:
            return self._stream(argument, context)
        return self._unary(argument, context)

    def _unary(self, argument: Any, context: grpc.ServicerContext) -> Any:
        code = grpc.StatusCode.OK
        try:
            return self.kind.behavior(self._enter(argument, context), context)
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
            yield from self.kind.stalls.responses(self.kind.behavior(request, context), stream)
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
        argument = self._admitted(argument, context)
        most = _LONGEST_STREAM_S if self.kind.streams else self.kind.max_call_seconds
        left = min(context.time_remaining(), self._arrived + most - time.monotonic())
        if not context.is_active() or left <= 0:
            raise DeadlineError("the call ended before its turn came; allow more time")
        active = self.open_stream(context).active if self.kind.streams else context.is_active
        key = (self.session or self.caller or self.request_id)[:_LONGEST_KEY]
        call = calls.Call(
            self.principal, time.monotonic() + left, active, key, self.request_id, self.trace
        )
        calls.begin(call)
        if self._open is not None and self.kind.reads_stream:
            return map(self.message, self.kind.stalls.requests(argument, self._open))
        return self.message(argument)

    def _admitted(self, argument: Any, context: grpc.ServicerContext) -> Any:
        """Give the call its place; what `_enter` is to work on. Done where it arrived."""
        return argument

    def open_stream(self, context: StreamContext) -> OpenStream:
        """Have the stream ended when it stands still, is too old, or its token is good no more."""
        size = self.lane.size
        # gRPC's own services do not look whether they are to end.
        hears = self.kind.is_watch or self.kind.method.startswith("/nobackfill.")
        stream = self._open = OpenStream(
            context, self._confirm, size.longest_s, hears=hears, drained=size.drained
        )
        self.on_end(self.kind.stalls.watch(stream))
        return stream

    def message(self, argument: Any) -> Any:
        """A request that the caller may make. Small ones were read where they came."""
        request = self.read(argument) if isinstance(argument, bytes) else argument
        check_gallery(self.kind.method, self.principal, request)
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
            level("refused", method=self.kind.method, code=code.name, error=type(error).__name__)
        status = rpc_status.to_status(status_of(error, self.request_id))
        metadata = (*status.trailing_metadata, ("x-request-id", self.request_id))
        context.abort_with_status(_Status(status.code, status.details, metadata))


class PlainRpc(Rpc):
    """A call of a plain `grpc.server`: it has a thread before its message has come.

    It waits on this thread for its message, then for its turn in a lane. gRPC is told that the call
    sends a stream, so that the wait can be watched and ended.
    """

    awaits_message = True

    def _admitted(self, argument: Any, context: grpc.ServicerContext) -> Any:
        admission, lane, request = self.kind.admission, self.lane, argument
        admission.working.add(self)
        if not context.add_callback(lambda: admission.working.discard(self)):
            admission.working.discard(self)
        if not self.kind.reads_stream:
            lane, request = admission.weigh(self, self._receive(argument, context))
        admission.enter(self, lane, context.peer())
        if not self.kind.streams:
            # A stream has its thread for as long as it lasts.
            lane.take_turn(min(context.time_remaining(), self.kind.max_call_seconds))
            self.on_end(lane.end_turn)
        return request

    def _receive(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Wait for the one message. The call is ended if it does not come in time."""
        kind, awaited = self.kind, self.kind.admission.awaited
        # At the gateway's end a message that is under way may still come.
        waiting = OpenStream(context, _nothing, kind.patience_s, hears=True, drained=False)
        ended = kind.stalls.watch(waiting)
        awaited.add(self)
        try:
            return next(messages)
        except StopIteration:
            raise InvalidInputError("expected one message, got none") from None
        finally:
            awaited.discard(self)
            ended()


# The one interceptor that every call passes, as soon as its headers come.
#
# It names the request and checks the token and the role, before a thread is taken or a message
# read. Services behind it only raise.

# Ids of this process's requests: random, then counted.
_prefix = os.urandom(6).hex() + "-"
_numbers = itertools.count(1)

# Generic in its stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]]"
MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class Interceptor(grpc.ServerInterceptor):
    """Wraps each call, for gRPC's own server or the one of loop.py."""

    def __init__(
        self,
        metrics: Metrics,
        tokens: Tokens | None,
        max_calls: int,
        max_call_seconds: float,
        patience_s: float = PATIENCE_S,
        slow: Callable[[str], bool] = lambda _gallery: False,
        at_once: Mapping[str, AtOnce] = MappingProxyType({}),
        tracing: Tracing | None = None,
        *,
        plain: bool = False,
    ) -> None:
        """`patience_s`: how long a unary call may take to send its message. `slow`: whether
        searches of a gallery take long, which then take no threads of the others. `at_once`: what
        answers calls of a method where they arrive, if it can. `plain`: a plain `grpc.server` gets
        the calls, not the one of loop.py."""
        self.plain = plain
        self.max_calls = max_calls
        self.patience_s = patience_s
        self._slow = slow
        self._at_once = at_once
        self._tracing = tracing
        self.metrics = metrics
        self._tokens = tokens
        self._max_call_seconds = max_call_seconds
        self.lanes = Lanes(max_calls, shared=tokens is not None, plain=plain)
        self.admission = CallAdmission(self.lanes)
        self.stalls = Stalls(metrics)
        self._draining = False
        self._kinds: dict[str, tuple[Kind, Handler]] = {}
        self.count_awaited(lambda: len(self.admission.awaited))

    def count_awaited(self, awaited: Callable[[], int]) -> None:
        """Show calls whose message has not come, as `awaited` counts them, beside the lanes'."""
        self.metrics.calls.lanes = {
            "message": (awaited, awaited),
            **{name: (lane.held, lane.waiting) for name, lane in self.lanes.all.items()},
        }

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], MaybeHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MaybeHandler:
        method = str(handler_call_details.method)
        known = self._kinds.get(method)
        if known is None:
            handler = continuation(handler_call_details)
            if handler is None:
                self.metrics.calls.count_unknown()
                return None
            known = self._kinds[method] = (self._kind(method, handler), handler)
        handling = self._handling(known, handler_call_details.invocation_metadata)
        request_id.set(handling.rpc.request_id)
        return handling

    def arrive(self, method: str, metadata: Metadata) -> "Handling | None":
        """How a call is handled that may be answered where it arrives; None: as any other, or it is
        not let in."""
        known = self._kinds.get(method)
        if known is None or known[0].at_once is None or self._tracing is not None:
            return None
        handling = self._handling(known, metadata)
        return handling if handling.rpc.refusal is None else None

    def _handling(self, known: "tuple[Kind, Handler]", metadata: Metadata) -> "Handling":
        kind, handler = known
        told = dict(metadata)
        made = PlainRpc if self.plain else Rpc
        rpc = made(kind, _request_name(_text(told.get("x-request-id"))))
        rpc.session = _text(told.get("x-session"))
        if self._tracing is not None:
            rpc.trace = CallTrace(self._tracing, kind.method, told)
        try:
            if self._draining:
                raise UnavailableError("the gateway is stopping; try again elsewhere")
            tokens, shown = self._tokens, _text(told.get("authorization"))
            principal = authorize(kind.method, tokens, shown)
            confirm = None
            if tokens is not None and RULES[kind.method] is not None:
                confirm = Confirmation(tokens, shown, principal)
            rpc.let_in(principal, confirm)
        except NobackfillError as error:
            rpc.refusal = error
        return Handling(handler, rpc, kind.write)

    def drain(self) -> None:
        """The gateway ends: calls that come now are refused, and those that nobody works on end."""
        self._draining = True
        self.stalls.end_all()

    def close(self) -> None:
        """End the threads once their calls have ended."""
        self.stalls.close()
        self.lanes.close()

    def _kind(self, method: str, handler: Handler) -> Kind:
        streams = bool(handler.request_streaming or handler.response_streaming)
        behavior = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        assert behavior is not None, "there are four kinds of calls"
        assert handler.request_deserializer is not None, "generated code brings one"
        return Kind(
            method=method,
            behavior=behavior,
            read=reader(handler.request_deserializer),
            write=_serializer(handler.response_serializer),
            reads_stream=bool(handler.request_streaming),
            sends_stream=bool(handler.response_streaming),
            lane=self.lanes.of(method, streams=streams),
            admission=self.admission,
            stalls=self.stalls,
            metrics=self.metrics,
            max_call_seconds=self._max_call_seconds,
            patience_s=self.patience_s,
            slow=self._slow,
            at_once=self._at_once.get(method),
        )


class Handling(grpc.RpcMethodHandler):  # type: ignore[type-arg] # generic in its stubs only
    """A call, as gRPC wants to have it handled: messages come as bytes, the rpc reads them."""

    request_deserializer = None

    def __init__(self, handler: Handler, rpc: Rpc, write: Callable[[Any], bytes]) -> None:
        self.rpc = rpc
        self.request_streaming = handler.request_streaming or rpc.awaits_message
        self.response_streaming = handler.response_streaming
        self.response_serializer = self.write = write
        # gRPC looks at the one that the two flags name.
        self.unary_unary = self.unary_stream = self.stream_unary = self.stream_stream = rpc


def _serializer(of_message: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """Some behaviors answer with bytes already."""
    assert of_message is not None, "generated code brings one"
    return lambda answer: answer if isinstance(answer, bytes) else of_message(answer)


def _request_name(given: str | None) -> str:
    """The caller's x-request-id if plain, else a new one."""
    plain = given is not None and 0 < len(given) <= 64 and given.isascii() and given.isprintable()
    return given if plain and given is not None else f"{_prefix}{next(_numbers):x}"


def _text(value: str | bytes | None) -> str | None:
    return value if isinstance(value, str) else None


def _address(peer: bytes | str) -> str:
    """A peer without its port: connections of one machine are one caller."""
    text = peer.decode(errors="replace") if isinstance(peer, bytes) else peer
    return text.rpartition(":")[0]
