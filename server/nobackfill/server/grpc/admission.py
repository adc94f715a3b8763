"""Admit calls: lanes of threads for each kind of call, limits for connections and for messages.

No kind of call uses another's threads. Calls without a token have lanes of their own, so that
strangers never delay callers with a token. With tokens, no caller takes a whole lane, and each role
has places that no other role takes.
"""

import contextlib
import os
import socket
import struct
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import structlog
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from nobackfill.errors import (
    DeadlineError,
    InvalidInputError,
    OverloadedError,
    TooLargeError,
)
from nobackfill.server.grpc.access import Role
from nobackfill.server.grpc.context import MAX_WAIT_SECONDS, error_boundary
from nobackfill.server.grpc.metrics import Metrics

log = structlog.get_logger("server.lanes")


@dataclass(frozen=True)
class Size:
    """Set the size of a lane.

    Attributes:
        threads: calls that are worked on at once.
        places: calls that are worked on or wait.
        share: largest share of the places for one caller, 0 to 1.
        reserve: share of the places that only one role may take, for each role, 0 to 1.
        longest_s: largest age of a stream in seconds.
        drained: the gateway waits for these calls when it stops.
    """

    threads: int
    places: int
    share: float = 0.5
    reserve: float = 1 / 16
    longest_s: float = 24 * 3600.0
    drained: bool = True

    @property
    def reserved(self) -> int:
        """The number of places that only one role may take."""
        return int(self.places * self.reserve)


