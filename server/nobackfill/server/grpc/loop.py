"""The hot path: gRPC's threaded server, with a loop and a pool of our own.

It receives a call's message before a thread is taken for it, and answers together what came
together. A search walks through a megabyte, and leaves neither gRPC nor Python in the processor's
caches: a message after it takes three times as long to receive as one after another message. So
messages are received first, then searched for, then answered.

This module alone uses names of grpcio that are not public. Importing it raises ImportError for a
grpcio that it was not tested with, or that lacks what it needs. The gateway then serves with a
plain `grpc.server` (listener.py).
"""

import inspect
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from heapq import heappop, heappush
from itertools import count, groupby
from typing import Any, NamedTuple

import grpc
import structlog
from grpc import _server
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from nobackfill.errors import InvalidInputError, NobackfillError, OverloadedError
from nobackfill.server.grpc.admission import LOOK_S, Lane
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.logs import request_id
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import AtOnce, Interceptor, Later, OpenStream, Rpc, Unanswered
from nobackfill.wire.connection import WATCH_AGAIN

# Versions of grpcio that this was tested with: the first, and the first that was not.
TESTED = ((1, 81), (1, 86))
# What is used of grpc._server, with its parameters where it is called or handed on.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "_abort": ("state", "call", "code", "details"),
    "_get_initial_metadata_operation": ("state", "metadata"),
    "_is_rpc_state_active": ("state",),
    "_application_code": ("code",),
    "_begin_shutdown_once": ("state",),
    "_possibly_finish_call": ("state", "token"),
    "_process_event_and_continue": ("state", "event"),
    "_receive_close_on_server": ("state",),
    "_receive_message": ("state", "call", "request_deserializer"),
    "_request_call": ("state",),
    "_request_registered_call": ("state", "method"),
    "_serialized_request": ("request_event",),
    "_status": ("rpc_event", "state", "serialized_response"),
    "_stream_response_in_pool": (
        "rpc_event", "state", "behavior", "argument_thunk", "request_deserializer",
        "response_serializer",
    ),
    "_unary_response_in_pool": (
        "rpc_event", "state", "behavior", "argument_thunk", "request_deserializer",
        "response_serializer",
    ),
    "_RPCState": (),
    "_Server": (
        "thread_pool", "generic_handlers", "interceptors", "options", "maximum_concurrent_rpcs",
        "compression", "xds",
    ),
}  # fmt: skip
_CONSTANTS = (
    "_CANCELLED", "_CLOSED", "_RECEIVE_CLOSE_ON_SERVER_TOKEN", "_RECEIVE_MESSAGE_TOKEN",
    "_SEND_MESSAGE_TOKEN", "_ServerStage",
)  # fmt: skip
_OPERATIONS = (
    "CompletionType", "ReceiveCloseOnServerOperation", "ReceiveMessageOperation",
    "SendInitialMetadataOperation", "SendMessageOperation", "SendStatusFromServerOperation",
    "StatusCode",
)  # fmt: skip


def check_grpcio() -> None:
    """Raise ImportError unless this grpcio was tested and has what this module needs."""
    version = grpc.__version__
    first, untested = TESTED
    if not first <= tuple(int(part) for part in version.split(".")[:2]) < untested:
        raise ImportError(
            f"grpcio {version} was not tested with the hot path; it needs "
            f"{'.'.join(map(str, first))} to below {'.'.join(map(str, untested))}"
        )
    for name in _CONSTANTS:
        if not hasattr(_server, name):
            raise ImportError(f"grpcio {version} has no grpc._server.{name}")
    for name in _OPERATIONS:
        if not hasattr(cygrpc, name):
            raise ImportError(f"grpcio {version} has no cygrpc.{name}")
    for name, parameters in _PARAMETERS.items():
        used: Any = getattr(_server, name, None)
        if used is None or tuple(inspect.signature(used).parameters) != parameters:
            raise ImportError(
                f"grpcio {version} has no grpc._server.{name} with {len(parameters)} parameters: "
                f"{', '.join(parameters)}"
            )


