"""gRPC's threaded server, which says when nothing more has come: what came together is answered
together then.

A search walks through a megabyte, and leaves neither gRPC nor Python in the processor's caches: a
message after it takes three times as long to receive as one after another message. So messages are
received first, then searched for, then answered. That is no public interface of grpcio, so what is
relied upon is checked, here and in executor.py.
"""

import inspect
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc
import structlog
from grpc import _server
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NobackfillError,
    OverloadedError,
    UnavailableError,
)
from nobackfill.server.grpc.access import RULES, Tokens, authorize
from nobackfill.server.grpc.admission import LARGE, Lane, Lanes, Stalls, reader
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.logs import name_request, request_name
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import Arrival, AtOnce, Kind, Later, Rpc, Unanswered
from nobackfill.server.grpc.traces import Tracing

# A call whose message is received and answered on gRPC's own thread: two requests to gRPC's core,
# where a call of grpcio's takes three, and keeps a state that nobody looks at. Whatever needs more
# becomes such a call. As in executor.py, no public interface of grpcio.


class QuickCall:
    """One of them, from its arrival; among the server's open calls until it has ended."""

    def __init__(
        self, event: Any, rpc: Rpc, write: Callable[[Any], bytes], open_calls: set[Any]
    ) -> None:
        """`event`: grpcio's of its arrival; `write`: what its answer's bytes are made by."""
        self.rpc = rpc
        self.event = event
        self.began = time.monotonic()
        self._write = write
        self._open_calls = open_calls
        self._lock = threading.Lock()
        self._whole: Arrival | None = None
        self._came = False
        open_calls.add(self)

    @property
    def listed(self) -> Any:
        """What stands for it among the server's open calls."""
        return self if self._whole is None else self._whole.state

    def receive(self, received: Callable[[bytes | None], None]) -> None:
        """Ask for the message; `received` gets it, or None when none will come."""

        def come(event: Any) -> Any:
            message = _server._serialized_request(event)
            with self._lock:
                self._came, ended = True, self._whole
            if ended is None:
                if message is None:
                    self.whole().state.client = _server._CLOSED
                received(message)
                return None, ()
            # With a second status a call never ends, nor the server.
            with ended.state.condition:
                finished = _server._possibly_finish_call(
                    ended.state, _server._RECEIVE_MESSAGE_TOKEN
                )
            received(None)
            return finished

        self.event.call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), come)

    def is_wanted(self) -> bool:
        """Whether the caller may still wait."""
        return bool(self.event.call_details.deadline > time.time())

    def send(self, answer: bytes) -> None:
        """Answer with a message that is there. It ends with what grpcio learns of the caller."""
        self.rpc.end(grpc.StatusCode.OK)
        self.event.call.start_server_batch(
            (
                cygrpc.SendInitialMetadataOperation(None, 0),
                cygrpc.SendMessageOperation(answer, 0),
                cygrpc.SendStatusFromServerOperation(None, cygrpc.StatusCode.ok, b"", 0),
                cygrpc.ReceiveCloseOnServerOperation(0),
            ),
            lambda _event: (self, ()),
        )

    def end_unread(self, code: grpc.StatusCode, sentence: str) -> None:
        """End a call whose message has not come; nothing, once it has: whoever has it answers."""
        with self._lock:
            if self._came:
                return
            whole = self._become()
        whole.end_unread(code, sentence)

    def whole(self) -> Arrival:
        """The same as a call of grpcio's, which knows whether its caller has left."""
        with self._lock:
            return self._become()

    def _become(self) -> Arrival:
        if self._whole is not None:
            return self._whole
        state: Any = _server._RPCState()  # type: ignore[no-untyped-call]
        state.context.run(name_request, self.rpc.request_id)
        with state.condition:
            self.event.call.start_server_batch(
                (cygrpc.ReceiveCloseOnServerOperation(0),), _server._receive_close_on_server(state)
            )
            state.due.add(_server._RECEIVE_CLOSE_ON_SERVER_TOKEN)
            if not self._came:
                state.due.add(_server._RECEIVE_MESSAGE_TOKEN)
        # Never none of them: the server would take itself for idle.
        self._open_calls.add(state)
        self._open_calls.remove(self)
        respond = _server._unary_response_in_pool
        self._whole = Arrival(
            state.context.run, respond, self.event, state, self.rpc, bytes, None, self._write
        )
        return self._whole