# A stream holds a thread, so a lane of streams has as many places as threads. A watch holds no
# thread, except on a plain server, where its lane has as many places as threads.
STREAMS: Mapping[str, Size] = {
    # PutItems, FetchFile, the vault's blobs.
    "transfers": Size(64, 64, 0.375),
    # Clients renew a watch that has ended. The threads are for reflection.
    "watches": Size(64, 20_000, longest_s=600.0, drained=False),
    # Only admins may call it; it lasts as long as the activation.
    "activations": Size(16, 16, reserve=0, longest_s=float("inf")),
    # Watches of the health, open to strangers.
    "public": Size(16, 1024, 0.25, reserve=0, longest_s=600.0, drained=False),
}
_HEALTH = Size(1, 64, 1.0, reserve=0)
# Calls that change galleries or the release, or measure for a while.
_OPERATIONS = Size(4, 32)
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

    def __init__(self, name: str, size: Size, *, shared: bool) -> None:
        """Start the threads.

        Args:
            name: name of the lane.
            size: its size.
            shared: callers can be told apart, so each gets its share only.
        """
        self.name = name
        self.size = size
        self._shared = shared
        self._caller_limit = max(1, round(size.places * size.share)) if shared else size.places
        self._lock = threading.Lock()
        self._callers: Counter[str] = Counter()
        self._roles: Counter[Role] = Counter()
        self._occupied = 0
        # For a plain server, whose calls have threads of their own.
        self._turns = threading.Semaphore(size.threads)
        self._pool = ThreadPoolExecutor(size.threads, thread_name_prefix=name)
        # One thread from the start, so that queued work always runs.
        self._pool.submit(int)

    def enter(self, caller: str, role: Role) -> None:
        """Take a place.

        Args:
            caller: the caller.
            role: its role.

        Raises:
            OverloadedError: the lane or the caller's share is full, or the free places are for
                other roles.
        """
        with self._lock:
            if self._callers[caller] >= self._caller_limit or not self._has_place(role):
                raise OverloadedError(
                    f"expected at most {self.size.places} {self.name} at once and "
                    f"{self._caller_limit} of one caller; try again with a growing delay"
                )
            self._occupied += 1
            self._callers[caller] += 1
            self._roles[role] += 1

    def _has_place(self, role: Role) -> bool:
        """Tell whether a place is free for a role; the caller holds the lock."""
        free = self.size.places - self._occupied
        if self._shared:
            others = (other for other in Role if other != role)
            free -= sum(max(0, self.size.reserved - self._roles[other]) for other in others)
        return free > 0

    def has_room(self, waiting: int) -> bool:
        """Tell whether one more call may come that takes no thread.

        Args:
            waiting: number of such calls that wait now; they count as occupied places.
        """
        return self._occupied + waiting < self.size.places

    def leave(self, caller: str, role: Role) -> None:
        """Release a place."""
        with self._lock:
            self._occupied -= 1
            self._roles[role] -= 1
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]

    def run(self, work: Callable[[], object]) -> None:
        """Run work on the next free thread, for a call that has a place.

        Raises nothing: gRPC's own thread calls this, and an error would end it.
        """
        try:
            self._pool.submit(work)
        except RuntimeError as error:
            # The system has no thread left, so an existing one will do it; or the lane is closed.
            log.warning("cannot start a thread", lane=self.name, error=str(error))

    def take_turn(self, timeout_s: float) -> None:
        """Wait on the call's own thread for a turn: at most `threads` calls work at once.

        Args:
            timeout_s: longest wait in seconds.

        Raises:
            DeadlineError: the turn did not come in time.
        """
        if not self._turns.acquire(timeout=min(timeout_s, MAX_WAIT_SECONDS)):
            raise DeadlineError("the call ended before its turn came; allow more time")

    def end_turn(self) -> None:
        """Let the next call work."""
        self._turns.release()

    def waiting(self) -> int:
        """Return the number of calls that have a place and no thread yet."""
        return max(0, self._occupied - self.size.threads)

    def occupied(self) -> int:
        """Return the number of calls that have a place."""
        return self._occupied

    def close(self) -> None:
        """Stop the threads once they are idle."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Lanes:
    """Hold all lanes of a gateway."""

    def __init__(self, max_calls: int, *, shared: bool, plain: bool = False) -> None:
        """Start the lanes.

        Args:
            max_calls: places for unary calls, of each weight.
            shared: callers can be told apart by tokens.
            plain: each stream holds a thread, also a watch.
        """
        calls = Size(_THREADS, max_calls)
        sizes = {
            "health": _HEALTH, "calls": calls, "heavy": Size(_HEAVY_THREADS, max_calls),
            "slow": calls, "operations": _OPERATIONS,
        }  # fmt: skip
        streams = {
            name: replace(size, places=size.threads) if plain else size
            for name, size in STREAMS.items()
        }
        self.all = {
            # Strangers are told apart by their address, with and without tokens.
            name: Lane(name, size, shared=shared or name == "public")
            for name, size in {**sizes, **streams}.items()
        }

    def of(self, method: str, *, streams: bool) -> Lane:
        """Return a method's lane.

        A unary call of another method is light until its message says otherwise.

        Args:
            method: /package.Service/Method.
            streams: the method has a stream.
        """
        return self.all[_LANES.get(method, "transfers" if streams else "calls")]

    def heavier(self, lane: Lane) -> Lane:
        """Return the lane for a call with a large message or an image."""
        return self.all["heavy"] if lane.name == "calls" else lane

    def slower(self, lane: Lane) -> Lane:
        """Return the lane for a search of a slow gallery."""
        return self.all["slow"] if lane.name == "calls" else lane

    def close(self) -> None:
        """Stop all lanes."""
        for lane in self.all.values():
            lane.close()


# Most connections of one address. A client needs one for all its calls; a proxy needs some for each
# of its clients.
LARGEST_PEER = 512
_CHECK_SECONDS = 0.5
_DESCRIPTORS = Path("/proc/self/fd")
# In the kernel's struct tcp_info: milliseconds since the last data arrived.
_SILENCE = struct.Struct("52xI")


class GrpcConnections:
    """Limit the connections of each peer to one port; a thread closes those that were silent
    longest.

    gRPC's core limits all connections together and ends silent ones, but counts none by peer.
    Sockets are found through /proc; on a system without it this does nothing.
    """

    def __init__(self, port: int, metrics: Metrics) -> None:
        self._port = port
        self._metrics = metrics
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="connections", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Accept no more connections, and close the open ones; their calls are lost."""
        with contextlib.suppress(OSError):
            for descriptor in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
                with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
                    if not _is_tcp(connection) or connection.getsockname()[1] != self._port:
                        continue
                    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        # gRPC keeps the descriptor's number, and does not notice the replacement.
                        with socket.socket(connection.family) as replacement:
                            os.dup2(replacement.fileno(), descriptor, inheritable=False)
                    else:
                        connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_CHECK_SECONDS):
            try:
                descriptors = [int(path.name) for path in _DESCRIPTORS.iterdir()]
            except FileNotFoundError:
                log.warning("connections are not limited by peer: this system has no /proc")
                return
            except OSError:
                # No descriptor is free for the look; gRPC ends silent connections.
                continue
            if len(descriptors) > LARGEST_PEER:
                with error_boundary(self._metrics, "connections"):
                    self._limit_peers(descriptors)

    def _limit_peers(self, descriptors: list[int]) -> None:
        """Close the connections that a peer has too many of."""
        peers: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for descriptor in descriptors:
            connection = self._connection(descriptor)
            if connection is not None:
                peer, silent_ms = connection
                peers[peer].append((silent_ms, descriptor))
        for peer, connections in peers.items():
            excess = len(connections) - LARGEST_PEER
            if excess > 0:
                for _, descriptor in sorted(connections, reverse=True)[:excess]:
                    self._shut(descriptor, peer)
                log.warning("closed connections: one peer had too many", connections=excess)

    def _connection(self, descriptor: int) -> tuple[str, int] | None:
        """Return the peer of a connection to our port, and the milliseconds of its silence; None
        for another descriptor.
        """
        with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
            if _is_tcp(connection) and connection.getsockname()[1] == self._port:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SILENCE.size)
                return str(connection.getpeername()[0]), _SILENCE.unpack(info)[0]
        return None

    def _shut(self, descriptor: int, peer: str) -> None:
        # Check again: gRPC may have closed it, and another file may have its number.
        peer_now = self._connection(descriptor)
        if peer_now is None or peer_now[0] != peer:
            return
        with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _is_tcp(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6)


