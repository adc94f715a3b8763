"""Take one call through the interceptor: authorise it, admit it to a lane, answer and count it.

A lane has the threads and places of one kind of call. No kind of call uses another's threads. Calls
without a token have lanes of their own, so that strangers never delay callers with a token. With
tokens, no caller takes a whole lane, and each role has places that no other role takes.
"""

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import grpc
import structlog
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from nobackfill.errors import (
    DeadlineError,
    InvalidInputError,
    NobackfillError,
    OverloadedError,
    TooLargeError,
    UnavailableError,
)
from nobackfill.server.grpc import context as calls
from nobackfill.server.grpc.context import (
    LOCAL,
    MAX_WAIT_SECONDS,
    RULES,
    Principal,
    Role,
    TokenRecheck,
    Tokens,
    WatchContext,
    authorize,
    check_gallery,
    error_boundary,
    grpc_status_of,
    status_code_of,
)
from nobackfill.server.grpc.logs import LogLimit, request_id
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.traces import CallTrace, Tracing
from nobackfill.v1 import search_pb2
from nobackfill.wire.connection import WATCH_AGAIN_TRAILER

lanes_log = structlog.get_logger("server.lanes")


@dataclass(frozen=True)
class LaneSize:
    """Set the size of a lane.

    Attributes:
        thread_count: calls that are worked on at once.
        capacity: calls that are worked on or wait.
        max_caller_share: largest share of the places for one caller, 0 to 1.
        role_reserve: share of the places that only one role may take, for each role, 0 to 1.
        max_stream_age_s: largest age of a stream in seconds.
        drains_on_stop: the gateway waits for these calls when it stops.
    """

    thread_count: int
    capacity: int
    max_caller_share: float = 0.5
    role_reserve: float = 1 / 16
    max_stream_age_s: float = 24 * 3600.0
    drains_on_stop: bool = True

    @property
    def reserved_places(self) -> int:
        """The number of places that only one role may take, rounded down."""
        return int(self.capacity * self.role_reserve)


# A stream holds a thread, so a lane of streams has as many places as threads. A watch holds no
# thread, except on a plain server, where its lane has as many places as threads.
STREAM_LANES: Mapping[str, LaneSize] = {
    # PutItems, FetchFile, the vault's blobs.
    "transfers": LaneSize(64, 64, 0.375),
    # Clients renew a watch that has ended. The threads are for reflection.
    "watches": LaneSize(64, 20_000, max_stream_age_s=600.0, drains_on_stop=False),
    # Only admins may call it; it lasts as long as the activation.
    "activations": LaneSize(16, 16, role_reserve=0, max_stream_age_s=float("inf")),
    # Watches of the health, open to strangers.
    "public": LaneSize(
        16, 1024, 0.25, role_reserve=0, max_stream_age_s=600.0, drains_on_stop=False
    ),
}
_HEALTH = LaneSize(1, 64, 1.0, role_reserve=0)
# Calls that change galleries or the release, or measure for a while.
_OPERATIONS = LaneSize(4, 32)
# Threads of unary calls; more of them would only compete for the interpreter.
_THREADS = 8
# Threads of calls with an image or a large message. They wait for the model server, which batches
# the images of waiting calls.
_HEAVY_THREADS = 32

_PACKAGE = "/nobackfill.v1."
_HEALTH_SERVICE = "/grpc.health.v1.Health/"
# Calls that report changes. Their behaviors yield None if nothing has changed.
WATCHES = frozenset(
    {
        _HEALTH_SERVICE + "Watch",
        _PACKAGE + "ReleaseService/WatchReleases",
        _PACKAGE + "ReleaseService/WatchCanary",
        _PACKAGE + "UpgradeService/WatchUpgrade",
    }
)
# Seconds between two looks of a watch for changes.
POLL_SECONDS = 0.2
_LANES: Mapping[str, str] = {
    _HEALTH_SERVICE + "Check": "health",
    _HEALTH_SERVICE + "List": "health",
    _HEALTH_SERVICE + "Watch": "public",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "watches",
    _PACKAGE + "ReleaseService/WatchReleases": "watches",
    _PACKAGE + "ReleaseService/ActivateRelease": "activations",
    _PACKAGE + "ReleaseService/WatchCanary": "watches",
    _PACKAGE + "UpgradeService/WatchUpgrade": "watches",
    _PACKAGE + "GalleryService/CreateGallery": "operations",
    _PACKAGE + "GalleryService/UpdateGallery": "operations",
    _PACKAGE + "GalleryService/DeleteGallery": "operations",
    _PACKAGE + "ReleaseService/RollbackRelease": "operations",
    _PACKAGE + "ReleaseService/RetireRelease": "operations",
    _PACKAGE + "UpgradeService/EstimateUpgrade": "operations",
    _PACKAGE + "UpgradeService/StartUpgrade": "operations",
    _PACKAGE + "UpgradeService/PauseUpgrade": "operations",
}


