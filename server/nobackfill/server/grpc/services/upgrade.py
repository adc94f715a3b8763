"""Implement UpgradeService: estimates and the progress of upgrades."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc

from nobackfill.errors import InvalidInputError
from nobackfill.server.galleries.answering import GallerySearcher
from nobackfill.server.galleries.hosted import GalleryRegistry, HostedGallery
from nobackfill.server.grpc.context import watcher_role
from nobackfill.server.grpc.services.gallery import healing_message
from nobackfill.server.rollout.lifecycle import GalleryOperations
from nobackfill.server.upgrades.subgroups import Subgroup, measure_subgroups
from nobackfill.server.upgrades.upgrading import Job
from nobackfill.v1 import upgrade_pb2 as pb
from nobackfill.v1.upgrade_pb2_grpc import UpgradeServiceServicer
from nobackfill.wire.values import fill_value


@dataclass(eq=False)
class UpgradeService(UpgradeServiceServicer):
    """Implement the calls of protos/nobackfill/v1/upgrade.proto."""

    _lifecycle: GalleryOperations
    _galleries: GalleryRegistry
    _searching: GallerySearcher

    def EstimateUpgrade(  # noqa: N802 - the contract's name
        self, request: pb.EstimateUpgradeRequest, context: grpc.ServicerContext
    ) -> pb.EstimateUpgradeResponse:
        """Estimate what a gallery's upgrade to a release costs; a sample is upgraded, and nothing
        is changed.

        Without a measured route, `expected_kept` is 0. It takes seconds. A gallery that has the
        release's space already costs nothing.

        Raises:
            InvalidInputError: spare_cores is not from 0 to below 1, or a model's output is invalid.
            NotFoundError: no gallery has this name, or the release is not published.
            PreconditionError: no upgrade leads to the release.
            VerificationError: the gallery is set aside, a file of the release is damaged, or a
                model fails its trial.
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            CannotWriteError: the gallery's file cannot be opened, or the sample or the
                publication's verified metadata cannot be written.
            ConfigurationError: the database refuses the statement, as without rights.
            OSError: the child process of a trial cannot be started.
            IncompatibleSpaceError: the active space was deleted meanwhile.
        """
        spare_cores = _spare_cores(request.spare_cores)
        cost, route = self._lifecycle.estimate_upgrade(
            request.gallery, request.release, spare_cores
        )
        response = pb.EstimateUpgradeResponse(
            items=cost.item_count,
            bytes=cost.disk_bytes,
            memory_bytes=cost.memory_bytes,
            route=route.releases or [request.release],
            expected_kept=route.retention or 0.0,
            left_behind=cost.left_behind_count,
        )
        response.duration.FromMilliseconds(int(cost.upgrade_seconds * 1000))
        response.index_duration.FromMilliseconds(int(cost.index_seconds * 1000))
        return response

    def StartUpgrade(  # noqa: N802
        self, request: pb.StartUpgradeRequest, context: grpc.ServicerContext
    ) -> pb.StartUpgradeResponse:
        """Resume or start a gallery's upgrade, or re-embed items from the images of the request.

        Returns at once with the state of the upgrade, except that images are re-embedded first. If
        an id has several images, the last counts. Items that do not exist, or were re-embedded
        already, are skipped. Images are ignored if an upgrade starts.

        Raises:
            InvalidInputError: spare_cores is not from 0 to below 1, or an image cannot be decoded;
                the others are re-embedded.
            TooLargeError: the images together are too large.
            NotFoundError: no gallery has this name.
            VerificationError: the gallery is set aside or damaged, or a model's output has another
                shape; or the saved job is not valid, or a newer version wrote it.
            PreconditionError: the request names another release than the active one, none is
                active, or the gallery is being upgraded and its images cannot be used.
            BusyError: an activation is under way, or a store is busy; OverloadedError if too many
                images are being decoded.
            UnavailableError: the model server or the database does not answer.
            CannotWriteError: the gallery cannot be written.
            NoEncoderError: the release embeds no images.
            DeadlineError, CancelledError: the call's time is over, or its caller has gone; earlier
                images stay re-embedded.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        cores = _spare_cores(request.spare_cores)
        images = {item.id: item.image for item in request.backfill}
        job = self._lifecycle.upgrade(
            request.gallery, request.release, cores, images, request.backfill_budget
        )
        return pb.StartUpgradeResponse(progress=_message(job))

    def WatchUpgrade(  # type: ignore[override] # noqa: N802 - None: nothing is new
        self, request: pb.WatchUpgradeRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchUpgradeResponse | None]:
        """Yield the progress of a gallery's upgrade at each change, until the upgrade is over.

        Without an upgrade, one answer says that it is done. None means that nothing is new. With
        `group_by`, quality by subgroup is measured at first and after larger changes, which takes
        seconds. It does not pause between two yields; the caller does.

        Raises:
            NotFoundError: no gallery has this name, or it was deleted meanwhile.
            VerificationError: the gallery is set aside.
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            InvalidInputError: no item has the metadata key `group_by`, or it has more than 200
                values.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            DeadlineError: the call's time is over while the quality is measured.
            CancelledError: the caller has cancelled the call meanwhile.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        last, report = None, _Report(self._searching, request.group_by)
        role = watcher_role(context)
        while True:
            # The gallery is not held open between two looks, so that it can be deleted.
            job = self._lifecycle.upgrade_job(request.gallery)
            progress = _message(job)
            if (healing := self._lifecycle.reembedding_progress(request.gallery)) is not None:
                progress.healing.CopyFrom(healing_message(healing, role))
            if request.group_by:
                with self._galleries.use_gallery(request.gallery) as hosted:
                    report.add_to(progress, hosted)
            if progress != last:
                last = progress
                yield pb.WatchUpgradeResponse(progress=progress)
            if job.is_over:
                return
            yield None

    def PauseUpgrade(  # noqa: N802
        self, request: pb.PauseUpgradeRequest, context: grpc.ServicerContext
    ) -> pb.PauseUpgradeResponse:
        """Pause a gallery's upgrade after its present chunk, and later ones until StartUpgrade,
        also over a restart.

        Raises:
            NotFoundError: no gallery has this name.
            VerificationError: the gallery is set aside; or the saved job is not valid, or a newer
                version wrote it.
            CannotWriteError: the state cannot be written.
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        return pb.PauseUpgradeResponse(
            progress=_message(self._lifecycle.pause_upgrade(request.gallery))
        )


