"""Activations: one at a time, in a thread, resumed after a restart, called off by a rollback."""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from nobackfill.errors import (
    BusyError,
    InvalidInputError,
    NobackfillError,
    PreconditionError,
    UnavailableError,
    VerificationError,
)
from nobackfill.gallery.search.aside import give_way
from nobackfill.release.manifest import Manifest
from nobackfill.server.canary.comparison import CanaryState
from nobackfill.server.galleries import lock_order
from nobackfill.server.galleries.lock_order import Level
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.rollout.endings import behind, end_jobs, fail
from nobackfill.server.rollout.parts import Parts
from nobackfill.server.rollout.rollout import Rollout
from nobackfill.server.rollout.run import CancelledError, Phase, Run
from nobackfill.server.state import (
    Activation,
    Canary,
    Lead,
    LeadLostError,
    RolloutName,
    tried_well,
)
from nobackfill.server.upgrades.throttle import DEFAULT_SPARE_CORES

log = structlog.get_logger("server.activation")

# How long a call waits for another that begins, undoes or retires; then it is refused.
_BRIEF_S = 5.0
# Where the database or another gateway stands still, an activation is begun again for so long,
# after a pause each time.
_PATIENCE_S, _AGAIN_S = 120.0, 1.0
# An activation that ended the gateway so many times after it was resumed is not resumed again.
_MOST_RESUMED = 2
# For which an old space may be announced to answer still.
_LONGEST_S = 100 * 365 * 24 * 3600


