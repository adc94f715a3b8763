"""Between the contract's messages of a canary and what the gateway works on."""

from nobackfill.server.canary.comparison import STOPS_AT, CanaryState, PairReport, Report
from nobackfill.server.rollout.promotion import check
from nobackfill.server.state import Canary
from nobackfill.v1 import release_pb2 as pb

_STATES = {
    CanaryState.RUNNING: pb.CANARY_STATE_RUNNING,
    CanaryState.PROMOTED: pb.CANARY_STATE_PROMOTED,
    CanaryState.STOPPED: pb.CANARY_STATE_STOPPED,
    CanaryState.ENDED: pb.CANARY_STATE_ENDED,
}


def from_canary(asked: pb.Canary) -> Canary:
    """Raises InvalidInputError."""
    given = {
        name: value
        for name in ("most_errors", "largest_p99_ratio")
        if (value := getattr(asked, name))
    }
    canary = Canary(
        share=asked.share,
        steps=tuple(asked.steps),
        every_s=asked.every.seconds + asked.every.nanos / 1e9,
        shadow=asked.shadow,
        **given,
    )
    check(canary)
    return canary


def to_canary(report: Report, canary: Canary | None) -> pb.WatchCanaryResponse:
    """`canary`: as it is set now."""
    answer = pb.WatchCanaryResponse(
        release=report.release,
        state=_STATES[report.state],
        message=report.message,
        old_pair=_pair(report.old),
        new_pair=_pair(report.new),
        compared=report.compared,
        overlap=report.overlap,
        rank_correlation=report.rank_correlation,
        skipped=report.skipped,
        evidence=report.evidence,
        stops_at=STOPS_AT,
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
        queries=pair.queries,
        errors=pair.errors,
        empty=pair.empty,
        p50=pair.p50,
        p99=pair.p99,
        score=pair.score,
        sessions=pair.sessions,
        approved=pair.said["approved"],
        rejected=pair.said["rejected"],
    )
