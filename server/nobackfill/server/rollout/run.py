"""One activation as its watchers see it: what it reports, until it is DONE or FAILED."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from nobackfill.errors import NobackfillError
from nobackfill.server.state import Activation, Lead


class Phase(StrEnum):
    VERIFYING = "verifying"
    LOADING = "loading"
    PROBING = "probing"
    UPGRADING = "upgrading"
    CANARY = "canary"
    SWITCHING = "switching"
    DONE = "done"
    FAILED = "failed"


class CancelledError(NobackfillError):
    """The activation was called off by a rollback or by the gateway's end."""


@dataclass(frozen=True)
class Event:
    """What an activation reported, and when (Unix time)."""

    phase: Phase
    done: int
    total: int
    message: str
    time: float


class Run:
    """One activation as its watchers see it."""

    def __init__(
        self, record: Activation, lead: Lead, work: Callable[["Run"], tuple[Phase, str]]
    ) -> None:
        """`work` is done in a thread of its own once started; it returns DONE or FAILED, and the
        message of that. `lead`: what it changes by; let go of in the end."""
        self.record = record
        self.lead = lead
        self._work = work
        self.cancelled = threading.Event()
        self._condition = threading.Condition()
        self._events: list[Event] = []
        self._thread = threading.Thread(target=self._live, name="activation")
        self._ended = False
        # While its canary waits for queries, nothing is moved: galleries may come and go.
        self.waiting = False

    def start(self) -> None:
        """Raises RuntimeError where no thread can be had."""
        self._thread.start()

    def running(self) -> bool:
        """Whether another must wait: False once it has reported its end, or its thread is gone."""
        return not self._ended and (self._thread.ident is None or self._thread.is_alive())

    def cancel(self) -> None:
        """End it before its next step; returns once it has ended."""
        self.cancelled.set()
        self._thread.join()

    def stop_if_cancelled(self) -> None:
        """Raises CancelledError."""
        if self.cancelled.is_set():
            raise CancelledError(f"the activation of release {self.record.release} was called off")

    def end(self, phase: Phase, message: str) -> None:
        """Report the last: DONE or FAILED. Another activation may begin now."""
        self._ended = True
        self.report(phase, message=message)

    def report(self, phase: Phase, done: int = 0, total: int = 0, message: str = "") -> None:
        """`done` of `total` items."""
        with self._condition:
            last = self._events[-1] if self._events else None
            # Progress within a phase replaces what was reported before.
            if last is not None and last.phase == phase == Phase.UPGRADING:
                self._events.pop()
            self._events.append(Event(phase, done, total, message, time.time()))
            self._condition.notify_all()

    def events(self, gone: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """All reports, from the beginning to DONE or FAILED, or until `gone`."""
        seen: list[Event] = []
        while not gone():
            for event in self._wait(seen):
                yield event
                if event.phase in (Phase.DONE, Phase.FAILED):
                    return

    def _live(self) -> None:
        """Whatever is raised in here, the run ends and says so."""
        phase, message = Phase.FAILED, ""
        try:
            phase, message = self._work(self)
        finally:
            self.lead.close()
            self.end(phase, message)

    def _wait(self, seen: list[Event]) -> list[Event]:
        """What is not in `seen` yet; it is added there, progress in the place of progress."""
        with self._condition:
            self._condition.wait_for(lambda: self._events != seen, 0.5)
            fresh = [event for event in self._events[max(0, len(seen) - 1) :] if event not in seen]
            seen[:] = self._events
            return fresh
