"""Start, resume and cancel activations: one at a time, in a thread."""

import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from nobackfill.gallery.search.index import lower_thread_priority
from nobackfill.release.manifest import Manifest
from nobackfill.server.canary.comparison import CanaryState
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.embedding import Models
from nobackfill.server.galleries.hosted import (
    NOTE,
    ROLLOUT,
    UNUSABLE_GALLERY_ERRORS,
    GalleryRegistry,
    HostedGallery,
    LockLevel,
    check_lock_order,
    hold_level,
)
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.rollout.rollout import (
    Phase,
    Rollout,
    RolloutCancelledError,
    RolloutParts,
    RolloutRun,
)
from nobackfill.server.state import (
    Activation,
    Canary,
    GatewayState,
    Leadership,
    LeadershipLostError,
    RolloutName,
    State,
    resume_count_reset,
)
from nobackfill.server.upgrades.upgrading import DEFAULT_SPARE_CORES

log = structlog.get_logger("server.activation")

# Longest wait (seconds) of a call for another that begins, rolls back or retires a release.
_LOCK_SECONDS = 5.0
# If the database or another gateway stalls, an activation is retried for so many seconds, with a
# pause before each try.
_RETRY_SECONDS, _RETRY_PAUSE_SECONDS = 120.0, 1.0
# An activation that crashed the gateway so many times after a resume is not resumed again.
_MAX_RESUMES = 2
# Longest time (seconds) for which queries of an old space may be answered: 100 years.
_MAX_OLD_SPACE_SECONDS = 100 * 365 * 24 * 3600
# Pause (seconds) before a failure that could not be recorded is recorded again.
_RECORD_RETRY_SECONDS = 1.0
# Longest step of a canary (seconds): a leap year. A larger number is a typing error, and some do
# not fit into the protocol.
_MAX_STEP_SECONDS = 366 * 24 * 3600


def roll_back_galleries(galleries: GalleryRegistry, active_release: int) -> dict[str, Exception]:
    """Return every gallery that is ahead of the active release to that release.

    The caller makes the plans again afterwards, and lets puts wait meanwhile, as `lock_writes`
    does. A gallery that fails stays as it is; the others go on.

    The space of the newer release stays as staging, and items without an older vector are no longer
    found. Notes and rollouts are removed. Each error is logged.

    Args:
        galleries: all galleries.
        active_release: the active release.

    Returns:
        The error of each gallery that could not return, by name.
    """
    errors: dict[str, Exception] = {}
    for hosted in galleries.all():
        try:
            _return_gallery(hosted, active_release)
        except UNUSABLE_GALLERY_ERRORS as error:
            log.error(
                "a gallery has a newer release than the active one, and cannot return to the "
                "active release",
                gallery=hosted.name,
                error=str(error),
            )
            errors[hosted.name] = error
    return errors


def _return_gallery(hosted: HostedGallery, active: int) -> None:
    state = {ROLLOUT: None, NOTE: None}
    if hosted.active_spec().release > active:
        hosted.store.rollback(leave_behind=True, state=state)
    elif hosted.active_spec().release == active and any(map(hosted.state_value, state)):
        hosted.store_state(state)


@contextmanager
def lock_writes(galleries: GalleryRegistry) -> Iterator[None]:
    """Block puts to every gallery during a block.

    Galleries are locked in the order of their names, as a flip locks them.

    It waits without a time limit for puts that run. A gallery that is created meanwhile is not
    locked. Deletions wait, too, at most 60 s, and then fail.

    Raises:
        LockOrderError: the thread holds a lock that comes later.
    """
    with galleries.hold_all() as hosted_galleries, ExitStack() as locks:
        for hosted in hosted_galleries:
            locks.enter_context(hosted.write_lock.exclusive())
        yield


