"""One canary as far as it got: what both pairs answered, and whether a bound is crossed."""

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from nobackfill.server.canary.evidence import CanaryEvidence
from nobackfill.server.canary.sessions import KINDS, CanarySessions, Kind
from nobackfill.server.galleries.ranking import SearchResult
from nobackfill.server.state import Canary

# How much two answers to one query have in common, and what one pair has answered.

# Durations that quantiles are taken of.
_LATEST = 1000


def overlap(one: Sequence[str], other: Sequence[str]) -> float:
    """Share of the longer answer's items that both have, 0 to 1; of two empty ones: 1."""
    longest = max(len(one), len(other))
    return len(set(one) & set(other)) / longest if longest else 1.0


def rank_correlation(one: Sequence[str], other: Sequence[str]) -> float | None:
    """Spearman's, of the ranks of the items that both answers have, -1 to 1; None below two."""
    ranks = {item: rank for rank, item in enumerate(other)}
    common = [ranks[item] for item in one if item in ranks]
    if len(common) < 2:
        return None
    # Ranks among the common items: no two are equal.
    order = np.argsort(np.argsort(common))
    return float(np.corrcoef(np.arange(len(common)), order)[0, 1])


@dataclass
class PairFigures:
    """What one pair answered. `seconds`: of its last answers while their callers waited."""

    queries: int = 0
    errors: int = 0
    empty: int = 0
    scores: float = 0.0
    scored: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))

    def count(self, found: SearchResult, seconds: float | None) -> None:
        """`seconds`: None where nobody waited for it."""
        self.queries += 1
        self.empty += not found.hits
        if seconds is not None:
            self.seconds.append(seconds)
        score = found.hits[0].score if found.hits else None
        if score is not None:
            self.scores += score
            self.scored += 1

    @property
    def score(self) -> float | None:
        """Mean calibrated score of the first hit."""
        return self.scores / self.scored if self.scored else None

    def quantile(self, share: float) -> float | None:
        """Seconds that `share` of the last answers took at most; None without any."""
        return float(np.quantile(self.seconds, share)) if self.seconds else None


@dataclass
class Likeness:
    """Of the answers to queries that both pairs have answered."""

    compared: int = 0
    overlaps: float = 0.0
    correlations: float = 0.0
    correlated: int = 0

    def count(self, old: SearchResult, new: SearchResult) -> None:
        one, other = ([hit.item.id for hit in found.hits] for found in (old, new))
        self.compared += 1
        self.overlaps += overlap(one, other)
        correlation = rank_correlation(one, other)
        if correlation is not None:
            self.correlations += correlation
            self.correlated += 1

    @property
    def overlap(self) -> float | None:
        return self.overlaps / self.compared if self.compared else None

    @property
    def rank_correlation(self) -> float | None:
        return self.correlations / self.correlated if self.correlated else None


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
# A caller's key, and a token, count for latency once in so many seconds.
_OF_KEY_S, _OF_TOKEN_S = 10.0, 1.0
_MOST_TURNS = 100_000
# Until it is known, a caller that waits less for the new pair says nothing by giving it up.
_PATIENT_S = 1.0


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
class CanaryReport:
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


@dataclass(frozen=True)
class Caller:
    """`key`: a digest of what says which pair answers; `token`: its name, empty without tokens."""

    key: int
    token: str = ""


class _CanaryTurns:
    """When each of many was counted last."""

    def __init__(self) -> None:
        self._last: OrderedDict[object, float] = OrderedDict()

    def due(self, one: object, every_s: float) -> bool:
        """Whether it is so long ago; then it is now."""
        now = time.monotonic()
        if now - self._last.get(one, -math.inf) < every_s:
            return False
        self._last[one] = now
        self._last.move_to_end(one)
        if len(self._last) > _MOST_TURNS:
            self._last.popitem(last=False)
        return True


