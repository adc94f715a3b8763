"""The canary as the pages show it: both pairs side by side, and what speaks against the new one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nobackfill.errors import BusyError
from nobackfill.v1 import release_pb2 as pb
from nobackfill.wire import Gateway


@dataclass(frozen=True)
class Shown:
    """`rows`: what is told, of the old pair, of the new one. `against`: bounds, evidence."""

    release: int
    state: str
    canary: pb.Canary
    message: str
    rows: Sequence[tuple[str, str, str]]
    alike: Sequence[tuple[str, str]]
    against: Sequence[tuple[str, float]]
    stops_at: float


def look(gateway: Gateway) -> Shown | None:
    """The last one since the gateway's start; None without one, and while the gateway has no place
    for who watches: the rest of a page is shown then. Raises NotPermittedError for a role that may
    not watch it."""
    try:
        found = next(gateway.watch_canary())
    except BusyError:
        return None
    return shown(found) if found.release else None


def shown(report: pb.WatchCanaryResponse) -> Shown:
    """A report in the words of a page."""
    old, new = report.old_pair, report.new_pair
    return Shown(
        release=report.release,
        state=pb.CanaryState.Name(report.state).removeprefix("CANARY_STATE_").lower(),
        canary=report.canary,
        message=report.message,
        rows=[(name, figure(old), figure(new)) for name, figure in _FIGURES],
        alike=[
            ("Answered by both", f"{report.compared}"),
            ("Not compared", f"{report.skipped}"),
            ("Overlap of both answers", _optional(report, "overlap", 100, " %")),
            ("Rank correlation", _optional(report, "rank_correlation", 1, "", 3)),
        ],
        against=sorted(report.evidence.items()),
        stops_at=report.stops_at,
    )


def _optional(
    message: pb.WatchCanaryResponse | pb.CanaryPair, field: str, scale: float, unit: str,
    digits: int = 1,
) -> str:  # fmt: skip
    if not message.HasField(field):
        return "not known"
    return f"{scale * getattr(message, field):.{digits}f}{unit}"


_FIGURES: Sequence[tuple[str, Callable[[pb.CanaryPair], str]]] = (
    ("queries", lambda pair: f"{pair.queries}"),
    ("failed", lambda pair: f"{pair.errors}"),
    ("empty answers", lambda pair: f"{pair.empty}"),
    ("half answered within", lambda pair: _optional(pair, "p50", 1000, " ms")),
    ("99 % within", lambda pair: _optional(pair, "p99", 1000, " ms")),
    ("score of the first hit", lambda pair: _optional(pair, "score", 100, " %")),
    ("callers", lambda pair: f"{pair.sessions}"),
    ("of them approved a hit", lambda pair: f"{pair.approved}"),
    ("of them rejected a hit", lambda pair: f"{pair.rejected}"),
)
