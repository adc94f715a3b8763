"""ReleaseService: what is published, and which release answers."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from nobackfill.errors import InvalidInputError, PreconditionError
from nobackfill.v1 import release_pb2 as pb
from nobackfill.v1.release_pb2_grpc import ReleaseServiceStub
from nobackfill.wire.connection import Connection

ROLLOUTS: Mapping[str, pb.Rollout] = {
    pb.Rollout.Name(number).removeprefix("ROLLOUT_").lower(): number
    for number in (
        pb.ROLLOUT_UNSPECIFIED,
        pb.ROLLOUT_DIRECT,
        pb.ROLLOUT_DUAL,
        pb.ROLLOUT_CUTOVER,
    )
}
# A rollback or a retirement waits for what runs.
_CHANGE_SECONDS = 600.0


class Releases(Connection):
    """Releases of the gateway, and files of its publication."""

    @cached_property
    def _releases(self) -> ReleaseServiceStub:
        return ReleaseServiceStub(self._channel)

    def list_releases(self) -> Sequence[pb.Release]:
        """What is published, and what the gateway does with each."""
        request = pb.ListReleasesRequest()
        return self._again(lambda t: self._releases.ListReleases(request, timeout=t)).releases

    def get_release(self, number: int) -> pb.Release:
        """One release with its manifest. Raises NotFoundError."""
        request = pb.GetReleaseRequest(number=number)
        return self._again(lambda t: self._releases.GetRelease(request, timeout=t)).release

    def watch_releases(self) -> Iterator[Sequence[pb.Release]]:
        """The present list at once, then again whenever it changes; without end."""
        request = pb.WatchReleasesRequest()
        answers = self._watched(lambda: self._releases.WatchReleases(request))
        return (answer.releases for answer in answers)

    def fetch_file(
        self, path: str, offset: int = 0, *, seconds: float | None = None
    ) -> Iterator[bytes]:
        """A file of the publication from an offset on, in pieces, within `seconds`.

        Raises NotFoundError, OutOfRangeError, DeadlineError.
        """
        request = pb.FetchFileRequest(path=path, offset=offset)
        stream = self._releases.FetchFile(request, timeout=seconds or self.seconds)
        return (answer.chunk for answer in self._followed(stream))

    def activate(
        self,
        number: int,
        *,
        rollout: str = "unspecified",
        spare_cores: float = 0.0,
        old_space_seconds: int = 0,
        canary: pb.Canary | None = None,
    ) -> Iterator[pb.ActivateReleaseResponse]:
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
        request = pb.ActivateReleaseRequest(
            number=number,
            rollout=ROLLOUTS[rollout],
            spare_cores=spare_cores,
            old_space_seconds=old_space_seconds,
            canary=canary,
        )
        return self._reported(number, self._releases.ActivateRelease(request))

    def promote(self, number: int) -> Iterator[pb.ActivateReleaseResponse]:
        """End the canary of a release well: all queries move to it. Raises PreconditionError where
        there is none, and after the last report of one that failed."""
        request = pb.ActivateReleaseRequest(number=number, promote=True)
        return self._reported(number, self._releases.ActivateRelease(request))

    def watch_canary(self) -> Iterator[pb.WatchCanaryResponse]:
        """How the canary goes, a message a second to its end."""
        request = pb.WatchCanaryRequest()
        return self._watched(lambda: self._releases.WatchCanary(request))

    def _reported(
        self, number: int, stream: Iterator[pb.ActivateReleaseResponse]
    ) -> Iterator[pb.ActivateReleaseResponse]:
        for report in self._followed(stream):
            yield report
            if report.phase == pb.PHASE_FAILED:
                raise PreconditionError(f"release {number} is not activated: {report.message}")

    def report_sync(self, report: pb.ReportSyncRequest) -> None:
        """How a device's last sync went. Raises InvalidInputError."""
        self._again(lambda t: self._releases.ReportSync(report, timeout=t))

    def rollback(self, *, confirm: bool = False, to: int = 0) -> pb.RollbackReleaseResponse:
        """Return to the release before, or only count and list what would not be found there.

        With `to`, the release that the unconfirmed answer named, a confirmed call goes back no
        further when it is repeated. Raises PreconditionError, BusyError.
        """
        request = pb.RollbackReleaseRequest(confirm=confirm, to_release=to)
        seconds = _CHANGE_SECONDS if confirm else None
        return self._once(
            lambda t: self._releases.RollbackRelease(request, timeout=t), seconds=seconds
        )

    def retire(self) -> Sequence[int]:
        """Drop spaces and models of every older release, for good; the releases retired."""
        request = pb.RetireReleaseRequest()
        return self._once(
            lambda t: self._releases.RetireRelease(request, timeout=t), seconds=_CHANGE_SECONDS
        ).retired
