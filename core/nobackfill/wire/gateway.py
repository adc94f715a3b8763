"""Define `Gateway`, the Python client of a gateway: its five services as one class."""

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

# ReleaseService: published releases, and the active one.

ROLLOUTS = tuple(name.removeprefix("ROLLOUT_").lower() for name, _ in release_pb2.Rollout.items())
# A rollback or a retirement waits for running work.
_CHANGE_SECONDS = 600.0


class ReleaseCalls(Connection):
    """Releases of the gateway, and files of its publication."""

    @cached_property
    def _releases(self) -> ReleaseServiceStub:
        return self._make_stub(ReleaseServiceStub)

    def list_releases(self) -> Sequence[release_pb2.Release]:
        """List the usable published releases by rising number, with the state of each at the
        gateway.

        Withdrawn ones are listed, too; before the first publication, the list is empty. Retried
        until the connection's `seconds` are over.

        Raises:
            NobackfillError: Any failure: UnavailableError (no answer), DeadlineError (the time is
                over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        request = release_pb2.ListReleasesRequest()
        return self._retry(self._releases.ListReleases, request).releases

    def get_release(self, number: int) -> release_pb2.Release:
        """Return a release with its manifest. Retried until the connection's `seconds` are over.

        Raises:
            NotFoundError: The release is not published.
            VerificationError: The publication, or the release's manifest, is not valid.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed, or `number` is negative.
        """
        request = release_pb2.GetReleaseRequest(number=number)
        return self._retry(self._releases.GetRelease, request).release

    def watch_releases(self) -> Iterator[Sequence[release_pb2.Release]]:
        """Yield the list of releases now, and again after each change; without end.

        The call has no deadline. It is made again only where the gateway ends it because of its
        age. Errors are raised at `next`. Each list is as that of `list_releases`. Closing the
        connection ends the iterator with CancelledError.

        Raises:
            NobackfillError: Any failure: UnavailableError (no answer), DeadlineError (the time is
                over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        request = release_pb2.WatchReleasesRequest()
        answers = self._watch(lambda: self._releases.WatchReleases(request))
        return (answer.releases for answer in answers)

    def fetch_file(
        self, path: str, offset: int = 0, *, seconds: float | None = None
    ) -> Iterator[bytes]:
        """Yield a file of the publication in pieces.

        Not retried: after a failure, call it again with the offset of the next byte. The bytes are
        not verified here. Closing the iterator ends the transfer.

        Args:
            path: Published path of the file, relative to the publication.
            offset: The first byte; the file's size gives no bytes.
            seconds: Longest time of the whole transfer; None or 0: the connection's `seconds`.

        Raises:
            NotFoundError: The file is not published; raised at the first piece, like the other
                errors.
            OutOfRangeError: The offset lies past the end.
            DeadlineError: The time is over.
            InvalidInputError: The path is absolute, or leads out of the publication.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed, or `offset` is negative; raised at once.
            VerificationError, CannotWriteError, BusyError: The file is unknown, and the gateway
                cannot verify or read the publication.
        """
        request = release_pb2.FetchFileRequest(path=path, offset=offset)
        stream = self._releases.FetchFile(request, timeout=seconds or self.seconds)
        return (answer.chunk for answer in self._read_stream(stream))

    def activate(
        self,
        number: int,
        *,
        rollout: str = "unspecified",
        spare_cores: float = 0.0,
        old_space_seconds: int = 0,
        canary: release_pb2.Canary | None = None,
    ) -> Iterator[release_pb2.ActivateReleaseResponse]:
        """Make a release the active one, and yield a report for each step.

        The activation begins with the call, and goes on at the gateway if the caller stops reading.
        Call it again during a canary to change the canary. It has no deadline and is not retried.
        The reports end early, without an error, when the gateway stops. While a canary of the
        release runs, a call with `canary` yields one report.

        Args:
            number: Number of the release, not older than the active one.
            rollout: direct, dual or cutover; unspecified lets the gateway choose.
            spare_cores: Share of the machine's cores that searches keep during the upgrade, 0 to
                below 1; 0 means 0.5.
            old_space_seconds: How long queries in the old space are answered after the switch; 0:
                until the release is retired.
            canary: The share of the callers that the release answers first, until it is promoted;
                None activates without a canary.

        Raises:
            InvalidInputError: Another rollout; raised at once. Or `spare_cores`,
                `old_space_seconds` or the canary is not valid; raised while reading, like the
                following errors.
            PreconditionError: The release is older than the active one, or the canary cannot be
                started or changed. Or the activation failed; raised after the last report.
            NotFoundError: The release is not published.
            BusyError: Another activation, rollback or retirement is under way.
            CannotWriteError: The state of the gateway cannot be written.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed, or a number is negative; raised at once.
            VerificationError: The publication or the manifest of the release is not valid.
        """
        if rollout not in ROLLOUTS:
            raise InvalidInputError(
                f"rollout: expected one of {', '.join(sorted(ROLLOUTS))}, got {rollout!r}; pass "
                "one of these"
            )
        request = release_pb2.ActivateReleaseRequest(
            number=number,
            rollout=f"ROLLOUT_{rollout.upper()}",
            spare_cores=spare_cores,
            old_space_seconds=old_space_seconds,
            canary=canary,
        )
        return self._read_reports(number, self._releases.ActivateRelease(request))

    def promote(self, number: int) -> Iterator[release_pb2.ActivateReleaseResponse]:
        """End a canary with success: the release answers all queries.

        Yield a report for each step. The promotion begins with the call, and goes on at the gateway
        if the caller stops reading. It has no deadline and is not retried.

        Args:
            number: Number of the release.

        Raises:
            PreconditionError: No such canary at this gateway; or the activation failed, raised
                after the last report.
            BusyError: A rollback or retirement is under way.
            CannotWriteError: The state of the gateway cannot be written.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed, or `number` is negative; raised at once. All
                other errors are raised while reading.
        """
        request = release_pb2.ActivateReleaseRequest(number=number, promote=True)
        return self._read_reports(number, self._releases.ActivateRelease(request))

    def watch_canary(self) -> Iterator[release_pb2.WatchCanaryResponse]:
        """Yield the state of the canary every second, until it ends.

        The stream is opened again if the gateway ends it because of its age. An ended canary gives
        one report. Without one since the gateway's start, the only report has release 0.

        Raises:
            NobackfillError: Any failure: UnavailableError (no answer), DeadlineError (the time is
                over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed. All errors are raised at `next`.
        """
        request = release_pb2.WatchCanaryRequest()
        return self._watch(lambda: self._releases.WatchCanary(request))

    def _read_reports(
        self, number: int, stream: Iterator[release_pb2.ActivateReleaseResponse]
    ) -> Iterator[release_pb2.ActivateReleaseResponse]:
        for report in self._read_stream(stream):
            yield report
            if report.phase == release_pb2.PHASE_FAILED:
                raise PreconditionError(
                    f"release {number} is not activated, and the former release goes on "
                    f"answering: {report.message}"
                )

    def report_sync(self, report: release_pb2.ReportSyncRequest) -> None:
        """Send a summary of a device's last sync to the gateway.

        The gateway counts it in its metrics and stores nothing. Retried until the connection's
        `seconds` are over. A retry after a lost answer may count twice.

        Raises:
            InvalidInputError: The release is not published there, the failure is unknown, or a
                number is out of its range.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        self._retry(self._releases.ReportSync, report)

    def rollback(
        self, *, confirm: bool = False, to: int = 0, canary: int = 0
    ) -> release_pb2.RollbackReleaseResponse:
        """Return to the previous release, or report only what this would lose.

        Not retried. A confirmed call may take 10 minutes, whatever the connection's `seconds` are.
        After a lost answer the release may have changed; a second call with `to` is then safe. A
        confirmed call cancels the activation under way. Repeated within five minutes, it changes no
        more, also without `to`.

        Args:
            confirm: Do it. Otherwise count and list the items that would be missing.
            to: The release that the unconfirmed answer named; 0 for the previous one. With it, a
                repeated call does not go back further. An unconfirmed call ignores it.
            canary: A release: a confirmed call only ends the canary of this release. 0 for no
                canary.

        Returns:
            The release that answers then, the number of items that are lost, and the first of them;
            all others are only counted.

        Raises:
            PreconditionError: No release to return to, another one than `to`, or this canary was
                promoted or is not running.
            BusyError: Another change is running for too long.
            CannotWriteError: The state of the gateway cannot be written.
            UnavailableError: The models cannot be loaded, or the gateway does not answer. In the
                first case, nothing has changed.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed, or `to` or `canary` is negative.
            NotFoundError: The release to return to is not published any more.
            VerificationError: A file of that release differs from its digest, or a gallery is
                damaged.
        """
        request = release_pb2.RollbackReleaseRequest(confirm=confirm, to_release=to, canary=canary)
        seconds = _CHANGE_SECONDS if confirm else None
        return self._call_once(self._releases.RollbackRelease, request, seconds=seconds)

    def retire(self) -> Sequence[int]:
        """Delete spaces and models of all older releases, permanently. No rollback then.

        Not retried. It may take 10 minutes, whatever the connection's `seconds` are. After a lost
        answer they may be gone; a second call then returns an empty list. A gallery that stayed
        with an older release keeps its vectors.

        Returns:
            The retired releases; empty if there were none.

        Raises:
            PreconditionError: No release was ever activated.
            BusyError: An activation or a rollback is under way.
            CannotWriteError: The state of the gateway cannot be written.
            NobackfillError: Any failure: UnavailableError (no answer), DeadlineError (the time is
                over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        request = release_pb2.RetireReleaseRequest()
        answer = self._call_once(self._releases.RetireRelease, request, seconds=_CHANGE_SECONDS)
        return answer.retired


# UpgradeService: migration of galleries into another release's space.


class UpgradeCalls(Connection):
    """Upgrades of single galleries."""

    @cached_property
    def _upgrades(self) -> UpgradeServiceStub:
        return self._make_stub(UpgradeServiceStub)

    def estimate_upgrade(
        self, gallery: str, release: int, *, spare_cores: float = 0.0
    ) -> upgrade_pb2.EstimateUpgradeResponse:
        """Estimate items, seconds and bytes of an upgrade, from a few items; change nothing.

        Not retried. A gallery that has the release's space already costs nothing.

        Args:
            gallery: Name of the gallery.
            release: The target.
            spare_cores: Share of the machine's cores that searches keep during the upgrade, 0 to
                below 1; 0 means 0.5.

        Raises:
            NotFoundError: No such gallery, or the release is not published.
            PreconditionError: No upgrade leads there.
            InvalidInputError: `spare_cores` is out of its range.
            VerificationError: The gallery is set aside, or a file of the release is damaged.
            BusyError: The database of the gallery is busy.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed, or `release` is negative.
            CannotWriteError: The gateway cannot store the sample or the verified metadata.
        """
        request = upgrade_pb2.EstimateUpgradeRequest(
            gallery=gallery, release=release, spare_cores=spare_cores
        )
        return self._call_once(self._upgrades.EstimateUpgrade, request)

    def start_upgrade(
        self,
        gallery: str,
        release: int,
        *,
        spare_cores: float = 0.0,
        backfill: Mapping[str, Image] | None = None,
        budget: int = 0,
    ) -> upgrade_pb2.UpgradeProgress:
        """Start or resume the upgrade of a gallery to the active release.

        Returns at once, except that the images of `backfill` are embedded first. Not retried.

        Args:
            gallery: Name of the gallery.
            release: The target: the active release, or 0 for it.
            spare_cores: Share of the machine's cores that searches keep during the upgrade, 0 to
                below 1; 0 means 0.5.
            backfill: Images by id of items to re-embed, the least certain first; None for none.
                Only items that were migrated are re-embedded, and only once the gallery's upgrade
                is done. Where the call starts an upgrade, they are ignored.
            budget: The largest number of items to re-embed; 0 for all of `backfill`.

        Returns:
            The progress at the start; `watch_upgrade` follows it.

        Raises:
            InvalidInputError: `spare_cores` is out of its range, or a backfill image cannot be read
                or decoded. Where the gateway cannot decode it, the others are re-embedded.
            TooLargeError: A backfill image, or all together, are larger than a gateway accepts.
            NotFoundError: No such gallery.
            PreconditionError: The release is not the active one, no upgrade leads there, or images
                were sent during an upgrade.
            BusyError: An activation is under way.
            CannotWriteError: The gallery cannot be written.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed, or `release` or `budget` is negative.
            NoEncoderError: As a PreconditionError: the release embeds no images.
            VerificationError: The gallery is damaged and set aside, or the release cannot be used.
            TypeError: A backfill image is neither bytes nor a path; a bytearray is neither.
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
        return self._call_once(self._upgrades.StartUpgrade, request).progress

    def watch_upgrade(
        self, gallery: str, *, by_key: str = ""
    ) -> Iterator[upgrade_pb2.UpgradeProgress]:
        """Yield the progress of an upgrade now and after each chunk, until it ends.

        Without an upgrade, one report says that it is done. The call has no deadline; it is made
        again only where the gateway ends it because of its age. A failure of the upgrade is its
        last report, and no error.

        Args:
            gallery: Name of the gallery.
            by_key: A metadata key: report the quality for each of its values, too. Empty: none.
                With a key, each larger change is measured for seconds.

        Raises:
            NotFoundError: No such gallery, or it was deleted meanwhile; raised at `next`, like the
                other errors.
            VerificationError: The gallery is set aside.
            InvalidInputError: No item has the key `by_key`, or it has too many values.
            NobackfillError: Any failure: UnavailableError (no answer), DeadlineError (the time is
                over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        request = upgrade_pb2.WatchUpgradeRequest(gallery=gallery, group_by=by_key)
        answers = self._watch(lambda: self._upgrades.WatchUpgrade(request))
        return (answer.progress for answer in answers)

    def pause_upgrade(self, gallery: str) -> upgrade_pb2.UpgradeProgress:
        """Stop an upgrade after the present chunk, and later ones of this gallery, until
        `start_upgrade` resumes them.

        Retried until the connection's `seconds` are over.

        Returns:
            The present progress; the chunk may still run.

        Raises:
            NotFoundError: No such gallery.
            VerificationError: The gallery is set aside.
            CannotWriteError: The state of the gateway cannot be written.
            NobackfillError: Any failure: UnavailableError (no answer), DeadlineError (the time is
                over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        request = upgrade_pb2.PauseUpgradeRequest(gallery=gallery)
        return self._retry(self._upgrades.PauseUpgrade, request).progress


# VaultService: blobs of ciphertext, in pieces.


class VaultCalls(Connection):
    """Blobs of the vault. Transfers are not retried: callers resume at `received_bytes`."""

    @cached_property
    def _vault(self) -> VaultServiceStub:
        return self._make_stub(VaultServiceStub)

    def received_bytes(self, blob: vault_pb2.Blob) -> int:
        """Return how many bytes of a blob the vault has received; 0 for an unknown blob.

        It sends the blob's description only. Retried until the connection's `seconds` are over.

        Raises:
            InvalidInputError: The id or the digest is not 64 hex digits, or the size is too small
                for ciphertext.
            TooLargeError: The blob is larger than the vault accepts.
            AlreadyExistsError: The vault has another blob with this id.
            QuotaExceededError: The vault is full for this name.
            BusyError: Another upload of the blob runs.
            NobackfillError: Any failure: UnavailableError (no answer), DeadlineError (the time is
                over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        request = vault_pb2.PutBlobRequest(blob=blob)
        return int(self._retry(self._put_request, request).received)

    def _put_request(
        self, request: vault_pb2.PutBlobRequest, timeout: float
    ) -> vault_pb2.PutBlobResponse:
        return self._vault.PutBlob(iter([request]), timeout=timeout)

    def put_blob(
        self,
        blob: vault_pb2.Blob,
        chunks: Iterable[bytes],
        offset: int = 0,
        *,
        seconds: float | None = None,
    ) -> int:
        """Send a blob in pieces.

        If the vault has the whole blob already, it ignores the bytes. After a failure, continue
        from `received_bytes`.

        Args:
            blob: Id, size and digest of the blob.
            chunks: Its bytes from `offset` on; empty chunks are skipped, and their errors end the
                call with a NobackfillError. Without any chunk, nothing describes the blob:
                InvalidInputError.
            offset: Number of bytes that the vault has already; a negative one ends the call with a
                NobackfillError.
            seconds: Longest time of the transfer; None: the connection's `seconds`. With 0, a
                blob of few bytes may arrive; otherwise DeadlineError.

        Returns:
            Number of bytes that the vault has now.

        Raises:
            InvalidInputError: The id or digest is not 64 hex digits, the bytes are no age
                ciphertext, or they differ from the digest. In the last case, the vault deletes
                them.
            TooLargeError: The blob is larger than the vault accepts, or than its `size`.
            QuotaExceededError: The vault is full for this name.
            OutOfRangeError: `offset` is not the number of bytes that the vault has.
            AlreadyExistsError: The vault has another blob with this id.
            BusyError: Another upload of the blob runs.
            CannotWriteError: The blob cannot be written.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """

        def requests() -> Iterator[vault_pb2.PutBlobRequest]:
            for number, chunk in enumerate(chunks):
                yield vault_pb2.PutBlobRequest(
                    blob=None if number else blob, offset=0 if number else offset, chunk=chunk
                )

        return int(self._call_once(self._vault.PutBlob, requests(), seconds=seconds).received)

    def get_blob(
        self, blob_id: str, offset: int = 0, *, seconds: float | None = None
    ) -> Iterator[bytes]:
        """Yield a blob in pieces.

        The digest is not checked here. After a failure, call it again with the offset of the next
        byte.

        Args:
            blob_id: Its id.
            offset: The first byte; the blob's size gives no bytes.
            seconds: Longest time of the transfer; None or 0: the connection's `seconds`.

        Raises:
            NotFoundError: No such complete blob of this token; raised at the first piece, like the
                other errors.
            OutOfRangeError: `offset` is above the blob's size.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed, or `offset` is negative; raised at once.
        """
        request = vault_pb2.GetBlobRequest(id=blob_id, offset=offset)
        stream = self._vault.GetBlob(request, timeout=seconds or self.seconds)
        return (answer.chunk for answer in self._read_stream(stream))

    def delete_blob(self, blob_id: str) -> None:
        """Delete a blob, or an unfinished upload; do nothing if it is missing.

        Retried until the connection's `seconds` are over. Blobs of other tokens count as missing.

        Raises:
            BusyError: Another call writes the blob.
            CannotWriteError: The blob cannot be deleted.
            NobackfillError: Any failure: UnavailableError (no answer), DeadlineError (the time is
                over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        request = vault_pb2.DeleteBlobRequest(id=blob_id)
        with suppress(NotFoundError):
            self._retry(self._vault.DeleteBlob, request)

    def list_blobs(self, page_token: str = "") -> vault_pb2.ListBlobsResponse:
        """Return a page of this token's complete blobs by rising id, and the token of the next
        page; it is empty at the end.

        Retried until the connection's `seconds` are over.

        Args:
            page_token: The token of the page; empty for the first.

        Raises:
            InvalidInputError: The token is not one of an earlier page.
            NobackfillError: Any failure: UnavailableError (no answer), DeadlineError (the time is
                over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        request = vault_pb2.ListBlobsRequest(page_token=page_token)
        return self._retry(self._vault.ListBlobs, request)


class Gateway(SearchCalls, GalleryCalls, ReleaseCalls, UpgradeCalls, VaultCalls):
    """A connection to one gateway, usable from several threads; see `Connection` for its arguments.

        from nobackfill.client import Gateway

        with Gateway("127.0.0.1:50051") as gateway:
            for hit in gateway.search("photos", image="query.png", k=5).hits:
                print(hit.id, hit.distance, hit.score)

    Hits and items are those of nobackfill.wire.answers, as on a device. Galleries, releases,
    upgrades and blobs are messages of the contract (nobackfill.v1).
    """
