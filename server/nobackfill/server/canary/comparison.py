"""One canary as far as it got: what both pairs answered, and whether a bound is crossed."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from nobackfill.server.canary.answers import Likeness, PairFigures
from nobackfill.server.canary.evidence import Evidence
from nobackfill.server.canary.sessions import KINDS, Kind, Sessions
from nobackfill.server.galleries.asked import Found
from nobackfill.server.state import Canary

# The probability that a release which keeps all bounds is stopped, however often that is asked: a
# quarter for each of the four.
ALPHA = 0.05
BOUNDS = ("errors", "latency", "approvals", "rejections")
STOPS_AT = len(BOUNDS) / ALPHA
_EVIDENCE_OF: Mapping[Kind, str] = {"approved": "approvals", "rejected": "rejections"}
# The share of the old pair's queries that take longer than its 99th percentile.
_SLOW = 0.01
# The percentile is known once so many queries are, and looked up anew after each so many.
_KNOWN, _ANEW = 200, 50


class CanaryState(StrEnum):
    RUNNING = "running"
    PROMOTED = "promoted"
    STOPPED = "stopped"
    ENDED = "ended"


@dataclass(frozen=True)
class PairReport:
    """`p50`, `p99` in seconds; `sessions`, and how many of them sent feedback of each kind."""

    queries: int
    errors: int
    empty: int
    p50: float | None
    p99: float | None
    score: float | None
    sessions: int
    said: Mapping[Kind, int]


@dataclass(frozen=True)
class Report:
    """`skipped`: queries that were not compared as too many waited. `evidence`: by bound; it stops
    where one reaches STOPS_AT."""

    release: int
    state: CanaryState
    message: str
    old: PairReport
    new: PairReport
    compared: int
    overlap: float | None
    rank_correlation: float | None
    skipped: int
    evidence: Mapping[str, float]


@dataclass
class _Counted:
    old: PairFigures = field(default_factory=PairFigures)
    new: PairFigures = field(default_factory=PairFigures)
    likeness: Likeness = field(default_factory=Likeness)
    skipped: int = 0


class Comparison:
    """Of one release with the one that answers; usable from several threads."""

    def __init__(self, release: int) -> None:
        self.release = release
        self._lock = threading.Lock()
        self._counted = _Counted()
        self._sessions = Sessions()
        self._errors, self._latency = Evidence(), Evidence()
        # The old pair's 99th percentile in seconds.
        self._p99: float | None = None
        self._share: float | None = None
        self._ended: tuple[CanaryState, str] | None = None

    def answered(
        self, canary: Canary, found: Found, seconds: float, key: int, *, new: bool
    ) -> None:
        """Count what a caller got, after so many seconds."""
        with self._lock:
            if canary.share != self._share:
                self._share = canary.share
                self._sessions.begin_anew()
            self._figures(new).count(found, seconds)
            items = [hit.item.id for hit in found.hits]
            self._sessions.answered(key, found.request_id, items, new=new)
            if not new:
                self._look_up()
                return
            self._errors.see(False, canary.most_errors)
            if self._p99 is not None:
                self._latency.see(seconds > canary.largest_p99_ratio * self._p99, _SLOW)

    def failed(self, canary: Canary) -> None:
        """Count a query that the new pair failed and the old one answered."""
        with self._lock:
            self._counted.new.queries += 1
            self._counted.new.errors += 1
            self._errors.see(True, canary.most_errors)

    def mirrored(self, canary: Canary, old: Found, new: Found, *, by_new: bool) -> None:
        """Count the answer that nobody waited for: the new pair's if `by_new`."""
        with self._lock:
            self._counted.likeness.count(old, new)
            if by_new:
                self._counted.new.count(new, None)
                self._errors.see(False, canary.most_errors)

    def skipped(self) -> None:
        """Count a query that was not compared."""
        with self._lock:
            self._counted.skipped += 1

    def feedback(self, request_id: str, item: str, kind: Kind) -> bool:
        """See Sessions.feedback."""
        with self._lock:
            return self._sessions.feedback(request_id, item, kind)

    def end(self, state: CanaryState, message: str) -> None:
        """It goes on no more; what it ended as first stands."""
        with self._lock:
            self._ended = self._ended or (state, message)

    def verdict(self, canary: Canary) -> str | None:
        """Why it is to be stopped; None while every bound holds, as far as can be told."""
        report = self.report()
        crossed = [bound for bound in BOUNDS if report.evidence[bound] >= STOPS_AT]
        return _sentence(crossed[0], report, canary) if crossed else None

    def report(self) -> Report:
        with self._lock:
            counted, sessions = self._counted, self._sessions
            state, message = self._ended or (CanaryState.RUNNING, "")
            return Report(
                release=self.release,
                state=state,
                message=message,
                old=self._pair(new=False),
                new=self._pair(new=True),
                compared=counted.likeness.compared,
                overlap=counted.likeness.overlap,
                rank_correlation=counted.likeness.rank_correlation,
                skipped=counted.skipped,
                evidence={
                    "errors": self._errors.value,
                    "latency": self._latency.value,
                    **{_EVIDENCE_OF[kind]: sessions.evidence[kind].value for kind in KINDS},
                },
            )

    def _figures(self, new: bool) -> PairFigures:
        return self._counted.new if new else self._counted.old

    def _look_up(self) -> None:
        queries = self._counted.old.queries
        if queries >= _KNOWN and queries % _ANEW == 0:
            self._p99 = self._counted.old.quantile(0.99)

    def _pair(self, *, new: bool) -> PairReport:
        figures = self._figures(new)
        return PairReport(
            queries=figures.queries,
            errors=figures.errors,
            empty=figures.empty,
            p50=figures.quantile(0.5),
            p99=figures.quantile(0.99),
            score=figures.score,
            sessions=self._sessions.counts[new],
            said={kind: self._sessions.said[kind][new] for kind in KINDS},
        )


NOTHING = replace(Comparison(0).report(), state=CanaryState.ENDED)


def _sentence(bound: str, report: Report, canary: Canary) -> str:
    old, new = report.old, report.new
    if bound == "errors":
        found = (
            f"errors: {new.errors} of {new.queries} queries failed in the new pair where the old "
            f"one answers; the bound is {canary.most_errors:.1%}"
        )
    elif bound == "latency":
        found = (
            f"latency: the new pair's p99 is {1000 * (new.p99 or 0):.1f} ms, the old one's "
            f"{1000 * (old.p99 or 0):.1f} ms; the bound is {canary.largest_p99_ratio:g} times that"
        )
    else:
        kind: Kind = "approved" if bound == "approvals" else "rejected"
        found = (
            f"feedback: {new.said[kind]} of {new.sessions} sessions {kind} answers of the new "
            f"pair, {old.said[kind]} of {old.sessions} of the old one"
        )
    return f"{found} (evidence {report.evidence[bound]:.0f}, stopped at {STOPS_AT:.0f})"
