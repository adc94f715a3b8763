"""Activations: one at a time, in a thread, resumed after a restart, called off by a rollback."""

import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import structlog

from nobackfill.errors import (
    BusyError,
    InvalidInputError,
    NobackfillError,
    PreconditionError,
    UnavailableError,
    VerificationError,
)
from nobackfill.gallery.search.index import give_way
from nobackfill.release.manifest import Manifest
from nobackfill.server.canary.comparison import CanaryState
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.embedding import Models
from nobackfill.server.galleries.galleries import UNUSABLE, GalleryRegistry
from nobackfill.server.galleries.hosted import NOTE, ROLLOUT, Hosted
from nobackfill.server.galleries.locks import Level, check_lock_order, hold_level
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.rollout.rollout import (
    Parts,
    Phase,
    Rollout,
    RolloutCancelledError,
    RolloutRun,
)
from nobackfill.server.state import (
    Activation,
    Canary,
    GatewayState,
    Lead,
    LeadLostError,
    RolloutName,
    State,
    tried_well,
)
from nobackfill.server.upgrades.upgrading import DEFAULT_SPARE_CORES

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
# Seconds after which a failure that could not be recorded is tried again.
_RETRY_S = 1.0
# Between steps: a leap year. Longer ones are typing errors, and messages could not tell some.
_STEP_MAX_S = 366 * 24 * 3600


def return_galleries(galleries: GalleryRegistry, active: int) -> dict[str, Exception]:
    """Bring every gallery back to the active release, where one is ahead of it. Plans are to be
    made anew afterwards.

    Returns what keeps a gallery from it, by name: it stays where it is, the others do not wait.
    """
    kept: dict[str, Exception] = {}
    for hosted in galleries.all():
        try:
            _return(hosted, active)
        except UNUSABLE as error:
            log.error("gallery not brought back", gallery=hosted.name, error=str(error))
            kept[hosted.name] = error
    return kept


def _return(hosted: Hosted, active: int) -> None:
    state = {ROLLOUT: None, NOTE: None}
    if hosted.spec().release > active:
        hosted.store.rollback(leave_behind=True, state=state)
    elif hosted.spec().release == active and any(map(hosted.state, state)):
        hosted.remember(state)


@contextmanager
def writes_locked(galleries: GalleryRegistry) -> Iterator[None]:
    """No gallery is put to meanwhile. Locked by rising name, as a flip locks them."""
    with galleries.holding() as held, ExitStack() as locks:
        for hosted in held:
            locks.enter_context(hosted.write_lock.exclusive())
        yield


def fail(
    parts: Parts, release: int, reason: str, lead: Lead, cancelled: threading.Event | None = None
) -> None:
    """Mark the release FAILED; what it did not yet replace serves on.

    Returns once that is durable, so that nothing begins it again but an operator. Where the disk is
    full or the database away it tries again until `cancelled` is set (None: once), or another
    gateway leads.
    """
    state, galleries = parts.state, parts.galleries

    def failed(now: State) -> dict[str, object]:
        marked = now.failed if now.active == release else {**now.failed, release: reason}
        return {"activation": None, "failed": marked}

    def give_back() -> None:
        state.revise(failed)
        if (active := state.now.active) is not None:
            return_galleries(galleries, active)

    with error_boundary(parts.metrics, "activation"):
        try:
            with writes_locked(galleries):
                state.together(give_back, lead)
        except LeadLostError as error:
            log.error("the failure is not recorded", error=str(error))
        except NobackfillError as error:
            log.error("the failure is not recorded yet", release=release, error=str(error))
            # The mark alone takes less room than what the galleries would write.
            _repeat(lambda: state.together(lambda: state.revise(failed), lead), cancelled)
        with writes_locked(galleries):
            old = parts.serving.replan()
        parts.serving.settle(old)


def _repeat(mark: Callable[[], object], cancelled: threading.Event | None) -> None:
    trouble = ""
    while True:
        try:
            mark()
        except LeadLostError:
            return
        except NobackfillError as error:
            if str(error) != trouble:
                log.error("the failure is not recorded yet", error=str(error))
            trouble = str(error)
        else:
            return
        if cancelled is None or cancelled.wait(_RETRY_S):
            return


