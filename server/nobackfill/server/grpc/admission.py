"""Lanes: threads for one kind of call, and places for those that wait for them.

No kind of call takes another's threads. What needs no token has lanes of its own, so that strangers
never keep those who have one waiting. Where there are tokens, no caller takes a whole lane, and no
role the places that each other role has of its own.
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
from nobackfill.server.grpc.context import LONGEST_WAIT_S, error_boundary
from nobackfill.server.grpc.metrics import Metrics

log = structlog.get_logger("server.lanes")


@dataclass(frozen=True)
class Size:
    """`threads` at work, `places` for calls at work or waiting, of which one caller may take
    `share`, a fraction, and each role has `reserve`, another, whatever the others hold. Streams are
    ended after `longest_s` seconds; `drained`: the gateway's end waits for them."""

    threads: int
    places: int
    share: float = 0.5
    reserve: float = 1 / 16
    longest_s: float = 24 * 3600.0
    drained: bool = True

    @property
    def own(self) -> int:
        """Places that each role has."""
        return int(self.places * self.reserve)


# Streams hold a thread each, so they have as many threads as places. A watch holds none, but on a
# plain server: there a lane has no more places than threads.
STREAMS: Mapping[str, Size] = {
    # PutItems, FetchFile, the vault's blobs.
    "transfers": Size(64, 64, 0.375),
    # Whoever wants to go on asks again. The threads are for reflection.
    "watches": Size(64, 20_000, longest_s=600.0, drained=False),
    # Admins alone call it; its age is that of what it reports.
    "activations": Size(16, 16, reserve=0, longest_s=float("inf")),
    # Watching the health, open to strangers.
    "public": Size(16, 1024, 0.25, reserve=0, longest_s=600.0, drained=False),
}
_HEALTH = Size(1, 64, 1.0, reserve=0)
# What changes galleries or the release, or measures for a while.
_OPERATIONS = Size(4, 32)
# Threads that answer unary calls: more of them only fight for the interpreter.
_THREADS = 8
# Threads of calls that bring an image or much else: they wait for the model server, and a batch is
# of those that do.
_HEAVY_THREADS = 32