class Activations:
    """Starts, resumes and calls off activations."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._run: Run | None = None

    def start(
        self,
        release: int,
        rollout: RolloutName | None = None,
        spare_cores: float = 0.0,
        old_space_seconds: int = 0,
        canary: Canary | None = None,
    ) -> Run:
        """Begin one. Raises NotFoundError, BusyError while another runs, PreconditionError for a
        release older than the active one, and for a canary where nothing is compared,
        InvalidInputError, CannotWriteError."""
        if old_space_seconds > _LONGEST_S:
            raise InvalidInputError(
                f"expected old_space_seconds of at most {_LONGEST_S} (100 years), got "
                f"{old_space_seconds}"
            )
        manifest = self._parts.catalog.find(release)
        with self.held(), self._leading("begin another activation") as lead:
            active = self._parts.state.now.active
            if active is not None and release < active:
                raise PreconditionError(
                    f"release {release} is older than the active release {active}; "
                    "RollbackRelease returns to the one before"
                )
            if canary is not None:
                _refuse_canary(release, active, rollout)
                rollout = "cutover"
            record = Activation(
                release=release,
                rollout=rollout or self._choose(manifest),
                spare_cores=spare_cores or DEFAULT_SPARE_CORES,
                old_space_seconds=old_space_seconds,
                canary=canary,
            )
            # One that was let go of and comes back is kept again, as any other.
            self._parts.state.revise(
                lambda now: {
                    "activation": record,
                    "retired": tuple(n for n in now.retired if n != release),
                    "rolled_back": None,
                }
            )
            if canary is not None:
                self._parts.canaries.begin(release)
            return self._launch(record, lead)

    def start_gallery(self, gallery: str, spare_cores: float) -> Run:
        """Carry one gallery that stayed behind over to the active release.

        Raises BusyError while another activation runs, CannotWriteError.
        """
        with self.held(), self._leading("begin another activation") as lead:
            record = Activation(
                release=self._parts.state.active(),
                rollout="cutover",
                spare_cores=spare_cores or DEFAULT_SPARE_CORES,
                old_space_seconds=0,
                only=gallery,
            )
            self._parts.state.change(activation=record, rolled_back=None)
            return self._launch(record, lead)

    def resume(self) -> Run | None:
        """Go on with what was under way when the gateway ended, or the one that led it; None if
        nothing was, if another leads it, or if it ended gateways again and again: that is a failed
        release now."""
        if self._parts.state.now.activation is None or self.running() is not None:
            return None
        lead = self._parts.state.lead()
        if lead is None:
            return None
        try:
            with self.held():
                record = self._parts.state.now.activation
                if record is None or self.running() is not None:
                    lead.close()
                    return None
                if record.resumed >= _MOST_RESUMED:
                    self._give_up(record, lead)
                    lead.close()
                    return None
                log.info("resuming activation", release=record.release)
                again = record.model_copy(update={"resumed": record.resumed + 1})
                self._parts.state.together(lambda: self._parts.state.change(activation=again), lead)
                if record.canary is not None:
                    self._parts.canaries.begin(record.release)
                return self._launch(again, lead)
        except BaseException:
            lead.close()
            raise

    def _give_up(self, record: Activation, lead: Lead) -> None:
        reason = (
            f"the gateway ended {1 + record.resumed} times while it was tried; activate it again "
            "if that had another cause"
        )
        log.error("activation given up", release=record.release, reason=reason)
        fail(self._parts, record.release, reason, lead)

    @contextmanager
    def _leading(self, what: str) -> Iterator[Lead]:
        """Lead an activation that is launched in the block. Raises BusyError where one is under
        way."""
        self.refuse_second(what)
        lead = self._parts.state.lead()
        if lead is None:
            raise BusyError(f"cannot {what} while another gateway ends one; try again with a delay")
        try:
            yield lead
        except BaseException:
            lead.close()
            raise

    def running(self) -> Run | None:
        """The activation under way that this gateway leads."""
        run = self._run
        return run if run is not None and run.running() else None

    def under_way(self) -> int | None:
        """The release that this gateway or another activates."""
        run, record = self.running(), self._parts.state.now.activation
        if run is not None:
            return run.record.release
        return record.release if record is not None and self._parts.state.shared else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """No activation begins meanwhile, nor is one undone by somebody else.

        Raises BusyError where another holds them for longer than a moment.
        """
        lock_order.check(Level.RELEASES)
        if not self._lock.acquire(timeout=_BRIEF_S):
            raise BusyError("releases are being rolled back or retired; try again with a delay")
        try:
            with lock_order.holding(Level.RELEASES), self._parts.state.held(_BRIEF_S):
                self._parts.state.catch_up()
                yield
        finally:
            self._lock.release()

    def call_off(self) -> None:
        """End the activation under way, if any, before its next step, and forget it."""
        self.interrupt()
        self._parts.state.depose()
        # All that another gateway did until then.
        self._parts.state.catch_up()

    def interrupt(self) -> None:
        """End the activation under way, if any; a restart resumes it."""
        run = self.running()
        if run is not None:
            run.cancel()
        record = self._parts.state.now.activation
        if record is not None and record.resumed and not self._parts.state.shared:
            # It ends in order.
            self._parts.state.revise(tried_well)

    def _choose(self, manifest: Manifest) -> RolloutName:
        active = self._parts.state.now.active
        if active is None:
            return "cutover"
        old = self._parts.catalog.manifest(active)
        return "direct" if manifest.searches(old.space) else "cutover"

    def refuse_second(self, what: str, *, beside_canary: bool = False) -> None:
        """Raises BusyError while an activation is under way; `beside_canary`: but not while its
        canary waits."""
        run, release = self.running(), self.under_way()
        waits = beside_canary and run is not None and run.waiting
        if release is not None and not waits:
            raise BusyError(
                f"cannot {what} while release {release} is being activated; try again when it has "
                "ended, or roll back"
            )

    def _launch(self, record: Activation, lead: Lead) -> Run:
        for hosted in self._parts.galleries.all():
            if record.only in (None, hosted.name):
                self._parts.upgrading.expect(hosted, record.release)
        run = self._run = Run(record, lead, self._work)
        try:
            run.start()
        except RuntimeError as error:
            run.end(Phase.FAILED, str(error))
            raise BusyError(f"the activation has no thread ({error}); try again later") from error
        return run

    def _work(self, run: Run) -> tuple[Phase, str]:
        phase, message = Phase.FAILED, "unforeseen error; the gateway's log has its traceback"
        with error_boundary(self._parts.metrics, "activation"):
            began = time.monotonic()
            phase, message = self._roll_out(run)
            if not run.cancelled.is_set():
                seconds = self._parts.metrics.swap_seconds.labels(phase.value)
                seconds.observe(time.monotonic() - began)
        with error_boundary(self._parts.metrics, "activation"):
            state, ended = self._parts.state, not run.cancelled.is_set()
            # Where another gateway leads on, they go on.
            if ended or not state.shared or state.now.activation is None:
                end_jobs(self._parts, phase, message)
        self._parts.metrics.upgrade_ratio.set(0)
        if run.record.canary is not None:
            self._parts.canaries.end(CanaryState.ENDED, message)
        return phase, message

    def _persist(self, run: Run) -> None:
        """Roll out. A gateway that stands still within a transaction, or a database that is away
        for a moment, says nothing about the release: it is begun again from the first step.
        Raises as `Rollout.run`, also what has gone on for too long."""
        state, end = self._parts.state, float("inf")
        while True:
            try:
                Rollout(run, self._parts).run()
                state.together(lambda: state.change(activation=None), run.lead)
                return
            except (BusyError, UnavailableError) as error:
                end = min(end, time.monotonic() + _PATIENCE_S)
                if not state.shared or time.monotonic() >= end:
                    raise
                log.warning("the activation waits for others", error=str(error))
            run.cancelled.wait(_AGAIN_S)
            run.stop_if_cancelled()

    def _roll_out(self, run: Run) -> tuple[Phase, str]:
        """How it ends: DONE or FAILED, and its message."""
        release = run.record.release
        try:
            give_way()
            self._persist(run)
        except (CancelledError, LeadLostError) as error:
            return Phase.FAILED, str(error)
        except (NobackfillError, OSError, sqlite3.Error) as error:
            log.error("activation failed", release=release, error=str(error))
            fail(self._parts, release, str(error), run.lead, run.cancelled)
            if isinstance(error, VerificationError):
                # Its models have failed: no later try goes on from the vectors that they made.
                self._parts.serving.drop_unused([release])
            return Phase.FAILED, str(error)
        except Exception as error:
            reason = f"unforeseen {type(error).__name__}; the gateway's log has its traceback"
            log.exception("activation failed", release=release, error=type(error).__name__)
            self._parts.metrics.unforeseen.labels("activation").inc()
            fail(self._parts, release, reason, run.lead, run.cancelled)
            return Phase.FAILED, reason
        run.lead.close()
        # From here on it has happened; what is left to do is to let go of what was before.
        with error_boundary(self._parts.metrics, "activation"):
            self._parts.serving.settle(self._parts.serving.replan())
        left = "; ".join(f"{name}: {why}" for name, why in behind(self._parts).items())
        log.info("activated", release=release, behind=left)
        return Phase.DONE, left


def _refuse_canary(release: int, active: int | None, rollout: RolloutName | None) -> None:
    if rollout not in (None, "cutover"):
        raise PreconditionError(f"a canary ends by cutover, got the rollout {rollout}")
    if active is None or active == release:
        raise PreconditionError(
            f"a canary compares release {release} with the active one, and there is no other"
        )
