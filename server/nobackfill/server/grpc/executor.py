"""Where calls arrive: a unary call's message is awaited before a thread is taken for it.

gRPC's threaded server takes a thread of its pool and then waits there for the message, so that
callers who send none hold the pool. This stands in the place of that pool: it lets gRPC receive the
message first (ADR 0008). That is no public interface of grpcio, so what is relied upon is checked.
"""

import inspect
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from itertools import groupby
from typing import Any

import grpc
import structlog
from grpc import _server

from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NobackfillError,
    OverloadedError,
)
from nobackfill.server.grpc.arrival import Arrival
from nobackfill.server.grpc.error_boundary import error_boundary
from nobackfill.server.grpc.lanes import Lane, Lanes
from nobackfill.server.grpc.messages import LARGE
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.quick_call import QuickCall
from nobackfill.server.grpc.rpc import AtOnce, Later, Unanswered

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

_PARAMETERS = (
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
            if tuple(inspect.signature(respond).parameters) != _PARAMETERS:
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
