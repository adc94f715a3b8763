"""An upgrade of very many items before it is run: a discrete simulation of windows, stragglers and
failures, from rates that were measured on few.

Each worker reads a window from the store, carries it, and writes it back. Reads and writes queue
for the store's lanes, first come, first served; carrying takes a worker's own core. Now and then a
window takes several times as long; now and then a worker is lost, its window is carried again by
another, and it comes back after a while.
"""

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class UpgradePlan:
    """`item_count` in windows of `window`; `carry`, items a second of one worker's core; `read` and
    `write`, items a second of one of the store's `lane_count`. A window in `straggle` of all takes
    `slow` times as long to carry. A worker is lost every `lost_every` hours on average, and is
    back after `back_after` seconds."""

    item_count: int
    window: int
    worker_count: int
    lane_count: int
    read: float
    carry: float
    write: float
    straggle: float = 0.01
    slow: float = 5.0
    lost_every: float = 24.0
    back_after: float = 600.0

    @property
    def windows(self) -> int:
        return -(-self.item_count // self.window)

    @property
    def least_hours(self) -> float:
        """Without a straggler or a loss, the slower of workers and store being always at work."""
        carrying = self.item_count / (self.carry * self.worker_count)
        storing = self.item_count * (1 / self.read + 1 / self.write) / self.lane_count
        return max(carrying, storing) / 3600


@dataclass(frozen=True)
class SimulatedRun:
    """The outcome of a simulated run.

    Attributes:
        hours: Hours until every item is carried.
        lost_workers: Number of workers that ended during the run.
        repeated_windows: Number of windows that were carried once more.
    """

    hours: float
    lost_workers: int
    repeated_windows: int


def simulate_upgrade(plan: UpgradePlan, seed: int) -> SimulatedRun:
    """One run, drawn by `seed`."""
    return _Simulated(plan, np.random.default_rng(seed)).run()


class _Simulated:
    """Events by time: (time, order, what, worker, life). A worker's `life` counts its losses, so
    that what an earlier one had under way is not taken for the present one's."""

    def __init__(self, plan: UpgradePlan, rng: np.random.Generator) -> None:
        self._plan, self._rng = plan, rng
        self._events: list[tuple[float, int, str, int, int]] = []
        self._order = 0
        self._free = plan.lane_count
        self._queue: deque[tuple[str, int, int]] = deque()
        self._life = [0] * plan.worker_count
        self._has = [False] * plan.worker_count
        self._away = [False] * plan.worker_count
        self._left, self._done = plan.windows, 0
        self._lost = self._again = 0

    def run(self) -> SimulatedRun:
        for worker in range(self._plan.worker_count):
            self._at(0.0, "begin", worker)
            self._at(self._until_lost(), "lose", worker)
        now = 0.0
        while self._done < self._plan.windows:
            now, _, what, worker, life = heapq.heappop(self._events)
            self._happen(now, what, worker, alive=life == self._life[worker])
        return SimulatedRun(now / 3600, self._lost, self._again)

    def _happen(self, now: float, what: str, worker: int, *, alive: bool) -> None:
        if what in ("read", "write"):
            # The store ends what it has begun, whoever asked for it.
            self._free += 1
        if what == "lose" and alive:
            self._lose(now, worker)
        elif alive and what in ("begin", "write"):
            if what == "write":
                self._done += 1
                self._has[worker] = False
            self._away[worker] = False
            if self._left and not self._has[worker]:
                self._left -= 1
                self._has[worker] = True
                self._queue.append(("read", worker, self._life[worker]))
        elif alive and what == "read":
            self._at(now + self._carrying(), "carry", worker)
        elif alive and what == "carry":
            self._queue.append(("write", worker, self._life[worker]))
        while self._free and self._queue:
            step, whose, life = self._queue.popleft()
            if life == self._life[whose]:
                self._free -= 1
                rate = self._plan.read if step == "read" else self._plan.write
                self._at(now + self._plan.window / rate, step, whose)

    def _lose(self, now: float, worker: int) -> None:
        self._lost += 1
        if self._has[worker]:
            self._has[worker] = False
            self._left += 1
            self._again += 1
        self._life[worker] += 1
        self._away[worker] = True
        back = now + self._plan.back_after
        self._at(back, "begin", worker)
        self._at(back + self._until_lost(), "lose", worker)
        # Who had nothing left to do takes what has come back.
        for idle in range(self._plan.worker_count):
            if self._left and not self._has[idle] and not self._away[idle]:
                self._at(now, "begin", idle)
                return

    def _carrying(self) -> float:
        slow = self._rng.random() < self._plan.straggle
        return self._plan.window / self._plan.carry * (self._plan.slow if slow else 1.0)

    def _until_lost(self) -> float:
        return float(self._rng.exponential(3600 * self._plan.lost_every))

    def _at(self, time: float, what: str, worker: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, what, worker, self._life[worker]))
