"""Run one activation, from verification to the last gallery: cutover, dual or direct.

`Rollout` is a state machine whose phases are its methods, in this order: verify, load, probe,
upgrade, canary, switch. `RolloutRun` is its thread, with the events that watchers read.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from nobackfill.errors import GateFailedError, NobackfillError, PreconditionError
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.release.manifest import Manifest
from nobackfill.release.probes import check_encoders
from nobackfill.server.canary.canaries import Canaries
from nobackfill.server.canary.comparison import CanaryState
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.embedding import Models
from nobackfill.server.galleries.hosted import NOTE, ROLLOUT, GalleryRegistry, HostedGallery
from nobackfill.server.galleries.plan import CANARY_KEY, direct_part, old_model_part, own_part
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.serving import PlanManager
from nobackfill.server.state import (
    Activation,
    Canary,
    GatewayState,
    Leadership,
    State,
    resume_count_reset,
)
from nobackfill.server.upgrades.upgrading import GalleryUpgrades, JobState

log = structlog.get_logger("server.rollout")

Result = TypeVar("Result")

# Seconds between two checks of a canary's bounds; its evidence does not depend on this.
_CANARY_EVERY_S = 0.25


class Phase(StrEnum):
    """Name a phase of an activation, in the order in which they come."""

    VERIFYING = "verifying"
    LOADING = "loading"
    PROBING = "probing"
    UPGRADING = "upgrading"
    CANARY = "canary"
    SWITCHING = "switching"
    DONE = "done"
    FAILED = "failed"


class RolloutCancelledError(NobackfillError):
    """A rollback or the gateway's shutdown cancelled the activation."""


@dataclass(frozen=True)
class RolloutEvent:
    """Report the progress of an activation.

    Attributes:
        phase: the phase it is in.
        upgraded_item_count: items upgraded.
        item_count: items to upgrade; 0 outside of upgrades.
        message: a sentence for operators; may be empty.
        time: Unix time of the report.
    """

    phase: Phase
    upgraded_item_count: int
    item_count: int
    message: str
    time: float