class _Report:
    """Measure quality by subgroup, again once the gallery has changed enough."""

    def __init__(self, searching: GallerySearcher, key: str) -> None:
        self._searching = searching
        self._key = key
        self._stage: tuple[object, ...] = ()
        self._quality = pb.SubgroupQuality()

    def add_to(self, progress: pb.UpgradeProgress, hosted: HostedGallery) -> None:
        """Add the quality to a message.

        Raises:
            InvalidInputError: the key makes no groups.
        """
        spaces = [part.space for part in hosted.plan.parts]
        tenth = 10 * progress.done // max(1, progress.total) if len(spaces) > 1 else 0
        stage = (*spaces, tenth, progress.re_embedded)
        if stage != self._stage:
            groups = measure_subgroups(hosted, self._searching, self._key)
            self._stage, self._quality = stage, _quality(groups)
        progress.quality.CopyFrom(self._quality)


def _spare_cores(share: float) -> float:
    if not 0 <= share < 1:
        raise InvalidInputError(
            "spare_cores (share of cores left to searches): expected 0 to below 1, got "
            f"{share:g}; send a fraction"
        )
    return share


def _quality(groups: Sequence[Subgroup]) -> pb.SubgroupQuality:
    items = sum(group.item_count for group in groups)
    quality = pb.SubgroupQuality(
        re_embedded_share=sum(group.re_embedded_count for group in groups) / items
    )
    for group in groups:
        message = quality.subgroups.add(
            items=group.item_count,
            re_embedded=group.re_embedded_count,
            probes=group.probe_count,
            cmc1=group.cmc1,
            cmc1_before=group.old_space_cmc1,
        )
        fill_value(group.value, message.value)
    return quality


def _message(job: Job) -> pb.UpgradeProgress:
    progress = pb.UpgradeProgress(
        gallery=job.gallery,
        from_release=job.from_release,
        to_release=job.to_release,
        state=f"UPGRADE_STATE_{job.state.name}",
        done=job.complete,
        total=job.total,
        items_per_second=job.items_per_second,
        re_embedded=job.re_embedded,
        neighbours_kept=job.neighbours_kept,
        message=job.message,
    )
    progress.remaining.FromMilliseconds(int(job.remaining_s * 1000))
    return progress
