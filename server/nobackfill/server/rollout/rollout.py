"""One activation, from verification to the last gallery: cutover, dual or direct."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum

import structlog

from nobackfill.errors import GateFailedError, NobackfillError, PreconditionError
from nobackfill.gallery import staging
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.release.manifest import Manifest
from nobackfill.server.core import Core
from nobackfill.server.galleries.bases import inherit_index
from nobackfill.server.galleries.hosted import NOTE, ROLLOUT, Hosted
from nobackfill.server.galleries.plan import Plan, old_model_part, own_part
from nobackfill.server.rollout.probing import check_models
from nobackfill.server.state import Activation
from nobackfill.server.upgrades.jobs import JobState

log = structlog.get_logger("server.rollout")


class Phase(StrEnum):
    VERIFYING = "verifying"
    LOADING = "loading"
    PROBING = "probing"
    UPGRADING = "upgrading"
    SWITCHING = "switching"
    DONE = "done"
    FAILED = "failed"


# Phase, items done, items in all, message.
Tell = Callable[[Phase, int, int, str], None]


class CancelledError(NobackfillError):
    """The activation was called off by a rollback or by the gateway's end."""


class Rollout:
    """Runs in a thread of its own. Every step may be repeated: a restart begins from the first."""

    def __init__(
        self, core: Core, record: Activation, tell: Tell, cancelled: threading.Event
    ) -> None:
        self._core = core
        self._record = record
        self._tell = tell
        self._cancelled = cancelled
        self._done = 0
        self._total = 0

    def run(self) -> None:
        """Raises NotFoundError, GateFailedError, VerificationError, PreconditionError (dual without
        calibration), CancelledError and whatever an upgrade raises."""
        with self._core.galleries.holding():
            self._run()

    def _run(self) -> None:
        manifest = self._verify()
        going = self._sort_galleries(manifest)
        self._stage(going, manifest)
        if self._record.rollout != "cutover":
            self._switch_queries(manifest)
        self._total = sum(hosted.store.count() for hosted in going)
        self._tell(Phase.UPGRADING, 0, self._total, "")
        whole = [hosted for hosted in going if self._carry(hosted, manifest)]
        if self._record.rollout == "cutover":
            self._tell(Phase.SWITCHING, self._done, self._total, "")
            self._flip(whole, manifest, active=True)

    def _verify(self) -> Manifest:
        core, number = self._core, self._record.release
        self._tell(Phase.VERIFYING, 0, 0, "")
        core.catalog.refresh()
        manifest = core.catalog.manifest(number)
        reason = core.catalog.releases[number]
        if reason is not None:
            raise PreconditionError(f"release {number} was withdrawn: {reason}")
        gate = manifest.gate
        if gate.verdict not in ("first", "passed") and not gate.forced:
            raise GateFailedError(f"release {number} did not pass its gate: {gate.detail}")
        folder = core.catalog.verified(number)
        sources = {hosted.spec().release for hosted in core.galleries.all()}
        core.upgrading.trials.release(manifest, sources, self._stop_if_cancelled)
        self._wait_for_models()
        core.models.load(manifest)
        self._tell(Phase.PROBING, 0, 0, "")
        check_models(folder, manifest, core.models)
        self._stop_if_cancelled()
        if self._record.resumed:
            # They did no harm: what ends the gateway from here on is something else.
            core.state.change(activation=self._record.model_copy(update={"resumed": 0}))
        return manifest

    def _wait_for_models(self) -> None:
        """A model server that is away says nothing about the release: it is waited for."""
        self._tell(Phase.LOADING, 0, 0, "")
        if not self._core.models.ready():
            self._tell(Phase.LOADING, 0, 0, "waiting for the model server")
        while not self._core.models.ready():
            self._cancelled.wait(0.2)
            self._stop_if_cancelled()

    def _sort_galleries(self, manifest: Manifest) -> list[Hosted]:
        """Those that can go; the others are told why they stay."""
        going = []
        for hosted in self._core.galleries.all():
            spec = hosted.spec()
            if spec.space == manifest.space or self._record.only not in (None, hosted.name):
                continue
            direct = self._record.rollout == "direct" and spec.space in manifest.searches_directly
            if direct or self._core.upgrading.route(hosted, manifest.release) is not None:
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
            old = self._core.catalog.manifest(hosted.spec().release)
            self._refuse_rollout(manifest, old)
        for hosted in going:
            if hosted.plan.query.release == manifest.release:
                # Mixed already, by an activation that did not end: it goes on as it began.
                continue
            kept = {info.spec.space for info in hosted.spaces()}
            if self._record.rollout != "cutover" and manifest.space in kept:
                # Searched from now on: read before puts have to wait.
                hosted.view(manifest.space)
            with hosted.writes.alone():
                staging.begin(hosted.store, SpaceSpec.of(manifest))
                hosted.remember({ROLLOUT: self._record.rollout, NOTE: None})
                self._replan(hosted)

    def _refuse_rollout(self, new: Manifest, old: Manifest) -> None:
        rollout = self._record.rollout
        if rollout == "direct" and old.space not in new.searches_directly:
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
        core = self._core
        if core.upgrading.route(hosted, manifest.release) is None:
            hosted.remember({NOTE: "served directly; no upgrade was published"})
            return False
        before = self._done
        left = self._upgrade(hosted, manifest)
        self._done = before + hosted.store.count() - left
        if left:
            note = _stuck(left, hosted)
            hosted.remember({NOTE: note})
            core.upgrading.finish(hosted.name, JobState.FAILED, note)
            return False
        core.upgrading.finish(hosted.name, JobState.INDEXING)
        # Where the release was active before a rollback, its own index is still there. What cannot
        # be inherited is built, which takes minutes: also given up when called off.
        source = hosted.view(hosted.spec().space)
        view = hosted.view(manifest.space, source, self._stop_if_cancelled)
        inherit_index(hosted, manifest.space, view, source, self._stop_if_cancelled)
        if self._record.rollout != "cutover":
            self._flip([hosted], manifest, active=False)
        return True

    def _upgrade(self, hosted: Hosted, manifest: Manifest) -> int:
        """Run the upgrade, over pauses, to its end; how many items stay behind."""
        upgrading, before = self._core.upgrading, self._done

        def on_progress(done: int) -> None:
            self._core.metrics.upgrade_ratio.set((before + done) / max(1, self._total))
            self._tell(Phase.UPGRADING, before + done, self._total, "")

        while True:
            outcome = upgrading.run(
                hosted, manifest, self._record.spare_cores, self._cancelled.is_set, on_progress
            )
            self._stop_if_cancelled()
            if not outcome.stopped:
                return outcome.left_behind
            upgrading.wait_resumed(hosted.name, self._cancelled.is_set)

    def _switch_queries(self, manifest: Manifest) -> None:
        """Direct and dual: the new release answers from now on, in galleries of mixed spaces."""
        self._tell(Phase.SWITCHING, 0, 0, "")
        self._set_active(manifest)
        self._core.replan()

    def _flip(self, whole: list[Hosted], manifest: Manifest, *, active: bool) -> None:
        """Make the new space the one that answers, in all of these galleries at once.

        Puts wait meanwhile; what came in the old space only since the upgrade is carried first.
        """
        core = self._core
        old: list[Plan] = []
        with ExitStack() as alone:
            flipped = []
            for hosted in whole:
                alone.enter_context(hosted.writes.alone())
                if hosted.spec().space == manifest.space:
                    continue
                if staging.left_behind(hosted.store, manifest.space):
                    core.upgrading.run(hosted, manifest, 0.0, self._cancelled.is_set)
                    self._stop_if_cancelled()
                if left := staging.left_behind(hosted.store, manifest.space):
                    hosted.remember({NOTE: _stuck(left, hosted)})
                    continue
                flipped.append(hosted)
            for hosted in flipped:
                staging.flip(hosted.store, manifest.space, state={ROLLOUT: None, NOTE: None})
            if active:
                self._set_active(manifest)
                old = core.replan()
            else:
                old = [self._replan(hosted) for hosted in flipped]
            for hosted in flipped:
                core.upgrading.finish(hosted.name, JobState.DONE)
        core.settle(old)

    def _set_active(self, manifest: Manifest) -> None:
        now = self._core.state.now
        if now.active == manifest.release:
            return
        previous = now.previous if now.active is None else (*now.previous, now.active)
        failed = {n: why for n, why in now.failed.items() if n != manifest.release}
        ends = dict(now.ends)
        if now.active is not None:
            # What an earlier swap announced counts no longer.
            space = self._core.catalog.manifest(now.active).space
            ends.pop(space, None)
            if self._record.old_space_seconds:
                ends[space] = time.time() + self._record.old_space_seconds
        self._core.state.change(
            active=manifest.release, previous=previous, failed=failed, ends=ends
        )

    def _replan(self, hosted: Hosted) -> Plan:
        return hosted.replan(self._core.state.now, self._core.catalog.manifests)

    def _stop_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError(f"the activation of release {self._record.release} was called off")


def _can_merge(new: Manifest, old: Manifest) -> bool:
    """Whether one ranking over both spaces is possible: scores for every origin there may be."""
    return bool(old_model_part(new, old).curves) and {"native", "upgraded"} <= set(
        own_part(new).curves
    )


def _stuck(items: int, hosted: Hosted) -> str:
    """Why a gallery cannot follow: what came without side-information, or lives elsewhere only."""
    return (
        f"{items} items have no vector in release {hosted.spec().release} with the "
        "side-information that the upgrade reads; put their images again"
    )
