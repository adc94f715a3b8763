"""The Python client of a gateway: its five services as one class."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property

from nobackfill.errors import InvalidInputError, NotFoundError, PreconditionError
from nobackfill.v1 import release_pb2, upgrade_pb2, vault_pb2
from nobackfill.v1.release_pb2_grpc import ReleaseServiceStub
from nobackfill.v1.upgrade_pb2_grpc import UpgradeServiceStub
from nobackfill.v1.vault_pb2_grpc import VaultServiceStub
from nobackfill.wire.answers import Image
from nobackfill.wire.connection import Connection
from nobackfill.wire.galleries import GalleryCalls, SearchCalls, image_bytes

# ReleaseService: what is published, and which release answers.

ROLLOUTS: Mapping[str, release_pb2.Rollout] = {
    release_pb2.Rollout.Name(number).removeprefix("ROLLOUT_").lower(): number
    for number in (
        release_pb2.ROLLOUT_UNSPECIFIED,
        release_pb2.ROLLOUT_DIRECT,
        release_pb2.ROLLOUT_DUAL,
        release_pb2.ROLLOUT_CUTOVER,
    )
}
# A rollback or a retirement waits for what runs.
_CHANGE_SECONDS = 600.0


class ReleaseCalls(Connection):
    """Releases of the gateway, and files of its publication."""

    @cached_property
    def _releases(self) -> ReleaseServiceStub:
        return ReleaseServiceStub(self._channel)

    def list_releases(self) -> Sequence[release_pb2.Release]:
        """What is published, and what the gateway does with each."""
        request = release_pb2.ListReleasesRequest()
        return self._again(lambda t: self._releases.ListReleases(request, timeout=t)).releases

    def get_release(self, number: int) -> release_pb2.Release:
        """One release with its manifest. Raises NotFoundError."""
        request = release_pb2.GetReleaseRequest(number=number)
        return self._again(lambda t: self._releases.GetRelease(request, timeout=t)).release

    def watch_releases(self) -> Iterator[Sequence[release_pb2.Release]]:
        """The present list at once, then again whenever it changes; without end."""
        request = release_pb2.WatchReleasesRequest()
        answers = self._watched(lambda: self._releases.WatchReleases(request))
        return (answer.releases for answer in answers)

    def fetch_file(
        self, path: str, offset: int = 0, *, seconds: float | None = None
    ) -> Iterator[bytes]:
        """A file of the publication from an offset on, in pieces, within `seconds`.

        Raises NotFoundError, OutOfRangeError, DeadlineError.
        """
        request = release_pb2.FetchFileRequest(path=path, offset=offset)
        stream = self._releases.FetchFile(request, timeout=seconds or self.seconds)
        return (answer.chunk for answer in self._followed(stream))

    def activate(
        self,
        number: int,
        *,
        rollout: str = "unspecified",
        spare_cores: float = 0.0,
        old_space_seconds: int = 0,
        canary: release_pb2.Canary | None = None,
    ) -> Iterator[release_pb2.ActivateReleaseResponse]:
        """Make a release the one that answers, by rollout direct, dual or cutover; each report.

        With `canary`, a share of the callers meets it first, until it is promoted; called again
        while it is under way, that changes it. It goes on at the gateway when one stops reading.
        Raises InvalidInputError for another rollout; the last report of a release that failed is
        followed by PreconditionError.
        """
        if rollout not in ROLLOUTS:
            raise InvalidInputError(
                f"rollout: expected one of {', '.join(sorted(ROLLOUTS))}, got {rollout!r}"
            )
        request = release_pb2.ActivateReleaseRequest(
            number=number,
            rollout=ROLLOUTS[rollout],
            spare_cores=spare_cores,
            old_space_seconds=old_space_seconds,
            canary=canary,
        )
        return self._reported(number, self._releases.ActivateRelease(request))

    def promote(self, number: int) -> Iterator[release_pb2.ActivateReleaseResponse]:
        """End the canary of a release well: all queries move to it. Raises PreconditionError where
        there is none, and after the last report of one that failed."""
        request = release_pb2.ActivateReleaseRequest(number=number, promote=True)
        return self._reported(number, self._releases.ActivateRelease(request))

    def watch_canary(self) -> Iterator[release_pb2.WatchCanaryResponse]:
        """How the canary goes, a message a second to its end."""
        request = release_pb2.WatchCanaryRequest()
        return self._watched(lambda: self._releases.WatchCanary(request))

    def _reported(
        self, number: int, stream: Iterator[release_pb2.ActivateReleaseResponse]
    ) -> Iterator[release_pb2.ActivateReleaseResponse]:
        for report in self._followed(stream):
            yield report
            if report.phase == release_pb2.PHASE_FAILED:
                raise PreconditionError(f"release {number} is not activated: {report.message}")

    def report_sync(self, report: release_pb2.ReportSyncRequest) -> None:
        """How a device's last sync went. Raises InvalidInputError."""
        self._again(lambda t: self._releases.ReportSync(report, timeout=t))

    def rollback(
        self, *, confirm: bool = False, to: int = 0, canary: int = 0
    ) -> release_pb2.RollbackReleaseResponse:
        """Return to the release before, or only count and list what would not be found there.

        With `to`, the release that the unconfirmed answer named, a confirmed call goes back no
        further when it is repeated. With `canary`, a release, a confirmed call only ends that
        release's canary. Raises PreconditionError, also where that canary was promoted or is not
        under way, and BusyError.
        """
        request = release_pb2.RollbackReleaseRequest(confirm=confirm, to_release=to, canary=canary)
        seconds = _CHANGE_SECONDS if confirm else None
        return self._once(
            lambda t: self._releases.RollbackRelease(request, timeout=t), seconds=seconds
        )

    def retire(self) -> Sequence[int]:
        """Drop spaces and models of every older release, for good; the releases retired."""
        request = release_pb2.RetireReleaseRequest()
        return self._once(
            lambda t: self._releases.RetireRelease(request, timeout=t), seconds=_CHANGE_SECONDS
        ).retired


