"""UpgradeService."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import grpc

from nobackfill.errors import InvalidInputError, PreconditionError
from nobackfill.server.core import Core
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.searching import Searching
from nobackfill.server.grpc.services.convert import to_value
from nobackfill.server.rollout.activation import Activations
from nobackfill.server.upgrades.backfill import backfill
from nobackfill.server.upgrades.jobs import Job, JobState
from nobackfill.server.upgrades.subgroups import Subgroup, subgroups
from nobackfill.server.upgrades.throttle import DEFAULT_SPARE_CORES
from nobackfill.v1 import upgrade_pb2 as pb
from nobackfill.v1.upgrade_pb2_grpc import UpgradeServiceServicer

_STATES = {
    JobState.RUNNING: pb.UPGRADE_STATE_RUNNING,
    JobState.PAUSED: pb.UPGRADE_STATE_PAUSED,
    JobState.INDEXING: pb.UPGRADE_STATE_INDEXING,
    JobState.DONE: pb.UPGRADE_STATE_DONE,
    JobState.FAILED: pb.UPGRADE_STATE_FAILED,
}


class UpgradeService(UpgradeServiceServicer):
    """See protos/nobackfill/v1/upgrade.proto."""

    def __init__(self, core: Core, activations: Activations) -> None:
        self._core = core
        self._activations = activations

    def EstimateUpgrade(  # noqa: N802 - the contract's name
        self, request: pb.EstimateUpgradeRequest, context: grpc.ServicerContext
    ) -> pb.EstimateUpgradeResponse:
        if not 0 <= request.spare_cores < 1:
            raise InvalidInputError("spare_cores: expected 0 to below 1")
        target = self._core.catalog.find(request.release)
        spare_cores = request.spare_cores or DEFAULT_SPARE_CORES
        with self._core.galleries.using(request.gallery) as hosted:
            self._core.catalog.verified(target.release)
            cost, route = self._core.upgrading.estimate(hosted, target, spare_cores)
        response = pb.EstimateUpgradeResponse(
            items=cost.items,
            bytes=cost.bytes,
            memory_bytes=cost.memory_bytes,
            route=route.releases or [target.release],
            expected_kept=route.kept or 0.0,
            left_behind=cost.left_behind,
        )
        response.duration.FromMilliseconds(int(cost.seconds * 1000))
        response.index_duration.FromMilliseconds(int(cost.index_seconds * 1000))
        return response

    def StartUpgrade(  # noqa: N802
        self, request: pb.StartUpgradeRequest, context: grpc.ServicerContext
    ) -> pb.StartUpgradeResponse:
        core = self._core
        active = core.active()
        if request.release not in (0, active.release):
            raise PreconditionError(
                f"expected the active release {active.release}, got {request.release}; "
                "ActivateRelease carries galleries to another"
            )
        if not 0 <= request.spare_cores < 1:
            raise InvalidInputError("spare_cores: expected 0 to below 1")
        with core.galleries.using(request.gallery) as hosted:
            core.upgrading.resume(hosted.name)
            behind = hosted.spec().space != active.space and self._activations.running() is None
            if not behind and request.backfill:
                images = {one.id: one.image for one in request.backfill}
                backfill(
                    hosted, core.embedding, images, request.backfill_budget,
                    lambda count: core.upgrading.count_re_embedded(hosted, count),
                )  # fmt: skip
        if behind:
            # Begun by somebody who holds no gallery: whoever flips it waits for its users.
            self._activations.start_gallery(request.gallery, request.spare_cores)
        with core.galleries.using(request.gallery) as hosted:
            return pb.StartUpgradeResponse(progress=_message(self._job(hosted)))

    def WatchUpgrade(  # noqa: N802
        self, request: pb.WatchUpgradeRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchUpgradeResponse]:
        changed, seen, last = self._core.upgrading.changed, -1, None
        report = _Report(self._core.searching, request.group_by)
        while context.is_active() and not self._core.stopping.is_set():
            # Not kept open while it waits: somebody may want to delete it.
            with self._core.galleries.using(request.gallery) as hosted:
                job = self._job(hosted)
                progress = _message(job)
                report.add_to(progress, hosted)
            if progress != last:
                last = progress
                yield pb.WatchUpgradeResponse(progress=progress)
            if job.ended:
                return
            seen = changed.wait(seen, 0.5)

    def PauseUpgrade(  # noqa: N802
        self, request: pb.PauseUpgradeRequest, context: grpc.ServicerContext
    ) -> pb.PauseUpgradeResponse:
        with self._core.galleries.using(request.gallery) as hosted:
            self._core.upgrading.pause(hosted.name)
            return pb.PauseUpgradeResponse(progress=_message(self._job(hosted)))

    def _job(self, hosted: Hosted) -> Job:
        """The last job of a gallery, as it is now."""
        # Looked at first: a job ends before its activation does.
        running = self._activations.running() is not None
        job = self._core.upgrading.job(hosted.name)
        if job is None:
            # None since the start: it is where it is.
            release = hosted.spec().release
            job = Job(hosted.name, release, release, JobState.DONE)
        if not job.ended and not running:
            job = replace(job, state=JobState.FAILED, message="its activation has ended")
        if job.ended and hosted.name in self._core.state.now.paused:
            # Those to come are held back.
            job = replace(job, state=JobState.PAUSED)
        return job


class _Report:
    """Quality by subgroup, measured again when what is served has changed enough to tell."""

    def __init__(self, searching: Searching, key: str) -> None:
        self._searching = searching
        self._key = key
        self._stage: tuple[object, ...] = ()
        self._quality = pb.SubgroupQuality()

    def add_to(self, progress: pb.UpgradeProgress, hosted: Hosted) -> None:
        """Does nothing without a key. Raises InvalidInputError for one that makes no groups."""
        if not self._key:
            return
        spaces = [part.space for part in hosted.plan.parts]
        tenth = 10 * progress.done // max(1, progress.total) if len(spaces) > 1 else 0
        stage = (*spaces, tenth, progress.re_embedded)
        if stage != self._stage:
            found = subgroups(hosted, self._searching, self._key)
            self._stage, self._quality = stage, _quality(found)
        progress.quality.CopyFrom(self._quality)


def _quality(found: Sequence[Subgroup]) -> pb.SubgroupQuality:
    items = sum(one.items for one in found)
    quality = pb.SubgroupQuality(re_embedded_share=sum(one.re_embedded for one in found) / items)
    for one in found:
        group = quality.subgroups.add(
            items=one.items,
            re_embedded=one.re_embedded,
            probes=one.probes,
            cmc1=one.cmc1,
            cmc1_before=one.before,
        )
        to_value(one.value, group.value)
    return quality


def _message(job: Job) -> pb.UpgradeProgress:
    progress = pb.UpgradeProgress(
        gallery=job.gallery,
        from_release=job.from_release,
        to_release=job.to_release,
        state=_STATES[job.state],
        done=job.done,
        total=job.total,
        items_per_second=job.items_per_second,
        re_embedded=job.re_embedded,
        neighbours_kept=job.neighbours_kept,
        message=job.message,
    )
    progress.remaining.FromMilliseconds(int(job.remaining_s * 1000))
    return progress