class Lane:
    """Hold the threads and places of one kind of call."""

    def __init__(self, name: str, size: LaneSize, *, limits_callers: bool) -> None:
        """Start one thread; the others start when work needs them. `close` stops them.

        Args:
            name: name of the lane, also in messages and names of threads.
            size: its size.
            limits_callers: callers can be told apart, so each gets its share only, at least one
                place, and each role has its reserve. Otherwise any caller may take all places.

        Raises:
            ValueError: the size has less than one thread.
            RuntimeError: the system has no thread left.
        """
        self.name = name
        self.size = size
        self._limits_callers = limits_callers
        share = max(1, round(size.capacity * size.max_caller_share))
        self._caller_limit = share if limits_callers else size.capacity
        self._lock = threading.Lock()
        self._callers: Counter[str] = Counter()
        self._roles: Counter[Role] = Counter()
        self._occupied = 0
        # For a plain server, whose calls have threads of their own.
        self._turns = threading.Semaphore(size.thread_count)
        self._pool = ThreadPoolExecutor(size.thread_count, thread_name_prefix=name)
        # One thread from the start, so that queued work always runs.
        self._pool.submit(int)

    def enter(self, caller_name: str, role: Role) -> None:
        """Take a place, without waiting; `leave` must follow, but not after an error.

        Any thread may call it.

        Args:
            caller_name: name of the caller's token, or its address.
            role: its role.

        Raises:
            OverloadedError: the lane or the caller's share is full, or the free places are for
                other roles.
        """
        with self._lock:
            if self._callers[caller_name] >= self._caller_limit or not self._has_place(role):
                kind = self.name if self.name.endswith("s") else f"{self.name} calls"
                raise OverloadedError(
                    f"expected at most {self.size.capacity} {kind} at once and "
                    f"{self._caller_limit} of one caller, got more; try again with a growing delay"
                )
            self._occupied += 1
            self._callers[caller_name] += 1
            self._roles[role] += 1

    def _has_place(self, role: Role) -> bool:
        """Tell whether a place is free for a role; the caller holds the lock."""
        free = self.size.capacity - self._occupied
        if self._limits_callers:
            others = (other for other in Role if other != role)
            free -= sum(max(0, self.size.reserved_places - self._roles[other]) for other in others)
        return free > 0

    def has_room(self, queued_count: int) -> bool:
        """Tell whether one more call may come that takes no thread.

        Takes no lock, so that the answer may be old. Shares of callers and roles are not checked.

        Args:
            queued_count: number of such calls that wait now; they count as occupied places.
        """
        return self._occupied + queued_count < self.size.capacity

    def leave(self, caller_name: str, role: Role) -> None:
        """Release a place that `enter` took for the same caller and role; once for each `enter`,
        which is not checked.
        """
        with self._lock:
            self._occupied -= 1
            self._roles[role] -= 1
            self._callers[caller_name] -= 1
            if not self._callers[caller_name]:
                del self._callers[caller_name]

    def run(self, work: Callable[[], object]) -> None:
        """Run work on the next free thread, for a call that has a place; does not wait.

        Raises nothing: gRPC's own thread calls this, and an error would end it. Without a new
        thread of the system, which is logged, an existing one does the work. After `close` the work
        is dropped, and only a warning is logged. An error that the work raises is lost.
        """
        try:
            self._pool.submit(work)
        except RuntimeError as error:
            # The system has no thread left, so an existing one will do it; or the lane is closed.
            lanes_log.warning(
                "cannot start a thread for a call, so the call waits for a busy thread",
                lane=self.name,
                error=str(error),
            )

    def take_turn(self, timeout_s: float) -> None:
        """Wait on the call's own thread for a turn: at most `size.thread_count` calls work at once.

        `end_turn` must follow once it has returned.

        Args:
            timeout_s: longest wait in seconds, at most an hour; 0 or less does not wait.

        Raises:
            DeadlineError: the turn did not come in time.
        """
        if not self._turns.acquire(timeout=min(timeout_s, MAX_WAIT_SECONDS)):
            raise _late_error()

    def end_turn(self) -> None:
        """Let the next call work; once for each turn that `take_turn` gave."""
        self._turns.release()

    def waiting_count(self) -> int:
        """Return how many calls have a place beyond the number of threads, at least 0; they wait,
        except watches, which need no thread.
        """
        return max(0, self._occupied - self.size.thread_count)

    def occupied_count(self) -> int:
        """Return the number of calls that have a place, whether they work or wait."""
        return self._occupied

    def close(self) -> None:
        """Stop the threads once they are idle; work that waits for a thread is dropped. Returns at
        once, and running work goes on.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)


def _late_error() -> DeadlineError:
    return DeadlineError(
        "the call's deadline passed before its turn came, because the gateway has much work; allow "
        "more time, or try again later"
    )


class Lanes:
    """Hold all lanes of a gateway."""

    def __init__(
        self, max_calls: int, *, limits_callers: bool, is_plain_server: bool = False
    ) -> None:
        """Start the lanes, each with one thread; `close` stops them.

        Args:
            max_calls: places for unary calls, of each weight: light, heavy and slow.
            limits_callers: callers can be told apart by tokens. Otherwise only the lane `public`
                limits callers, by their address.
            is_plain_server: each stream holds a thread, also a watch, so that lanes of streams have
                as many places as threads.

        Raises:
            RuntimeError: the system has no thread left; lanes that were started stay.
        """
        calls = LaneSize(_THREADS, max_calls)
        sizes = {
            "health": _HEALTH, "calls": calls, "heavy": LaneSize(_HEAVY_THREADS, max_calls),
            "slow": calls, "operations": _OPERATIONS,
        }  # fmt: skip
        streams = {
            name: replace(size, capacity=size.thread_count) if is_plain_server else size
            for name, size in STREAM_LANES.items()
        }
        self.by_name = {
            # Strangers are told apart by their address, with and without tokens.
            name: Lane(name, size, limits_callers=limits_callers or name == "public")
            for name, size in {**sizes, **streams}.items()
        }

    def lane_of(self, method: str, *, is_stream: bool) -> Lane:
        """Return a method's lane; an unknown method has `transfers` or `calls`.

        A unary call of another method is light until its message says otherwise.

        Args:
            method: /package.Service/Method.
            is_stream: the method has a stream.
        """
        return self.by_name[_LANES.get(method, "transfers" if is_stream else "calls")]

    def heavy_lane(self, lane: Lane) -> Lane:
        """Return the lane for a call with a large message or an image: `heavy` instead of `calls`;
        any other lane is returned as it is.
        """
        return self.by_name["heavy"] if lane.name == "calls" else lane

    def slow_lane(self, lane: Lane) -> Lane:
        """Return the lane for a search of a slow gallery: `slow` instead of `calls`; any other lane
        is returned as it is.
        """
        return self.by_name["slow"] if lane.name == "calls" else lane

    def close(self) -> None:
        """Stop the threads of all lanes once they are idle; work that waits for a thread is
        dropped. Returns at once.
        """
        for lane in self.by_name.values():
            lane.close()


# Limits of a message are checked before it is decoded. A part takes two bytes on the wire, and
# fifty times as much once it is decoded: 32 MiB of empty parts would take a gigabyte, and hold the
# interpreter for half a second.

# Most items, ids or queries of one message.
MAX_ITEMS_PER_MESSAGE = 10_000
# Most other fields of a message.
_OTHER_FIELDS = 100
# Most fields at any depth: fifty for each item.
_MAX_PARTS = 500_000
# Below this size the depth of a message is harmless; walking through it would cost a fifth of
# putting its items.
_SHALLOW = 2 * 2**20
# Larger messages are decoded on the thread that works for them, not on the one that receives calls.
LARGE_MESSAGE_BYTES = 64 * 1024


def checked_parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Wrap a message class's FromString, so that it refuses invalid messages and those of too many
    parts.

    The decoder counts the parts of messages above 20,200 bytes before it decodes them.

    Args:
        parse: the class's FromString.

    Returns:
        The decoder. It raises InvalidInputError for bytes that are no such message, or that hold a
        group in what is counted. It raises TooLargeError for more than 10,100 fields, or above 2
        MiB for more than 500,000 at any depth.
    """
    descriptor: Descriptor = parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]

    def read(data: bytes) -> Any:
        # A part takes at least two bytes.
        if len(data) > 2 * (MAX_ITEMS_PER_MESSAGE + _OTHER_FIELDS):
            _check_count(data, descriptor)
        try:
            return parse(data)
        except DecodeError:
            raise InvalidInputError(
                "expected a request message of this method, got bytes that cannot be decoded as "
                "one; generate the client from the gateway's .proto files"
            ) from None

    return read