class RolloutRun:
    """Run one activation in a thread, and let watchers follow its events."""

    def __init__(
        self,
        record: Activation,
        lead: Leadership,
        work: Callable[["RolloutRun"], tuple[Phase, str]],
    ) -> None:
        """Prepare the thread of an activation.

        Args:
            record: the activation.
            lead: the lead under which it changes galleries; closed at the end.
            work: the activation itself, called with this object; it returns DONE or FAILED, and a
                message. If it raises, FAILED is reported.
        """
        self.activation = record
        self.leadership = lead
        self._work = work
        self.cancel_event = threading.Event()
        self._condition = threading.Condition()
        self._events: list[RolloutEvent] = []
        self._thread = threading.Thread(target=self._run_work, name="activation")
        self._ended = False
        # True while its canary waits for queries: galleries may then be created and deleted.
        self.is_canary_waiting = False

    def start(self) -> None:
        """Start the thread.

        Call it once. The thread keeps the process alive until it ends.

        Raises:
            RuntimeError: the system has no thread left, or it was called before.
        """
        self._thread.start()

    def is_running(self) -> bool:
        """Tell whether the activation still blocks others.

        False once it has reported its end, or its thread is gone.

        It is True before `start`.
        """
        return not self._ended and (self._thread.ident is None or self._thread.is_alive())

    def cancel(self) -> None:
        """Stop the activation before its next step; returns once its thread has ended.

        Its record stays, so that a restart resumes it. After the end, it does nothing.

        A step may take as long as a chunk of an upgrade, a model's trial or a wait for a lock. Call
        it after `start`, and not in the thread of the activation.

        Raises:
            RuntimeError: the thread was not started, or is the caller's own.
        """
        self.cancel_event.set()
        self._thread.join()

    def raise_if_cancelled(self) -> None:
        """Stop here if the activation was cancelled.

        A lead that was lost is not noticed here.

        Raises:
            RolloutCancelledError: it was cancelled.
        """
        if self.cancel_event.is_set():
            raise RolloutCancelledError(
                f"the activation of release {self.activation.release} was cancelled"
            )

    def end(self, phase: Phase, message: str) -> None:
        """Report the end of the activation; another may begin now.

        It adds a last event. A second call adds another one.

        Args:
            phase: DONE or FAILED.
            message: a sentence for operators.
        """
        self._ended = True
        self.add_event(phase, message=message)

    def add_event(self, phase: Phase, complete: int = 0, total: int = 0, message: str = "") -> None:
        """Add an event, and wake the watchers.

        Progress during the upgrade replaces the event before it. Any thread may call it; events
        stay in memory only.

        Args:
            phase: the phase it is in.
            complete: items upgraded.
            total: items to upgrade; 0 outside of upgrades.
            message: a sentence for operators; may be empty.
        """
        with self._condition:
            last = self._events[-1] if self._events else None
            if last is not None and last.phase == phase == Phase.UPGRADING:
                self._events.pop()
            self._events.append(RolloutEvent(phase, complete, total, message, time.time()))
            self._condition.notify_all()

    def events(self, is_gone: Callable[[], bool] = lambda: False) -> Iterator[RolloutEvent]:
        """Yield all events from the beginning to DONE or FAILED, then wait for new ones.

        It never ends if no end is reported and `is_gone` stays False. Progress events between two
        looks are skipped. Any number of threads may follow, each from the beginning.

        Args:
            is_gone: checked when there was no event for half a second; True ends the iteration
                early.
        """
        previous_events: list[RolloutEvent] = []
        while True:
            new = self._wait(previous_events)
            for event in new:
                yield event
                if event.phase in (Phase.DONE, Phase.FAILED):
                    return
            if not new and is_gone():
                return

    def _run_work(self) -> None:
        """Run the work; the end is reported whatever it raises."""
        phase, message = Phase.FAILED, ""
        try:
            phase, message = self._work(self)
        finally:
            self.leadership.close()
            self.end(phase, message)

    def _wait(self, previous_events: list[RolloutEvent]) -> list[RolloutEvent]:
        """Wait up to half a second for new events, and add them to `previous_events`.

        Returns:
            The new events.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._events != previous_events, 0.5)
            latest = self._events[max(0, len(previous_events) - 1) :]
            new = [event for event in latest if event not in previous_events]
            previous_events[:] = self._events
            return new


def check_golden_probes(folder: Path, manifest: Manifest, models: Models) -> None:
    """Run golden probes through the loaded models, and compare with the published answers.

    A model that the release does not have is not checked.

    Args:
        folder: the publication folder.
        manifest: the release.
        models: what runs the models.

    Raises:
        VerificationError: an output differs from the published one, or the file of probes is
            missing or not as signed.
        UnavailableError: the models are not loaded, or the model server does not answer.
    """
    check_encoders(
        folder,
        manifest,
        partial(models.embed_images, manifest) if manifest.embedder.file else None,
        partial(models.compute_side, manifest) if manifest.side_encoder else None,
        partial(models.embed_texts, manifest) if manifest.text_encoder else None,
    )


@dataclass(frozen=True)
class RolloutParts:
    """Group the parts of a gateway that an activation needs.

    Attributes:
        models: runs models.
        catalog: published releases.
        state: the gateway's state.
        galleries: the open galleries.
        upgrades: runs upgrades of galleries.
        plan_manager: makes plans.
        canaries: compares both releases during a canary.
        metrics: the gateway's metrics.
    """

    models: Models
    catalog: Catalog
    state: GatewayState
    galleries: GalleryRegistry
    upgrades: GalleryUpgrades
    plan_manager: PlanManager
    canaries: Canaries
    metrics: Metrics


class Rollout:
    """Activate one release.

    Runs in a thread of its own. Every step can be repeated: a restart begins from the first.
    """

    def __init__(self, run: RolloutRun, parts: RolloutParts) -> None:
        self._run = run
        self._record = run.activation
        self._parts = parts
        self._done = 0
        self._total = 0

    def run(self) -> None:
        """Run the activation to its end: verify, load, probe, upgrade, canary, switch.

        It waits without a limit while the model server is away, a gallery is paused, or the canary
        runs. Each step is durable, so that a new run continues. After an error what was done stays;
        the caller calls `record_failure`. Galleries without a route stay with their release, and
        get a note.

        Raises:
            NotFoundError: the release is not published, or a gallery was deleted.
            PreconditionError: the release is withdrawn, the rollout does not suit it, or its canary
                stopped.
            GateFailedError: the release did not pass its gate.
            VerificationError: a file or a model is not as published, or a gallery is damaged.
            RolloutCancelledError: the activation was cancelled, here or by another gateway.
            LeadershipLostError: another gateway leads the activation now; its last transaction
                changed nothing.
            BusyError, UnavailableError: a store, the state, the publication or the model server is
                busy, or does not answer.
            CannotWriteError: a gallery, the state or the publication's verified metadata cannot be
                written.
            InvalidInputError: a space has too many dimensions for the database.
            ConfigurationError: a gallery has a space of a release that is not published here; or
                the release embeds texts, and the extra `text` is not installed; or the database
                refuses a statement.
            OSError: the child process of a trial cannot be started, or the folder of the verified
                metadata cannot be read.
        """
        with self._parts.galleries.hold_all():
            folder, manifest = self._verify()
            self._load(manifest)
            self._probe(folder, manifest)
            upgraded = self._upgrade_all(manifest)
            if self._record.canary is not None:
                self._start_canary(upgraded, manifest)
            elif self._record.rollout == "cutover":
                self._switch_galleries(upgraded, manifest)
        if self._record.canary is not None:
            self._wait_for_promotion()
            # Galleries and items may have been added and deleted during the canary.
            with self._parts.galleries.hold_all():
                self._switch_galleries(self._upgrade_all(manifest), manifest)

    def _verify(self) -> tuple[Path, Manifest]:
        """Check the release's gate and digests, and try its models in a child process.

        Returns:
            The publication folder and the manifest.
        """
        number = self._record.release
        catalog = self._parts.catalog
        self._run.add_event(Phase.VERIFYING)
        catalog.refresh()
        manifest = catalog.manifest(number)
        reason = catalog.withdrawal_by_release[number]
        if reason is not None:
            raise PreconditionError(
                f"release {number} was withdrawn by its publisher ({reason}); activate another "
                "release, which `gateway releases` lists"
            )
        gate = manifest.gate
        if gate.verdict not in ("first", "passed") and not gate.forced:
            raise GateFailedError(
                f"release {number} did not pass its gate, the publisher's test against the "
                f"previous release ({gate.detail}); activate another release"
            )
        folder = catalog.verify_files(number)
        sources = {hosted.active_spec().release for hosted in self._parts.galleries.all()}
        self._parts.upgrades.trials.try_release_models(
            manifest, sources, self._run.raise_if_cancelled
        )
        return folder, manifest

    def _load(self, manifest: Manifest) -> None:
        """Load the models; wait while the model server is away, which is not the release's
        fault.
        """
        models = self._parts.models
        self._run.add_event(Phase.LOADING)
        if not models.is_ready():
            self._run.add_event(Phase.LOADING, message="waiting for the model server")
        while not models.is_ready():
            self._run.cancel_event.wait(0.2)
            self._run.raise_if_cancelled()
        models.load(manifest)

    def _probe(self, folder: Path, manifest: Manifest) -> None:
        """Check the loaded models' answers against the published ones."""
        self._run.add_event(Phase.PROBING)
        check_golden_probes(folder, manifest, self._parts.models)
        self._run.raise_if_cancelled()
        if self._record.resumed:
            # The models did not crash the gateway: a later crash has another cause.
            self._transact(lambda: self._parts.state.revise(resume_count_reset))

    def _upgrade_all(self, manifest: Manifest) -> list[HostedGallery]:
        """Fill the release's space in every gallery that has a route to it.

        Returns:
            The galleries whose new space is complete.
        """
        movable = self._sort_galleries(manifest)
        self._stage_galleries(movable, manifest)
        if self._record.rollout != "cutover":
            self._switch_queries(manifest)
        self._done, self._total = 0, sum(hosted.store.count() for hosted in movable)
        self._run.add_event(Phase.UPGRADING, 0, self._total)
        return [hosted for hosted in movable if self._upgrade_gallery(hosted, manifest)]

    def _sort_galleries(self, manifest: Manifest) -> list[HostedGallery]:
        """Return the galleries that have a route to the release; the others get a note with the
        reason.
        """
        movable = []
        is_direct = self._record.rollout == "direct"
        for hosted in self._parts.galleries.all():
            spec = hosted.active_spec()
            if spec.space == manifest.space or self._record.only not in (None, hosted.name):
                continue
            upgrades = self._parts.upgrades
            if upgrades.best_route(hosted, manifest.release, is_direct=is_direct) is not None:
                movable.append(hosted)
            else:
                note = (
                    f"no upgrade leads from release {spec.release} to {manifest.release} with the "
                    "side-information that the gallery has; publish such an upgrade, or send the "
                    "images of the items again"
                )
                hosted.store_state({NOTE: note})
        return movable

    def _stage_galleries(self, movable: list[HostedGallery], manifest: Manifest) -> None:
        """Begin the new space in each gallery: from now on puts are embedded for both releases."""
        for hosted in movable:
            old = self._parts.catalog.manifest(hosted.active_spec().release)
            self._refuse_rollout(manifest, old)
        for hosted in movable:
            is_answering = hosted.plan.query_manifest.release == manifest.release
            if is_answering or hosted.plan.canary_part is not None:
                # An earlier activation has begun this space; continue with it.
                continue
            present = {info.spec.space for info in hosted.spaces()}
            if self._record.rollout != "cutover" and manifest.space in present:
                hosted.prepare_space(manifest.space)
            with hosted.write_lock.exclusive():
                self._transact(partial(self._begin_staging, hosted, manifest))
                self._parts.plan_manager.replan_gallery(hosted)

    def _begin_staging(self, hosted: HostedGallery, manifest: Manifest) -> None:
        hosted.store.add_staging_space(SpaceSpec.of(manifest))
        hosted.store_state({ROLLOUT: self._record.rollout, NOTE: None})

    def _refuse_rollout(self, new: Manifest, old: Manifest) -> None:
        rollout = self._record.rollout
        if rollout == "direct" and not new.searches_space_directly(old.space):
            raise PreconditionError(
                f"rollout direct: release {new.release} does not declare that its queries may "
                f"search vectors of release {old.release}; use --rollout cutover or --rollout dual"
            )
        if rollout == "direct" and new.adapter_to(old.space) and not _merges_adapted(new, old):
            raise PreconditionError(
                f"rollout direct: release {new.release} has no calibration to rank its hits with "
                f"those that its query adapter finds among vectors of release {old.release}; "
                "publish it with --eval or --eval-texts, or use --rollout cutover"
            )
        if rollout == "dual" and not _can_merge(new, old):
            raise PreconditionError(
                f"rollout dual: release {new.release} has no calibration to rank its hits with "
                f"those of release {old.release}; publish it with --eval or --eval-texts, or use "
                "--rollout cutover"
            )

    def _upgrade_gallery(self, hosted: HostedGallery, manifest: Manifest) -> bool:
        """Upgrade one gallery's vectors.

        Returns:
            True if every item has a vector in the new space; else the gallery gets a note.
        """
        if self._parts.upgrades.best_route(hosted, manifest.release) is None:
            hosted.store_state(
                {NOTE: "searched directly: no upgrade was published for its release"}
            )
            return False
        done = self._done
        missing = self._upgrade(hosted, manifest)
        self._done = done + hosted.store.count() - missing
        if missing:
            note = _missing_note(missing, hosted)
            hosted.store_state({NOTE: note})
            self._parts.upgrades.finish_job(hosted.name, JobState.FAILED, note)
            return False
        self._parts.upgrades.finish_job(hosted.name, JobState.INDEXING)
        hosted.build_first_index(manifest.space, self._run.raise_if_cancelled)
        if self._record.rollout != "cutover":
            self._flip_galleries([hosted], manifest, active=False)
        return True

    def _upgrade(self, hosted: HostedGallery, manifest: Manifest) -> int:
        """Run a gallery's upgrade to its end, over pauses.

        Returns:
            The number of items without a vector in the new space.
        """
        already_done, cores = self._done, self._record.spare_cores
        upgrades, is_cancelled = self._parts.upgrades, self._run.cancel_event.is_set

        def on_progress(complete: int) -> None:
            self._parts.metrics.upgrade_ratio.set((already_done + complete) / max(1, self._total))
            self._run.add_event(Phase.UPGRADING, already_done + complete, self._total)

        while True:
            outcome = upgrades.run_upgrade(hosted, manifest, cores, is_cancelled, on_progress)
            self._run.raise_if_cancelled()
            if not outcome.was_stopped:
                return outcome.left_behind_count
            upgrades.wait_while_paused(hosted.name, is_cancelled)

    def _switch_queries(self, manifest: Manifest) -> None:
        """Let the new release answer from now on, in galleries that live in two spaces (direct and
        dual).
        """
        self._run.add_event(Phase.SWITCHING)
        seconds = self._record.old_space_seconds
        self._transact(lambda: self._parts.plan_manager.record_activation(manifest, seconds))
        self._parts.plan_manager.replan_all()

    def _start_canary(self, upgraded: list[HostedGallery], manifest: Manifest) -> None:
        """Start the canary: a share of the queries is answered in the new space of these
        galleries.
        """
        for hosted in upgraded:
            with hosted.write_lock.exclusive():
                hosted.store_state({ROLLOUT: CANARY_KEY})
                self._parts.plan_manager.replan_gallery(hosted)
            note = f"release {manifest.release} runs as a canary; it is not active yet"
            self._parts.upgrades.finish_job(hosted.name, JobState.DONE, note)

    def _wait_for_promotion(self) -> None:
        """Move the canary from step to step until its release is promoted.

        A step lasts its time in a gateway that serves: a restart, or a change of the canary's share
        or steps, begins the step again.

        Raises:
            PreconditionError: a bound is crossed, or the release is withdrawn.
            RolloutCancelledError: the activation was cancelled.
        """
        run, canaries, release = self._run, self._parts.canaries, self._record.release
        step, began = None, time.monotonic()
        run.is_canary_waiting = True
        try:
            while True:
                run.raise_if_cancelled()
                canary = canaries.running_settings()
                if canary is None:
                    # Another gateway may have cancelled it.
                    raise RolloutCancelledError(
                        f"the activation of release {release} was cancelled"
                    )
                self._judge_canary()
                if canary.promoted:
                    log.info("canary promoted", release=release)
                    canaries.end_comparison(CanaryState.PROMOTED)
                    return
                setting = canary.share, canary.shadow, canary.every_s, canary.steps
                if setting != step:
                    step, began = setting, time.monotonic()
                    log.info("canary", release=release, share=canary.share, shadow=canary.shadow)
                    run.add_event(Phase.CANARY, message=describe_share(canary, release))
                if canary.every_s and time.monotonic() - began >= canary.every_s:
                    self._transact(self._next_canary_step)
                run.cancel_event.wait(_CANARY_EVERY_S)
        finally:
            run.is_canary_waiting = False

    def _next_canary_step(self) -> None:
        has_answered = self._parts.canaries.has_answered(self._record.release)
        self._parts.state.revise(lambda state: _next_step(state, has_answered=has_answered))

    def _judge_canary(self) -> None:
        withdrawn = self._parts.catalog.withdrawal_by_release.get(self._record.release)
        reason = self._parts.canaries.stop_reason()
        if withdrawn is not None:
            reason = f"the release was withdrawn: {withdrawn}"
        if reason is not None:
            self._parts.canaries.end_comparison(CanaryState.STOPPED, reason)
            raise PreconditionError(
                f"the canary of release {self._record.release} stopped, so the release before it "
                f"answers all callers: {reason}"
            )

    def _switch_galleries(self, upgraded: list[HostedGallery], manifest: Manifest) -> None:
        self._run.add_event(Phase.SWITCHING, self._done, self._total)
        self._flip_galleries(upgraded, manifest, active=True)

    def _flip_galleries(
        self, upgraded: list[HostedGallery], manifest: Manifest, *, active: bool
    ) -> None:
        """Make the new space the active one in all of these galleries at once.

        Puts wait during the flip. Items that were put only in the old space since the upgrade are
        upgraded first.

        Args:
            upgraded: galleries whose new space was complete.
            manifest: the release.
            active: also make the release the active one.
        """

        def switch() -> list[HostedGallery]:
            flipped = [hosted for hosted in upgraded if self._is_complete(hosted, manifest)]
            for hosted in flipped:
                hosted.store.flip(manifest.space, state={ROLLOUT: None, NOTE: None})
            if active:
                self._parts.plan_manager.record_activation(manifest, self._record.old_space_seconds)
            return flipped

        with ExitStack() as locks:
            for hosted in upgraded:
                locks.enter_context(hosted.write_lock.exclusive())
            flipped = self._transact(switch)
            if active:
                old = self._parts.plan_manager.replan_all()
            else:
                old = [self._parts.plan_manager.replan_gallery(hosted) for hosted in flipped]
            for hosted in flipped:
                self._parts.upgrades.finish_job(hosted.name, JobState.DONE)
        self._parts.plan_manager.retire_plans(old)

    def _is_complete(self, hosted: HostedGallery, manifest: Manifest) -> bool:
        """Upgrade a gallery's last items, and tell whether its new space is complete.

        The caller holds the write lock. False also if the gallery has flipped already.
        """
        if hosted.active_spec().space == manifest.space:
            return False
        # In a shared database this makes the other gateways' puts wait.
        hosted.store.add_staging_space(SpaceSpec.of(manifest))
        if hosted.store.count_items_without_vector(manifest.space):
            # Run here, within this thread's transaction.
            should_stop = self._run.cancel_event.is_set
            self._parts.upgrades.run_upgrade(
                hosted, manifest, 0.0, should_stop, in_this_thread=True
            )
            self._run.raise_if_cancelled()
        missing = hosted.store.count_items_without_vector(manifest.space)
        if missing:
            hosted.store_state({NOTE: _missing_note(missing, hosted)})
        return not missing

    def _transact(self, work: Callable[[], Result]) -> Result:
        """Run work that all gateways see at once, or not at all if this one has lost the lead."""
        return self._parts.state.transact(work, self._run.leadership)