# UpgradeService: galleries carried into another release's space.


class UpgradeCalls(Connection):
    """Upgrades, a gallery each."""

    @cached_property
    def _upgrades(self) -> UpgradeServiceStub:
        return UpgradeServiceStub(self._channel)

    def estimate_upgrade(
        self, gallery: str, release: int, *, spare_cores: float = 0.0
    ) -> upgrade_pb2.EstimateUpgradeResponse:
        """Items, seconds and bytes, measured on a few items; nothing is changed."""
        request = upgrade_pb2.EstimateUpgradeRequest(
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
    ) -> upgrade_pb2.UpgradeProgress:
        """Start, or resume, the upgrade of a gallery to the active release.

        `backfill`: images by id of items to be embedded again, the least certain first, at most
        `budget` of them (0: all).
        """
        images = [
            upgrade_pb2.BackfillImage(id=name, image=image_bytes(image))
            for name, image in (backfill or {}).items()
        ]
        request = upgrade_pb2.StartUpgradeRequest(
            gallery=gallery,
            release=release,
            spare_cores=spare_cores,
            backfill=images,
            backfill_budget=budget,
        )
        return self._once(lambda t: self._upgrades.StartUpgrade(request, timeout=t)).progress

    def watch_upgrade(self, gallery: str, *, by: str = "") -> Iterator[upgrade_pb2.UpgradeProgress]:
        """Progress now, then at every chunk, to the end; with the metadata key `by`, the quality of
        each of its values, too."""
        request = upgrade_pb2.WatchUpgradeRequest(gallery=gallery, group_by=by)
        answers = self._watched(lambda: self._upgrades.WatchUpgrade(request))
        return (answer.progress for answer in answers)

    def pause_upgrade(self, gallery: str) -> upgrade_pb2.UpgradeProgress:
        """Stop after the present chunk; `start_upgrade` resumes."""
        request = upgrade_pb2.PauseUpgradeRequest(gallery=gallery)
        return self._again(lambda t: self._upgrades.PauseUpgrade(request, timeout=t)).progress


# VaultService: blobs of ciphertext, in pieces.


class VaultCalls(Connection):
    """Blobs of the vault. A transfer is one try: whoever makes it resumes at what is held."""

    @cached_property
    def _vault(self) -> VaultServiceStub:
        return VaultServiceStub(self._channel)

    def held_of_blob(self, blob: vault_pb2.Blob) -> int:
        """Bytes that the vault has of a blob."""
        request = vault_pb2.PutBlobRequest(blob=blob)
        return int(self._again(lambda t: self._vault.PutBlob(iter([request]), timeout=t)).received)

    def put_blob(
        self,
        blob: vault_pb2.Blob,
        chunks: Iterable[bytes],
        offset: int = 0,
        *,
        seconds: float | None = None,
    ) -> int:
        """Send a blob from `offset` on, within `seconds`; bytes that the vault has then.

        Raises InvalidInputError, TooLargeError, QuotaExceededError, OutOfRangeError.
        """

        def requests() -> Iterator[vault_pb2.PutBlobRequest]:
            first = True
            for chunk in chunks:
                yield vault_pb2.PutBlobRequest(
                    blob=blob if first else None, offset=offset if first else 0, chunk=chunk
                )
                first = False

        return int(
            self._once(
                lambda t: self._vault.PutBlob(requests(), timeout=t), seconds=seconds
            ).received
        )

    def get_blob(
        self, blob_id: str, offset: int = 0, *, seconds: float | None = None
    ) -> Iterator[bytes]:
        """A blob from an offset on, in pieces, within `seconds`. Raises NotFoundError."""
        request = vault_pb2.GetBlobRequest(id=blob_id, offset=offset)
        stream = self._vault.GetBlob(request, timeout=seconds or self.seconds)
        return (answer.chunk for answer in self._followed(stream))

    def delete_blob(self, blob_id: str) -> None:
        """Delete a blob; one that is not there is fine."""
        request = vault_pb2.DeleteBlobRequest(id=blob_id)
        with suppress(NotFoundError):
            self._again(lambda t: self._vault.DeleteBlob(request, timeout=t))

    def list_blobs(self, page_token: str = "") -> vault_pb2.ListBlobsResponse:
        """A page of blobs by id, and the token of the next."""
        request = vault_pb2.ListBlobsRequest(page_token=page_token)
        return self._again(lambda t: self._vault.ListBlobs(request, timeout=t))


class Gateway(SearchCalls, GalleryCalls, ReleaseCalls, UpgradeCalls, VaultCalls):
    """A connection to one gateway, usable from several threads; see `Connection` for its arguments.

        from nobackfill.client import Gateway

        with Gateway("127.0.0.1:50051") as gateway:
            for hit in gateway.search("photos", image="query.png", k=5).hits:
                print(hit.id, hit.distance, hit.score)

    Hits and items come as in nobackfill.wire.answers, as those of a device do; galleries,
    releases, upgrades and blobs as the contract's messages (nobackfill.v1).
    """