def _duplicate(descriptor: int) -> socket.socket:
    """Duplicate a descriptor as a socket.

    Raises:
        OSError: the descriptor is not a socket.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        # Also for EBADF, which a folder that was opened with O_PATH gives.
        os.close(copy)
        raise


# Limits of a message are checked before it is decoded. A part takes two bytes on the wire, and
# fifty times as much once it is decoded: 32 MiB of empty parts would take a gigabyte, and hold the
# interpreter for half a second.

# Most items, ids or queries of one message.
LARGEST_COUNT = 10_000
# Most other fields of a message.
_OTHER_FIELDS = 100
# Most fields at any depth: fifty for each item.
_MAX_PARTS = 500_000
# Below this size the depth of a message is harmless; walking through it would cost a fifth of
# putting its items.
_SHALLOW = 2 * 2**20
# Larger messages are decoded on the thread that works for them, not on the one that receives calls.
LARGE = 64 * 1024


def reader(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Wrap a message class's FromString, so that it refuses invalid messages and those of too many
    parts.

    Args:
        parse: the class's FromString.

    Returns:
        The decoder; it raises InvalidInputError or TooLargeError.
    """
    descriptor: Descriptor = parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]

    def read(data: bytes) -> Any:
        # A part takes at least two bytes.
        if len(data) > 2 * (LARGEST_COUNT + _OTHER_FIELDS):
            _check_count(data, descriptor)
        try:
            return parse(data)
        except DecodeError:
            raise InvalidInputError(
                "the request is not the protocol's message; use the .proto files"
            ) from None

    return read


def _check_count(data: bytes, descriptor: Descriptor) -> None:
    """Check the number of a message's parts; parsing refuses cut and garbled ones.

    Raises:
        TooLargeError: there are too many parts.
        InvalidInputError: it has a group, which no field of the protocol is.
    """
    parts = 0
    limit = LARGEST_COUNT + _OTHER_FIELDS
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
                    f"expected fields of the protocol, got a group (field {tag >> 3}); use the "
                    ".proto files"
                )
            start += length
            parts += 1
            if parts > limit:
                raise TooLargeError(
                    f"expected at most {LARGEST_COUNT} items, ids or queries in a message, and "
                    f"{_MAX_PARTS} values in them, got more; send several messages"
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
