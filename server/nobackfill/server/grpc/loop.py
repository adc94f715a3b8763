"""Serve gRPC calls on the hot path: grpcio's threaded server with a loop and a pool of our own.

It receives a call's message before it takes a thread for the call, and it answers calls that arrive
together in one go. A search walks through a megabyte, which drives gRPC and Python out of the
processor's caches: receiving a message then takes three times as long. So messages are received
first, then searched for, then answered.

Only this module uses private names of grpcio. Importing it raises ImportError if grpcio was not
tested with it, or lacks a name. The gateway then serves with a plain `grpc.server` (listener.py).
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
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.logs import request_id
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import (
    POLL_SECONDS,
    DeferredAnswer,
    DeferredCall,
    ImmediateAnswer,
    Interceptor,
    Lane,
    OpenStream,
    Rpc,
)
from nobackfill.wire.connection import WATCH_AGAIN_TRAILER

# The first tested version of grpcio, and the first untested one.
TESTED_GRPCIO = ((1, 81), (1, 86))
# The names of grpc._server that are used, with the parameters of functions.
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
    """Check that grpcio was tested with this module, and has the names that it uses.

    Names of grpc._server and of cygrpc are looked up, and the parameters of functions compared.

    Raises:
        ImportError: it was not tested, or lacks a name.
    """
    version = grpc.__version__
    first, untested = TESTED_GRPCIO
    if not first <= tuple(int(part) for part in version.split(".")[:2]) < untested:
        raise _unfit(version, "was not tested")
    for name in _CONSTANTS:
        if not hasattr(_server, name):
            raise _unfit(version, f"has no grpc._server.{name}")
    for name in _OPERATIONS:
        if not hasattr(cygrpc, name):
            raise _unfit(version, f"has no cygrpc.{name}")
    for name, parameters in _PARAMETERS.items():
        member: Any = getattr(_server, name, None)
        if member is None or tuple(inspect.signature(member).parameters) != parameters:
            raise _unfit(version, f"has no grpc._server.{name}({', '.join(parameters)})")


def _unfit(version: str, reason: str) -> ImportError:
    first, untested = (".".join(map(str, one)) for one in TESTED_GRPCIO)
    return ImportError(
        f"the gateway's fast server cannot be used: grpcio {version} {reason}; install grpcio "
        f"{first} to below {untested}"
    )


check_grpcio()


class Arrival:
    """Receive and answer one call that grpcio hands to its pool."""

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
        self._has_message = False
        self.arrived_at = time.monotonic()

    def to_arrival(self) -> "Arrival":
        """Return the call itself, so that callers need not know its class; see
        QuickCall.to_arrival.
        """
        return self

    def answer(self, argument: Callable[[], Any]) -> None:
        """Run the method's behavior on this thread, and send its answer; blocks until it has ended.

        An error of the behavior becomes the call's status, and is not raised. Call it at most once,
        and not after `send`, `finish` or `refuse`.

        Args:
            argument: returns the encoded message, or the iterator over messages of a stream.
        """
        self._run(self._respond, self.event, self.state, self.rpc, argument, None, self._write)

    def send(self, answer: bytes) -> None:
        """Send an encoded answer with status OK, without waiting.

        The call is counted as OK, and what it held is released, also if the caller has cancelled
        it; then nothing is sent. Call it once.
        """
        self.rpc.end(grpc.StatusCode.OK)
        _server._status(self.event, self.state, answer)

    def is_wanted(self) -> bool:
        """Tell whether the caller still waits: it has not cancelled, and its own deadline has not
        passed.
        """
        open_ = self.state.client is not _server._CANCELLED
        return open_ and self.event.call_details.deadline > time.time()

    def deadline(self) -> float:
        """Return the latest time for the answer, on the monotonic clock in seconds.

        It is the caller's deadline, but at most the longest time of a unary call from now. It lies
        in the past if the caller's deadline has passed.
        """
        remaining = float(self.event.call_details.deadline) - time.time()
        return time.monotonic() + min(remaining, self.rpc.time_limit_s())

    def is_active(self) -> bool:
        """Tell whether the caller has not cancelled, and no status was sent. A passed deadline is
        not checked.
        """
        return bool(_server._is_rpc_state_active(self.state))

    def cancel(self) -> None:
        """Cancel the call: its caller gets CANCELLED unless it has a status already. It is not
        counted here.
        """
        self.event.call.cancel()

    def push(self, message: bytes, on_sent: Callable[[], None]) -> None:
        """Send one message of a stream, without waiting; does nothing if the call has ended.

        Push the next message only after `on_sent`: gRPC sends one at a time. Any thread may call
        it; it takes the lock of grpcio's state.

        Args:
            message: the encoded message.
            on_sent: called on gRPC's own thread once there is room for the next message, or the
                send has failed; not called if the call had ended before. An error that it raises
                ends the thread of all calls.
        """
        state, token = self.state, _server._SEND_MESSAGE_TOKEN

        def complete(_event: Any) -> Any:
            with state.condition:
                finished = _server._possibly_finish_call(state, token)
            on_sent()
            return finished

        with state.condition:
            if not _server._is_rpc_state_active(state):
                return
            operations: tuple[Any, ...] = (cygrpc.SendMessageOperation(message, 0),)
            if state.initial_metadata_allowed:
                state.initial_metadata_allowed = False
                operations = (_server._get_initial_metadata_operation(state, None), *operations)
            self.event.call.start_server_batch(operations, complete)
            state.due.add(token)

    def finish(self, trailers: tuple[tuple[str, str], ...] | None) -> None:
        """End a stream with OK, and count it as OK; a cancelled call gets no status. Call it once.

        Call it after `on_sent` of the last message.

        Args:
            trailers: trailing metadata; None means none.
        """
        self.rpc.end(grpc.StatusCode.OK)
        self.state.trailing_metadata = trailers
        _server._status(self.event, self.state, None)

    def on_finish(self, callback: Callable[[], None]) -> None:
        """Call a function once the call has ended, on gRPC's own thread; at once, on this thread,
        if it has ended already.

        Any thread may call it. An error of the function is logged by grpcio, but reaches the caller
        if the call has ended already.
        """
        with self.state.condition:
            ended = self.state.callbacks is None
            if not ended:
                self.state.callbacks.append(callback)
        if ended:
            callback()

    def refuse(self, error: Exception) -> None:
        """Answer with an error, without waiting, and count the call with the error's status.

        The refusal is logged, but at most 10 such lines a second. Call it at most once, for a call
        without a status.

        Args:
            error: any error; one that is not a NobackfillError gets a message without details.
        """
        self.rpc.refusal = error
        self.answer(lambda: b"")

    def receive(self, on_message: Callable[[bytes | None], None]) -> None:
        """Request the message, without waiting; call it once.

        Args:
            on_message: called once, on gRPC's own thread, with the encoded message; with None if
                the caller sent none, has left, or has got a status meanwhile. An error that it
                raises ends the thread of all calls.
        """
        take = _server._receive_message(self.state, self.event.call, None)

        def complete(event: Any) -> Any:
            finished = take(event)
            with self.state.condition:
                message, self.state.request = self.state.request, None
                # Answer nothing after a status: a call with a second status never ends, and neither
                # does the server.
                self._has_message = True
                if self.state.statused:
                    message = None
            on_message(message)
            return finished

        with self.state.condition:
            operation = cygrpc.ReceiveMessageOperation(0)
            self.event.call.start_server_batch((operation,), complete)
            self.state.due.add(_server._RECEIVE_MESSAGE_TOKEN)

    def end_unread(self, code: grpc.StatusCode, sentence: str) -> None:
        """End a call whose message has not arrived; does nothing if it has, or if the call has a
        status.

        The call is counted later, once `receive` reports that no message came. Any thread may call
        it, also before `receive`.

        Args:
            code: the status.
            sentence: the error message.
        """
        with self.state.condition:
            if not self._has_message and not self.state.statused:
                self.rpc.code = code
                number = _server._application_code(code)
                _server._abort(self.state, self.event.call, number, sentence.encode())


class QuickCall:
    """Receive and answer one call on gRPC's own thread.

    It makes two requests to gRPC's core, where a call of grpcio makes three and keeps a state that
    nobody reads. It becomes an Arrival if it needs more. It is one of the server's open calls until
    it ends.
    """

    def __init__(
        self, event: Any, rpc: Rpc, write: Callable[[Any], bytes], open_calls: set[Any]
    ) -> None:
        """Register the call as open.

        Args:
            event: grpcio's event of the arrival.
            rpc: the call for the interceptor.
            write: encodes the answer.
            open_calls: the server's open calls.
        """
        self.rpc = rpc
        self.event = event
        self.arrived_at = time.monotonic()
        self._write = write
        self._open_calls = open_calls
        self._lock = threading.Lock()
        self._arrival: Arrival | None = None
        self._has_message = False
        open_calls.add(self)

    @property
    def open_call(self) -> Any:
        """The entry of this call among the server's open calls: itself, or grpcio's state once it
        has become an Arrival.
        """
        return self if self._arrival is None else self._arrival.state

    def receive(self, on_message: Callable[[bytes | None], None]) -> None:
        """Request the message, without waiting; call it once.

        Args:
            on_message: called once, on gRPC's own thread, with the encoded message; with None if
                the caller sent none or has left, or if `end_unread` has ended the call. An error
                that it raises ends the thread of all calls.
        """

        def complete(event: Any) -> Any:
            message = _server._serialized_request(event)
            with self._lock:
                self._has_message, arrival = True, self._arrival
            if arrival is None:
                if message is None:
                    self.to_arrival().state.client = _server._CLOSED
                on_message(message)
                return None, ()
            # Answer nothing after a status: a call with a second status never ends, and neither
            # does the server.
            with arrival.state.condition:
                finished = _server._possibly_finish_call(
                    arrival.state, _server._RECEIVE_MESSAGE_TOKEN
                )
            on_message(None)
            return finished

        self.event.call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), complete)

    def is_wanted(self) -> bool:
        """Tell whether the caller's deadline has not passed. A caller that has cancelled is not
        noticed.
        """
        return bool(self.event.call_details.deadline > time.time())

    def send(self, answer: bytes) -> None:
        """Send an encoded answer with status OK, without waiting, and count the call as OK.

        The call ends once grpcio knows whether the caller is still there. Call it once, and not
        after `to_arrival`. A call whose caller has left counts as OK, too, and nothing is sent.
        """
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
        """End a call whose message has not arrived; does nothing if it has, or if the call has a
        status.

        Else the call becomes an Arrival. Any thread may call it.

        Args:
            code: the status.
            sentence: the error message.
        """
        with self._lock:
            if self._has_message:
                return
            arrival = self._become_arrival()
        arrival.end_unread(code, sentence)

    def to_arrival(self) -> Arrival:
        """Turn the call into one of grpcio's, which knows whether its caller has left.

        Every later call returns the same Arrival. It replaces this call among the server's open
        calls. Any thread may call it, but not after `send`.
        """
        with self._lock:
            return self._become_arrival()

    def _become_arrival(self) -> Arrival:
        if self._arrival is not None:
            return self._arrival
        state: Any = _server._RPCState()  # type: ignore[no-untyped-call]
        state.context.run(request_id.set, self.rpc.request_id)
        with state.condition:
            self.event.call.start_server_batch(
                (cygrpc.ReceiveCloseOnServerOperation(0),), _server._receive_close_on_server(state)
            )
            state.due.add(_server._RECEIVE_CLOSE_ON_SERVER_TOKEN)
            if not self._has_message:
                state.due.add(_server._RECEIVE_MESSAGE_TOKEN)
        # Add before removing: without any open call the server would consider itself idle.
        self._open_calls.add(state)
        self._open_calls.remove(self)
        respond = _server._unary_response_in_pool
        self._arrival = Arrival(
            state.context.run, respond, self.event, state, self.rpc, bytes, None, self._write
        )
        return self._arrival


# Watches are calls that report changes, and hold no thread. Callers with the same request share a
# source, which makes their messages. A few threads poll the sources in turn. gRPC tells when a
# message was sent; a slow caller then gets the newest message, not each of them.

# Threads that poll sources, and most of them that one method uses. A poll may take long, as when
# quality by subgroup is measured.
_POLL_THREADS, _MAX_PER_METHOD = 4, 2


class SourceMessage(NamedTuple):
    """Hold the newest message of a source.

    Attributes:
        sequence_number: counts messages from 1; 0 before the first.
        message: the encoded message; None before the first.
        is_last: True if no message follows.
    """

    sequence_number: int
    message: bytes | None
    is_last: bool


class Watcher:
    """Send one caller the newest message of its source, one at a time."""

    def __init__(self, arrival: Arrival, stream: OpenStream, metrics: Metrics) -> None:
        self.source: WatchSource | None = None
        self.has_ended = False
        self._arrival = arrival
        self._stream = stream
        self._metrics = metrics
        self._lock = threading.Lock()
        self._last_number = 0
        self._is_sending = False

    def begin(self) -> None:
        """Register for the end of the call, and offer messages when the stream is stopped.

        The watcher must have a source. If the call has ended already, the watcher leaves its source
        at once.
        """
        self._stream.on_stop = self.send_newest
        self._arrival.on_finish(self._on_finish)

    def send_newest(self) -> None:
        """Send the newest message if the one before was sent; end the call after the last. Never
        waits.

        It also checks the caller. A caller that may not continue gets the refusal, and an error of
        the source goes to the caller. A stream that is too old ends with OK, and a trailer asks to
        watch again. Any thread may call it; without news it does nothing. The watcher must have a
        source.
        """
        source = self.source
        assert source is not None, "the watcher was added to a source"
        if not self._stream.is_stopped:
            try:
                self._stream.check()
            except NobackfillError as error:
                # This call returns here.
                self._stream.stop(error)
                return
        with self._lock:
            if self._is_sending or self.has_ended:
                return
            news = source.newest_message
            sends = news.sequence_number != self._last_number and not self._stream.is_stopped
            if sends:
                self._is_sending, self._last_number = True, news.sequence_number
            elif news.is_last or self._stream.is_stopped:
                self.has_ended = True
            else:
                return
        if sends and news.message is not None:
            self._stream.waiting_since = time.monotonic()
            self._arrival.push(news.message, self._on_sent)
        else:
            self._end(source)

    def _end(self, source: "WatchSource") -> None:
        source.remove_watcher(self)
        error = self._stream.stop_reason or source.error
        if error is not None:
            self._arrival.refuse(error)
        else:
            self._arrival.finish(((WATCH_AGAIN_TRAILER, "1"),) if self._stream.is_too_old else None)

    def _on_sent(self) -> None:
        # This runs on gRPC's own thread, which an error would end.
        with error_boundary(self._metrics, "watches"):
            self._stream.waiting_since = None
            with self._lock:
                self._is_sending = False
            self.send_newest()

    def _on_finish(self) -> None:
        with error_boundary(self._metrics, "watches"), self._lock:
            had_ended, self.has_ended = self.has_ended, True
        assert self.source is not None, "the watcher was added to a source"
        self.source.remove_watcher(self)
        if not had_ended:
            self._arrival.rpc.end(grpc.StatusCode.CANCELLED)


class WatchSource:
    """Make the messages of one request for all callers that sent it."""

    def __init__(
        self, request_key: tuple[str, bytes], make_messages: Callable[[], Iterator[bytes | None]]
    ) -> None:
        self.request_key = request_key
        self.make_messages = make_messages
        self.newest_message = SourceMessage(0, None, is_last=False)
        # The error that ended it; None if it ended by itself.
        self.error: Exception | None = None
        # Guarded by the pump's lock: watchers that came since the last poll, and the time of the
        # next one.
        self.new_watchers: list[Watcher] = []
        self.next_poll_at = 0.0
        self.is_polling = False
        self._messages: Iterator[bytes | None] = iter(())
        self._lock = threading.Lock()
        self._watchers: set[Watcher] = set()

    @property
    def is_empty(self) -> bool:
        """Whether no watcher is left; newcomers that wait for their first poll do not count."""
        return not self._watchers

    def remove_watcher(self, watcher: Watcher) -> None:
        """Remove a watcher; one that is not there is no error."""
        with self._lock:
            self._watchers.discard(watcher)

    def poll(self, new_watchers: Sequence[Watcher]) -> None:
        """Make the next message if something has changed, and offer it to the watchers.

        Newcomers get the present message: the source begins again for them. Without any watcher, it
        does nothing. An error of the source is kept in `error` and offered as the end, and is not
        raised. Call it on one thread at a time. After the last message it offers the end once more.

        Args:
            new_watchers: watchers that came since the last poll; those whose call has ended are
                left out.
        """
        number, message, is_last = self.newest_message
        new_watchers = [watcher for watcher in new_watchers if not watcher.has_ended]
        if not new_watchers and self.is_empty:
            # All watchers have left.
            return
        try:
            if new_watchers:
                self._messages = self.make_messages()
            # A second call tells whether the first message was the last.
            for _ in range(2):
                next_message = next(self._messages)
                if next_message is None:
                    break
                if next_message != message or not new_watchers:
                    number, message = number + 1, next_message
        except StopIteration:
            is_last = True
        except Exception as error:  # noqa: BLE001 - its watchers get the error
            self.error, is_last = error, True
        has_changed = number != self.newest_message.sequence_number or is_last
        with self._lock:
            self._watchers.update(watcher for watcher in new_watchers if not watcher.has_ended)
            watchers = tuple(self._watchers)
        self.newest_message = SourceMessage(number, message, is_last)
        for watcher in watchers if has_changed else new_watchers:
            watcher.send_newest()


class WatchPoller:
    """Poll all sources in turn, on four threads that start at once and that `close` stops."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._changed = threading.Condition()
        self._sources: dict[tuple[str, bytes], WatchSource] = {}
        # By method: the time of a poll, a number that no two entries share, and the source.
        self._queues: dict[str, list[tuple[float, int, WatchSource]]] = defaultdict(list)
        self._polling: Counter[str] = Counter()
        self._numbers = count()
        self._closing = False
        for _ in range(_POLL_THREADS):
            threading.Thread(target=self._work, name="watches", daemon=True).start()

    def add(
        self,
        key: tuple[str, bytes],
        make_messages: Callable[[], Iterator[bytes | None]],
        watcher: Watcher,
    ) -> None:
        """Add a watcher, without waiting.

        Its source is polled as soon as a thread is free, then every 0.2 s. At most 4 sources are
        polled at once, and 2 of one method. After `close` no source is polled any more, and the
        watcher gets nothing. Any thread may call it, once for each watcher.

        Args:
            key: method, and role and encoded request; it identifies the source.
            make_messages: makes the source's messages; None means that nothing has changed. Used
                only if the key has no source yet. It is called on a thread of the poller, again
                whenever watchers have joined.
            watcher: the watcher; the poller sets its `source`.
        """
        with self._changed:
            source = self._sources.get(key)
            if source is None:
                source = self._sources[key] = WatchSource(key, make_messages)
            self._join(source, watcher)
            if not source.is_polling:
                self._plan(source, time.monotonic())
        watcher.begin()

    def close(self) -> None:
        """Stop the threads once they have polled; does not wait for them, and ends no call.

        Watchers get no further message, and a second call changes nothing.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _join(self, source: WatchSource, watcher: Watcher) -> None:
        watcher.source = source
        source.new_watchers.append(watcher)

    def _plan(self, source: WatchSource, at: float) -> None:
        source.next_poll_at = at
        heappush(self._queues[source.request_key[0]], (at, next(self._numbers), source))
        self._changed.notify()

    def _work(self) -> None:
        while (work := self._next()) is not None:
            source, newcomers = work
            with error_boundary(self._metrics, "watches"):
                source.poll(newcomers)
            self._finish_poll(source)

    def _next(self) -> tuple[WatchSource, list[Watcher]] | None:
        """Wait for the source that is to be polled next; None once the poller is closed."""
        with self._changed:
            while not self._closing:
                queue = self._earliest()
                if queue is None:
                    self._changed.wait()
                elif (remaining := queue[0][0] - time.monotonic()) > 0:
                    self._changed.wait(remaining)
                else:
                    _, _, source = heappop(queue)
                    self._polling[source.request_key[0]] += 1
                    source.is_polling = True
                    newcomers, source.new_watchers = source.new_watchers, []
                    return source, newcomers
            return None

    def _earliest(self) -> list[tuple[float, int, WatchSource]] | None:
        """Return the queue with the earliest poll, of the methods that may use another thread."""
        first = None
        for method, queue in self._queues.items():
            while queue and (queue[0][2].is_polling or queue[0][0] != queue[0][2].next_poll_at):
                # The source was scheduled again since.
                heappop(queue)
            has_thread = self._polling[method] < _MAX_PER_METHOD
            if queue and has_thread and (first is None or queue < first):
                first = queue
        return first

    def _finish_poll(self, source: WatchSource) -> None:
        with self._changed:
            source.is_polling = False
            self._polling[source.request_key[0]] -= 1
            self._changed.notify()
            newcomers = source.new_watchers
            if source.newest_message.is_last or (source.is_empty and not newcomers):
                del self._sources[source.request_key]
                if newcomers:
                    new_source = self._sources[source.request_key] = WatchSource(
                        source.request_key, source.make_messages
                    )
                    for watcher in newcomers:
                        self._join(new_source, watcher)
                    self._plan(new_source, time.monotonic())
            else:
                self._plan(source, time.monotonic() + (0.0 if newcomers else POLL_SECONDS))


log = structlog.get_logger("server.executor")

_CHECK_SECONDS = 0.5
# Most calls of one caller whose message is awaited, for each call that may wait for a thread. They
# hold no thread. Above the limit the longest awaited one is ended, so callers that send promptly
# are unaffected.
_AWAITED_PER_CALL = 4
# Most calls that are answered in one go; nothing is received meanwhile. Larger messages go to a
# thread.
_MAX_BATCH, _MAX_BATCH_MESSAGE = 16, 256 * 1024
# The result for gRPC of each submitted call; nobody waits for it.
_FINISHED: Future[Any] = Future()
_FINISHED.set_result(None)

# A call with or without grpcio's state.
Call = Arrival | QuickCall


class CallExecutor(Executor):
    """Receive each call's message before a thread is taken for it; gRPC uses this as its thread
    pool. Its own threads, five, run from the construction to `close`.

    gRPC's threaded server takes a thread of its pool and waits there for the message, so callers
    that send none hold the pool (ADR 0008).
    """

    def __init__(self, interceptor: Interceptor) -> None:
        self._admission = interceptor.admission
        self._metrics = interceptor.metrics
        self._max_awaited = _AWAITED_PER_CALL * interceptor.max_calls
        self._receive_timeout_s = interceptor.receive_timeout_s
        self._lock = threading.Lock()
        # By caller, the longest awaited first; all callers without a token are one.
        self._awaited: defaultdict[str, dict[Call, None]] = defaultdict(dict)
        self._watches = WatchPoller(interceptor.metrics)
        self._batch: list[tuple[ImmediateAnswer, Call, bytes]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="executor", daemon=True)
        self._thread.start()

    def submit(self, *call: Any, **_none: Any) -> Future[Any]:
        """Take a call that has arrived; gRPC calls this. Never waits.

        A refused call gets its error. A call that reads a stream gets a thread of its lane, or
        OverloadedError as its status. The message of any other call is requested first. After
        `close` it still takes calls, but no silent call is ended any more.

        Returns:
            A future that is finished and holds None, whatever becomes of the call.
        """
        arrival = Arrival(*call)
        rpc = arrival.rpc
        if rpc.refusal is not None:
            arrival.refuse(rpc.refusal)
        elif rpc.reads_stream:
            self._run(arrival, rpc.lane, arrival.argument)
        else:
            self.receive_message(arrival)
        return _FINISHED

    def unread_count(self) -> int:
        """Return the number of calls whose message has not arrived, of all callers."""
        with self._lock:
            return sum(map(len, self._awaited.values()))

    def end_unread_calls(self) -> None:
        """End all calls whose message has not arrived with UNAVAILABLE, because the gateway stops.
        Calls that arrive later are still taken.

        It sends the ends and does not wait; any thread may call it.
        """
        with self._lock:
            arrivals = [arrival for calls in self._awaited.values() for arrival in calls]
        for arrival in arrivals:
            arrival.end_unread(grpc.StatusCode.UNAVAILABLE, "the gateway is stopping")

    def close(self) -> None:
        """Stop the thread that ends silent calls, and wait for it; then tell the threads of watches
        to stop, without waiting. No call is ended.

        Calls that arrive later are still taken, but silent ones stay open. A second call changes
        nothing.
        """
        self._stopping.set()
        self._thread.join()
        self._watches.close()

    def receive_message(self, arrival: Call) -> None:
        """Request a call's message, without waiting.

        A caller may have 4 calls without a message for each call that may wait. Above that, its
        longest awaited call ends with RESOURCE_EXHAUSTED. All callers without a token count as one.
        Call it once for each call, on any thread.

        Args:
            arrival: the call; it ends with DEADLINE_EXCEEDED if its message does not come within
                the patience of the interceptor.
        """
        longest = None
        with self._lock:
            awaited = self._awaited[arrival.rpc.caller]
            if len(awaited) >= self._max_awaited:
                longest = next(iter(awaited))
                del awaited[longest]
            awaited[arrival] = None
        if longest is not None:
            longest.end_unread(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"expected at most {self._max_awaited} calls of one caller that wait for their "
                "request message, got more; send the message of each call promptly",
            )
        arrival.receive(lambda message: self._received(arrival, message))

    def _received(self, arrival: Call, message: bytes | None) -> None:
        with self._lock:
            self._awaited[arrival.rpc.caller].pop(arrival, None)
        rpc = arrival.rpc
        if message is None:
            self._end_without_message(arrival.to_arrival())
            return
        if (
            rpc.answer_immediately is None
            or len(message) > _MAX_BATCH_MESSAGE
            or not rpc.lane.has_room(self.waiting_call_count)
        ):
            self._hand_on(arrival.to_arrival(), message)
            return
        self._batch.append((rpc.answer_immediately, arrival, message))
        if self.waiting_call_count >= _MAX_BATCH:
            self.answer_batch()

    @property
    def waiting_call_count(self) -> int:
        """The number of calls that wait to be answered in one go, 0 to 16."""
        return len(self._batch)

    def answer_batch(self) -> None:
        """Answer the calls that need no thread; called on gRPC's own thread only.

        Calls of one method that follow each other are answered in one go. Calls without such an
        answer, with a past deadline, or of a batch that failed get a thread. A failure is logged
        and counted. Without waiting calls it does nothing.

        Raises:
            ValueError: a method's immediate answer returned too few or too many answers.
            Exception: any error of a DeferredAnswer's functions. Either ends gRPC's thread.
        """
        batch, self._batch = self._batch, []
        for answer, calls in groupby(batch, key=lambda entry: entry[0]):
            self._answer(answer, [(arrival, message) for _, arrival, message in calls])

    def _answer(self, answer_calls: ImmediateAnswer, calls: Sequence[tuple[Call, bytes]]) -> None:
        answers: Sequence[bytes | DeferredAnswer | None] = [None] * len(calls)
        with error_boundary(self._metrics, "at once"):
            answers = answer_calls([(message, arrival.rpc.principal) for arrival, message in calls])
        begins: set[Callable[[], None]] = set()
        for (arrival, message), answer in zip(calls, answers, strict=True):
            if answer is None or not arrival.is_wanted():
                self._hand_on(arrival.to_arrival(), message)
            elif isinstance(answer, bytes):
                arrival.send(answer)
            elif arrival.rpc.trace is not None:
                # A trace needs one thread that works for the call.
                self._hand_on(arrival.to_arrival(), message)
            else:
                self._answer_later(arrival.to_arrival(), message, answer)
                begins.add(answer.begin_batch)
        for begin in begins:
            begin()

    def _answer_later(self, arrival: Arrival, message: bytes, later: DeferredAnswer) -> None:
        """Queue a call; it takes a place in the lane where a thread would wait for the same
        work.
        """
        lane = self._admission.lanes.heavy_lane(arrival.rpc.lane)

        def complete(answer: bytes | None) -> None:
            if answer is not None and arrival.is_wanted():
                arrival.send(answer)
            else:
                lane.run(lambda: arrival.answer(lambda: message))

        if self._enters(arrival, lane):
            later.add_call(DeferredCall(arrival.deadline(), arrival.is_wanted, complete))

    def _hand_on(self, arrival: Arrival, message: bytes) -> None:
        """Give a call to a thread of its lane."""
        try:
            lane, request = self._admission.choose_lane(arrival.rpc, message)
        except NobackfillError as error:
            arrival.refuse(error)
            return
        if arrival.rpc.method.is_watch:
            self._watch_for(arrival, lane, request)
        else:
            self._run(arrival, lane, lambda: request)

    def _watch_for(self, arrival: Arrival, lane: Lane, message: Any) -> None:
        """Add a watch, which holds no thread."""
        rpc = arrival.rpc
        if not self._enters(arrival, lane):
            return
        try:
            request = rpc.decode_and_check(message)
        except NobackfillError as error:
            arrival.refuse(error)
            return
        # Unknown fields do not make another source.
        request.DiscardUnknownFields()
        # Messages depend on the role, so callers of different roles share no source.
        role = rpc.principal.role
        key = rpc.method.path, role.name.encode() + request.SerializeToString(deterministic=True)
        watcher = Watcher(arrival, rpc.open_stream(arrival), self._metrics)
        self._watches.add(key, partial(rpc.method.watch, request, role), watcher)

    def _end_without_message(self, arrival: Arrival) -> None:
        if arrival.state.client is _server._CLOSED and not arrival.state.statused:
            arrival.refuse(
                InvalidInputError("expected one request message in the call, got none; send one")
            )
        else:
            arrival.rpc.end(arrival.rpc.code or grpc.StatusCode.CANCELLED)

    def _run(self, arrival: Arrival, lane: Lane, argument: Callable[[], Any]) -> None:
        if self._enters(arrival, lane):
            lane.run(lambda: arrival.answer(argument))

    def _enters(self, arrival: Arrival, lane: Lane) -> bool:
        """Take a place for a call, or refuse it; tells whether it has one."""
        try:
            self._admission.enter(arrival.rpc, lane, arrival.event.call.peer())
        except OverloadedError as error:
            arrival.refuse(error)
            return False
        return True

    def _watch(self) -> None:
        while not self._stopping.wait(_CHECK_SECONDS):
            with error_boundary(self._metrics, "executor"):
                self._end_silent()

    def _end_silent(self) -> None:
        limit = time.monotonic() - self._receive_timeout_s
        with self._lock:
            silent = [
                arrival
                for calls in self._awaited.values()
                for arrival in calls
                if arrival.arrived_at < limit
            ]
        for arrival in silent:
            arrival.end_unread(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the call's request message did not arrive within {self._receive_timeout_s:g} s; "
                "send the message promptly",
            )
        if silent:
            log.warning(
                "ended calls whose request message did not arrive in time",
                calls=len(silent),
                seconds=self._receive_timeout_s,
            )


_STARTED = _server._ServerStage.STARTED
# Seconds after which the loop checks whether the server object is gone, as gRPC's own loop does.
_IDLE_SECONDS = 1.0
# Pause (seconds) between two checks whether all calls are answered.
_DRAIN_CHECK_SECONDS = 0.01
# Most events that are handled while calls wait to be answered; they may belong to other calls.
_MAX_EVENTS = 64


class LoopServer(_server._Server):
    """Serve calls through an interceptor and our pool."""

    def __init__(self, interceptor: Interceptor, options: Sequence[tuple[str, Any]]) -> None:
        pool: Any = CallExecutor(interceptor)
        super().__init__(pool, (), [interceptor], options, None, None, False)
        self._interceptor = interceptor
        self._pool: CallExecutor = pool
        interceptor.set_awaited_counter(pool.unread_count)

    @property
    def grpc_server(self) -> grpc.Server:
        """The object to which services and ports are added: the server itself."""
        return self

    def start(self) -> None:
        """Start the loop in a daemon thread; does not wait. Call it once, after services and ports
        were added.

        Raises:
            ValueError: the server was started before.
        """
        state = self._state
        with state.lock:
            if state.stage is not _server._ServerStage.STOPPED:
                raise ValueError("this gRPC server was started before; create another one")
            state.server.start()
            state.stage = _STARTED
            for method in state.registered_method_handlers:
                _server._request_registered_call(state, method)
            _server._request_call(state)
        threading.Thread(
            target=_serve, args=(state, self._interceptor, self._pool), daemon=True
        ).start()

    def wait_for_calls(self, end_time: float) -> None:
        """Wait until the calls that are open now have ended; later calls are not waited for.

        It looks every 0.01 s, ends no call, and returns at `end_time` even if calls are open.
        Streams count, too.

        Args:
            end_time: latest time on the monotonic clock; one in the past returns at once.
        """
        with self._state.lock:
            open_calls = set(self._state.rpc_states)
        while open_calls and time.monotonic() < end_time:
            time.sleep(_DRAIN_CHECK_SECONDS)
            # Some may have become calls of grpcio.
            open_calls = {
                call.open_call if isinstance(call, QuickCall) else call for call in open_calls
            }
            with self._state.lock:
                open_calls &= self._state.rpc_states

    def end_unread_calls(self) -> None:
        """End the calls whose message has not arrived with UNAVAILABLE; calls that arrive later are
        still taken.
        """
        self._pool.end_unread_calls()

    def close(self) -> None:
        """Stop the pool's threads, once the server has stopped; waits for the thread that ends
        silent calls.
        """
        self._pool.close()


def _serve(state: Any, interceptor: Interceptor, executor: CallExecutor) -> None:
    events = 0
    while True:
        events = events + 1 if executor.waiting_call_count else 0
        # A time in the past polls without a wait; gRPC waits a millisecond for the present time,
        # which each search would pay while a watch is open.
        event = state.completion_queue.poll(0 if events else time.time() + _IDLE_SECONDS)
        if state.server_deallocated:
            _server._begin_shutdown_once(state)
        has_event = event.completion_type != cygrpc.CompletionType.queue_timeout
        if (
            has_event
            and not _take_quickly(state, interceptor, executor, event)
            and not _server._process_event_and_continue(state, event)
        ):
            return
        # Do not wait for more if these calls are all that are open.
        is_all = len(state.rpc_states) <= executor.waiting_call_count
        if executor.waiting_call_count and (is_all or not has_event or events >= _MAX_EVENTS):
            executor.answer_batch()
        # As in gRPC's own loop: the event may keep an ended call in memory.
        event = None


def _take_quickly(state: Any, interceptor: Interceptor, executor: CallExecutor, event: Any) -> bool:
    """Take the arrival of a call that this thread may answer; tells whether it was one."""
    method = event.tag
    if type(method) is not str or not event.success or state.stage is not _STARTED:
        return False
    handling = interceptor.immediate_handler(method, event.invocation_metadata)
    if handling is None:
        return False
    with state.lock:
        if state.stage is not _STARTED:
            return False
        state.due.remove(method)
        call = QuickCall(event, handling.rpc, handling.encode_answer, state.rpc_states)
        _server._request_registered_call(state, method)
    executor.receive_message(call)
    return True
