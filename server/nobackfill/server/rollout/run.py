"""One activation as its watchers see it: what it reports, until it is DONE or FAILED."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nobackfill.server.rollout.rollout import Phase
from nobackfill.server.state import Activation


@dataclass(frozen=True)
class Event:
    """What an activation told, and when (Unix time)."""

    phase: Phase
    done: int
    total: int
    message: str
    time: float


class Run:
    """One activation as its watchers see it."""

    def __init__(self, record: Activation, work: Callable[["Run"], tuple[Phase, str]]) -> None:
        """`work` is done in a thread of its own once started; it returns DONE or FAILED, and what
        is to be said of that."""
        self.record = record
        self._work = work
        self.cancelled = threading.Event()
        self._condition = threading.Condition()
        self._events: list[Event] = []
        self._thread = threading.Thread(target=self._live, name="activation")
        self._ended = False

    def start(self) -> None:
        """Raises RuntimeError where no thread can be had."""
        self._thread.start()

    def running(self) -> bool:
        """Whether another must wait: False once the end was told, and if its thread is no more."""
        return not self._ended and (self._thread.ident is None or self._thread.is_alive())

    def cancel(self) -> None:
        """End it before its next step; returns once it has ended."""
        self.cancelled.set()
        self._thread.join()

    def end(self, phase: Phase, message: str) -> None:
        """The last that is told: DONE or FAILED. Another activation may begin now."""
        self._ended = True
        self.tell(phase, 0, 0, message)

    def tell(self, phase: Phase, done: int, total: int, message: str) -> None:
        with self._condition:
            last = self._events[-1] if self._events else None
            # Progress within a phase replaces what was told before.
            if last is not None and last.phase == phase == Phase.UPGRADING:
                self._events.pop()
            self._events.append(Event(phase, done, total, message, time.time()))
            self._condition.notify_all()

    def events(self, gone: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """All that is told, from the beginning to DONE or FAILED, or until `gone`."""
        told: list[Event] = []
        while not gone():
            for event in self._wait(told):
                yield event
                if event.phase in (Phase.DONE, Phase.FAILED):
                    return

    def _live(self) -> None:
        """Whatever is raised in here, the run ends and says so."""
        phase, message = Phase.FAILED, ""
        try:
            phase, message = self._work(self)
        finally:
            self.end(phase, message)

    def _wait(self, told: list[Event]) -> list[Event]:
        """What is not in `told` yet; it is added there, progress in the place of progress."""
        with self._condition:
            self._condition.wait_for(lambda: self._events != told, 0.5)
            fresh = [event for event in self._events[max(0, len(told) - 1) :] if event not in told]
            told[:] = self._events
            return fresh