# Where calls arrive: a unary call's message is awaited before a thread is taken for it.
#
# gRPC's threaded server takes a thread of its pool and then waits there for the message, so that
# callers who send none hold the pool. This stands in the place of that pool: it lets gRPC receive
# the message first (ADR 0008). That is no public interface of grpcio, so what is relied upon is
# checked.

log = structlog.get_logger("server.executor")

# For so long a unary call may take to send its message.
PATIENCE_S = 20.0
_EVERY_S = 0.5
# Calls of one caller whose message is awaited, for each one that may wait for a thread: they cost
# no thread. Of more, the longest awaited is ended: who sends a message at once is never in the way.
_AWAITED = 4
# Calls that are answered together at most: meanwhile nothing else is received. Larger messages are
# for a thread.
_GATHERED, _GATHERABLE = 16, 256 * 1024
# Bytes of large messages that have come and are worked on, or wait for it.
_LARGEST_HELD = 512 * 2**20
# What gRPC is given for each call: nobody waits for it.
_DONE: Future[Any] = Future()
_DONE.set_result(None)

_RESPOND_PARAMETERS = (
    "rpc_event", "state", "behavior", "argument_thunk", "request_deserializer",
    "response_serializer",
)  # fmt: skip


# As grpcio makes them, and those that need less.
Call = Arrival | QuickCall


