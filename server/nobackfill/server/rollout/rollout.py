"""One activation, from verification to the last gallery: cutover, dual or direct.

`Rollout` is a state machine whose phases are its methods, in order: verify, load, probe, upgrade,
canary, switch. `RolloutRun` is what its watchers see of it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from nobackfill.errors import GateFailedError, NobackfillError, PreconditionError
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.release.manifest import Manifest, TextRole
from nobackfill.release.models import Images
from nobackfill.release.probes import check_encoders
from nobackfill.server.canary.canaries import Canaries
from nobackfill.server.canary.comparison import CanaryState
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.embedding import Models
from nobackfill.server.galleries.galleries import GalleryRegistry
from nobackfill.server.galleries.hosted import NOTE, ROLLOUT, Hosted
from nobackfill.server.galleries.plan import CANARY, old_model_part, own_part
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.serving import Serving
from nobackfill.server.state import Activation, Canary, GatewayState, Lead, State, tried_well
from nobackfill.server.upgrades.upgrading import JobState, Upgrading
from nobackfill.vectors import Vectors

log = structlog.get_logger("server.rollout")

Result = TypeVar("Result")

# Seconds between two looks at a canary's bounds; its evidence does not depend on it.
_CANARY_EVERY_S = 0.25


class Phase(StrEnum):
    VERIFYING = "verifying"
    LOADING = "loading"
    PROBING = "probing"
    UPGRADING = "upgrading"
    CANARY = "canary"
    SWITCHING = "switching"
    DONE = "done"
    FAILED = "failed"


class RolloutCancelledError(NobackfillError):
    """The activation was called off by a rollback or by the gateway's end."""


@dataclass(frozen=True)
class Event:
    """What an activation reported, and when (Unix time)."""

    phase: Phase
    done: int
    total: int
    message: str
    time: float