check_grpcio()

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

    def is_active(self) -> bool:
        """Whether its caller is there, and no status was sent."""
        return bool(_server._is_rpc_state_active(self.state))

    def cancel(self) -> None:
        """Cut it off."""
        self.event.call.cancel()

    def push(self, message: bytes, taken: Callable[[], None]) -> None:
        """Send one message of a stream, and call `taken` once gRPC has room for the next. Does
        nothing where the call has ended. Never waits."""
        state, token = self.state, _server._SEND_MESSAGE_TOKEN

        def sent(_event: Any) -> Any:
            with state.condition:
                finished = _server._possibly_finish_call(state, token)
            taken()
            return finished

        with state.condition:
            if not _server._is_rpc_state_active(state):
                return
            operations: tuple[Any, ...] = (cygrpc.SendMessageOperation(message, 0),)
            if state.initial_metadata_allowed:
                state.initial_metadata_allowed = False
                operations = (
                    _server._get_initial_metadata_operation(state, None),
                    *operations,
                )
            self.event.call.start_server_batch(operations, sent)
            state.due.add(token)

    def finish(self, trailers: tuple[tuple[str, str], ...] | None) -> None:
        """End a stream with OK."""
        self.rpc.end(grpc.StatusCode.OK)
        self.state.trailing_metadata = trailers
        _server._status(self.event, self.state, None)

    def on_finish(self, left: Callable[[], None]) -> None:
        """Call `left` once the call has ended, whatever ended it."""
        with self.state.condition:
            ended = self.state.callbacks is None
            if not ended:
                self.state.callbacks.append(left)
        if ended:
            left()

    def refuse(self, error: Exception) -> None:
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


# A call whose message is received and answered on gRPC's own thread: two requests to gRPC's core,
# where a call of grpcio's takes three, and keeps a state that nobody looks at. Whatever needs more
# becomes such a call.


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
        state.context.run(request_id.set, self.rpc.request_id)
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


# Watches: calls that are told what changes, and cost no thread.
#
# Callers who send the same request to the same method watch the same. One source makes the messages
# for all of them, and a few threads ask the sources in turn. gRPC tells when a message was taken; a
# slow caller then gets the newest, not each.

# Threads that ask sources, and how many of them one method takes at most. A look may take long:
# quality by subgroup is measured.
_LOOKING, _OF_A_METHOD = 4, 2


class SourceNews(NamedTuple):
    """The newest message of a source, its number from 1 on, and whether it is the last. Number 0:
    none yet."""

    number: int
    message: bytes | None
    is_last: bool


class Watcher:
    """One watch: it gets the newest message of its source, one at a time."""

    def __init__(self, arrival: Arrival, stream: OpenStream, metrics: Metrics) -> None:
        self.source: WatchSource | None = None
        self.has_ended = False
        self._arrival = arrival
        self._stream = stream
        self._metrics = metrics
        self._lock = threading.Lock()
        self._sent = 0
        self._sending = False

    def begin(self) -> None:
        """Hear of the end from now on."""
        self._stream.on_stop = self.offer
        self._arrival.on_finish(self._left)

    def offer(self) -> None:
        """Send the newest message once the one before was taken. End the call after the last, or
        where it was stopped. Never waits."""
        source = self.source
        assert source is not None, "it was added to one"
        if not self._stream.is_stopped:
            try:
                self._stream.check()
            except NobackfillError as error:
                # It calls this again.
                self._stream.stop(error)
                return
        with self._lock:
            if self._sending or self.has_ended:
                return
            news = source.news
            sends = news.number != self._sent and not self._stream.is_stopped
            if sends:
                self._sending, self._sent = True, news.number
            elif news.is_last or self._stream.is_stopped:
                self.has_ended = True
            else:
                return
        if sends and news.message is not None:
            self._stream.waiting = time.monotonic()
            self._arrival.push(news.message, self._taken)
        else:
            self._end(source)

    def _end(self, source: "WatchSource") -> None:
        source.leave(self)
        error = self._stream.reason or source.error
        if error is not None:
            self._arrival.refuse(error)
        else:
            self._arrival.finish(((WATCH_AGAIN, "1"),) if self._stream.is_old else None)

    def _taken(self) -> None:
        # On gRPC's own thread, which an error would end.
        with error_boundary(self._metrics, "watches"):
            self._stream.waiting = None
            with self._lock:
                self._sending = False
            self.offer()

    def _left(self) -> None:
        with error_boundary(self._metrics, "watches"), self._lock:
            ended, self.has_ended = self.has_ended, True
        assert self.source is not None, "it was added to one"
        self.source.leave(self)
        if not ended:
            self._arrival.rpc.end(grpc.StatusCode.CANCELLED)