def _check_count(data: bytes, descriptor: Descriptor) -> None:
    """Check the number of a message's parts; parsing refuses cut and garbled ones.

    Raises:
        TooLargeError: there are too many parts.
        InvalidInputError: it has a group, which no field of the protocol is.
    """
    parts = 0
    limit = MAX_ITEMS_PER_MESSAGE + _OTHER_FIELDS
    open_messages = [(0, len(data), descriptor)]
    while open_messages:
        start, end, message_type = open_messages.pop()
        nested = _nested(message_type)
        while start < end:
            tag, start = _varint(data, start)
            kind = tag & 7
            length = _WIDTHS.get(kind, end)
            if kind == 2:
                length, start = _varint(data, start)
                inner = nested.get(tag >> 3)
                if inner is not None and length:
                    open_messages.append((start, min(start + length, end), inner))
            elif kind == 0:
                start = _varint(data, start)[1]
            elif kind in _GROUP:
                raise InvalidInputError(
                    f"expected fields of the protocol, got a group (field {tag >> 3}); generate "
                    "the client from the gateway's .proto files"
                )
            start += length
            parts += 1
            if parts > limit:
                raise TooLargeError(
                    f"expected at most {MAX_ITEMS_PER_MESSAGE} items, ids or queries in a message, "
                    f"and {_MAX_PARTS} fields at any depth (keys and values of metadata count), "
                    "got more; send several messages"
                )
        if len(data) <= _SHALLOW:
            return
        limit = _MAX_PARTS


# Size of a value by its wire type; parsing ends at other types.
_WIDTHS: Mapping[int, int] = {0: 0, 1: 8, 5: 4}
# Wire types of a group's begin and end. Parsing takes a group of any number as an unknown field,
# and continues after it.
_GROUP = (3, 4)


@cache
def _nested(descriptor: Descriptor) -> Mapping[int, Descriptor]:
    """Return the fields that are messages, by number."""
    fields = descriptor.fields_by_number.items()
    return {
        number: field.message_type for number, field in fields if field.message_type is not None
    }


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """Read a varint; returns its value and where it ends."""
    value = shift = 0
    while start < len(data):
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            break
        shift += 7
    return value, start


log = structlog.get_logger("server.interceptor")
# Limits the log of refusals that cost the gateway no work.
_unworked = LogLimit(10)
# Most characters of a session's name that are used.
_MAX_KEY = 256
# Longest time (seconds) of a stream whose caller sets no deadline.
_MAX_STREAM_SECONDS = 24 * 3600.0
# Longest time (seconds) for a unary call to send its message.
RECEIVE_TIMEOUT_S = 20.0
# Most bytes of large messages that are worked on, or wait.
_MAX_HELD_BYTES = 512 * 2**20

# The behavior of a method: (request, context). A watch gets None as its context.
Behavior = Callable[[Any, Any], Any]


def _accept() -> None:
    """Accept every caller, as a gateway without tokens does."""


# A client that neither sends nor reads for so long (seconds) has gone, or is an attacker.
_STALL_SECONDS = 60.0
_CHECK_SECONDS = 0.5
# A stream that was asked to end is cancelled after so long (seconds).
_GRACE_SECONDS = 1.0


class StreamContext(Protocol):
    """Describe the part of a stream's `grpc.ServicerContext` that is used."""

    def is_active(self) -> bool: ...

    def cancel(self) -> object: ...


