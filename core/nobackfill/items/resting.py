"""Items that could not be embedded: left alone for longer each time that it was in vain."""

import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_DAY_S = 86_400.0
# Of so many it is known; of more, those that rest longest.
_MOST = 100_000

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class _Rest:
    """When it ends, and how long it is."""

    end: float
    seconds: float


class Resting(Generic[Key]):
    """What fails rests `first` seconds, twice as long each time, and `longest` at most; what the
    source lacks rests a day. An item that has not failed again for as long as it had rested begins
    anew. Threads may share it."""

    def __init__(
        self, first: float, longest: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first, self._longest, self._clock = first, longest, clock
        self._lock = threading.Lock()
        self._rests: dict[Key, _Rest] = {}

    def ready(self, keys: Sequence[Key]) -> list[Key]:
        """Those that do not rest, in their order."""
        now = self._clock()
        with self._lock:
            return [
                key for key in keys if (rest := self._rests.get(key)) is None or rest.end <= now
            ]

    def failed(self, keys: Collection[Key]) -> None:
        """They could not be embedded."""
        now = self._clock()
        with self._lock:
            for key in keys:
                seconds = self._longer(self._rests.get(key), now)
                self._rests[key] = _Rest(now + seconds, seconds)
            self._forget(now)

    def _longer(self, last: _Rest | None, now: float) -> float:
        """How long an item rests after its last rest."""
        if last is None or now >= last.end + last.seconds:
            return self._first
        return min(2 * last.seconds, self._longest)

    def gone(self, keys: Collection[Key]) -> None:
        """The source lacks them."""
        now = self._clock()
        with self._lock:
            self._rests |= dict.fromkeys(keys, _Rest(now + _DAY_S, _DAY_S))
            self._forget(now)

    def _forget(self, now: float) -> None:
        """Where there are too many: those that begin anew, then those whose rest ends first."""
        if len(self._rests) <= _MOST:
            return
        known = {key: rest for key, rest in self._rests.items() if now < rest.end + rest.seconds}
        longest = sorted(known.items(), key=lambda one: one[1].end, reverse=True)
        # Half, so that it is not sorted again at the next one.
        self._rests = dict(longest[: _MOST // 2]) if len(known) > _MOST // 2 else known
