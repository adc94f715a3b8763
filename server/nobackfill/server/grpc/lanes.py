"""Lanes: threads for one kind of call, and places for those that wait for them.

No kind of call takes another's threads. What needs no token has lanes of its own, so that strangers
never keep those who have one waiting. Where there are tokens, no caller takes a whole lane, and no
role the places that each other role has of its own.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from nobackfill.errors import OverloadedError
from nobackfill.server.grpc.tokens import Role

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


# Streams hold a thread each, so they have as many threads as places.
STREAMS: Mapping[str, Size] = {
    # PutItems, FetchFile, the vault's blobs.
    "transfers": Size(64, 64, 0.375),
    # Whoever wants to go on asks again.
    "watches": Size(64, 64, longest_s=600.0, drained=False),
    # Admins alone call it; its age is that of what it reports.
    "activations": Size(16, 16, reserve=0, longest_s=float("inf")),
    # Watching the health, open to strangers.
    "public": Size(16, 16, 0.25, reserve=0, longest_s=600.0, drained=False),
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
    """All lanes of a gateway. `max_calls`: places for unary calls of each weight."""

    def __init__(self, max_calls: int, *, shared: bool) -> None:
        calls = Size(_THREADS, max_calls)
        sizes = {
            "health": _HEALTH, "calls": calls, "heavy": Size(_HEAVY_THREADS, max_calls),
            "slow": calls, "operations": _OPERATIONS,
        }  # fmt: skip
        self.all = {
            # Strangers are told apart by their address, with or without tokens.
            name: Lane(name, size, shared=shared or name == "public")
            for name, size in {**sizes, **STREAMS}.items()
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