class CanaryComparison:
    """Of one release with the one that answers; usable from several threads."""

    def __init__(self, release: int, setting: Callable[[], Canary | None]) -> None:
        """`setting`: the newest; None once the canary has ended."""
        self.release = release
        self._setting = setting
        self._lock = threading.Lock()
        self._counted = _Counted()
        self._sessions = CanarySessions()
        self._errors, self._latency = CanaryEvidence(), CanaryEvidence()
        # When a query of a caller's key, and of a token, counted for latency.
        self._keys, self._tokens = _CanaryTurns(), _CanaryTurns()
        # The old pair's 99th percentile in seconds.
        self._p99: float | None = None
        # What says who is answered by which pair: share and shadow.
        self._chosen_by: tuple[float, bool] | None = None
        self._ended: tuple[CanaryState, str] | None = None

    def answered(
        self, canary: Canary, found: SearchResult, seconds: float, caller: "Caller", *, new: bool
    ) -> bool:
        """Count what a caller got, after so many seconds. True: it may be too slow, which
        `repeated` counts once the same query was answered by both pairs."""
        with self._lock:
            self._figures(new).count(found, seconds)
            self._remember(canary, found, caller.key, new=new)
            if not new:
                self._look_up()
                return False
            self._errors.see(False, canary.most_errors)
            if self._p99 is None or not self._in_turn(caller):
                return False
            if seconds > canary.largest_p99_ratio * self._p99:
                return True
            self._latency.see(False, _SLOW)
            return False

    def repeated(self, canary: Canary, old: float, new: float) -> None:
        """Count a query that was too slow, and took so many seconds when both pairs answered it
        again: one that takes as long in the old pair says nothing about the new one."""
        with self._lock:
            if new > canary.largest_p99_ratio * old:
                self._latency.see(True, _SLOW)

    def failed(self, canary: Canary) -> None:
        """Count a query that the new pair failed and the old one answered."""
        with self._lock:
            self._counted.new.queries += 1
            self._counted.new.errors += 1
            self._errors.see(True, canary.most_errors)

    def share_of_time(self, left: float) -> float:
        """Seconds, of those that a query's caller has left, in which the new pair is to answer: the
        rest, a quarter to a half, is kept for the old one, which answers if it does not."""
        p99 = self._p99
        return left / 2 if p99 is None else max(left / 2, min(left * 3 / 4, left - 2 * p99))

    def late(
        self, canary: Canary, given: float, took: float, caller: "Caller", *, single: bool
    ) -> bool:
        """Count what the new pair did not answer in the seconds it was `given`, and the old one in
        those it `took`; `single`: one query, not several in a call. True as in `answered`.

        Only where the bounds allow no query to take so long: else callers that hardly wait would
        stop any release.
        """
        with self._lock:
            of_latency = single and self._p99 is not None
            enough = max(_PATIENT_S, canary.largest_p99_ratio * took)
            if single and self._p99 is not None:
                enough = canary.largest_p99_ratio * self._p99
            if given < enough:
                return False
            self._counted.new.queries += 1
            self._counted.new.errors += 1
            if single:
                # It would have taken longer.
                self._counted.new.seconds.append(given)
            if of_latency:
                return self._in_turn(caller)
            self._errors.see(True, canary.most_errors)
            return False

    def batched(self, canary: Canary) -> None:
        """Count several queries of one call that the new pair has answered, as one, which is what
        they are where it fails them."""
        with self._lock:
            self._counted.new.queries += 1
            self._errors.see(False, canary.most_errors)

    def answered_alone(self) -> None:
        """Count a query that only the new pair reads: there is nothing to compare it with."""
        with self._lock:
            self._counted.new.queries += 1

    def mirrored(
        self, canary: Canary, old: SearchResult, new: SearchResult, *, by_new: bool
    ) -> None:
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

    def report(self) -> CanaryReport:
        with self._lock:
            counted, sessions = self._counted, self._sessions
            state, message = self._ended or (CanaryState.RUNNING, "")
            return CanaryReport(
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

    def _remember(self, canary: Canary, found: SearchResult, key: int, *, new: bool) -> None:
        now = self._setting()
        if now is None:
            return
        chosen_by = now.share, now.shadow
        if chosen_by != self._chosen_by:
            self._chosen_by = chosen_by
            self._sessions.begin_anew()
        # What an older setting has chosen, and ends only now, may be of the other pair today.
        if (canary.share, canary.shadow) == chosen_by:
            items = [hit.item.id for hit in found.hits]
            self._sessions.answered(key, found.request_id, items, new=new)

    def _figures(self, new: bool) -> PairFigures:
        return self._counted.new if new else self._counted.old

    def _in_turn(self, caller: "Caller") -> bool:
        """Whether a query counts for latency: one of a caller's key in a while, and fewer of a
        token than it could have keys."""
        turn = self._keys.due(caller.key, _OF_KEY_S)
        return turn and (not caller.token or self._tokens.due(caller.token, _OF_TOKEN_S))

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


NOTHING = replace(CanaryComparison(0, lambda: None).report(), state=CanaryState.ENDED)


def _sentence(bound: str, report: CanaryReport, canary: Canary) -> str:
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