def record_failure(
    parts: RolloutParts,
    release: int,
    reason: str,
    lead: Leadership,
    cancel_event: threading.Event | None = None,
) -> None:
    """Record that a release failed, and return galleries that had moved to it.

    A release that is active already is not marked. Returns once the failure is durable, so that
    only an operator can start the release again. If that fails, as on a full disk, the record alone
    is tried again every second, until `cancel_event` is set or another gateway leads. Plans are
    made again at the end, and old ones are waited for, at most 120 s each. Puts wait meanwhile.

    It raises no error: if the record cannot be made, it logs that and returns. Unexpected errors
    are logged and counted.

    Args:
        parts: the parts of the gateway.
        release: the release.
        reason: a sentence for operators.
        lead: the lead of the activation.
        cancel_event: ends the retries; None means a single retry.
    """
    state, galleries = parts.state, parts.galleries

    def failed(state: State) -> dict[str, object]:
        failures = state.failed if state.active == release else {**state.failed, release: reason}
        return {"activation": None, "failed": failures}

    def give_back() -> None:
        state.revise(failed)
        if (active := state.current.active) is not None:
            roll_back_galleries(galleries, active)

    with error_boundary(parts.metrics, "activation"):
        try:
            with lock_writes(galleries):
                state.transact(give_back, lead)
        except LeadershipLostError as error:
            log.error(
                "the failure of the activation was not recorded by this gateway, because another "
                "gateway leads the activation now",
                error=str(error),
            )
        except NobackfillError as error:
            log.error(
                "the failure of the activation is not recorded yet; the gateway tries again",
                release=release,
                error=str(error),
            )
            # Record the failure alone: it needs less space than returning the galleries.
            _record_failure(
                lambda: state.transact(lambda: state.revise(failed), lead), cancel_event
            )
        with lock_writes(galleries):
            old = parts.plan_manager.replan_all()
        parts.plan_manager.retire_plans(old)


def _record_failure(record: Callable[[], object], cancelled: threading.Event | None) -> None:
    last_error = ""
    while True:
        try:
            record()
        except LeadershipLostError:
            return
        except NobackfillError as error:
            if str(error) != last_error:
                log.error(
                    "the failure of the activation is not recorded yet; the gateway tries again",
                    error=str(error),
                )
            last_error = str(error)
        else:
            return
        if cancelled is None or cancelled.wait(_RECORD_RETRY_SECONDS):
            return


def lagging_galleries(parts: RolloutParts) -> dict[str, str]:
    """Return the galleries that are not in the active release's space, with the reason of each.

    They come in the order of their names. Galleries that are set aside are left out. Without an
    active release all are listed.

    Raises:
        NotFoundError: the gallery is closed or deleted.
        BusyError, UnavailableError: the store is busy, or does not answer.
        VerificationError: the store is damaged.
        CannotWriteError: the file cannot be opened, or the disk fails.
        ConfigurationError: the database refuses the statement, as without rights.
    """
    return {
        hosted.name: str(hosted.state_value(NOTE) or "its upgrade is running")
        for hosted in parts.galleries.all()
        if hosted.active_spec().release != parts.state.current.active
    }


def end_jobs(parts: RolloutParts, phase: Phase, message: str) -> None:
    """End the jobs of all galleries' upgrades once an activation ends; unfinished ones get its
    message.

    On DONE an unfinished job gets its gallery's note instead. Jobs that have ended stay. After an
    error the jobs of earlier galleries have ended.

    Args:
        parts: the parts of the gateway.
        phase: DONE or FAILED.
        message: a sentence for operators; may be empty.

    Raises:
        NotFoundError: the gallery is closed or deleted.
        BusyError, UnavailableError: the store is busy, or does not answer.
        CannotWriteError: the store cannot be written.
        VerificationError: the store is damaged.
        ConfigurationError: the database refuses the statement, as without rights.
    """
    for hosted in parts.galleries.all():
        why = str(hosted.state_value(NOTE) or "") if phase is Phase.DONE else message
        parts.upgrades.fail_job(hosted.name, why)