def behind(parts: Parts) -> dict[str, str]:
    """Galleries whose active space is not the active release's, with the reason."""
    return {
        hosted.name: str(hosted.state(NOTE) or "its upgrade is under way")
        for hosted in parts.galleries.all()
        if hosted.spec().release != parts.state.now.active
    }


def end_jobs(parts: Parts, phase: Phase, message: str) -> None:
    """No upgrade is under way any more: those that did not get to their end say why."""
    for hosted in parts.galleries.all():
        why = str(hosted.state(NOTE) or "") if phase is Phase.DONE else message
        parts.upgrading.give_up(hosted.name, why)


class Activations:
    """Starts, resumes and calls off activations."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._run: RolloutRun | None = None

    def start(
        self,
        release: int,
        rollout: RolloutName | None = None,
        spare_cores: float = 0.0,
        old_space_seconds: int = 0,
        canary: Canary | None = None,
    ) -> RolloutRun:
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

    def start_gallery(self, gallery: str, spare_cores: float) -> RolloutRun:
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

    def resume(self) -> RolloutRun | None:
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

    def canary_under_way(self, release: int) -> bool:
        """Whether a canary of this release is under way or about to begin."""
        record = self._parts.state.now.activation
        return record is not None and record.release == release and record.canary is not None

    def change_canary(self, release: int, canary: Canary) -> None:
        """Give a canary under way another share, other steps and bounds.

        Raises InvalidInputError, PreconditionError for a share that is smaller, or where there is
        no canary of the release, CannotWriteError.
        """
        check_canary(canary)

        def changed(now: State) -> Mapping[str, object]:
            record, before = _canary(now, release)
            if canary.share < before.share:
                raise PreconditionError(
                    f"the share is {before.share:g}, and shares only grow, got {canary.share:g}; "
                    f"`gateway canary stop {release}` ends the canary"
                )
            kept = canary.model_copy(update={"promoted": before.promoted})
            return {"activation": record.model_copy(update={"canary": kept})}

        self._parts.state.revise(changed)

    def promote_canary(self, release: int) -> RolloutRun:
        """End a canary: all queries move to the new pair.

        Raises PreconditionError where there is no canary of the release, and where it has answered
        nobody, CannotWriteError.
        """

        def promoted(now: State) -> Mapping[str, object]:
            record, canary = _canary(now, release)
            ended = canary.model_copy(update={"promoted": True})
            return {"activation": record.model_copy(update={"canary": ended})}

        with self.held():
            run = self.running()
            if run is None:
                if self.canary_under_way(release):
                    raise PreconditionError(
                        f"another gateway leads the canary of release {release}; ask that one"
                    )
                raise _none(release)
            if not self._parts.canaries.met(release):
                raise PreconditionError(
                    f"release {release} has answered no query of its canary at this gateway: there "
                    "is no evidence to promote it by. Let more callers meet it, as with `gateway "
                    f"canary step {release} --share 50%`, or end the canary with `gateway canary "
                    f"stop {release}` and run `gateway activate {release}`, which asks for none"
                )
            self._parts.state.revise(promoted)
        return run

    def drop_canary(self, release: int) -> None:
        """Forget the activation that a canary belongs to, so that no step promotes it any more.

        Raises PreconditionError where it was promoted or is not under way, CannotWriteError.
        """

        def dropped(now: State) -> Mapping[str, object]:
            record = now.activation
            promoted = record is not None and record.canary is not None and record.canary.promoted
            if now.active == release or (promoted and record and record.release == release):
                raise PreconditionError(
                    f"release {release} has no canary to stop: it was promoted, or it answers all "
                    "callers already; `gateway rollback` returns to the release before"
                )
            _canary(now, release)
            return {"activation": None}

        self._parts.state.revise(dropped)

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

    def running(self) -> RolloutRun | None:
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
        check_lock_order(Level.RELEASES)
        if not self._lock.acquire(timeout=_BRIEF_S):
            raise BusyError("releases are being rolled back or retired; try again with a delay")
        try:
            with hold_level(Level.RELEASES), self._parts.state.held(_BRIEF_S):
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

    def _launch(self, record: Activation, lead: Lead) -> RolloutRun:
        for hosted in self._parts.galleries.all():
            if record.only in (None, hosted.name):
                self._parts.upgrading.expect(hosted, record.release)
        run = self._run = RolloutRun(record, lead, self._work)
        try:
            run.start()
        except RuntimeError as error:
            run.end(Phase.FAILED, str(error))
            raise BusyError(f"the activation has no thread ({error}); try again later") from error
        return run

    def _work(self, run: RolloutRun) -> tuple[Phase, str]:
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

    def _persist(self, run: RolloutRun) -> None:
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

    def _roll_out(self, run: RolloutRun) -> tuple[Phase, str]:
        """How it ends: DONE or FAILED, and its message."""
        release = run.record.release
        try:
            give_way()
            self._persist(run)
        except (RolloutCancelledError, LeadLostError) as error:
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


def check_canary(canary: Canary) -> None:
    """Raises InvalidInputError for what is no canary."""
    shares = (canary.share, *canary.steps)
    grows = all(one < other for one, other in pairwise(shares))
    if not (shares[0] > 0 and shares[-1] <= 1 and grows):
        raise InvalidInputError(
            "canary: expected growing shares above 0 and at most 1, got "
            + ", ".join(f"{share:g}" for share in shares)
        )
    if not 0 <= canary.every_s <= _STEP_MAX_S or (canary.steps and not canary.every_s):
        raise InvalidInputError(
            f"canary: expected more than 0 seconds between steps, and at most {_STEP_MAX_S:,}, got "
            f"{canary.every_s:g}"
        )
    # What is not finite could not be read from the state again.
    if not (0 < canary.most_errors < 1 and 0 < canary.largest_p99_ratio < math.inf):
        raise InvalidInputError(
            "canary: expected most_errors between 0 and 1, and a finite largest_p99_ratio above 0, "
            "got "
            f"{canary.most_errors:g} and {canary.largest_p99_ratio:g}"
        )


def _canary(now: State, release: int) -> tuple[Activation, Canary]:
    record = now.activation
    if record is None or record.release != release or record.canary is None:
        raise _none(release)
    return record, record.canary


def _none(release: int) -> PreconditionError:
    return PreconditionError(
        f"no canary of release {release} is under way; `gateway canary start {release} --share 5%` "
        "begins one"
    )


class FirstActivation:
    """What a gateway without an active release does by itself."""

    def __init__(
        self, catalog: Catalog, state: GatewayState, models: Models, activations: Activations,
        stopping: threading.Event, metrics: Metrics,
    ) -> None:  # fmt: skip
        self._catalog = catalog
        self._state = state
        self._models = models
        self._activations = activations
        self._stopping = stopping
        self._metrics = metrics

    def begin(self) -> None:
        """Return once a release that is there answers; one that is not, or whose model server is
        not, is waited for in a thread."""
        newest = self._catalog.newest()
        # One that failed is tried again by an operator only.
        tried = newest if newest in self._state.now.failed else None
        if newest is not None and tried is None and self._models.ready():
            tried = newest if self._activate(newest) else None
        if self._state.now.active is None:
            threading.Thread(target=self._wait, args=(tried,), name="first", daemon=True).start()

    def _wait(self, tried: int | None) -> None:
        seen = -1
        while not self._stopping.is_set() and self._state.now.active is None:
            newest = self._catalog.newest()
            if newest is not None and newest != tried:
                # One that fails is not tried over and over; the next one published is.
                with error_boundary(self._metrics, "first"):
                    tried = newest if self._activate(newest) else None
            seen = self._catalog.changed.wait(seen, 0.5)

    def _activate(self, release: int) -> bool:
        """Whether it was tried: another gateway may be doing it."""
        try:
            for event in self._activations.start(release).events():
                log.info("first activation", phase=event.phase, message=event.message)
        except BusyError as error:
            log.info("another activates", release=release, error=str(error))
            return False
        except NobackfillError as error:
            log.error("first activation refused", release=release, error=str(error))
        return True