_PACKAGE = "/nobackfill.v1."
_HEALTH_SERVICE = "/grpc.health.v1.Health/"
# Calls that are told what changes. Their behaviors yield None where nothing is new.
WATCHES = frozenset(
    {
        _HEALTH_SERVICE + "Watch",
        _PACKAGE + "ReleaseService/WatchReleases",
        _PACKAGE + "ReleaseService/WatchCanary",
        _PACKAGE + "UpgradeService/WatchUpgrade",
    }
)
# How often a watch looks whether something is new.
LOOK_S = 0.2
_CHOSEN: Mapping[str, str] = {
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
    """One kind's threads and places."""

    def __init__(self, name: str, size: Size, *, shared: bool) -> None:
        """`shared`: callers can be told apart, so that each has its share only."""
        self.name = name
        self.size = size
        self._shared = shared
        self._most = max(1, round(size.places * size.share)) if shared else size.places
        self._lock = threading.Lock()
        self._callers: Counter[str] = Counter()
        self._roles: Counter[Role] = Counter()
        self._held = 0
        # Of a plain server, whose calls bring their threads along.
        self._turns = threading.Semaphore(size.threads)
        self._pool = ThreadPoolExecutor(size.threads, thread_name_prefix=name)
        # One thread from the start: what `run` queues is always done by somebody.
        self._pool.submit(int)

    def enter(self, caller: str, role: Role) -> None:
        """Take a place. Raises OverloadedError when the lane, or the caller's share, is full, or
        when what is free belongs to other roles."""
        with self._lock:
            if self._callers[caller] >= self._most or not self._free(role):
                raise OverloadedError(
                    f"expected at most {self.size.places} {self.name} at once, {self._most} of "
                    "one caller; try again with a growing delay"
                )
            self._held += 1
            self._callers[caller] += 1
            self._roles[role] += 1

    def _free(self, role: Role) -> bool:
        """Whether a place is left for a role; under the lock."""
        left = self.size.places - self._held
        if self._shared:
            others = (other for other in Role if other != role)
            left -= sum(max(0, self.size.own - self._roles[other]) for other in others)
        return left > 0

    def has_room(self, also: int) -> bool:
        """Whether a call that takes no thread may come, beside so many of its kind: they count as
        those that take one."""
        return self._held + also < self.size.places

    def leave(self, caller: str, role: Role) -> None:
        """Give the place back."""
        with self._lock:
            self._held -= 1
            self._roles[role] -= 1
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]

    def run(self, work: Callable[[], object]) -> None:
        """Do `work`, for which a place was taken, on the next free thread. Raises nothing: gRPC's
        own thread calls this, and would end."""
        try:
            self._pool.submit(work)
        except RuntimeError as error:
            # The system gives no further thread: one that is there does it. Or the lane is closed.
            log.warning("no thread started", lane=self.name, error=str(error))

    def take_turn(self, timeout_s: float) -> None:
        """Wait on the call's own thread until no more than `threads` are at work. Raises
        DeadlineError."""
        if not self._turns.acquire(timeout=min(timeout_s, LONGEST_WAIT_S)):
            raise DeadlineError("the call ended before its turn came; allow more time")

    def end_turn(self) -> None:
        """Let the next call work."""
        self._turns.release()

    def waiting(self) -> int:
        """Calls that have a place and no thread yet."""
        return max(0, self._held - self.size.threads)

    def held(self) -> int:
        """Calls that have a place."""
        return self._held

    def close(self) -> None:
        """End the threads once they are idle."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Lanes:
    """All lanes of a gateway. `max_calls`: places for unary calls of each weight. `plain`: each
    stream holds a thread, watches too."""

    def __init__(self, max_calls: int, *, shared: bool, plain: bool = False) -> None:
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
            # Strangers are told apart by their address, with or without tokens.
            name: Lane(name, size, shared=shared or name == "public")
            for name, size in {**sizes, **streams}.items()
        }

    def of(self, method: str, *, streams: bool) -> Lane:
        """A method's lane. Unary calls that are not named here are light until their message says
        otherwise."""
        return self.all[_CHOSEN.get(method, "transfers" if streams else "calls")]

    def heavier(self, lane: Lane) -> Lane:
        """Where a call of `lane` goes whose message is large or brings an image."""
        return self.all["heavy"] if lane.name == "calls" else lane

    def slower(self, lane: Lane) -> Lane:
        """Where a call of `lane` goes that searches a gallery in which searches take long."""
        return self.all["slow"] if lane.name == "calls" else lane

    def close(self) -> None:
        for lane in self.all.values():
            lane.close()


# Connections of one peer are bounded: those that were silent for longest are closed. At the end all
# are.
#
# gRPC's core bounds all connections together and ends silent ones, but counts none by peer. Sockets
# are found through /proc, so this does nothing where there is none.

# Of one address. A client needs one, for all its calls; a proxy some for each that it serves.
LARGEST_PEER = 512
_EVERY_S = 0.5
_DESCRIPTORS = Path("/proc/self/fd")
# In the kernel's struct tcp_info: milliseconds since data came.
_LAST_DATA = struct.Struct("52xI")


class GrpcConnections:
    """Watches the connections to one port, from a thread of its own."""

    def __init__(self, port: int, metrics: Metrics) -> None:
        self._port = port
        self._metrics = metrics
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="connections", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Take no more of them, and close those that there are: calls on them are lost."""
        with contextlib.suppress(OSError):
            for descriptor in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
                with contextlib.suppress(OSError), _borrowed(descriptor) as found:
                    if not _is_tcp(found) or found.getsockname()[1] != self._port:
                        continue
                    if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        # gRPC, which still has its number, hears nothing of it.
                        with socket.socket(found.family) as deaf:
                            os.dup2(deaf.fileno(), descriptor, inheritable=False)
                    else:
                        found.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            try:
                descriptors = [int(path.name) for path in _DESCRIPTORS.iterdir()]
            except FileNotFoundError:
                log.warning("connections are not bounded by peer: there is no /proc here")
                return
            except OSError:
                # No descriptor is left to look with; silent connections are ended by gRPC.
                continue
            if len(descriptors) > LARGEST_PEER:
                with error_boundary(self._metrics, "connections"):
                    self._bound(descriptors)

    def _bound(self, descriptors: list[int]) -> None:
        """Close what one peer has too many of."""
        peers: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for descriptor in descriptors:
            found = self._connection(descriptor)
            if found is not None:
                peer, silent_ms = found
                peers[peer].append((silent_ms, descriptor))
        for peer, connections in peers.items():
            excess = len(connections) - LARGEST_PEER
            if excess > 0:
                for _, descriptor in sorted(connections, reverse=True)[:excess]:
                    self._shut(descriptor, peer)
                log.warning("connections closed, one peer had too many", connections=excess)

    def _connection(self, descriptor: int) -> tuple[str, int] | None:
        """The peer of a connection to our port, and for how long it was silent."""
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
            if _is_tcp(connection) and connection.getsockname()[1] == self._port:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA.size)
                return str(connection.getpeername()[0]), _LAST_DATA.unpack(info)[0]
        return None

    def _shut(self, descriptor: int, peer: str) -> None:
        # Asked again: gRPC may have closed it meanwhile, and another file got its number.
        found = self._connection(descriptor)
        if found is None or found[0] != peer:
            return
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _is_tcp(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6)


