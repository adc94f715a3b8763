"""UpgradeService: galleries carried into another release's space."""

from collections.abc import Iterator, Mapping
from functools import cached_property

from nobackfill.v1 import upgrade_pb2 as pb
from nobackfill.v1.upgrade_pb2_grpc import UpgradeServiceStub
from nobackfill.wire.answers import Image
from nobackfill.wire.connection import Connection
from nobackfill.wire.searches import image_bytes


class Upgrades(Connection):
    """Upgrades, a gallery each."""

    @cached_property
    def _upgrades(self) -> UpgradeServiceStub:
        return UpgradeServiceStub(self._channel)

    def estimate_upgrade(
        self, gallery: str, release: int, *, spare_cores: float = 0.0
    ) -> pb.EstimateUpgradeResponse:
        """Items, seconds and bytes, measured on a few items; nothing is changed."""
        request = pb.EstimateUpgradeRequest(
            gallery=gallery, release=release, spare_cores=spare_cores
        )
        return self._once(lambda t: self._upgrades.EstimateUpgrade(request, timeout=t))

    def start_upgrade(
        self,
        gallery: str,
        release: int,
        *,
        spare_cores: float = 0.0,
        backfill: Mapping[str, Image] | None = None,
        budget: int = 0,
    ) -> pb.UpgradeProgress:
        """Start, or resume, the upgrade of a gallery to the active release.

        `backfill`: images by id of items to be embedded again, the least certain first, at most
        `budget` of them (0: all).
        """
        images = [
            pb.BackfillImage(id=name, image=image_bytes(image))
            for name, image in (backfill or {}).items()
        ]
        request = pb.StartUpgradeRequest(
            gallery=gallery,
            release=release,
            spare_cores=spare_cores,
            backfill=images,
            backfill_budget=budget,
        )
        return self._once(lambda t: self._upgrades.StartUpgrade(request, timeout=t)).progress

    def watch_upgrade(self, gallery: str, *, by: str = "") -> Iterator[pb.UpgradeProgress]:
        """Progress now, then at every chunk, to the end; with the metadata key `by`, the quality of
        each of its values, too."""
        request = pb.WatchUpgradeRequest(gallery=gallery, group_by=by)
        answers = self._watched(lambda: self._upgrades.WatchUpgrade(request))
        return (answer.progress for answer in answers)

    def pause_upgrade(self, gallery: str) -> pb.UpgradeProgress:
        """Stop after the present chunk; `start_upgrade` resumes."""
        request = pb.PauseUpgradeRequest(gallery=gallery)
        return self._again(lambda t: self._upgrades.PauseUpgrade(request, timeout=t)).progress