class Activations:
    """Start, resume, promote and cancel activations."""

    def __init__(self, parts: RolloutParts) -> None:
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
        """Start the activation of a release.

        The record is durable before the thread starts, and a restart resumes it. An activation of
        the release that is active already repeats it, for galleries that stayed behind. A
        rollback's five minutes end. If a gallery's store fails at the begin, the activation stays
        recorded, and a restart resumes it.

        Args:
            release: the release.
            rollout: how queries are answered meanwhile; None means direct if the release declares
                it, else cutover.
            spare_cores: share of cores that upgrades leave to searches, 0 to 1; 0 means the
                default.
            old_space_seconds: how long queries of the old space are answered, at least 0; 0 means
                without an end.
            canary: settings of a canary, which `check_canary` accepts; None means no canary.

        Returns:
            The activation, which runs in its own thread.

        Raises:
            NotFoundError: the release is not published.
            BusyError: another activation, rollback or retirement is under way, or the system has no
                thread left; then the activation is recorded, and a restart resumes it.
            PreconditionError: the release is older than the active one; or a canary has nothing to
                compare it with, or another rollout than cutover.
            InvalidInputError: `old_space_seconds` is too large.
            CannotWriteError: the state, or the publication's verified metadata, cannot be written.
            UnavailableError: the database does not answer, or the publication folder cannot be
                read.
            VerificationError: the publication, the release's manifest or the state in the database
                is not valid.
            LockOrderError: the thread holds a lock that comes later.
            OSError: the folder of the verified metadata cannot be read.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        if old_space_seconds > _MAX_OLD_SPACE_SECONDS:
            raise InvalidInputError(
                f"old_space_seconds: expected at most {_MAX_OLD_SPACE_SECONDS} seconds (100 "
                f"years), got {old_space_seconds}; request a shorter time"
            )
        manifest = self._parts.catalog.find_manifest(release)
        with self.block_activations(), self._take_lead("begin another activation") as lead:
            active = self._parts.state.current.active
            if active is not None and release < active:
                raise PreconditionError(
                    f"release {release} is older than the active release {active}; "
                    "run `gateway rollback` to return to the previous one"
                )
            if canary is not None:
                _refuse_canary(release, active, rollout)
                rollout = "cutover"
            record = Activation(
                release=release,
                rollout=rollout or self._default_rollout(manifest),
                spare_cores=spare_cores or DEFAULT_SPARE_CORES,
                old_space_seconds=old_space_seconds,
                canary=canary,
            )
            # A retired release that is activated again is no longer retired.
            self._parts.state.revise(
                lambda state: {
                    "activation": record,
                    "retired": tuple(n for n in state.retired if n != release),
                    "rolled_back": None,
                }
            )
            if canary is not None:
                self._parts.canaries.begin_comparison(release)
            return self._launch_run(record, lead)

    def start_gallery(self, gallery: str, spare_cores: float) -> RolloutRun:
        """Upgrade one gallery, which stayed with an older release, to the active one.

        Whether the gallery exists is not checked: for an unknown name the activation ends without
        work. A rollback's five minutes end.

        Args:
            gallery: its name.
            spare_cores: share of cores that the upgrade leaves to searches, 0 to 1; 0 means the
                default.

        Returns:
            The activation, which runs in its own thread.

        Raises:
            BusyError: another activation, rollback or retirement is under way, or the system has no
                thread left; then the activation is recorded, and a restart resumes it.
            CannotWriteError: the state cannot be written.
            PreconditionError: no release is active.
            UnavailableError: the database does not answer.
            LockOrderError: the thread holds a lock that comes later.
            VerificationError: the state in the database is damaged, or a newer version wrote it.
            NotFoundError: the gallery was deleted meanwhile.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        with self.block_activations(), self._take_lead("begin another activation") as lead:
            record = Activation(
                release=self._parts.state.active_release(),
                rollout="cutover",
                spare_cores=spare_cores or DEFAULT_SPARE_CORES,
                old_space_seconds=0,
                only=gallery,
            )
            self._parts.state.change(activation=record, rolled_back=None)
            return self._launch_run(record, lead)

    def resume(self) -> RolloutRun | None:
        """Resume the activation that was under way when this gateway, or its leader, ended.

        A release that ended gateways too often is recorded as failed instead.

        A release is given up after two resumes that did not end in order. Counts of an earlier
        canary are dropped.

        Returns:
            The activation; None if there is nothing to resume, another gateway leads, or the
            release failed.

        Raises:
            BusyError: a rollback or retirement is under way, or the system has no thread left.
            CannotWriteError: the state cannot be written.
            UnavailableError: the database does not answer.
            LeadershipLostError: another gateway has taken the lead meanwhile.
            VerificationError: the shared state or a new gallery is damaged, or a model fails its
                check.
            LockOrderError: the thread holds a lock that comes later.
            NotFoundError: a gallery was deleted meanwhile.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        if self._parts.state.current.activation is None or self.current_run() is not None:
            return None
        lead = self._parts.state.take_leadership()
        if lead is None:
            return None
        try:
            with self.block_activations():
                record = self._parts.state.current.activation
                if record is None or self.current_run() is not None:
                    lead.close()
                    return None
                if record.resumed >= _MAX_RESUMES:
                    self._give_up(record, lead)
                    lead.close()
                    return None
                log.info("resuming activation", release=record.release)
                resumed = record.model_copy(update={"resumed": record.resumed + 1})
                self._parts.state.transact(
                    lambda: self._parts.state.change(activation=resumed), lead
                )
                if record.canary is not None:
                    self._parts.canaries.begin_comparison(record.release)
                return self._launch_run(resumed, lead)
        except BaseException:
            lead.close()
            raise

    def _give_up(self, record: Activation, lead: Leadership) -> None:
        reason = (
            f"the gateway crashed {1 + record.resumed} times during the activation of release "
            f"{record.release}; if the activation was not the cause, run `gateway activate "
            f"{record.release}` again"
        )
        log.error(
            "the activation is given up; the former release goes on answering",
            release=record.release,
            reason=reason,
        )
        record_failure(self._parts, record.release, reason, lead)

    def is_canary_running(self, release: int) -> bool:
        """Tell whether a canary of a release is running or about to begin.

        It is so until the switch, also after a promotion, at any gateway that shares the state.
        """
        record = self._parts.state.current.activation
        return record is not None and record.release == release and record.canary is not None

    def change_canary(self, release: int, canary: Canary) -> None:
        """Change the share, steps and bounds of a running canary.

        The step begins again if share, shadow, steps or the time between them change. A promotion
        that was recorded stays. Any gateway that shares the state may call it.

        Args:
            release: the release of the canary.
            canary: the new settings; its share may not be smaller than before.

        Raises:
            InvalidInputError: the settings are not valid; see `check_canary`.
            PreconditionError: no canary of the release runs, or the share is smaller.
            CannotWriteError: the state cannot be written.
            UnavailableError, BusyError: the database does not answer, or is busy.
            VerificationError: the state in the database is damaged, or a newer version wrote it.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        check_canary(canary)

        def changed(state: State) -> Mapping[str, object]:
            record, old = _canary_record(state, release)
            if canary.share < old.share:
                raise PreconditionError(
                    f"canary: expected a share of at least {old.share:g}, the present one, got "
                    f"{canary.share:g}; `gateway canary stop {release}` ends the canary"
                )
            new = canary.model_copy(update={"promoted": old.promoted})
            return {"activation": record.model_copy(update={"canary": new})}

        self._parts.state.revise(changed)

    def promote_canary(self, release: int) -> RolloutRun:
        """End a canary by moving all queries to its release.

        A second call while the switch is under way changes nothing.

        It returns before the switch; follow the activation's events.

        Args:
            release: the release of the canary.

        Returns:
            The activation, which completes the switch.

        Raises:
            PreconditionError: this gateway leads no canary of the release, or the release has
                answered no query of its canary.
            BusyError: a rollback or retirement is under way, or the database is busy.
            CannotWriteError: the state cannot be written.
            UnavailableError: the database does not answer.
            LockOrderError: the thread holds a lock that comes later.
            VerificationError: the state in the database is damaged, or a newer version wrote it.
            ConfigurationError: the database refuses the statement, as without rights.
        """

        def promoted(state: State) -> Mapping[str, object]:
            record, canary = _canary_record(state, release)
            ended = canary.model_copy(update={"promoted": True})
            return {"activation": record.model_copy(update={"canary": ended})}

        with self.block_activations():
            run = self.current_run()
            if run is None:
                if self.is_canary_running(release):
                    raise PreconditionError(
                        f"another gateway leads the canary of release {release}; run `gateway "
                        f"canary promote {release} --server HOST:PORT` with that gateway's address"
                    )
                raise _no_canary(release)
            if not self._parts.canaries.has_answered(release):
                raise PreconditionError(
                    f"release {release} has answered no query of its canary at this gateway, so "
                    "there is no evidence for promoting it. Raise its share with `gateway canary "
                    f"step {release} --share 50%`, or end the canary with `gateway canary stop "
                    f"{release}` and run `gateway activate {release}`, which needs no evidence"
                )
            self._parts.state.revise(promoted)
        return run

    def forget_canary(self, release: int) -> None:
        """Forget the activation of a canary, so that no later step promotes it.

        The thread of the activation notices it within a moment, and ends as cancelled.

        Args:
            release: the release of the canary.

        Raises:
            PreconditionError: the canary was promoted, or does not run.
            CannotWriteError: the state cannot be written.
            UnavailableError, BusyError: the database does not answer, or is busy.
            VerificationError: the state in the database is damaged, or a newer version wrote it.
            ConfigurationError: the database refuses the statement, as without rights.
        """

        def dropped(state: State) -> Mapping[str, object]:
            record = state.activation
            promoted = record is not None and record.canary is not None and record.canary.promoted
            if state.active == release or (promoted and record and record.release == release):
                raise PreconditionError(
                    f"release {release} has no canary to stop: it was promoted, or it answers all "
                    "callers already; run `gateway rollback` to return to the previous one"
                )
            _canary_record(state, release)
            return {"activation": None}

        self._parts.state.revise(dropped)

    @contextmanager
    def _take_lead(self, action: str) -> Iterator[Leadership]:
        """Take the lead of an activation that the block launches; an error in the block gives it
        up.

        Raises:
            BusyError: an activation is under way.
        """
        self.check_none_running(action)
        lead = self._parts.state.take_leadership()
        if lead is None:
            raise BusyError(
                f"cannot {action} while another gateway ends an activation; try again in a few "
                "seconds"
            )
        try:
            yield lead
        except BaseException:
            lead.close()
            raise

    def current_run(self) -> RolloutRun | None:
        """Return the activation that this gateway leads; None if it leads none.

        An activation that has reported its end no longer counts.
        """
        run = self._run
        return run if run is not None and run.is_running() else None

    def activating_release(self) -> int | None:
        """Return the release that this gateway, or one that shares its database, activates.

        Returns:
            The release; None if none is activated. An activation that only waits for a restart does
            not count, unless the state is shared.
        """
        run, record = self.current_run(), self._parts.state.current.activation
        if run is not None:
            return run.activation.release
        return record.release if record is not None and self._parts.state.shared else None

    @contextmanager
    def block_activations(self) -> Iterator[None]:
        """Keep activations from beginning, and others from changing them, during a block.

        It waits up to five seconds for other calls here, and as long for other gateways. In a
        shared database it first follows their changes. It may not be nested.

        Raises:
            BusyError: another call held them for more than a few seconds.
            UnavailableError: the database does not answer.
            LockOrderError: the thread holds a lock that comes later.
            VerificationError: the shared state or a new gallery is damaged, or a model fails its
                check.
            CannotWriteError: the publication's verified metadata cannot be stored.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        check_lock_order(LockLevel.RELEASES)
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            raise BusyError(
                "a release is being activated, rolled back or retired; try again in a few seconds"
            )
        try:
            with (
                hold_level(LockLevel.RELEASES),
                self._parts.state.block_other_gateways(_LOCK_SECONDS),
            ):
                self._parts.state.catch_up()
                yield
        finally:
            self._lock.release()

    def cancel(self) -> None:
        """Cancel the activation under way, if any, before its next step, and forget it.

        Call it within `block_activations`, so that no other begins meanwhile. It waits until the
        thread of the activation has ended, and ends the lead of another gateway. All changes of the
        activation stay.

        Raises:
            CannotWriteError: the state cannot be written.
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            VerificationError: the shared state or a new gallery is damaged, or a model fails its
                check.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        self.interrupt()
        self._parts.state.end_leadership()
        # Follow what another gateway did until then.
        self._parts.state.catch_up()

    def interrupt(self) -> None:
        """Stop the activation under way, if any; a restart resumes it.

        It waits until the thread has ended. Without an activation it does nothing. One that another
        gateway leads goes on.

        Raises:
            CannotWriteError: the state cannot be written.
        """
        run = self.current_run()
        if run is not None:
            run.cancel()
        record = self._parts.state.current.activation
        if record is not None and record.resumed and not self._parts.state.shared:
            # An orderly stop does not count as a crash.
            self._parts.state.revise(resume_count_reset)

    def _default_rollout(self, manifest: Manifest) -> RolloutName:
        active = self._parts.state.current.active
        if active is None:
            return "cutover"
        old = self._parts.catalog.manifest(active)
        return "direct" if manifest.searches_space_directly(old.space) else "cutover"

    def check_none_running(self, action: str, *, during_canary: bool = False) -> None:
        """Check that no activation is under way.

        In a shared database an activation of another gateway counts, too; its canary never counts
        as waiting. The answer holds only within `block_activations`.

        Args:
            action: the action that the caller wants, for the error.
            during_canary: allow it while the canary of an activation waits.

        Raises:
            BusyError: an activation is under way.
        """
        run, release = self.current_run(), self.activating_release()
        waits = during_canary and run is not None and run.is_canary_waiting
        if release is not None and not waits:
            raise BusyError(
                f"cannot {action} while release {release} is being activated; try again when the "
                "activation has ended, or cancel it with `gateway rollback --yes`"
            )

    def _launch_run(self, record: Activation, lead: Leadership) -> RolloutRun:
        for hosted in self._parts.galleries.all():
            if record.only in (None, hosted.name):
                self._parts.upgrades.expect_upgrade(hosted, record.release)
        run = self._run = RolloutRun(record, lead, self._work)
        try:
            run.start()
        except RuntimeError as error:
            run.end(Phase.FAILED, str(error))
            raise BusyError(
                f"the system has no thread for the activation ({error}); try again later"
            ) from error
        return run

    def _work(self, run: RolloutRun) -> tuple[Phase, str]:
        phase, message = Phase.FAILED, "unexpected error; the gateway's log has the traceback"
        with error_boundary(self._parts.metrics, "activation"):
            began = time.monotonic()
            phase, message = self._roll_out(run)
            if not run.cancel_event.is_set():
                seconds = self._parts.metrics.swap_seconds.labels(phase.value)
                seconds.observe(time.monotonic() - began)
        with error_boundary(self._parts.metrics, "activation"):
            state, ended = self._parts.state, not run.cancel_event.is_set()
            # If another gateway continues the activation, its jobs go on.
            if ended or not state.shared or state.current.activation is None:
                end_jobs(self._parts, phase, message)
        self._parts.metrics.upgrade_ratio.set(0)
        if run.activation.canary is not None:
            self._parts.canaries.end_comparison(CanaryState.ENDED, message)
        return phase, message

    def _run_with_retries(self, run: RolloutRun) -> None:
        """Run an activation, and run it again from the first step if the database or a gateway
        stalls.

        Raises:
            NobackfillError: as `Rollout.run`; also a stall that lasts too long.
        """
        state, end = self._parts.state, float("inf")
        while True:
            try:
                Rollout(run, self._parts).run()
                state.transact(lambda: state.change(activation=None), run.leadership)
                return
            except (BusyError, UnavailableError) as error:
                end = min(end, time.monotonic() + _RETRY_SECONDS)
                if not state.shared or time.monotonic() >= end:
                    raise
                log.warning(
                    "the activation stopped because of an error, and begins again with its first "
                    "step",
                    error=str(error),
                )
            run.cancel_event.wait(_RETRY_PAUSE_SECONDS)
            run.raise_if_cancelled()

    def _roll_out(self, run: RolloutRun) -> tuple[Phase, str]:
        """Run an activation, and record how it ends.

        Returns:
            DONE or FAILED, and a sentence for operators.
        """
        release = run.activation.release
        try:
            lower_thread_priority()
            self._run_with_retries(run)
        except (RolloutCancelledError, LeadershipLostError) as error:
            return Phase.FAILED, str(error)
        except (NobackfillError, OSError, sqlite3.Error) as error:
            log.error("activation failed", release=release, error=str(error))
            record_failure(self._parts, release, str(error), run.leadership, run.cancel_event)
            if isinstance(error, VerificationError):
                # The models failed: delete the vectors that they made, so that no later try uses
                # them.
                self._parts.plan_manager.drop_unused_spaces([release])
            return Phase.FAILED, str(error)
        except Exception as error:
            reason = f"unexpected {type(error).__name__}; the gateway's log has the traceback"
            log.exception("activation failed", release=release, error=type(error).__name__)
            self._parts.metrics.unexpected_errors.labels("activation").inc()
            record_failure(self._parts, release, reason, run.leadership, run.cancel_event)
            return Phase.FAILED, reason
        run.leadership.close()
        # The release is active from here on; the rest only frees what the old one used.
        with error_boundary(self._parts.metrics, "activation"):
            self._parts.plan_manager.retire_plans(self._parts.plan_manager.replan_all())
        reasons = lagging_galleries(self._parts)
        lagging = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        log.info("activated", release=release, behind=lagging)
        return Phase.DONE, lagging