def _borrowed(descriptor: int) -> socket.socket:
    """A descriptor of our own for the same socket. Raises OSError for anything but a socket."""
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        # Also where it says EBADF: so it does of a folder that was opened by its path alone.
        os.close(own)
        raise


# Reading a request's bytes: its parts are counted before anything is made of them.
#
# A part takes two bytes on the wire, and fifty times as much once it is read: 32 MiB of empty parts
# would take a gigabyte, and half a second in which nobody else gets the interpreter.

# Items, ids or queries of one message.
LARGEST_COUNT = 10_000
# Fields beside them.
_OTHERS = 100
# Fields at any depth: fifty for each item.
_PARTS = 500_000
# Up to here a message can do no harm with what lies deeper than its items, and walking costs a
# fifth of putting them.
_SHALLOW = 2 * 2**20
# Messages above this are read on the thread that works for them, not where all calls arrive.
LARGE = 64 * 1024


def reader(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A message class's FromString that refuses what is no message, or one of too many parts.

    What it returns raises InvalidInputError, TooLargeError.
    """
    descriptor: Descriptor = parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]

    def read(data: bytes) -> Any:
        # No part takes less than two bytes.
        if len(data) > 2 * (LARGEST_COUNT + _OTHERS):
            _check_count(data, descriptor)
        try:
            return parse(data)
        except DecodeError:
            raise InvalidInputError(
                "the request is not the protocol's message; use the .proto files"
            ) from None

    return read


def _check_count(data: bytes, descriptor: Descriptor) -> None:
    """Raises TooLargeError, early, and InvalidInputError for a group, which no field of the
    protocol is. What is cut off or garbled is left to parsing to refuse."""
    parts = 0
    most = LARGEST_COUNT + _OTHERS
    todo = [(0, len(data), descriptor)]
    while todo:
        start, end, of = todo.pop()
        nested = _nested(of)
        while start < end:
            tag, start = _varint(data, start)
            kind = tag & 7
            length = _WIDTHS.get(kind, end)
            if kind == 2:
                length, start = _varint(data, start)
                inner = nested.get(tag >> 3)
                if inner is not None and length:
                    todo.append((start, min(start + length, end), inner))
            elif kind == 0:
                start = _varint(data, start)[1]
            elif kind in _GROUP:
                raise InvalidInputError(
                    f"expected fields of the protocol, got a group (field {tag >> 3}), which it "
                    "has none of; use the .proto files"
                )
            start += length
            parts += 1
            if parts > most:
                raise TooLargeError(
                    f"expected at most {LARGEST_COUNT} items, ids or queries in a message, and "
                    f"{_PARTS} values in them, got more; send several messages"
                )
        if len(data) <= _SHALLOW:
            return
        most = _PARTS


# Bytes of a value by its wire type; parsing ends at what is none.
_WIDTHS: Mapping[int, int] = {0: 0, 1: 8, 5: 4}
# Wire types of a group's begin and end. Parsing takes one of any number as an unknown field, and
# reads on behind it.
_GROUP = (3, 4)


@cache
def _nested(descriptor: Descriptor) -> Mapping[int, Descriptor]:
    """The fields that are messages, by number."""
    fields = descriptor.fields_by_number.items()
    return {number: f.message_type for number, f in fields if f.message_type is not None}


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """A value and where it ends."""
    value = shift = 0
    while start < len(data):
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            break
        shift += 7
    return value, start