class OpenStream:
    """Track one stream, which must end if it stalls, gets too old or its token is no longer
    valid.
    """

    def __init__(
        self, context: StreamContext, confirm_caller: Callable[[], None], max_age_s: float, *,
        checks_stop: bool, drains_on_stop: bool,
    ) -> None:  # fmt: skip
        """Start to track a stream; `stop`, `stop_if_due` or a StallMonitor ends it.

        Args:
            context: the stream's context.
            confirm_caller: raises a NobackfillError once the caller may not continue.
            max_age_s: largest age in seconds from now; infinite means no limit.
            checks_stop: its work checks `is_active`, so it has 1 s to end by itself; otherwise it
                is cancelled at once.
            drains_on_stop: the gateway waits for it when it stops.
        """
        self.context = context
        self.confirm_caller = confirm_caller
        self.ends_at = time.monotonic() + max_age_s
        self.drains_on_stop = drains_on_stop
        # The error for its caller, if it was ended with one; and whether it was ended because of
        # its age.
        self.stop_reason: NobackfillError | None = None
        self.is_too_old = False
        # Since when it waits for its client; None while it does not.
        self.waiting_since: float | None = None
        # Ends a stream that has no thread.
        self.on_stop: Callable[[], None] | None = None
        self._grace_s = _GRACE_SECONDS if checks_stop else 0.0
        self._stopped: float | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the stream was asked to end; it may still run."""
        return self._stopped is not None

    def is_active(self) -> bool:
        """Tell whether the stream's work continues: it was not asked to end, and its caller is
        connected.
        """
        return self._stopped is None and self.context.is_active()

    def check(self) -> None:
        """Check that the caller may continue.

        A stream that was asked to end without a reason passes.

        Raises:
            UnauthenticatedError: its token was removed, has expired, or has another name, role,
                galleries or limit of items now.
            NobackfillError: the stream was ended with this error.
        """
        self.confirm_caller()
        if self.stop_reason is not None:
            raise self.stop_reason

    def stop(self, reason: NobackfillError | None = None) -> None:
        """Ask the stream to end; a later call cancels it if it still runs after the grace period.

        The first call records the reason and calls `on_stop` on this thread; the reason of later
        calls is ignored. The grace period is 1 s. If the work does not check, there is none, and
        the first call cancels the stream itself. StallMonitor calls this again every 0.5 s.

        No lock is taken: two threads at once may both call `on_stop`, whose errors pass through.

        Args:
            reason: the error for its caller; None means that it ends without one.
        """
        now = time.monotonic()
        if self._stopped is None:
            self.stop_reason, self._stopped = reason, now
            if self.on_stop is not None:
                self.on_stop()
        if now - self._stopped >= self._grace_s:
            self.context.cancel()

    def stop_if_due(self, refusal: NobackfillError | None) -> None:
        """Stop the stream if it must end by now: it is refused, too old, or was asked to end
        before; see `stop`.

        An age above the limit sets `is_too_old`, and the stream ends without an error.

        Args:
            refusal: why its caller may not continue; None if it may.
        """
        if refusal is not None:
            self.stop(refusal)
        if self._stopped is None and time.monotonic() > self.ends_at:
            self.is_too_old = True
            self.stop()
        elif self._stopped is not None:
            # Its work may not have checked yet.
            self.stop()


class StallMonitor:
    """End streams that stall; one thread watches all of them, from the construction to `close`.

    Time that the gateway itself takes does not count.
    """

    def __init__(self, metrics: Metrics, patience_s: float = _STALL_SECONDS) -> None:
        self._metrics = metrics
        self._patience_s = patience_s
        self._lock = threading.Lock()
        # By what confirms their callers: a token has thousands of watches, and is looked at once.
        self._streams: dict[Callable[[], None], set[OpenStream]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)
        self._thread.start()

    def watch(self, stream: OpenStream) -> Callable[[], None]:
        """Watch a stream; returns the function to call once it has ended. A second call of it does
        nothing.

        Every 0.5 s a thread checks the caller, the age, and how long the client has let it wait.
        If the caller may not continue, or the stream is too old, it is stopped (`OpenStream.stop`).
        It is cancelled if one message takes longer than `patience_s`, by default 60 s. After
        `close` it is not watched.
        """
        with self._lock:
            self._streams.setdefault(stream.confirm_caller, set()).add(stream)
        return lambda: self._forget(stream)

    def watch_requests(self, requests: Iterator[Any], stream: OpenStream) -> Iterator[Any]:
        """Yield the client's messages, and check the caller for each; the wait for each is watched.

        It ends when the client ends its stream. Sets and clears `stream.waiting_since`. A stream
        that was asked to end without a reason continues.

        Raises:
            UnauthenticatedError: the caller may not continue.
            NobackfillError: the stream was ended with this error.
            Exception: whatever `requests` raises, as gRPC does for a cancelled call.
        """
        while True:
            stream.waiting_since = time.monotonic()
            try:
                request = next(requests)
            except StopIteration:
                return
            finally:
                stream.waiting_since = None
            stream.check()
            yield request

    def watch_responses(
        self, responses: Iterator[Any], stream: OpenStream, ended: threading.Event
    ) -> Iterator[Any]:
        """Yield our messages, and check the caller for each; the client's reading is watched.

        None means that nothing has changed: this waits for POLL_SECONDS, or until `ended` is set.
        Then it asks again, or ends if the stream is not active. Other messages are yielded even if
        it was asked to end without a reason. Sets and clears `stream.waiting_since`.

        Args:
            responses: what the call yields.
            stream: the tracked stream.
            ended: set once the call has ended, so that its thread is free at once.

        Raises:
            UnauthenticatedError: the caller may not continue.
            NobackfillError: the stream was ended with this error.
            Exception: whatever `responses` raises.
        """
        for response in responses:
            if response is None:
                ended.wait(POLL_SECONDS)
                if not stream.is_active():
                    return
                continue
            stream.check()
            stream.waiting_since = time.monotonic()
            try:
                yield response
            finally:
                stream.waiting_since = None

    def end_all(self) -> None:
        """Ask the streams to end that the gateway does not wait for when it stops; do not wait.

        Their callers get no error. Work that does not check is cancelled at once, other work 1 s
        later by the thread that watches.
        """
        for _, streams in self._streams_by_check():
            for stream in streams:
                if not stream.drains_on_stop:
                    stream.stop()

    def close(self) -> None:
        """Stop the thread, and wait for it. Streams that are open are watched no more."""
        self._stopping.set()
        self._thread.join()

    def _streams_by_check(self) -> list[tuple[Callable[[], None], list[OpenStream]]]:
        with self._lock:
            return [(confirm, list(streams)) for confirm, streams in self._streams.items()]

    def _forget(self, stream: OpenStream) -> None:
        with self._lock:
            streams = self._streams.get(stream.confirm_caller, set())
            streams.discard(stream)
            if not streams:
                self._streams.pop(stream.confirm_caller, None)

    def _watch(self) -> None:
        while not self._stopping.wait(_CHECK_SECONDS):
            with error_boundary(self._metrics, "stalls"):
                for confirm, streams in self._streams_by_check():
                    self._enforce(_refusal(confirm), streams)

    def _enforce(self, refusal: NobackfillError | None, streams: Sequence[OpenStream]) -> None:
        now = time.monotonic()
        for stream in streams:
            since = stream.waiting_since
            # Thousands of quiet streams must not hold the interpreter: this line is all they cost.
            if (
                refusal is None
                and since is None
                and now <= stream.ends_at
                and not stream.is_stopped
            ):
                continue
            stream.stop_if_due(refusal)
            if since is not None and now - since > self._patience_s:
                log.warning(
                    "ended a streaming call, because its client has stopped reading or sending"
                )
                stream.context.cancel()


def _refusal(confirm: Callable[[], None]) -> NobackfillError | None:
    """Return why the callers of a token may not continue; None if they may."""
    try:
        confirm()
    except NobackfillError as error:
        return error
    return None


class DeferredCall(NamedTuple):
    """Hold a call that other threads answer.

    Attributes:
        deadline: latest time for the answer, on the monotonic clock.
        is_wanted: tells whether the caller still waits.
        send_answer: takes the encoded answer, once; None means that the call needs a thread of its
            own.
    """

    deadline: float
    is_wanted: Callable[[], bool]
    send_answer: Callable[[bytes | None], None]


class DeferredAnswer(NamedTuple):
    """Answer a call on other threads.

    Attributes:
        add_call: takes the call, without waiting.
        begin_batch: called once all calls that came together were added.
    """

    add_call: Callable[[DeferredCall], None]
    begin_batch: Callable[[], None]


# Maps encoded requests with their callers to encoded answers, without waiting, or to what answers
# later; None means that a call needs a thread.
ImmediateAnswer = Callable[
    [Sequence[tuple[bytes, Principal]]], Sequence[bytes | DeferredAnswer | None]
]


class _Status(
    NamedTuple("_Fields", [("code", Any), ("details", Any), ("trailing_metadata", Any)]),
    grpc.Status,
):
    """A status with its error details and the request's id."""