class CallExecutor(Executor):
    """Takes the place of gRPC's thread pool."""

    def __init__(self, lanes: Lanes, max_calls: int, patience_s: float, metrics: Metrics) -> None:
        """Raises ConfigurationError for a grpcio that works otherwise."""
        for respond in (_server._unary_response_in_pool, _server._stream_response_in_pool):
            if tuple(inspect.signature(respond).parameters) != _RESPOND_PARAMETERS:
                raise ConfigurationError(
                    f"grpcio {grpc.__version__} hands calls on otherwise than expected; install "
                    "the version that constraints.txt names"
                )
        self._lanes = lanes
        self._metrics = metrics
        self._most = _AWAITED * max_calls
        self._patience_s = patience_s
        self._lock = threading.Lock()
        # By caller, the longest awaited first; strangers are one.
        self._awaited: defaultdict[str, dict[Call, None]] = defaultdict(dict)
        self._held = 0
        self._gathered: list[tuple[AtOnce, Call, bytes]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="executor", daemon=True)
        self._thread.start()

    def submit(self, *call: Any, **_none: Any) -> Future[Any]:
        """What gRPC calls for each call that arrives. Never waits."""
        arrival = Arrival(*call)
        rpc = arrival.rpc
        if rpc.refusal is not None:
            arrival.refuse(rpc.refusal)
        elif rpc.reads_stream:
            self._admit(arrival, rpc.lane, arrival.argument)
        else:
            self.take(arrival)
        return _DONE

    def awaited(self) -> int:
        """Calls whose message has not come yet."""
        with self._lock:
            return sum(map(len, self._awaited.values()))

    def give_up(self) -> None:
        """The gateway ends: nothing more is awaited."""
        with self._lock:
            left = [arrival for some in self._awaited.values() for arrival in some]
        for arrival in left:
            arrival.end_unread(grpc.StatusCode.UNAVAILABLE, "the gateway is stopping")

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def take(self, arrival: Call) -> None:
        """Await its message. Never waits."""
        longest = None
        with self._lock:
            awaited = self._awaited[arrival.rpc.caller]
            if len(awaited) >= self._most:
                longest = next(iter(awaited))
                del awaited[longest]
            awaited[arrival] = None
        if longest is not None:
            longest.end_unread(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"expected at most {self._most} calls that have sent no message; send it at once",
            )
        arrival.receive(lambda message: self._received(arrival, message))

    def _received(self, arrival: Call, message: bytes | None) -> None:
        with self._lock:
            self._awaited[arrival.rpc.caller].pop(arrival, None)
        rpc = arrival.rpc
        if message is None:
            self._nothing_came(arrival.whole())
            return
        if (
            rpc.at_once is None
            or len(message) > _GATHERABLE
            or not rpc.lane.has_room(self.gathered)
        ):
            self._hand_on(arrival.whole(), message)
            return
        self._gathered.append((rpc.at_once, arrival, message))
        if self.gathered >= _GATHERED:
            self.answer_gathered()

    @property
    def gathered(self) -> int:
        """Calls that have come and wait for what comes with them."""
        return len(self._gathered)

    def answer_gathered(self) -> None:
        """Answer what takes no thread; only gRPC's own thread calls this."""
        gathered, self._gathered = self._gathered, []
        for at_once, some in groupby(gathered, key=lambda one: one[0]):
            self._answer(at_once, [(arrival, message) for _, arrival, message in some])

    def _answer(self, at_once: AtOnce, calls: Sequence[tuple[Call, bytes]]) -> None:
        answers: Sequence[bytes | Later | None] = [None] * len(calls)
        with error_boundary(self._metrics, "at once"):
            answers = at_once([(message, arrival.rpc.principal) for arrival, message in calls])
        begins: set[Callable[[], None]] = set()
        for (arrival, message), answer in zip(calls, answers, strict=True):
            if answer is None or not arrival.is_wanted():
                self._hand_on(arrival.whole(), message)
            elif isinstance(answer, bytes):
                arrival.send(answer)
            elif arrival.rpc.trace is not None:
                # Its parts are noted by the one thread that works for it.
                self._hand_on(arrival.whole(), message)
            else:
                self._answer_later(arrival.whole(), message, answer)
                begins.add(answer.begin)
        for begin in begins:
            begin()

    def _answer_later(self, arrival: Arrival, message: bytes, later: Later) -> None:
        """It has its place in the lane in which a thread would wait for the same."""
        lane = self._lanes.heavier(arrival.rpc.lane)

        def done(answer: bytes | None) -> None:
            if answer is not None and arrival.is_wanted():
                arrival.send(answer)
            else:
                lane.run(lambda: arrival.answer(lambda: message))

        if self._enters(arrival, lane):
            later.add(Unanswered(arrival.deadline(), arrival.is_wanted, done))

    def _hand_on(self, arrival: Arrival, message: bytes) -> None:
        """To a thread of its lane."""
        rpc = arrival.rpc
        lane = rpc.lane
        large = len(message) > LARGE
        try:
            request: Any = message
            if not large:
                request = rpc.read(message)
            if large or rpc.is_heavy(request):
                lane = self._lanes.heavier(lane)
            elif rpc.is_slow(request):
                lane = self._lanes.slower(lane)
        except NobackfillError as error:
            arrival.refuse(error)
            return
        self._hold(arrival, lane, request, len(message) if large else 0)

    def _hold(self, arrival: Arrival, lane: Lane, request: Any, size: int) -> None:
        with self._lock:
            full = bool(size) and self._held > 0 and self._held + size > _LARGEST_HELD
            if not full:
                self._held += size
        if full:
            arrival.refuse(OverloadedError("too many large requests at once; try again later"))
            return
        if size:
            arrival.rpc.on_end(lambda: self._let_go(size))
        self._admit(arrival, lane, lambda: request)

    def _let_go(self, size: int) -> None:
        with self._lock:
            self._held -= size

    def _nothing_came(self, arrival: Arrival) -> None:
        if arrival.state.client is _server._CLOSED and not arrival.state.statused:
            arrival.refuse(InvalidInputError("expected one message, got none"))
        else:
            arrival.rpc.end(arrival.rpc.code or grpc.StatusCode.CANCELLED)

    def _admit(self, arrival: Arrival, lane: Lane, argument: Callable[[], Any]) -> None:
        if self._enters(arrival, lane):
            lane.run(lambda: arrival.answer(argument))

    def _enters(self, arrival: Arrival, lane: Lane) -> bool:
        """Whether it has got a place; it is refused without."""
        caller = arrival.rpc.caller or _address(arrival.event.call.peer())
        role = arrival.rpc.principal.role
        try:
            lane.enter(caller, role)
        except OverloadedError as error:
            arrival.refuse(error)
            return False
        arrival.rpc.on_end(lambda: lane.leave(caller, role))
        return True

    def _watch(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            with error_boundary(self._metrics, "executor"):
                self._end_silent()

    def _end_silent(self) -> None:
        limit = time.monotonic() - self._patience_s
        with self._lock:
            silent = [a for some in self._awaited.values() for a in some if a.began < limit]
        for arrival in silent:
            arrival.end_unread(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the request did not come within {self._patience_s:g} s; send it at once",
            )
        if silent:
            log.warning("calls ended that sent no message", calls=len(silent))


def _address(peer: bytes | str) -> str:
    """A peer without its port: connections of one machine are one caller."""
    text = peer.decode(errors="replace") if isinstance(peer, bytes) else peer
    return text.rpartition(":")[0]


# The one interceptor that every call passes, as soon as its headers come.
#
# It names the request and checks the token and the role, before a thread is taken or a message
# read. What follows is in rpc.py. Services behind it only raise.

# Generic in its stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]]"
MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class Interceptor(grpc.ServerInterceptor):
    """Wraps each call. `pool` is what gRPC hands them to."""

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
    ) -> None:
        """`patience_s`: how long a unary call may take to send its message. `slow`: whether
        searches of a gallery take long, which then take no threads of the others. `at_once`: what
        answers calls of a method where they arrive, if it can."""
        self._slow = slow
        self._at_once = at_once
        self._tracing = tracing
        self._metrics = metrics
        self._tokens = tokens
        self._max_call_seconds = max_call_seconds
        self._lanes = Lanes(max_calls, shared=tokens is not None)
        self._executor = CallExecutor(self._lanes, max_calls, patience_s, metrics)
        self._stalls = Stalls(metrics)
        self._draining = False
        self._kinds: dict[str, tuple[Kind, Handler]] = {}
        awaited = self._executor.awaited
        metrics.calls.lanes = {
            "message": (awaited, awaited),
            **{name: (lane.held, lane.waiting) for name, lane in self._lanes.all.items()},
        }

    @property
    def pool(self) -> CallExecutor:
        return self._executor

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
                self._metrics.calls.count_unknown()
                return None
            known = self._kinds[method] = (self._kind(method, handler), handler)
        handling = self._handling(known, handler_call_details.invocation_metadata)
        name_request(handling.rpc.request_id)
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
        rpc = Rpc(kind, request_name(_text(told.get("x-request-id"))))
        rpc.session = _text(told.get("x-session"))
        if self._tracing is not None:
            rpc.trace = self._tracing.begin(kind.method, told)
        try:
            if self._draining:
                raise UnavailableError("the gateway is stopping; try again elsewhere")
            tokens, shown = self._tokens, _text(told.get("authorization"))
            principal = authorize(kind.method, tokens, shown)
            confirm = None
            if tokens is not None and RULES[kind.method] is not None:
                confirm = partial(tokens.confirm, shown, principal)
            rpc.let_in(principal, confirm)
        except NobackfillError as error:
            rpc.refusal = error
        return Handling(handler, rpc, kind.write)

    def drain(self) -> None:
        """The gateway ends: calls that come now are refused, and those that nobody works on end."""
        self._draining = True
        self._executor.give_up()
        self._stalls.end_all()

    def close(self) -> None:
        """End the threads once their calls have ended."""
        self._stalls.close()
        self._executor.close()
        self._lanes.close()

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
            lane=self._lanes.of(method, streams=streams),
            stalls=self._stalls,
            metrics=self._metrics,
            max_call_seconds=self._max_call_seconds,
            slow=self._slow,
            at_once=self._at_once.get(method),
        )


