"""Implement ReleaseService: releases, their files, activations and canaries."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from nobackfill.errors import InvalidInputError
from nobackfill.release.manifest import Manifest
from nobackfill.server.canary.canaries import Canaries
from nobackfill.server.canary.comparison import (
    EVIDENCE_LIMIT,
    CanaryReport,
    CanaryState,
    PairReport,
)
from nobackfill.server.catalog import Catalog
from nobackfill.server.grpc.context import current_call
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.services.convert import fill_space_end
from nobackfill.server.rollout.activation import Activations, check_canary
from nobackfill.server.rollout.rollback import Rollbacks
from nobackfill.server.rollout.rollout import Phase, RolloutEvent, describe_share
from nobackfill.server.state import Canary, GatewayState, RolloutName, State
from nobackfill.v1 import release_pb2 as pb
from nobackfill.v1.release_pb2_grpc import ReleaseServiceServicer


def parse_canary(message: pb.Canary) -> Canary:
    """Parse the settings of a canary; bounds of 0 mean the defaults.

    Raises:
        InvalidInputError: a share, a time or a bound is out of its range, or the shares do not
            grow.
    """
    bounds = {
        name: value
        for name in ("most_errors", "largest_p99_ratio")
        if (value := getattr(message, name))
    }
    canary = Canary(
        share=message.share,
        steps=tuple(message.steps),
        every_s=message.every.seconds + message.every.nanos / 1e9,
        shadow=message.shadow,
        **bounds,
    )
    check_canary(canary)
    return canary


def canary_message(report: CanaryReport, canary: Canary | None) -> pb.WatchCanaryResponse:
    """Encode the report of a canary.

    Args:
        report: the report.
        canary: its present settings; None without a running canary. Settings of a canary that has
            ended are left out.
    """
    answer = pb.WatchCanaryResponse(
        release=report.release,
        state=f"CANARY_STATE_{report.state.name}",
        message=report.message,
        old_pair=_pair(report.old_pair),
        new_pair=_pair(report.new_pair),
        compared=report.compared_query_count,
        overlap=report.mean_overlap,
        rank_correlation=report.mean_rank_correlation,
        skipped=report.skipped_query_count,
        evidence=report.evidence_by_bound,
        stops_at=EVIDENCE_LIMIT,
    )
    if canary is not None and report.state is CanaryState.RUNNING:
        answer.canary.CopyFrom(
            pb.Canary(
                share=canary.share,
                steps=canary.steps,
                shadow=canary.shadow,
                most_errors=canary.most_errors,
                largest_p99_ratio=canary.largest_p99_ratio,
            )
        )
        answer.canary.every.FromMilliseconds(int(canary.every_s * 1000))
    return answer


def _pair(pair: PairReport) -> pb.CanaryPair:
    return pb.CanaryPair(
        queries=pair.query_count,
        errors=pair.error_count,
        empty=pair.empty_answer_count,
        p50=pair.p50_latency_s,
        p99=pair.p99_latency_s,
        score=pair.mean_score,
        sessions=pair.session_count,
        approved=pair.feedback_counts["approved"],
        rejected=pair.feedback_counts["rejected"],
    )


_FAILURES = {
    pb.SYNC_FAILURE_UNSPECIFIED: "none",
    pb.SYNC_FAILURE_NO_ROUTE: "no route",
    pb.SYNC_FAILURE_REFUSED: "refused",
    pb.SYNC_FAILURE_LEFT_BEHIND: "left behind",
}


_ROLLOUTS: dict[int, RolloutName | None] = {
    pb.ROLLOUT_UNSPECIFIED: None,
    pb.ROLLOUT_DIRECT: "direct",
    pb.ROLLOUT_DUAL: "dual",
    pb.ROLLOUT_CUTOVER: "cutover",
}

# Seconds between two reports of a canary.
_REPORT_SECONDS = 1.0


@dataclass(eq=False)
class ReleaseService(ReleaseServiceServicer):
    """Implement the calls of protos/nobackfill/v1/release.proto."""

    _catalog: Catalog
    _state: GatewayState
    _activations: Activations
    _rollbacks: Rollbacks
    _canaries: Canaries
    _metrics: Metrics
    # Ends the streams of activations when the gateway drains.
    _stopping: threading.Event

    def ListReleases(  # noqa: N802 - the contract's name
        self, request: pb.ListReleasesRequest, context: grpc.ServicerContext
    ) -> pb.ListReleasesResponse:
        """List every usable published release by rising number, withdrawn ones included; empty
        before the first publication.
        """
        return pb.ListReleasesResponse(releases=self._releases())

    def GetRelease(  # noqa: N802
        self, request: pb.GetReleaseRequest, context: grpc.ServicerContext
    ) -> pb.GetReleaseResponse:
        """Return one release, withdrawn or not; one that was published a moment ago is found, too.

        Raises:
            NotFoundError: the release is not published.
            VerificationError: the publication or the release's manifest is not valid.
            UnavailableError: the publication folder cannot be read.
            CannotWriteError: the verified metadata cannot be stored.
            BusyError: another process reads the publication at this moment.
        """
        manifest = self._catalog.find_manifest(request.number)
        return pb.GetReleaseResponse(release=self._release(manifest))

    def WatchReleases(  # type: ignore[override] # noqa: N802 - None: nothing is new
        self, request: pb.WatchReleasesRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchReleasesResponse | None]:
        """Yield all releases at once, and again after each change, until the caller ends the call.

        Releases come by rising number, withdrawn ones included. None means that nothing is new; the
        server then looks again a little later.
        """
        changed, version, last = self._catalog.change_counter, -1, None
        while True:
            if changed.change_count != version:
                version = changed.change_count
                response = pb.WatchReleasesResponse(releases=self._releases())
                if response != last:
                    last = response
                    yield response
            yield None

    def FetchFile(  # noqa: N802
        self, request: pb.FetchFileRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.FetchFileResponse]:
        """Yield a published file in pieces from an offset; the first answer has the file's size.

        At the end of the file there is one answer without bytes.

        Raises:
            InvalidInputError: the path is absolute, or leads out of the folder.
            NotFoundError: the file is not published.
            OSError: reading the file fails.
            OutOfRangeError: the offset is above the file's size.
            VerificationError: the file is unknown, and the publication is not valid.
            UnavailableError: the file is unknown, and the publication folder cannot be read.
            CannotWriteError, BusyError: the file is unknown, and the verified metadata cannot be
                stored, or another process reads the publication.
        """
        file = self._catalog.open_file(request.path, request.offset)
        first = next(file.chunks, b"")
        yield pb.FetchFileResponse(chunk=first, size=file.size)
        for chunk in file.chunks:
            yield pb.FetchFileResponse(chunk=chunk)

    def ActivateRelease(  # noqa: N802
        self, request: pb.ActivateReleaseRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ActivateReleaseResponse]:
        """Start an activation, or change or promote a canary, and yield its events to the end.

        The activation goes on if the caller leaves. For the active release it is repeated, for
        galleries that stayed behind. With a canary's settings while a canary of the release runs,
        only its settings change, and one event is yielded. A failed activation is no error of the
        call: the last event has the phase FAILED. The call is recorded in the audit. The events end
        early when the gateway stops. With `promote`, rollout and settings are ignored.

        Raises:
            InvalidInputError: the rollout, spare_cores, old_space_seconds or the canary is not
                valid.
            NotFoundError: the release is not published.
            VerificationError: the publication or the release's manifest is not valid.
            BusyError: another activation, rollback or retirement is under way.
            PreconditionError: the release is older than the active one, or the canary cannot be
                started, changed or promoted.
            CannotWriteError: the state, or the publication's verified metadata, cannot be written.
            UnavailableError: the database does not answer, or the publication folder cannot be
                read.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        if request.rollout not in _ROLLOUTS or not 0 <= request.spare_cores < 1:
            raise InvalidInputError(
                "expected a rollout that the .proto file defines (direct, dual, cutover or "
                "unspecified), and spare_cores, the share of cores left to searches, from 0 to "
                f"below 1; got rollout {request.rollout} and spare_cores "
                f"{request.spare_cores:g}; correct the request"
            )
        number = request.number
        canary = parse_canary(request.canary) if request.HasField("canary") else None
        if request.promote:
            run = self._activations.promote_canary(number)
        elif canary is not None and self._activations.is_canary_running(number):
            self._activations.change_canary(number, canary)
            sentence = describe_share(canary, number)
            self._audit("canary", sentence)
            yield _response(RolloutEvent(Phase.CANARY, 0, 0, sentence, time.time()))
            return
        else:
            rollout, seconds = _ROLLOUTS[request.rollout], request.old_space_seconds
            run = self._activations.start(number, rollout, request.spare_cores, seconds, canary)
        self._audit("promote" if request.promote else "activate", f"release {number}")
        for event in run.events(self._is_gone):
            yield _response(event)

    def WatchCanary(  # type: ignore[override] # noqa: N802 - None: nothing is new
        self, request: pb.WatchCanaryRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchCanaryResponse | None]:
        """Yield a report of the canary every second, until it has ended.

        The last report of an ended canary is yielded once; without a canary since the start, one
        report has release 0. None means that nothing is new.
        """
        while True:
            answer = canary_message(self._canaries.last_report(), self._canaries.running_settings())
            yield answer
            if answer.state != pb.CANARY_STATE_RUNNING:
                return
            next_report = time.monotonic() + _REPORT_SECONDS
            while time.monotonic() < next_report:
                yield None

    def ReportSync(  # noqa: N802
        self, request: pb.ReportSyncRequest, context: grpc.ServicerContext
    ) -> pb.ReportSyncResponse:
        """Count a device's report of a sync in the metrics; nothing else is stored.

        A sync whose probes did not pass counts as the failure `probes`. Its seconds count only
        without a failure, `neighbours_kept` always.

        Raises:
            InvalidInputError: the release is not published here, the failure is unknown, seconds
                are not from 0 to below 1e9, or neighbours_kept is not from 0 to 1; nothing is
                counted then.
        """
        is_published = request.release in self._catalog.withdrawal_by_release
        neighbours_kept = request.neighbours_kept if request.HasField("neighbours_kept") else 0.0
        is_valid = (
            is_published
            and request.failure in _FAILURES
            and 0 <= request.seconds < 1e9
            and 0 <= neighbours_kept <= 1
        )
        if not is_valid:
            raise InvalidInputError(
                "report: expected a release that is published here, a failure that the .proto file "
                "defines, seconds from 0 to below 1e9, and neighbours_kept from 0 to 1; got "
                f"{'' if is_published else 'the unknown '}release {request.release}, failure "
                f"{request.failure}, {request.seconds:g} s and {neighbours_kept:g}; correct the "
                "report"
            )
        release = str(request.release)
        failure = _FAILURES[request.failure]
        if failure == "none" and not request.probes_passed:
            failure = "probes"
        self._metrics.devices.syncs.labels(release, failure).inc()
        if failure == "none":
            self._metrics.devices.sync_seconds.labels(release).observe(request.seconds)
        if request.HasField("neighbours_kept"):
            self._metrics.devices.neighbours_kept.labels(release).observe(neighbours_kept)
        return pb.ReportSyncResponse()

    def _is_gone(self) -> bool:
        return not current_call().is_active() or self._stopping.is_set()

    def RollbackRelease(  # noqa: N802
        self, request: pb.RollbackReleaseRequest, context: grpc.ServicerContext
    ) -> pb.RollbackReleaseResponse:
        """Roll back to the previous release, or stop a canary; without `confirm`, only report what
        would be lost. Then `to_release` and `canary` are ignored.

        A rollback cancels the activation under way, and is recorded in the audit. Repeated, it
        changes nothing: with `to_release`, or without it for five minutes. After a call without
        `confirm`, a rollback without `to_release` is a new one. The answer lists only the first
        lost items.

        Raises:
            PreconditionError: there is no release to return to, `to_release` is not the one that a
                rollback leads to, or no canary of the release runs.
            BusyError: another rollback, activation or retirement takes too long.
            UnavailableError: the models cannot be loaded, or the database does not answer; nothing
                has changed.
            CannotWriteError: the state cannot be written, or a gallery's file cannot be opened.
            NotFoundError: the release to return to is not published any more.
            VerificationError: a model's file does not match its signed digest, or a gallery or the
                state is damaged.
            ConfigurationError: the release embeds texts, and the extra `text` is not installed; or
                the database refuses a statement.
        """
        to = request.to_release or None
        if not request.confirm:
            result = self._rollbacks.preview()
        elif request.canary:
            result = self._rollbacks.stop_canary(request.canary)
        else:
            result = self._rollbacks.roll_back(to)
        if request.confirm:
            self._audit(
                "roll back", f"to release {result.release}, {result.lost_count} items not found"
            )
        return pb.RollbackReleaseResponse(
            number=result.release,
            lost_items=result.lost_count,
            lost=[
                pb.LostItem(gallery=gallery, id=name) for gallery, name in result.first_lost_items
            ],
            done=request.confirm,
        )

    def RetireRelease(  # noqa: N802
        self, request: pb.RetireReleaseRequest, context: grpc.ServicerContext
    ) -> pb.RetireReleaseResponse:
        """Delete the vectors and models of every release older than the active one, for good;
        record that in the audit.

        A gallery that stayed with an older release keeps its vectors. A second call retires none.

        Raises:
            BusyError: an activation or a rollback is under way.
            PreconditionError: no release was ever activated.
            CannotWriteError: the state cannot be written.
            UnavailableError: the database does not answer.
            NotFoundError: a gallery was deleted meanwhile.
            VerificationError: a gallery is damaged.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        retired = self._rollbacks.retire_old_releases()
        self._audit("retire", f"releases {', '.join(map(str, retired)) or 'none'}")
        return pb.RetireReleaseResponse(retired=retired)

    def _audit(self, what: str, of_what: str) -> None:
        self._state.record_audit(current_call().principal.name, what, of_what)

    def _releases(self) -> list[pb.Release]:
        manifests = self._catalog.manifests
        return [self._release(manifests[number]) for number in sorted(manifests)]

    def _release(self, manifest: Manifest) -> pb.Release:
        withdrawn = self._catalog.withdrawal_by_release.get(manifest.release)
        state, reason = release_state(manifest.release, self._state.current, withdrawn)
        spaces = {m.space: m.release for m in self._catalog.manifests.values()}
        release = pb.Release(
            number=manifest.release,
            space=manifest.space,
            side_space=manifest.side_space or "",
            dim=manifest.embedder.dim,
            side_dim=manifest.side_encoder.dim if manifest.side_encoder else 0,
            metric=manifest.embedder.metric,
            embeds_images=manifest.embedder.file is not None,
            embeds_texts=manifest.text_encoder is not None,
            state=state,
            reason=reason,
            searches_directly=[spaces[s] for s in manifest.searches_directly if s in spaces],
            upgrades_from=[upgrade.from_release for upgrade in manifest.upgrades],
            manifest=manifest.model_dump_json(),
        )
        fill_space_end(manifest.space, self._state.current.ends, release.ends_at)
        return release


def release_state(release: int, state: State, withdrawn: str | None) -> tuple[pb.ReleaseState, str]:
    """Return the state of a release, with the reason if it failed or was withdrawn; the reason is
    empty otherwise.

    An active release stays active when it is withdrawn, with the reason. Any other withdrawn
    release counts as withdrawn, also if it failed or was retired. A release that is not in the
    state counts as published.

    Args:
        release: the release.
        state: the gateway's state.
        withdrawn: why it was withdrawn; None if it was not.
    """
    if release == state.active:
        return pb.RELEASE_STATE_ACTIVE, withdrawn or ""
    if withdrawn is not None:
        return pb.RELEASE_STATE_WITHDRAWN, withdrawn
    if state.activation is not None and state.activation.release == release:
        return pb.RELEASE_STATE_ACTIVATING, ""
    if release in state.failed:
        return pb.RELEASE_STATE_FAILED, state.failed[release]
    if release in state.previous:
        return pb.RELEASE_STATE_PREVIOUS, ""
    if release in state.retired:
        return pb.RELEASE_STATE_RETIRED, ""
    return pb.RELEASE_STATE_PUBLISHED, ""


def _response(event: RolloutEvent) -> pb.ActivateReleaseResponse:
    response = pb.ActivateReleaseResponse(
        phase=f"PHASE_{event.phase.name}",
        done=event.upgraded_item_count,
        total=event.item_count,
        message=event.message,
    )
    response.time.FromNanoseconds(int(event.time * 1e9))
    return response