class WatchSource:
    """What one request watches, for all who sent the same."""

    def __init__(self, key: tuple[str, bytes], make: Callable[[], Iterator[bytes | None]]) -> None:
        self.key = key
        self.make = make
        self.news = SourceNews(0, None, is_last=False)
        # Why it ended, if not by itself.
        self.error: Exception | None = None
        # Of the pump, under its lock: who came since the last look, and when the next is due.
        self.newcomers: list[Watcher] = []
        self.due = 0.0
        self.is_looking = False
        self._messages: Iterator[bytes | None] = iter(())
        self._lock = threading.Lock()
        self._watchers: set[Watcher] = set()

    @property
    def is_empty(self) -> bool:
        return not self._watchers

    def leave(self, watcher: Watcher) -> None:
        """Tell a watcher nothing more."""
        with self._lock:
            self._watchers.discard(watcher)

    def look(self, newcomers: Sequence[Watcher]) -> None:
        """Make the next message, if something is new, and offer it. Newcomers get what is so now:
        for them it begins anew."""
        number, newest, is_last = self.news
        newcomers = [one for one in newcomers if not one.has_ended]
        if not newcomers and self.is_empty:
            # All have left: what nobody waits for is not measured.
            return
        try:
            if newcomers:
                self._messages = self.make()
            # The second tells whether the first was the last.
            for _ in range(2):
                message = next(self._messages)
                if message is None:
                    break
                if message != newest or not newcomers:
                    number, newest = number + 1, message
        except StopIteration:
            is_last = True
        except Exception as error:  # noqa: BLE001 - its watchers are told
            self.error, is_last = error, True
        changed = number != self.news.number or is_last
        with self._lock:
            self._watchers.update(one for one in newcomers if not one.has_ended)
            watchers = tuple(self._watchers)
        self.news = SourceNews(number, newest, is_last)
        for watcher in watchers if changed else newcomers:
            watcher.offer()