class Handling(grpc.RpcMethodHandler):  # type: ignore[type-arg] # generic in its stubs only
    """A call, as gRPC wants to have it handled: messages come as bytes, the rpc reads them."""

    request_deserializer = None

    def __init__(self, handler: Handler, rpc: Rpc, write: Callable[[Any], bytes]) -> None:
        self.rpc = rpc
        self.request_streaming = handler.request_streaming
        self.response_streaming = handler.response_streaming
        self.response_serializer = self.write = write
        # gRPC looks at the one that the two flags name.
        self.unary_unary = self.unary_stream = self.stream_unary = self.stream_stream = rpc


def _serializer(of_message: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """Some behaviors answer with bytes already."""
    assert of_message is not None, "generated code brings one"
    return lambda answer: answer if isinstance(answer, bytes) else of_message(answer)


def _text(value: str | bytes | None) -> str | None:
    return value if isinstance(value, str) else None


_STARTED = _server._ServerStage.STARTED
# Then it is looked whether the server was forgotten, as gRPC does.
_IDLE_S = 1.0
# How often it is looked whether all is answered.
_DRAINED_S = 0.01
# Events that may come while calls are gathered: of other calls they need not end.
_PATIENCE = 64
_SERVER_PARAMETERS = (
    "self", "thread_pool", "generic_handlers", "interceptors", "options",
    "maximum_concurrent_rpcs", "compression", "xds",
)  # fmt: skip


class Server(_server._Server):
    """Calls pass `interceptor`, and are answered by its pool."""

    def __init__(
        self,
        interceptor: Interceptor,
        options: Sequence[tuple[str, Any]],
    ) -> None:
        """Raises ConfigurationError for a grpcio that works otherwise."""
        if tuple(inspect.signature(_server._Server.__init__).parameters) != _SERVER_PARAMETERS:
            raise ConfigurationError(
                f"grpcio {grpc.__version__} makes servers otherwise than expected; install the "
                "version that constraints.txt names"
            )
        pool: Any = interceptor.pool
        super().__init__(pool, (), [interceptor], options, None, None, False)
        self._interceptor = interceptor

    def start(self) -> None:
        """As gRPC's, with another loop. Raises ValueError if it was started."""
        state = self._state
        with state.lock:
            if state.stage is not _server._ServerStage.STOPPED:
                raise ValueError("started already")
            state.server.start()
            state.stage = _STARTED
            for method in state.registered_method_handlers:
                _server._request_registered_call(state, method)
            _server._request_call(state)
        threading.Thread(target=_serve, args=(state, self._interceptor), daemon=True).start()

    def finish(self, end: float) -> None:
        """Wait until what is being answered now has ended, at most until `end` on the monotonic
        clock. What comes meanwhile is not waited for."""
        with self._state.lock:
            left = set(self._state.rpc_states)
        while left and time.monotonic() < end:
            time.sleep(_DRAINED_S)
            # Some have become calls of grpcio's meanwhile.
            left = {one.listed if isinstance(one, QuickCall) else one for one in left}
            with self._state.lock:
                left &= self._state.rpc_states


def _serve(state: Any, interceptor: Interceptor) -> None:
    executor, since = interceptor.pool, 0
    while True:
        since = since + 1 if executor.gathered else 0
        event = state.completion_queue.poll(time.time() + (0 if since else _IDLE_S))
        if state.server_deallocated:
            _server._begin_shutdown_once(state)
        came = event.completion_type != cygrpc.CompletionType.queue_timeout
        if (
            came
            and not _quickly(state, interceptor, event)
            and not _server._process_event_and_continue(state, event)
        ):
            return
        # Whose calls are all that are open, they are waited for no longer.
        alone = len(state.rpc_states) <= executor.gathered
        if executor.gathered and (alone or not came or since >= _PATIENCE):
            executor.answer_gathered()
        # gRPC's own loop says why: an event may hold a call that has ended.
        event = None


def _quickly(state: Any, interceptor: Interceptor, event: Any) -> bool:
    """Whether it was the arrival of a call that this thread may answer; its message is awaited."""
    method = event.tag
    if type(method) is not str or not event.success or state.stage is not _STARTED:
        return False
    handling = interceptor.arrive(method, event.invocation_metadata)
    if handling is None:
        return False
    with state.lock:
        if state.stage is not _STARTED:
            return False
        state.due.remove(method)
        call = QuickCall(event, handling.rpc, handling.write, state.rpc_states)
        _server._request_registered_call(state, method)
    interceptor.pool.take(call)
    return True