def _refuse_canary(release: int, active: int | None, rollout: RolloutName | None) -> None:
    if rollout not in (None, "cutover"):
        raise PreconditionError(
            f"rollout: a canary needs the rollout cutover, got {rollout}; leave the rollout out"
        )
    if active == release:
        raise PreconditionError(
            f"release {release} is active already; a canary needs another release, which `gateway "
            "releases` lists"
        )
    if active is None:
        raise PreconditionError(
            f"a canary compares release {release} with the active release, but no release is "
            f"active; run `gateway activate {release}`"
        )


def check_canary(canary: Canary) -> None:
    """Check the settings of a canary.

    Shares must rise from above 0 to at most 1. Steps need a time above 0, at most a leap year.
    `most_errors` must lie between 0 and 1, neither of them included. `largest_p99_ratio` must be
    finite and above 0. NaN is refused.

    Raises:
        InvalidInputError: a share, a time or a bound is out of its range.
    """
    shares = (canary.share, *canary.steps)
    grows = all(share < next_share for share, next_share in pairwise(shares))
    if not (shares[0] > 0 and shares[-1] <= 1 and grows):
        raise InvalidInputError(
            "canary: expected shares of the callers above 0 and at most 1, each step larger than "
            f"the one before, got {', '.join(f'{share:g}' for share in shares)}; correct the shares"
        )
    if not 0 <= canary.every_s <= _MAX_STEP_SECONDS or (canary.steps and not canary.every_s):
        raise InvalidInputError(
            f"canary: expected more than 0 seconds between steps, and at most "
            f"{_MAX_STEP_SECONDS:,}, got {canary.every_s:g}; correct the time between steps"
        )
    # An infinite bound could not be read back from the state.
    if not (0 < canary.most_errors < 1 and 0 < canary.largest_p99_ratio < math.inf):
        raise InvalidInputError(
            "canary: expected most_errors above 0 and below 1, and a finite largest_p99_ratio "
            f"above 0, got {canary.most_errors:g} and {canary.largest_p99_ratio:g}; leave a bound "
            "out for its default"
        )