class RolloutRun:
    """One activation as its watchers see it."""

    def __init__(
        self, record: Activation, lead: Lead, work: Callable[["RolloutRun"], tuple[Phase, str]]
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
            raise RolloutCancelledError(
                f"the activation of release {self.record.release} was called off"
            )

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


def check_models(folder: Path, manifest: Manifest, models: Models) -> None:
    """Golden probes through the running models: what Triton answers must be what was published.

    Raises VerificationError when an output differs, UnavailableError.
    """

    def embed(images: Images) -> Vectors:
        return models.embed(manifest, images)

    def read(texts: Sequence[str], role: TextRole) -> Vectors:
        return models.texts(manifest, texts, role)

    def side(images: Images) -> Vectors:
        vectors = models.side(manifest, images)
        assert vectors is not None, "asked for releases with a side encoder only"
        return vectors

    check_encoders(
        folder,
        manifest,
        embed if manifest.embedder.file else None,
        side if manifest.side_encoder else None,
        read if manifest.text_encoder else None,
    )


@dataclass(frozen=True)
class Parts:
    """The parts of a gateway that an activation moves together."""

    models: Models
    catalog: Catalog
    state: GatewayState
    galleries: GalleryRegistry
    upgrading: Upgrading
    serving: Serving
    canaries: Canaries
    metrics: Metrics


class Rollout:
    """Runs in a thread of its own. Every step may be repeated: a restart begins from the first."""

    def __init__(self, run: RolloutRun, parts: Parts) -> None:
        self._run = run
        self._record = run.record
        self._parts = parts
        self._done = 0
        self._total = 0

    def run(self) -> None:
        """Raises NotFoundError, PreconditionError (a withdrawn release, dual without calibration, a
        canary that stopped), GateFailedError, VerificationError, CancelledError and whatever an
        upgrade raises."""
        with self._parts.galleries.holding():
            folder, manifest = self._verify()
            self._load(manifest)
            self._probe(folder, manifest)
            carried = self._carry_all(manifest)
            if self._record.canary is not None:
                self._open_canary(carried, manifest)
            elif self._record.rollout == "cutover":
                self._switch_galleries(carried, manifest)
        if self._record.canary is not None:
            self._wait_for_promotion()
            # Galleries have come and gone meanwhile, and items.
            with self._parts.galleries.holding():
                self._switch_galleries(self._carry_all(manifest), manifest)

    def _verify(self) -> tuple[Path, Manifest]:
        """Check the gate and the digests, and try the models in a child; the publication folder
        and the manifest."""
        number = self._record.release
        catalog = self._parts.catalog
        self._run.report(Phase.VERIFYING)
        catalog.refresh()
        manifest = catalog.manifest(number)
        reason = catalog.releases[number]
        if reason is not None:
            raise PreconditionError(f"release {number} was withdrawn: {reason}")
        gate = manifest.gate
        if gate.verdict not in ("first", "passed") and not gate.forced:
            raise GateFailedError(f"release {number} did not pass its gate: {gate.detail}")
        folder = catalog.verified(number)
        sources = {hosted.spec().release for hosted in self._parts.galleries.all()}
        self._parts.upgrading.trials.release(manifest, sources, self._run.stop_if_cancelled)
        return folder, manifest

    def _load(self, manifest: Manifest) -> None:
        """Wait for a model server that is away: that says nothing about the release."""
        models = self._parts.models
        self._run.report(Phase.LOADING)
        if not models.ready():
            self._run.report(Phase.LOADING, message="waiting for the model server")
        while not models.ready():
            self._run.cancelled.wait(0.2)
            self._run.stop_if_cancelled()
        models.load(manifest)

    def _probe(self, folder: Path, manifest: Manifest) -> None:
        """What the loaded models answer must be what was published."""
        self._run.report(Phase.PROBING)
        check_models(folder, manifest, self._parts.models)
        self._run.stop_if_cancelled()
        if self._record.resumed:
            # Its models did no harm: what ends the gateway from here on is something else.
            self._together(lambda: self._parts.state.revise(tried_well))

    def _carry_all(self, manifest: Manifest) -> list[Hosted]:
        """Fill the release's space in every gallery that can go; those where it is whole now."""
        going = self._sort_galleries(manifest)
        self._stage(going, manifest)
        if self._record.rollout != "cutover":
            self._switch_queries(manifest)
        self._done, self._total = 0, sum(hosted.store.count() for hosted in going)
        self._run.report(Phase.UPGRADING, 0, self._total)
        return [hosted for hosted in going if self._carry(hosted, manifest)]

    def _sort_galleries(self, manifest: Manifest) -> list[Hosted]:
        """Those that can go; the others note why they stay."""
        going = []
        directly = self._record.rollout == "direct"
        for hosted in self._parts.galleries.all():
            spec = hosted.spec()
            if spec.space == manifest.space or self._record.only not in (None, hosted.name):
                continue
            if self._parts.upgrading.route(hosted, manifest.release, directly=directly) is not None:
                going.append(hosted)
            else:
                note = (
                    f"no upgrade leads from release {spec.release} to {manifest.release} with the "
                    "side-information it has"
                )
                hosted.remember({NOTE: note})
        return going

    def _stage(self, going: list[Hosted], manifest: Manifest) -> None:
        """From here on images that are put are embedded for both releases."""
        for hosted in going:
            old = self._parts.catalog.manifest(hosted.spec().release)
            self._refuse_rollout(manifest, old)
        for hosted in going:
            if hosted.plan.query.release == manifest.release or hosted.plan.canary is not None:
                # Mixed already, by an activation that did not end: it goes on as it began.
                continue
            kept = {info.spec.space for info in hosted.spaces()}
            if self._record.rollout != "cutover" and manifest.space in kept:
                hosted.expect(manifest.space)
            with hosted.write_lock.exclusive():
                self._together(partial(self._begin, hosted, manifest))
                self._parts.serving.replan_one(hosted)

    def _begin(self, hosted: Hosted, manifest: Manifest) -> None:
        hosted.store.begin(SpaceSpec.of(manifest))
        hosted.remember({ROLLOUT: self._record.rollout, NOTE: None})

    def _refuse_rollout(self, new: Manifest, old: Manifest) -> None:
        rollout = self._record.rollout
        if rollout == "direct" and not new.searches(old.space):
            raise PreconditionError(
                f"release {new.release} does not declare that it searches release {old.release} "
                "directly; use the dual or the cutover rollout"
            )
        if rollout == "dual" and not _can_merge(new, old):
            raise PreconditionError(
                f"release {new.release} carries no calibration to rank its hits with those of "
                f"release {old.release}; use the cutover rollout"
            )

    def _carry(self, hosted: Hosted, manifest: Manifest) -> bool:
        """Upgrade one gallery's vectors; whether all of them got there."""
        if self._parts.upgrading.route(hosted, manifest.release) is None:
            hosted.remember({NOTE: "served directly; no upgrade was published"})
            return False
        before = self._done
        left = self._upgrade(hosted, manifest)
        self._done = before + hosted.store.count() - left
        if left:
            note = _stuck(left, hosted)
            hosted.remember({NOTE: note})
            self._parts.upgrading.finish(hosted.name, JobState.FAILED, note)
            return False
        self._parts.upgrading.finish(hosted.name, JobState.INDEXING)
        hosted.make_ready(manifest.space, self._run.stop_if_cancelled)
        if self._record.rollout != "cutover":
            self._flip([hosted], manifest, active=False)
        return True

    def _upgrade(self, hosted: Hosted, manifest: Manifest) -> int:
        """Run the upgrade, over pauses, to its end; how many items stay behind."""
        before = self._done

        def on_progress(done: int) -> None:
            self._parts.metrics.upgrade_ratio.set((before + done) / max(1, self._total))
            self._run.report(Phase.UPGRADING, before + done, self._total)

        while True:
            outcome = self._parts.upgrading.run(
                hosted, manifest, self._record.spare_cores, self._run.cancelled.is_set, on_progress
            )
            self._run.stop_if_cancelled()
            if not outcome.stopped:
                return outcome.left_behind
            self._parts.upgrading.wait_resumed(hosted.name, self._run.cancelled.is_set)

    def _switch_queries(self, manifest: Manifest) -> None:
        """Direct and dual: the new release answers from now on, in galleries of mixed spaces."""
        self._run.report(Phase.SWITCHING)
        seconds = self._record.old_space_seconds
        self._together(lambda: self._parts.serving.activate(manifest, seconds))
        self._parts.serving.replan()

    def _open_canary(self, carried: list[Hosted], manifest: Manifest) -> None:
        """From here on a share of the queries is answered in the new space of these galleries."""
        for hosted in carried:
            with hosted.write_lock.exclusive():
                hosted.remember({ROLLOUT: CANARY})
                self._parts.serving.replan_one(hosted)
            note = f"release {manifest.release} is on trial; it is not active yet"
            self._parts.upgrading.finish(hosted.name, JobState.DONE, note)

    def _wait_for_promotion(self) -> None:
        """Move the canary from step to step; return once the release is promoted.

        Raises PreconditionError where a bound is crossed or the release withdrawn, CancelledError.
        A step takes its time of a gateway that serves: a restart begins it anew, and so does a
        change of the canary's share or steps.
        """
        run, canaries, release = self._run, self._parts.canaries, self._record.release
        step, began = None, time.monotonic()
        run.waiting = True
        try:
            while True:
                run.stop_if_cancelled()
                canary = canaries.setting()
                if canary is None:
                    # Another gateway may have called it off.
                    raise RolloutCancelledError(
                        f"the activation of release {release} was called off"
                    )
                self._judge_canary()
                if canary.promoted:
                    log.info("canary promoted", release=release)
                    canaries.end(CanaryState.PROMOTED)
                    return
                now = canary.share, canary.shadow, canary.every_s, canary.steps
                if now != step:
                    step, began = now, time.monotonic()
                    log.info("canary", release=release, share=canary.share, shadow=canary.shadow)
                    run.report(Phase.CANARY, message=share_of(canary, release))
                if canary.every_s and time.monotonic() - began >= canary.every_s:
                    self._together(self._next_canary_step)
                run.cancelled.wait(_CANARY_EVERY_S)
        finally:
            run.waiting = False

    def _next_canary_step(self) -> None:
        met = self._parts.canaries.met(self._record.release)
        self._parts.state.revise(lambda now: _next_step(now, met=met))

    def _judge_canary(self) -> None:
        withdrawn = self._parts.catalog.releases.get(self._record.release)
        reason = self._parts.canaries.verdict()
        if withdrawn is not None:
            reason = f"the release was withdrawn: {withdrawn}"
        if reason is not None:
            self._parts.canaries.end(CanaryState.STOPPED, reason)
            raise PreconditionError(f"its canary stopped: {reason}")

    def _switch_galleries(self, carried: list[Hosted], manifest: Manifest) -> None:
        self._run.report(Phase.SWITCHING, self._done, self._total)
        self._flip(carried, manifest, active=True)

    def _flip(self, carried: list[Hosted], manifest: Manifest, *, active: bool) -> None:
        """Make the new space the one that answers, in all of these galleries at once.

        Puts wait meanwhile; what came in the old space only since the upgrade is carried first.
        """

        def switch() -> list[Hosted]:
            flipped = [hosted for hosted in carried if self._is_whole(hosted, manifest)]
            for hosted in flipped:
                hosted.store.flip(manifest.space, state={ROLLOUT: None, NOTE: None})
            if active:
                self._parts.serving.activate(manifest, self._record.old_space_seconds)
            return flipped

        with ExitStack() as locks:
            for hosted in carried:
                locks.enter_context(hosted.write_lock.exclusive())
            flipped = self._together(switch)
            if active:
                old = self._parts.serving.replan()
            else:
                old = [self._parts.serving.replan_one(hosted) for hosted in flipped]
            for hosted in flipped:
                self._parts.upgrading.finish(hosted.name, JobState.DONE)
        self._parts.serving.settle(old)

    def _is_whole(self, hosted: Hosted, manifest: Manifest) -> bool:
        """Whether a gallery can be flipped: nobody puts from here on, what came last is carried."""
        if hosted.spec().space == manifest.space:
            return False
        # Where gateways share it, this makes the others' puts wait.
        hosted.store.begin(SpaceSpec.of(manifest))
        if hosted.store.left_behind(manifest.space):
            # Within this thread's transaction.
            self._parts.upgrading.run(hosted, manifest, 0.0, self._run.cancelled.is_set, here=True)
            self._run.stop_if_cancelled()
        left = hosted.store.left_behind(manifest.space)
        if left:
            hosted.remember({NOTE: _stuck(left, hosted)})
        return not left

    def _together(self, work: Callable[[], Result]) -> Result:
        """What is seen by all gateways at once, or by none where this one leads no more."""
        return self._parts.state.together(work, self._run.lead)


def _can_merge(new: Manifest, old: Manifest) -> bool:
    """Whether one ranking over both spaces is possible: scores for every origin there may be."""
    return bool(old_model_part(new, old).curves) and {"native", "upgraded"} <= set(
        own_part(new).curves
    )


def _stuck(items: int, hosted: Hosted) -> str:
    """Why a gallery cannot follow: what came without side-information, or lives elsewhere only."""
    return (
        f"{items} items have no vector in release {hosted.spec().release} with the "
        "side-information that the upgrade reads; put their images again, or, as texts have none, "
        "publish an upgrade that reads none"
    )


def share_of(canary: Canary, release: int) -> str:
    """A sentence for who watches."""
    does = "is compared with" if canary.shadow else "answers"
    return f"release {release} {does} {canary.share:.3g} of the callers"


def _next_step(now: State, *, met: bool) -> Mapping[str, object]:
    """`met`: whether the release has answered a query; it is not promoted without."""
    record = now.activation
    if record is None or record.canary is None:
        return {}
    canary = record.canary
    if canary.steps:
        values: dict[str, object] = {"share": canary.steps[0], "steps": canary.steps[1:]}
    elif canary.share == 1 and not canary.shadow and met:
        values = {"promoted": True}
    else:
        # The last step stays until somebody promotes it.
        return {}
    return {"activation": record.model_copy(update={"canary": canary.model_copy(update=values)})}