@dataclass(frozen=True)
class RpcMethod:
    """Hold what all calls of one method share.

    Attributes:
        path: /package.Service/Method.
        behavior: the service's method.
        decode_request: decodes a message; raises InvalidInputError and TooLargeError.
        encode_answer: encodes an answer.
        reads_stream: the client sends several messages.
        sends_stream: the server sends several messages.
        lane: lane of calls whose message is small and light.
        interceptor: holds what all methods share.
        answer_immediately: answers some calls on the thread that receives them; None if it answers
            none.
    """

    path: str
    behavior: Behavior
    decode_request: Callable[[bytes], Any]
    encode_answer: Callable[[Any], bytes]
    reads_stream: bool
    sends_stream: bool
    lane: Lane
    interceptor: "Interceptor"
    answer_immediately: ImmediateAnswer | None = None

    @property
    def is_watch(self) -> bool:
        """Whether a call reports changes: its method is one of WATCHES."""
        return self.path in WATCHES

    def watch(self, request: Any, role: Role) -> Iterator[bytes | None]:
        """Yield the encoded messages of a watch; None if nothing has changed. Never sleeps; errors
        of the service's method, which gets a WatchContext, pass through.

        Args:
            request: the decoded request.
            role: the role of all callers that get the messages.
        """
        for response in self.behavior(request, WatchContext(role)):
            yield None if response is None else self.encode_answer(response)

    @property
    def is_streaming(self) -> bool:
        """Whether a call may last as long as its client likes: one side sends several messages."""
        return self.reads_stream or self.sends_stream