def _canary_record(state: State, release: int) -> tuple[Activation, Canary]:
    record = state.activation
    if record is None or record.release != release or record.canary is None:
        raise _no_canary(release)
    return record, record.canary


def _no_canary(release: int) -> PreconditionError:
    return PreconditionError(
        f"no canary of release {release} runs; run `gateway canary start {release} --share 5%` to "
        "begin one"
    )


@dataclass(eq=False)
class FirstActivation:
    """Activate the newest release in a gateway that has no active one."""

    _catalog: Catalog
    _state: GatewayState
    _models: Models
    _activations: Activations
    _stopping: threading.Event
    _metrics: Metrics

    def activate_newest(self) -> None:
        """Activate the newest release that is published, and return once it answers or has failed.

        Call it only while no release is active. If none is published, or the model server is away,
        a thread waits for both. A release that failed before is not tried again; the thread waits
        for a newer one. A thread waits, too, if another gateway may be activating. Errors of the
        activation are logged, not raised. The thread ends when a release is active, or the gateway
        stops.

        Raises:
            RuntimeError: the system has no thread left to wait in.
        """
        newest = self._catalog.newest_release()
        # Only an operator retries a release that failed.
        attempted = newest if newest in self._state.current.failed else None
        if newest is not None and attempted is None and self._models.is_ready():
            attempted = newest if self._activate(newest) else None
        if self._state.current.active is None:
            threading.Thread(
                target=self._wait, args=(attempted,), name="first", daemon=True
            ).start()

    def _wait(self, attempted: int | None) -> None:
        version = -1
        while not self._stopping.is_set() and self._state.current.active is None:
            newest = self._catalog.newest_release()
            if newest is not None and newest != attempted:
                # A release that fails is not retried; the next one that is published is tried.
                with error_boundary(self._metrics, "first"):
                    attempted = newest if self._activate(newest) else None
            version = self._catalog.change_counter.wait_for_change(version, 0.5)

    def _activate(self, release: int) -> bool:
        """Activate a release.

        Returns:
            False if another gateway may be activating it.
        """
        try:
            for event in self._activations.start(release).events():
                log.info("first activation", phase=event.phase, message=event.message)
        except BusyError as error:
            log.info(
                "another gateway activates the first release", release=release, error=str(error)
            )
            return False
        except NobackfillError as error:
            log.error(
                "cannot activate the first release; correct the error, and run `gateway activate` "
                "with its number",
                release=release,
                error=str(error),
            )
        return True
