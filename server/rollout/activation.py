"""Activations: one at a time, in a thread, resumed after a restart, called off by a rollback."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog

from release.errors import BusyError, CannotWriteError, NobackfillError, PreconditionError
from release.manifest import Manifest
from server.core import Core
from server.galleries.indexing import give_way
from server.rollout.rollout import CancelledError, Phase, Rollout
from server.state import Activation, RolloutName
from server.upgrades.upgrading import DEFAULT_SPARE_CORES

log = structlog.get_logger("server.activation")


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

    def __init__(self, record: Activation) -> None:
        self.record = record
        self.cancelled = threading.Event()
        self._condition = threading.Condition()
        self._events: list[Event] = []
        self.thread: threading.Thread | None = None
        self.ended = False

    def end(self, phase: Phase, message: str) -> None:
        """The last that is told: DONE or FAILED. Another activation may begin now."""
        self.ended = True
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

    def _wait(self, told: list[Event]) -> list[Event]:
        """What is not in `told` yet; it is added there, progress in the place of progress."""
        with self._condition:
            self._condition.wait_for(lambda: self._events != told, 0.5)
            fresh = [event for event in self._events[max(0, len(told) - 1) :] if event not in told]
            told[:] = self._events
            return fresh


class Activations:
    """Starts, resumes and calls off activations."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._run: Run | None = None

    def start(
        self,
        release: int,
        rollout: RolloutName | None = None,
        spare_cores: float = 0.0,
        old_space_seconds: int = 0,
    ) -> Run:
        """Begin one. Raises NotFoundError, BusyError while another runs, PreconditionError for a
        release older than the active one, CannotWriteError."""
        manifest = self._core.catalog.find(release)
        active = self._core.state.now.active
        if active is not None and release < active:
            raise PreconditionError(
                f"release {release} is older than the active release {active}; "
                "RollbackRelease returns to the one before"
            )
        record = Activation(
            release=release,
            rollout=rollout or self._choose(manifest),
            spare_cores=spare_cores or DEFAULT_SPARE_CORES,
            old_space_seconds=old_space_seconds,
        )
        with self._lock:
            self._refuse_second()
            # One that was let go of and comes back is kept again, as any other.
            retired = tuple(n for n in self._core.state.now.retired if n != release)
            self._core.state.change(activation=record, retired=retired)
            return self._launch(record)

    def start_gallery(self, gallery: str, spare_cores: float) -> Run:
        """Carry one gallery that stayed behind over to the active release.

        Raises BusyError while another activation runs, CannotWriteError.
        """
        active = self._core.active()
        record = Activation(
            release=active.release,
            rollout="cutover",
            spare_cores=spare_cores or DEFAULT_SPARE_CORES,
            old_space_seconds=0,
            only=gallery,
        )
        with self._lock:
            self._refuse_second()
            self._core.state.change(activation=record)
            return self._launch(record)

    def resume(self) -> Run | None:
        """Go on with what was under way when the gateway ended; None if nothing was."""
        record = self._core.state.now.activation
        if record is None:
            return None
        with self._lock:
            self._refuse_second()
            log.info("resuming activation", release=record.release)
            return self._launch(record)

    def running(self) -> Run | None:
        """The activation under way."""
        run = self._run
        return run if run is not None and not run.ended else None

    def call_off(self) -> None:
        """End the activation under way, if any, before its next step, and forget it."""
        self.interrupt()
        if self._core.state.now.activation is not None:
            self._core.state.change(activation=None)

    def interrupt(self) -> None:
        """End the activation under way, if any; a restart resumes it."""
        run = self.running()
        if run is not None and run.thread is not None:
            run.cancelled.set()
            run.thread.join()

    def _choose(self, manifest: Manifest) -> RolloutName:
        active = self._core.state.now.active
        if active is None:
            return "cutover"
        old = self._core.catalog.manifest(active)
        return "direct" if old.space in manifest.searches_directly else "cutover"

    def _refuse_second(self) -> None:
        run = self.running()
        if run is not None:
            raise BusyError(
                f"release {run.record.release} is being activated; wait for it, or roll back"
            )

    def _launch(self, record: Activation) -> Run:
        run = self._run = Run(record)
        run.thread = threading.Thread(target=self._work, args=(run,), name="activation")
        run.thread.start()
        return run

    def _work(self, run: Run) -> None:
        core, release = self._core, run.record.release
        give_way()
        began = time.monotonic()
        try:
            Rollout(core, run.record, run.tell, run.cancelled).run()
            core.state.change(activation=None)
        except CancelledError as error:
            run.end(Phase.FAILED, str(error))
        except (NobackfillError, OSError, sqlite3.Error) as error:
            log.error("activation failed", release=release, error=str(error))
            core.metrics.swap_seconds.labels("failed").observe(time.monotonic() - began)
            self._fail(release, str(error))
            run.end(Phase.FAILED, str(error))
        else:
            core.settle(core.replan())
            core.metrics.swap_seconds.labels("done").observe(time.monotonic() - began)
            behind = "; ".join(f"{name}: {why}" for name, why in core.behind().items())
            run.end(Phase.DONE, behind)
            log.info("activated", release=release, behind=behind)

    def _fail(self, release: int, reason: str) -> None:
        """Mark the release FAILED; what it did not yet replace serves on."""
        now = self._core.state.now
        values: dict[str, object] = {"activation": None}
        if now.active != release:
            values["failed"] = {**now.failed, release: reason}
        try:
            self._core.state.change(**values)
        except CannotWriteError as error:
            # A restart finds the activation as it was, and tries it again.
            log.error("the failure is not recorded", error=str(error))
        self._core.settle(self._core.replan())