def _can_merge(new: Manifest, old: Manifest) -> bool:
    """Tell whether hits of both spaces can be ranked together: every origin needs a calibration."""
    return bool(old_model_part(new, old).score_curves) and {"native", "upgraded"} <= set(
        own_part(new).score_curves
    )


def _merges_adapted(new: Manifest, old: Manifest) -> bool:
    """Tell whether hits through a query adapter can be ranked with new ones: distances of two
    spaces do not compare, so every origin needs a calibration."""
    origins = {"native", "upgraded"} if new.upgrades else {"native"}
    return bool(direct_part(new, old).score_curves) and origins <= set(own_part(new).score_curves)


def _missing_note(item_count: int, hosted: HostedGallery) -> str:
    """Explain why a gallery cannot move: some items lack a vector or side-information."""
    return (
        f"{item_count} items have no vector in release {hosted.active_spec().release} with the "
        "side-information that the upgrade needs, so the gallery stays with that release; send "
        "their images again, or publish an upgrade without side-information (texts have none)"
    )


def describe_share(canary: Canary, release: int) -> str:
    """Describe a canary's share in one sentence, for operators.

    Args:
        canary: the settings; its share has three digits in the sentence.
        release: the release of the canary.
    """
    verb = "is compared with" if canary.shadow else "answers"
    return f"release {release} {verb} {100 * canary.share:.3g}% of the callers"


def _next_step(state: State, *, has_answered: bool) -> Mapping[str, object]:
    """Compute a canary's next step.

    Args:
        state: the state.
        has_answered: the release has answered a query here; without that it is not promoted.

    Returns:
        The changed fields of the state; empty if the last step waits for an operator.
    """
    record = state.activation
    if record is None or record.canary is None:
        return {}
    canary = record.canary
    if canary.steps:
        values: dict[str, object] = {"share": canary.steps[0], "steps": canary.steps[1:]}
    elif canary.share == 1 and not canary.shadow and has_answered:
        values = {"promoted": True}
    else:
        # The last step lasts until an operator promotes the release.
        return {}
    return {"activation": record.model_copy(update={"canary": canary.model_copy(update=values)})}