class CallAdmission:
    """Give each call a place in a lane, and limit the memory of large messages."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        # For a plain server: calls that have a thread, and those whose message is awaited.
        self.working_calls: set[PlainRpc] = set()
        self.calls_awaiting_message: set[PlainRpc] = set()
        self._lock = threading.Lock()
        self._held = 0

    def choose_lane(self, rpc: "Rpc", message: bytes) -> tuple[Lane, Any]:
        """Choose the lane of a call by its message.

        A large message (above 64 KiB) is decoded later, by the thread that works for it. It counts
        toward 512 MiB until the call ends.

        Args:
            rpc: the call.
            message: its encoded message.

        Returns:
            The lane, and the decoded request or the large message as bytes.

        Raises:
            InvalidInputError: a message that is not large is no message of the method.
            TooLargeError: a message that is not large has too many parts.
            OverloadedError: large messages are being worked on, and with this one they would exceed
                512 MiB. A single one is never refused.
        """
        if len(message) > LARGE_MESSAGE_BYTES:
            self._hold(rpc, len(message))
            return self.lanes.heavy_lane(rpc.lane), message
        request = rpc.decode_request(message)
        if rpc.is_heavy(request):
            return self.lanes.heavy_lane(rpc.lane), request
        return self.lanes.slow_lane(rpc.lane) if rpc.is_slow(request) else rpc.lane, request

    def enter(self, rpc: "Rpc", lane: Lane, peer: bytes | str) -> None:
        """Take a place in a lane, without waiting, until the call has ended.

        Args:
            rpc: the call; its token's name is the caller.
            lane: the lane.
            peer: gRPC's address of the client; without a token, it is the caller, less its port.

        Raises:
            OverloadedError: the lane, or the caller's share of it, is full, or the free places are
                for other roles.
        """
        caller = rpc.caller or _address(peer)
        role = rpc.principal.role
        lane.enter(caller, role)
        rpc.on_end(lambda: lane.leave(caller, role))

    def _hold(self, rpc: "Rpc", size: int) -> None:
        with self._lock:
            if self._held > 0 and self._held + size > _MAX_HELD_BYTES:
                raise OverloadedError(
                    "the gateway already works on as many bytes of large requests as it accepts "
                    "at a time; try again in a few seconds, or send smaller messages"
                )
            self._held += size
        rpc.on_end(lambda: self._release(size))

    def _release(self, size: int) -> None:
        with self._lock:
            self._held -= size


class Rpc:
    """Track one call from its arrival; gRPC calls it as the method's behavior, at most once."""

    # Whether gRPC calls the behavior before a unary call's message has arrived.
    awaits_message = False

    def __init__(self, method: RpcMethod, request_id: str) -> None:
        self.method = method
        self.request_id = request_id
        self._arrived = time.monotonic()
        self._endings: list[Callable[[], None]] = []
        self.principal = LOCAL
        self._shared = method.interceptor
        self.decode_request = method.decode_request
        self.answer_immediately = method.answer_immediately
        self.lane = method.lane
        self.reads_stream = method.reads_stream
        # The caller whose share of a lane it takes; empty means its address.
        self.caller = ""
        # The session that the caller names; None without one.
        self.session: str | None = None
        # Why it is refused; None if it is not.
        self.refusal: Exception | None = None
        # Its trace; None without tracing.
        self.trace: CallTrace | None = None
        # The status with which it was ended before its message arrived.
        self.code: grpc.StatusCode | None = None
        # Raises once its caller may not continue.
        self._confirm: Callable[[], None] = _accept
        self._open: OpenStream | None = None

    def time_limit_s(self) -> float:
        """Return the longest time for the answer of a unary call, in seconds from its arrival."""
        return self._shared.max_call_seconds

    def accept_caller(self, principal: Principal, confirm: Callable[[], None] | None) -> None:
        """Accept the caller; from now on its share of a lane is that of its token.

        Args:
            principal: the caller.
            confirm: raises once its token is no longer valid; None means that it has no token, and
                its address is the caller.
        """
        self.principal = principal
        if confirm is not None:
            self.caller, self._confirm = principal.name, confirm

    def on_end(self, ending: Callable[[], None]) -> None:
        """Register a function to call once the call has ended. It must not raise; functions run in
        the order of registration, on the thread that calls `end`.
        """
        self._endings.append(ending)

    def end(self, code: grpc.StatusCode) -> None:
        """Count the call with its duration, release what it held, and export its trace. Call it
        exactly once. An error of an ending passes, and the call is then not counted.
        """
        for ending in self._endings:
            ending()
        self._shared.metrics.calls.count(self.method.path, code, time.monotonic() - self._arrived)
        if self.trace is not None:
            self.trace.end(code, self.request_id)

    def is_heavy(self, request: Any) -> bool:
        """Tell whether a small request needs much work: a search for which a model must embed an
        image. One image in a batch suffices. Other requests never do.
        """
        if isinstance(request, search_pb2.SearchRequest):
            return request.query.HasField("image")
        if isinstance(request, search_pb2.SearchBatchRequest):
            return any(query.HasField("image") for query in request.queries)
        return False

    def is_slow(self, request: Any) -> bool:
        """Tell whether a request is a slow search, or a search of a slow gallery.

        A search that sets `accuracy` is slow. A request without `query` or `queries` is none.
        """
        searches = hasattr(request, "query") or hasattr(request, "queries")
        return searches and (request.HasField("accuracy") or self._shared.is_slow(request.gallery))

    def __call__(self, argument: Any, context: grpc.ServicerContext) -> Any:
        if self.method.sends_stream:
            return self._answer_stream(argument, context)
        return self._answer_unary(argument, context)

    def _answer_unary(self, argument: Any, context: grpc.ServicerContext) -> Any:
        code = grpc.StatusCode.OK
        try:
            return self.method.behavior(self._enter(argument, context), context)
        except Exception as error:  # noqa: BLE001 - only here and in `_answer_stream`
            code = self._code(error, context)
            self._refuse(context, error, code)
        finally:
            self.end(code)

    def _answer_stream(self, argument: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        code = grpc.StatusCode.OK
        try:
            request = self._enter(argument, context)
            stream = self._open
            assert stream is not None, "_enter opened it"
            ended = threading.Event()
            if not context.add_callback(ended.set):
                ended.set()
            responses = self.method.behavior(request, context)
            yield from self._shared.stall_monitor.watch_responses(responses, stream, ended)
            if stream.stop_reason is not None:
                raise stream.stop_reason
            if stream.is_too_old:
                context.set_trailing_metadata(((WATCH_AGAIN_TRAILER, "1"),))
        except GeneratorExit:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:  # noqa: BLE001
            code = self._code(error, context)
            self._refuse(context, error, code)
        finally:
            self.end(code)

    def _enter(self, argument: Any, context: grpc.ServicerContext) -> Any:
        """Prepare the call; returns the message, or an iterator over the messages."""
        if self.trace is not None:
            self.trace.end_queue_part()
        if self.refusal is not None:
            raise self.refusal
        argument = self._take_place(argument, context)
        limit = _MAX_STREAM_SECONDS if self.method.is_streaming else self._shared.max_call_seconds
        remaining = min(context.time_remaining(), self._arrived + limit - time.monotonic())
        if not context.is_active() or remaining <= 0:
            raise _late_error()
        active = (
            self.open_stream(context).is_active if self.method.is_streaming else context.is_active
        )
        key = (self.session or self.caller or self.request_id)[:_MAX_KEY]
        call = calls.Call(
            self.principal, time.monotonic() + remaining, active, key, self.request_id, self.trace
        )
        calls.set_current_call(call)
        if self._open is not None and self.method.reads_stream:
            requests = self._shared.stall_monitor.watch_requests(argument, self._open)
            return map(self.decode_and_check, requests)
        return self.decode_and_check(argument)

    def _take_place(self, argument: Any, context: grpc.ServicerContext) -> Any:
        """Give the call its place, unless it got one when it arrived; returns its argument."""
        return argument

    def open_stream(self, context: StreamContext) -> OpenStream:
        """Start to watch a stream, which must end if it stalls, gets too old or its token is no
        longer valid.

        It is watched until the call ends. Streams of other packages, such as reflection, are
        cancelled without a grace period. Call it once.
        """
        size = self.lane.size
        # gRPC's own services do not check whether they must end.
        checks_stop = self.method.is_watch or self.method.path.startswith("/nobackfill.")
        stream = self._open = OpenStream(
            context,
            self._confirm,
            size.max_stream_age_s,
            checks_stop=checks_stop,
            drains_on_stop=size.drains_on_stop,
        )
        self.on_end(self._shared.stall_monitor.watch(stream))
        return stream

    def decode_and_check(self, argument: Any) -> Any:
        """Return a decoded request, once the caller may make it. A decoded argument is not decoded
        again.

        Raises:
            InvalidInputError: the bytes are no message of the method.
            TooLargeError: the message has too many parts.
            NotPermittedError: the caller's role is not for the gallery.
        """
        request = self.decode_request(argument) if isinstance(argument, bytes) else argument
        check_gallery(self.method.path, self.principal, request)
        return request

    def _code(self, error: Exception, context: grpc.ServicerContext) -> grpc.StatusCode:
        if not context.is_active():
            return grpc.StatusCode.CANCELLED
        return status_code_of(self._reason(error))

    def _reason(self, error: Exception) -> Exception:
        """Return why the stream was ended, if it was: its work then raised only that."""
        return self._open.stop_reason or error if self._open is not None else error

    def _refuse(
        self, context: grpc.ServicerContext, error: Exception, code: grpc.StatusCode
    ) -> NoReturn:
        error = self._reason(error)
        is_unexpected = code is grpc.StatusCode.INTERNAL
        level = log.exception if is_unexpected else log.warning
        if self.refusal is None or _unworked.allows():
            level("refused", method=self.method.path, code=code.name, error=type(error).__name__)
        status = rpc_status.to_status(grpc_status_of(error, self.request_id))
        metadata = (*status.trailing_metadata, ("x-request-id", self.request_id))
        context.abort_with_status(_Status(status.code, status.details, metadata))


class PlainRpc(Rpc):
    """Track a call of a plain `grpc.server`, which has a thread before its message has arrived.

    It waits on that thread for its message, then for its turn in a lane. gRPC is told that the call
    sends a stream, so that the wait can be watched and ended.
    """

    awaits_message = True

    def _take_place(self, argument: Any, context: grpc.ServicerContext) -> Any:
        admission, lane, request = self._shared.admission, self.lane, argument
        admission.working_calls.add(self)
        if not context.add_callback(lambda: admission.working_calls.discard(self)):
            admission.working_calls.discard(self)
        if not self.method.reads_stream:
            lane, request = admission.choose_lane(self, self._receive(argument, context))
        admission.enter(self, lane, context.peer())
        if not self.method.is_streaming:
            # A stream has its thread until it ends.
            lane.take_turn(min(context.time_remaining(), self._shared.max_call_seconds))
            self.on_end(lane.end_turn)
        return request

    def _receive(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Wait for the one message; the call is ended if it does not arrive in time."""
        shared, awaited = self._shared, self._shared.admission.calls_awaiting_message
        # A message that is under way when the gateway stops may still arrive.
        waiting = OpenStream(
            context, _accept, shared.receive_timeout_s, checks_stop=True, drains_on_stop=False
        )
        stop_watching = shared.stall_monitor.watch(waiting)
        awaited.add(self)
        try:
            return next(messages)
        except StopIteration:
            raise InvalidInputError(
                "expected one request message before the client's end of the stream, got none; "
                "send one"
            ) from None
        finally:
            awaited.discard(self)
            stop_watching()


# Request ids of this process: a random prefix and a counter.
_prefix = os.urandom(6).hex() + "-"
_numbers = itertools.count(1)

# These types are generic only in grpcio's stubs.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]]"
MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class Interceptor(grpc.ServerInterceptor):
    """Wrap every call, as soon as its headers arrive, for gRPC's own server or that of loop.py.

    It names the request, and checks the token and the role, before a thread is taken or a message
    read. Services only raise errors.
    """

    def __init__(
        self,
        metrics: Metrics,
        tokens: Tokens | None,
        max_calls: int,
        max_call_seconds: float,
        receive_timeout_s: float = RECEIVE_TIMEOUT_S,
        is_slow: Callable[[str], bool] = lambda _gallery: False,
        immediate_answers: Mapping[str, ImmediateAnswer] = MappingProxyType({}),
        tracing: Tracing | None = None,
        *,
        is_plain_server: bool = False,
    ) -> None:
        """Make the lanes, and start their threads and the one that ends stalled streams; `close`
        stops them.

        Args:
            metrics: the gateway's metrics; they export the lanes' numbers from now on.
            tokens: the tokens; None accepts everybody as an administrator.
            max_calls: most unary calls of each kind at once.
            max_call_seconds: longest time for a unary call.
            receive_timeout_s: longest time in seconds for a unary call to send its message; 20 by
                default.
            is_slow: tells whether searches of a gallery are slow; these have a lane of their own.
                By default none is.
            immediate_answers: by method, what answers calls on the thread that receives them; none
                by default.
            tracing: takes the spans of calls; None means no traces.
            is_plain_server: a plain `grpc.server` serves, not that of loop.py.

        Raises:
            RuntimeError: the system has no thread left; threads that were started stay.
        """
        self.is_plain_server = is_plain_server
        self.max_calls = max_calls
        self.receive_timeout_s = receive_timeout_s
        self.is_slow = is_slow
        self._immediate_answers = immediate_answers
        self._tracing = tracing
        self.metrics = metrics
        self._tokens = tokens
        self.max_call_seconds = max_call_seconds
        self.lanes = Lanes(
            max_calls, limits_callers=tokens is not None, is_plain_server=is_plain_server
        )
        self.admission = CallAdmission(self.lanes)
        self.stall_monitor = StallMonitor(metrics)
        self._draining = False
        self._methods: dict[str, tuple[RpcMethod, Handler]] = {}
        self.set_awaited_counter(lambda: len(self.admission.calls_awaiting_message))

    def set_awaited_counter(self, awaited: Callable[[], int]) -> None:
        """Export the number of calls whose message has not arrived, with the lanes' numbers;
        replaces what was exported before.

        Args:
            awaited: returns that number; called at each export.
        """
        lanes = self.lanes.by_name.items()
        counts = {name: (lane.occupied_count, lane.waiting_count) for name, lane in lanes}
        self.metrics.calls.lanes = {"message": (awaited, awaited), **counts}

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], MaybeHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MaybeHandler:
        """Wrap a call; None, and it is counted, if the method is unknown.

        A call that must be refused is wrapped, too, and gets its error when gRPC answers it. It is
        refused without a valid token or role, above the token's rate, or while the gateway stops.
        Sets the request's id for the log of this thread.
        """
        method = str(handler_call_details.method)
        entry = self._methods.get(method)
        if entry is None:
            handler = continuation(handler_call_details)
            if handler is None:
                self.metrics.calls.count_unknown_method()
                return None
            entry = self._methods[method] = (self._make_method(method, handler), handler)
        handling = self._handling(entry, handler_call_details.invocation_metadata)
        request_id.set(handling.rpc.request_id)
        return handling

    def immediate_handler(self, method: str, metadata: Metadata) -> "RpcHandler | None":
        """Return how a call is handled that may be answered where it arrives.

        Returns None if it is handled as any other call. That is so if its method has no immediate
        answer or was not called before, if calls are traced, or if it is refused. A call that is
        returned, or refused for its role, was counted for its token's rate. The request's id is not
        set for the log.
        """
        entry = self._methods.get(method)
        if entry is None or entry[0].answer_immediately is None or self._tracing is not None:
            return None
        handling = self._handling(entry, metadata)
        return handling if handling.rpc.refusal is None else None

    def _handling(self, entry: "tuple[RpcMethod, Handler]", metadata: Metadata) -> "RpcHandler":
        method, handler = entry
        headers = dict(metadata)
        rpc_class = PlainRpc if self.is_plain_server else Rpc
        rpc = rpc_class(method, _request_name(_text(headers.get("x-request-id"))))
        rpc.session = _text(headers.get("x-session"))
        if self._tracing is not None:
            rpc.trace = CallTrace(self._tracing, method.path, headers)
        try:
            if self._draining:
                raise UnavailableError(
                    "the gateway is stopping; call another gateway, or try again later"
                )
            tokens, authorization = self._tokens, _text(headers.get("authorization"))
            principal = authorize(method.path, tokens, authorization)
            confirm = None
            if tokens is not None and RULES[method.path] is not None:
                confirm = TokenRecheck(tokens, authorization, principal)
            rpc.accept_caller(principal, confirm)
        except NobackfillError as error:
            rpc.refusal = error
        return RpcHandler(handler, rpc, method.encode_answer)

    def drain(self) -> None:
        """Refuse new calls with UnavailableError, and end streams that the gateway does not wait
        for, because it stops. Waits for no call, and cannot be undone.
        """
        self._draining = True
        self.stall_monitor.end_all()

    def close(self) -> None:
        """Stop the threads once their calls have ended; waits only for the thread that ends stalled
        streams. Work that waits for a thread is dropped.
        """
        self.stall_monitor.close()
        self.lanes.close()

    def _make_method(self, method: str, handler: Handler) -> RpcMethod:
        streams = bool(handler.request_streaming or handler.response_streaming)
        behavior = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        assert behavior is not None, "gRPC has four kinds of calls"
        assert handler.request_deserializer is not None, "generated code has one"
        return RpcMethod(
            path=method,
            behavior=behavior,
            decode_request=checked_parser(handler.request_deserializer),
            encode_answer=_serializer(handler.response_serializer),
            reads_stream=bool(handler.request_streaming),
            sends_stream=bool(handler.response_streaming),
            lane=self.lanes.lane_of(method, is_stream=streams),
            interceptor=self,
            answer_immediately=self._immediate_answers.get(method),
        )


class RpcHandler(grpc.RpcMethodHandler):  # type: ignore[type-arg] # generic in its stubs only
    """Describe to gRPC how a call is handled: messages arrive as bytes, and the rpc decodes
    them.
    """

    request_deserializer = None

    def __init__(self, handler: Handler, rpc: Rpc, encode_answer: Callable[[Any], bytes]) -> None:
        self.rpc = rpc
        self.request_streaming = handler.request_streaming or rpc.awaits_message
        self.response_streaming = handler.response_streaming
        self.response_serializer = self.encode_answer = encode_answer
        # gRPC uses the one that the two flags select.
        self.unary_unary = self.unary_stream = self.stream_unary = self.stream_stream = rpc


def _serializer(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """Encode answers that are not bytes already."""
    assert serialize is not None, "generated code has one"
    return lambda answer: answer if isinstance(answer, bytes) else serialize(answer)


def _request_name(requested: str | None) -> str:
    """Return the caller's x-request-id if it is short plain ASCII, else a new id."""
    if requested and len(requested) <= 64 and requested.isascii() and requested.isprintable():
        return requested
    return f"{_prefix}{next(_numbers):x}"


def _text(value: str | bytes | None) -> str | None:
    return value if isinstance(value, str) else None


def _address(peer: bytes | str) -> str:
    """Return a peer's address without its port: all connections of one machine are one caller."""
    text = peer.decode(errors="replace") if isinstance(peer, bytes) else peer
    return text.rpartition(":")[0]
