"""UpgradeService."""

from collections.abc import Iterator, Sequence

import grpc

from nobackfill.errors import InvalidInputError
from nobackfill.server.galleries.answering import Searching
from nobackfill.server.galleries.galleries import GalleryRegistry
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.grpc.services.gallery import to_healing
from nobackfill.server.rollout.lifecycle import Lifecycle
from nobackfill.server.upgrades.subgroups import Subgroup, subgroups
from nobackfill.server.upgrades.upgrading import Job, JobState
from nobackfill.v1 import upgrade_pb2 as pb
from nobackfill.v1.upgrade_pb2_grpc import UpgradeServiceServicer
from nobackfill.wire.values import fill_value

_STATES = {
    JobState.RUNNING: pb.UPGRADE_STATE_RUNNING,
    JobState.PAUSED: pb.UPGRADE_STATE_PAUSED,
    JobState.INDEXING: pb.UPGRADE_STATE_INDEXING,
    JobState.DONE: pb.UPGRADE_STATE_DONE,
    JobState.FAILED: pb.UPGRADE_STATE_FAILED,
}


class UpgradeService(UpgradeServiceServicer):
    """See protos/nobackfill/v1/upgrade.proto."""

    def __init__(
        self, lifecycle: Lifecycle, galleries: GalleryRegistry, searching: Searching
    ) -> None:
        self._lifecycle = lifecycle
        self._galleries = galleries
        self._searching = searching

    def EstimateUpgrade(  # noqa: N802 - the contract's name
        self, request: pb.EstimateUpgradeRequest, context: grpc.ServicerContext
    ) -> pb.EstimateUpgradeResponse:
        spare_cores = _spare_cores(request.spare_cores)
        cost, route = self._lifecycle.estimate(request.gallery, request.release, spare_cores)
        response = pb.EstimateUpgradeResponse(
            items=cost.items,
            bytes=cost.bytes,
            memory_bytes=cost.memory_bytes,
            route=route.releases or [request.release],
            expected_kept=route.kept or 0.0,
            left_behind=cost.left_behind,
        )
        response.duration.FromMilliseconds(int(cost.seconds * 1000))
        response.index_duration.FromMilliseconds(int(cost.index_seconds * 1000))
        return response

    def StartUpgrade(  # noqa: N802
        self, request: pb.StartUpgradeRequest, context: grpc.ServicerContext
    ) -> pb.StartUpgradeResponse:
        job = self._lifecycle.upgrade(
            request.gallery,
            request.release,
            _spare_cores(request.spare_cores),
            {one.id: one.image for one in request.backfill},
            request.backfill_budget,
        )
        return pb.StartUpgradeResponse(progress=_message(job))

    def WatchUpgrade(  # type: ignore[override] # noqa: N802 - None: nothing is new
        self, request: pb.WatchUpgradeRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchUpgradeResponse | None]:
        last, report = None, _Report(self._searching, request.group_by)
        while True:
            # The gallery is not kept open meanwhile: somebody may want to delete it.
            job = self._lifecycle.job(request.gallery)
            progress = _message(job)
            if (healing := self._lifecycle.healing(request.gallery)) is not None:
                progress.healing.CopyFrom(to_healing(healing))
            if request.group_by:
                with self._galleries.using(request.gallery) as hosted:
                    report.add_to(progress, hosted)
            if progress != last:
                last = progress
                yield pb.WatchUpgradeResponse(progress=progress)
            if job.ended:
                return
            yield None

    def PauseUpgrade(  # noqa: N802
        self, request: pb.PauseUpgradeRequest, context: grpc.ServicerContext
    ) -> pb.PauseUpgradeResponse:
        return pb.PauseUpgradeResponse(progress=_message(self._lifecycle.pause(request.gallery)))


class _Report:
    """Quality by subgroup, measured again when what is served has changed enough to tell."""

    def __init__(self, searching: Searching, key: str) -> None:
        self._searching = searching
        self._key = key
        self._stage: tuple[object, ...] = ()
        self._quality = pb.SubgroupQuality()

    def add_to(self, progress: pb.UpgradeProgress, hosted: Hosted) -> None:
        """Raises InvalidInputError for a key that makes no groups."""
        spaces = [part.space for part in hosted.plan.parts]
        tenth = 10 * progress.done // max(1, progress.total) if len(spaces) > 1 else 0
        stage = (*spaces, tenth, progress.re_embedded)
        if stage != self._stage:
            found = subgroups(hosted, self._searching, self._key)
            self._stage, self._quality = stage, _quality(found)
        progress.quality.CopyFrom(self._quality)


def _spare_cores(share: float) -> float:
    if not 0 <= share < 1:
        raise InvalidInputError(f"spare_cores: expected 0 to below 1, got {share:g}")
    return share


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
        fill_value(one.value, group.value)
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
