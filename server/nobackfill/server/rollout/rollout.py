"""One activation, from verification to the last gallery: cutover, dual or direct."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import structlog

from nobackfill.errors import PreconditionError
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries.hosted import NOTE, ROLLOUT, Hosted
from nobackfill.server.galleries.plan import CANARY, old_model_part, own_part
from nobackfill.server.rollout.canary_steps import CanarySteps
from nobackfill.server.rollout.parts import Parts
from nobackfill.server.rollout.run import Phase, Run
from nobackfill.server.state import tried_well
from nobackfill.server.upgrades.job import JobState

log = structlog.get_logger("server.rollout")

Result = TypeVar("Result")


class Rollout:
    """Runs in a thread of its own. Every step may be repeated: a restart begins from the first."""

    def __init__(self, run: Run, parts: Parts) -> None:
        self._run = run
        self._record = run.record
        self._parts = parts
        self._done = 0
        self._total = 0

    def run(self) -> None:
        """Raises NotFoundError, GateFailedError, VerificationError, PreconditionError (dual without
        calibration), CancelledError and whatever an upgrade raises."""
        with self._parts.galleries.holding():
            manifest = self._admit()
            carried = self._carry_all(manifest)
            if self._record.canary is not None:
                self._open_canary(carried, manifest)
            elif self._record.rollout == "cutover":
                self._switch_galleries(carried, manifest)
        if self._record.canary is not None:
            CanarySteps(self._run, self._parts).wait()
            # Galleries have come and gone meanwhile, and items.
            with self._parts.galleries.holding():
                self._switch_galleries(self._carry_all(manifest), manifest)

    def _carry_all(self, manifest: Manifest) -> list[Hosted]:
        """Fill the release's space in every gallery that can go; those where it is whole now."""
        going = self._sort_galleries(manifest)
        self._stage(going, manifest)
        if self._record.rollout != "cutover":
            self._switch_queries(manifest)
        self._done, self._total = 0, sum(hosted.store.count() for hosted in going)
        self._run.report(Phase.UPGRADING, 0, self._total)
        return [hosted for hosted in going if self._carry(hosted, manifest)]

    def _switch_galleries(self, carried: list[Hosted], manifest: Manifest) -> None:
        self._run.report(Phase.SWITCHING, self._done, self._total)
        self._flip(carried, manifest, active=True)

    def _open_canary(self, carried: list[Hosted], manifest: Manifest) -> None:
        """From here on a share of the queries is answered in the new space of these galleries."""
        for hosted in carried:
            with hosted.write_lock.exclusive():
                hosted.remember({ROLLOUT: CANARY})
                self._parts.serving.replan_one(hosted)
            note = f"release {manifest.release} is on trial; it is not active yet"
            self._parts.upgrading.finish(hosted.name, JobState.DONE, note)

    def _admit(self) -> Manifest:
        manifest = self._parts.admission.admit(self._run)
        if self._record.resumed:
            # Its models did no harm: what ends the gateway from here on is something else.
            self._together(lambda: self._parts.state.revise(tried_well))
        return manifest

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

    def _together(self, work: Callable[[], Result]) -> Result:
        """What is seen by all gateways at once, or by none where this one leads no more."""
        return self._parts.state.together(work, self._run.lead)

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