class WatchPump:
    """Asks all sources in turn whether something is new."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._changed = threading.Condition()
        self._sources: dict[tuple[str, bytes], WatchSource] = {}
        # By method: when, a number that no two share, what.
        self._due: dict[str, list[tuple[float, int, WatchSource]]] = defaultdict(list)
        self._looking: Counter[str] = Counter()
        self._numbers = count()
        self._closing = False
        for _ in range(_LOOKING):
            threading.Thread(target=self._work, name="watches", daemon=True).start()

    def add(
        self, key: tuple[str, bytes], make: Callable[[], Iterator[bytes | None]], watcher: Watcher
    ) -> None:
        """Have `watcher` told what `make` yields, and what `key` stands for. Never waits."""
        with self._changed:
            source = self._sources.get(key)
            if source is None:
                source = self._sources[key] = WatchSource(key, make)
            self._join(source, watcher)
            if not source.is_looking:
                self._plan(source, time.monotonic())
        watcher.begin()

    def close(self) -> None:
        """End the threads once they have looked."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _join(self, source: WatchSource, watcher: Watcher) -> None:
        watcher.source = source
        source.newcomers.append(watcher)

    def _plan(self, source: WatchSource, at: float) -> None:
        source.due = at
        heappush(self._due[source.key[0]], (at, next(self._numbers), source))
        self._changed.notify()

    def _work(self) -> None:
        while (work := self._next()) is not None:
            source, newcomers = work
            with error_boundary(self._metrics, "watches"):
                source.look(newcomers)
            self._look_again(source)

    def _next(self) -> tuple[WatchSource, list[Watcher]] | None:
        """Wait for the source that is due next; None once the pump is closed."""
        with self._changed:
            while not self._closing:
                due = self._earliest()
                if due is None:
                    self._changed.wait()
                elif (left := due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    _, _, source = heappop(due)
                    self._looking[source.key[0]] += 1
                    source.is_looking = True
                    newcomers, source.newcomers = source.newcomers, []
                    return source, newcomers
            return None

    def _earliest(self) -> list[tuple[float, int, WatchSource]] | None:
        """The queue of the method whose source is due first, of those that may take a thread."""
        first = None
        for method, due in self._due.items():
            while due and (due[0][2].is_looking or due[0][0] != due[0][2].due):
                # It was planned anew since.
                heappop(due)
            if due and self._looking[method] < _OF_A_METHOD and (first is None or due < first):
                first = due
        return first

    def _look_again(self, source: WatchSource) -> None:
        with self._changed:
            source.is_looking = False
            self._looking[source.key[0]] -= 1
            self._changed.notify()
            newcomers = source.newcomers
            if source.news.is_last or (source.is_empty and not newcomers):
                del self._sources[source.key]
                if newcomers:
                    fresh = self._sources[source.key] = WatchSource(source.key, source.make)
                    for watcher in newcomers:
                        self._join(fresh, watcher)
                    self._plan(fresh, time.monotonic())
            else:
                self._plan(source, time.monotonic() + (0.0 if newcomers else LOOK_S))


# Where calls arrive: a unary call's message is awaited before a thread is taken for it.
#
# gRPC's threaded server takes a thread of its pool and then waits there for the message, so that
# callers who send none hold the pool. This stands in the place of that pool: it lets gRPC receive
# the message first (ADR 0008).

log = structlog.get_logger("server.executor")

_EVERY_S = 0.5
# Calls of one caller whose message is awaited, for each one that may wait for a thread: they cost
# no thread. Of more, the longest awaited is ended: who sends a message at once is never in the way.
_AWAITED = 4
# Calls that are answered together at most: meanwhile nothing else is received. Larger messages are
# for a thread.
_GATHERED, _GATHERABLE = 16, 256 * 1024
# What gRPC is given for each call: nobody waits for it.
_DONE: Future[Any] = Future()
_DONE.set_result(None)

# As grpcio makes them, and those that need less.
Call = Arrival | QuickCall


class CallExecutor(Executor):
    """Takes the place of gRPC's thread pool."""

    def __init__(self, interceptor: Interceptor) -> None:
        self._admission = interceptor.admission
        self._metrics = interceptor.metrics
        self._most = _AWAITED * interceptor.max_calls
        self._patience_s = interceptor.patience_s
        self._lock = threading.Lock()
        # By caller, the longest awaited first; strangers are one.
        self._awaited: defaultdict[str, dict[Call, None]] = defaultdict(dict)
        self._watches = WatchPump(interceptor.metrics)
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
            self._run(arrival, rpc.lane, arrival.argument)
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
        self._watches.close()

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
        lane = self._admission.lanes.heavier(arrival.rpc.lane)

        def done(answer: bytes | None) -> None:
            if answer is not None and arrival.is_wanted():
                arrival.send(answer)
            else:
                lane.run(lambda: arrival.answer(lambda: message))

        if self._enters(arrival, lane):
            later.add(Unanswered(arrival.deadline(), arrival.is_wanted, done))

    def _hand_on(self, arrival: Arrival, message: bytes) -> None:
        """To a thread of its lane."""
        try:
            lane, request = self._admission.weigh(arrival.rpc, message)
        except NobackfillError as error:
            arrival.refuse(error)
            return
        if arrival.rpc.kind.is_watch:
            self._watch_for(arrival, lane, request)
        else:
            self._run(arrival, lane, lambda: request)

    def _watch_for(self, arrival: Arrival, lane: Lane, message: Any) -> None:
        """Have it told what is new, on no thread of its own."""
        rpc = arrival.rpc
        if not self._enters(arrival, lane):
            return
        try:
            request = rpc.message(message)
        except NobackfillError as error:
            arrival.refuse(error)
            return
        # Fields that this gateway does not know make no other source.
        request.DiscardUnknownFields()
        key = rpc.kind.method, request.SerializeToString(deterministic=True)
        watcher = Watcher(arrival, rpc.open_stream(arrival), self._metrics)
        self._watches.add(key, partial(rpc.kind.watch, request), watcher)

    def _nothing_came(self, arrival: Arrival) -> None:
        if arrival.state.client is _server._CLOSED and not arrival.state.statused:
            arrival.refuse(InvalidInputError("expected one message, got none"))
        else:
            arrival.rpc.end(arrival.rpc.code or grpc.StatusCode.CANCELLED)

    def _run(self, arrival: Arrival, lane: Lane, argument: Callable[[], Any]) -> None:
        if self._enters(arrival, lane):
            lane.run(lambda: arrival.answer(argument))

    def _enters(self, arrival: Arrival, lane: Lane) -> bool:
        """Whether it has got a place; it is refused without."""
        try:
            self._admission.enter(arrival.rpc, lane, arrival.event.call.peer())
        except OverloadedError as error:
            arrival.refuse(error)
            return False
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


_STARTED = _server._ServerStage.STARTED
# Then it is looked whether the server was forgotten, as gRPC does.
_IDLE_S = 1.0
# How often it is looked whether all is answered.
_DRAINED_S = 0.01
# Events that may come while calls are gathered: of other calls they need not end.
_PATIENCE = 64


class Server(_server._Server):
    """Calls pass `interceptor`, and are answered by our pool."""

    def __init__(self, interceptor: Interceptor, options: Sequence[tuple[str, Any]]) -> None:
        pool: Any = CallExecutor(interceptor)
        super().__init__(pool, (), [interceptor], options, None, None, False)
        self._interceptor = interceptor
        self._pool: CallExecutor = pool
        interceptor.count_awaited(pool.awaited)

    @property
    def server(self) -> grpc.Server:
        """What services and ports are added to."""
        return self

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
        threading.Thread(
            target=_serve, args=(state, self._interceptor, self._pool), daemon=True
        ).start()

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

    def give_up(self) -> None:
        """End the calls whose message has not come."""
        self._pool.give_up()

    def close(self) -> None:
        """End the pool's thread, once the server has stopped."""
        self._pool.close()


def _serve(state: Any, interceptor: Interceptor, executor: CallExecutor) -> None:
    since = 0
    while True:
        since = since + 1 if executor.gathered else 0
        # To look without a wait takes a time that is over: gRPC waits a millisecond for one of now.
        # While a watch is open, calls are never alone, and each search waited for that.
        event = state.completion_queue.poll(0 if since else time.time() + _IDLE_S)
        if state.server_deallocated:
            _server._begin_shutdown_once(state)
        came = event.completion_type != cygrpc.CompletionType.queue_timeout
        if (
            came
            and not _quickly(state, interceptor, executor, event)
            and not _server._process_event_and_continue(state, event)
        ):
            return
        # Whose calls are all that are open, they are waited for no longer.
        alone = len(state.rpc_states) <= executor.gathered
        if executor.gathered and (alone or not came or since >= _PATIENCE):
            executor.answer_gathered()
        # gRPC's own loop says why: an event may hold a call that has ended.
        event = None


def _quickly(state: Any, interceptor: Interceptor, executor: CallExecutor, event: Any) -> bool:
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
    executor.take(call)
    return True
