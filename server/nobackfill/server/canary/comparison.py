"""Compare the two pairs of a canary: their answers, their errors, and whether a bound is crossed.

A pair is a query model with the gallery that it searches: the active release's, and the canary's.
"""

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from nobackfill.server.canary.evidence import CanaryEvidence
from nobackfill.server.canary.sessions import FEEDBACK_KINDS, CanarySessions, FeedbackKind
from nobackfill.server.galleries.plan import SearchResult
from nobackfill.server.state import Canary

# Number of latest durations for the quantiles.
_DURATIONS = 1000


def overlap(one: Sequence[str], other: Sequence[str]) -> float:
    """Return the share of the longer answer's items that both answers have.

    A repeated id counts once among the common ones.

    Args:
        one: item ids of an answer.
        other: item ids of the other answer.

    Returns:
        0 to 1; 1 for two empty answers.
    """
    longest = max(len(one), len(other))
    return len(set(one) & set(other)) / longest if longest else 1.0


def rank_correlation(one: Sequence[str], other: Sequence[str]) -> float | None:
    """Return Spearman's rank correlation of the items that both answers have.

    Args:
        one: item ids of an answer, best first, without repeats.
        other: item ids of the other answer, best first, without repeats.

    Returns:
        -1 to 1; None if fewer than two items are common.
    """
    ranks = {item: rank for rank, item in enumerate(other)}
    common = [ranks[item] for item in one if item in ranks]
    if len(common) < 2:
        return None
    # Ranks among the common items: no two are equal.
    order = np.argsort(np.argsort(common))
    return float(np.corrcoef(np.arange(len(common)), order)[0, 1])


@dataclass
class AnsweredFigures:
    """Count the answers of one pair of query model and gallery.

    Attributes:
        query_count: queries that it answered, or failed.
        error_count: queries that it failed.
        empty_answer_count: answers without a hit.
        score_sum: sum of the calibrated scores of first hits.
        scored_count: number of answers whose first hit had a score.
        recent_latencies: the latest durations that callers waited.
    """

    query_count: int = 0
    error_count: int = 0
    empty_answer_count: int = 0
    score_sum: float = 0.0
    scored_count: int = 0
    recent_latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_DURATIONS))

    def count_answer(self, answer: SearchResult, seconds: float | None) -> None:
        """Count an answer.

        The latest 1000 durations are kept. A first hit without a score counts for no mean. No lock
        is taken: the caller holds one.

        Args:
            answer: the answer.
            seconds: its duration; None if no caller waited for it.
        """
        self.query_count += 1
        self.empty_answer_count += not answer.hits
        if seconds is not None:
            self.recent_latencies.append(seconds)
        score = answer.hits[0].score if answer.hits else None
        if score is not None:
            self.score_sum += score
            self.scored_count += 1

    @property
    def mean_score(self) -> float | None:
        """Return the mean score of first hits, 0 to 1; None if no hit had a score."""
        return self.score_sum / self.scored_count if self.scored_count else None

    def duration_quantile(self, share: float) -> float | None:
        """Return a quantile of the latest durations in seconds; None without any.

        The latest 1000 are kept; values between two of them are interpolated.

        Args:
            share: the quantile, 0 to 1.
        """
        return float(np.quantile(self.recent_latencies, share)) if self.recent_latencies else None


@dataclass
class AnswerSimilarity:
    """Compare the answers to queries that both pairs have answered.

    Attributes:
        query_count: number of these queries.
        overlap_sum: sum of their overlaps.
        correlation_sum: sum of their rank correlations.
        correlation_count: number of queries whose rank correlation is defined.
    """

    query_count: int = 0
    overlap_sum: float = 0.0
    correlation_sum: float = 0.0
    correlation_count: int = 0

    def count_pair(self, old: SearchResult, new: SearchResult) -> None:
        """Count a query that both pairs have answered.

        Two empty answers have overlap 1 and no rank correlation. No lock is taken: the caller holds
        one.

        Args:
            old: the old pair's answer.
            new: the new pair's answer.
        """
        one, other = ([hit.item.id for hit in answer.hits] for answer in (old, new))
        self.query_count += 1
        self.overlap_sum += overlap(one, other)
        correlation = rank_correlation(one, other)
        if correlation is not None:
            self.correlation_sum += correlation
            self.correlation_count += 1

    @property
    def mean_overlap(self) -> float | None:
        """Return the mean overlap, 0 to 1; None without a query."""
        return self.overlap_sum / self.query_count if self.query_count else None

    @property
    def mean_rank_correlation(self) -> float | None:
        """Return the mean rank correlation, -1 to 1; None if it is defined for no query."""
        return self.correlation_sum / self.correlation_count if self.correlation_count else None


# Probability of stopping a release that keeps every bound, however often it is checked; each of the
# four bounds gets a quarter.
ALPHA = 0.05
BOUNDS = ("errors", "latency", "approvals", "rejections")
EVIDENCE_LIMIT = len(BOUNDS) / ALPHA
_EVIDENCE_OF: Mapping[FeedbackKind, str] = {"approved": "approvals", "rejected": "rejections"}
# Share of the old pair's queries that take longer than its 99th percentile.
_SLOW_SHARE = 0.01
# The 99th percentile is computed after so many queries, and again after each so many.
_MIN_QUERIES, _QUERIES_PER_UPDATE = 200, 50
# A key, and a token, count for latency once in so many seconds.
_KEY_SECONDS, _TOKEN_SECONDS = 10.0, 1.0
_MAX_TURNS = 100_000
# Before the percentile is known, a timeout counts only if the new pair had at least so many
# seconds.
_MIN_WAIT_SECONDS = 1.0


class CanaryState(StrEnum):
    """Name the state of a canary: running, or how it ended."""

    RUNNING = "running"
    PROMOTED = "promoted"
    STOPPED = "stopped"
    ENDED = "ended"


@dataclass(frozen=True)
class PairReport:
    """Report one pair's figures.

    Attributes:
        query_count: queries answered, or failed.
        error_count: queries that it failed.
        empty_answer_count: answers without a hit.
        p50_latency_s: median duration in seconds; None without any.
        p99_latency_s: 99th percentile of durations in seconds; None without any.
        mean_score: mean calibrated score of first hits; None without one.
        session_count: callers' keys that it answered.
        feedback_counts: number of sessions that sent feedback, by kind.
    """

    query_count: int
    error_count: int
    empty_answer_count: int
    p50_latency_s: float | None
    p99_latency_s: float | None
    mean_score: float | None
    session_count: int
    feedback_counts: Mapping[FeedbackKind, int]


@dataclass(frozen=True)
class CanaryReport:
    """Report a canary.

    Attributes:
        release: the release of the canary; 0 if there was none.
        state: running, or how it ended.
        message: why it ended; may be empty.
        old_pair: figures of the active release's pair.
        new_pair: figures of the canary's pair.
        compared_query_count: queries that both pairs have answered.
        mean_overlap: mean share of common items, 0 to 1; None without a query.
        mean_rank_correlation: mean rank correlation, -1 to 1; None without one.
        skipped_query_count: queries that were not compared because too many waited.
        evidence_by_bound: evidence by bound; the canary stops when one reaches EVIDENCE_LIMIT.
    """

    release: int
    state: CanaryState
    message: str
    old_pair: PairReport
    new_pair: PairReport
    compared_query_count: int
    mean_overlap: float | None
    mean_rank_correlation: float | None
    skipped_query_count: int
    evidence_by_bound: Mapping[str, float]


@dataclass(frozen=True)
class Caller:
    """Identify a caller.

    Attributes:
        canary_key: digest that decides which pair answers.
        token_name: name of the token; empty if the gateway has no tokens.
    """

    canary_key: int
    token_name: str = ""


class _CanaryTurns:
    """Remember when each of many keys was counted last."""

    def __init__(self) -> None:
        self._last: OrderedDict[object, float] = OrderedDict()

    def take(self, key: object, every_s: float) -> bool:
        """Count a key now, unless it was counted less than `every_s` seconds ago; tell whether it
        was.
        """
        now = time.monotonic()
        if now - self._last.get(key, -math.inf) < every_s:
            return False
        self._last[key] = now
        self._last.move_to_end(key)
        if len(self._last) > _MAX_TURNS:
            self._last.popitem(last=False)
        return True


class CanaryComparison:
    """Compare a canary's release with the active one. Thread-safe."""

    def __init__(self, release: int, canary_settings: Callable[[], Canary | None]) -> None:
        """Start a comparison.

        Args:
            release: the release of the canary; 0 for none.
            canary_settings: returns the newest settings; None once the canary has ended.
        """
        self.release = release
        self._setting = canary_settings
        self._lock = threading.Lock()
        self._old, self._new = AnsweredFigures(), AnsweredFigures()
        self._similarity, self._skip_count = AnswerSimilarity(), 0
        self._sessions = CanarySessions()
        self._errors, self._latency = CanaryEvidence(), CanaryEvidence()
        # When a query of each key, and of each token, last counted for latency.
        self._keys, self._tokens = _CanaryTurns(), _CanaryTurns()
        # The old pair's 99th percentile in seconds.
        self._p99: float | None = None
        # Share and shadow, which assign callers to pairs.
        self._assignment: tuple[float, bool] | None = None
        self._ended: tuple[CanaryState, str] | None = None

    def count_answer(
        self,
        canary: Canary,
        answer: SearchResult,
        seconds: float,
        caller: "Caller",
        *,
        is_new_pair: bool,
    ) -> bool:
        """Count an answer that a caller got.

        An answer of the new pair is also evidence for it against the bound on errors. Latency
        counts once the old pair has answered 200 queries, and for each key once in 10 s. A change
        of share or shadow restarts the sessions, but not the evidence. An answer that older
        settings chose, or that comes after the canary has ended, is counted without a session.

        Args:
            canary: the settings that chose the pair.
            answer: the answer.
            seconds: its duration as the caller saw it.
            caller: the caller.
            is_new_pair: True if the new pair answered.

        Returns:
            True if the new pair may have been too slow. Then the query is to be run on both pairs,
            and their times given to `count_rerun`.
        """
        with self._lock:
            self._pair_figures(is_new_pair).count_answer(answer, seconds)
            self._record_session(canary, answer, caller.canary_key, new=is_new_pair)
            if not is_new_pair:
                self._update_p99()
                return False
            self._errors.add_outcome(False, canary.most_errors)
            if self._p99 is None or not self._counts_for_latency(caller):
                return False
            if seconds > canary.largest_p99_ratio * self._p99:
                return True
            self._latency.add_outcome(False, _SLOW_SHARE)
            return False

    def count_rerun(self, canary: Canary, old_seconds: float, new_seconds: float) -> None:
        """Count a slow query that was run again on both pairs.

        A query that is as slow in the old pair is no evidence against the new one.

        Nothing is counted in the new pair's favour. It is slow if it takes more than
        `largest_p99_ratio` times the old pair's time.

        Args:
            canary: the settings.
            old_seconds: seconds that the old pair took.
            new_seconds: seconds that the new pair took.
        """
        with self._lock:
            if new_seconds > canary.largest_p99_ratio * old_seconds:
                self._latency.add_outcome(True, _SLOW_SHARE)

    def count_failure(self, canary: Canary) -> None:
        """Count a query that failed in the new pair and was answered by the old one, as an error.

        It is evidence against the new pair.

        Args:
            canary: the settings, with the bound on errors.
        """
        with self._lock:
            self._new.query_count += 1
            self._new.error_count += 1
            self._errors.add_outcome(True, canary.most_errors)

    def time_allowance(self, remaining: float) -> float:
        """Return how long the new pair may take for a query.

        The rest, a quarter to a half, is left for the old pair, which answers if the new one does
        not.

        Before the old pair's 99th percentile is known, it is a half.

        Args:
            remaining: seconds until the caller's deadline; infinity without one gives infinity.

        Returns:
            Seconds for the new pair.
        """
        half, p99 = remaining / 2, self._p99
        return half if p99 is None else max(half, min(remaining * 3 / 4, remaining - 2 * p99))

    def count_timeout(
        self,
        canary: Canary,
        allowed_seconds: float,
        elapsed_seconds: float,
        caller: "Caller",
        *,
        is_single_query: bool,
    ) -> bool:
        """Count a query that the new pair did not answer in its time, and the old one then
        answered.

        It counts only if the bounds allow no query to take so long. Otherwise callers with short
        deadlines would stop any release.

        A timeout that counts is an error in the figures. It is evidence for latency after the
        repeat, if the percentile is known; otherwise it is evidence for errors at once.

        Args:
            canary: the settings.
            allowed_seconds: seconds that the new pair had.
            elapsed_seconds: seconds that the old pair took.
            caller: the caller.
            is_single_query: True for a call of one query.

        Returns:
            True if the query is to be run again on both pairs, as in `count_answer`.
        """
        with self._lock:
            of_latency = is_single_query and self._p99 is not None
            enough = max(_MIN_WAIT_SECONDS, canary.largest_p99_ratio * elapsed_seconds)
            if is_single_query and self._p99 is not None:
                enough = canary.largest_p99_ratio * self._p99
            if allowed_seconds < enough:
                return False
            self._new.query_count += 1
            self._new.error_count += 1
            if is_single_query:
                # A lower limit: the query would have taken longer.
                self._new.recent_latencies.append(allowed_seconds)
            if of_latency:
                return self._counts_for_latency(caller)
            self._errors.add_outcome(True, canary.most_errors)
            return False

    def count_batch(self, canary: Canary) -> None:
        """Count a call of several queries that the new pair answered, as one query.

        It is evidence for the new pair against the bound on errors. It has no duration, score or
        session.

        Args:
            canary: the settings.
        """
        with self._lock:
            self._new.query_count += 1
            self._errors.add_outcome(False, canary.most_errors)

    def count_unpaired(self) -> None:
        """Count a query that only the new pair can read: there is nothing to compare it with.

        It is no evidence.
        """
        with self._lock:
            self._new.query_count += 1

    def count_mirrored(
        self, canary: Canary, old: SearchResult, new: SearchResult, *, is_new_mirrored: bool
    ) -> None:
        """Count a query that both pairs answered.

        A mirrored answer of the new pair is evidence for it against the bound on errors; it has no
        duration. The old answer is only compared here; `count_answer` counts it.

        Args:
            canary: the settings.
            old: the old pair's answer.
            new: the new pair's answer.
            is_new_mirrored: True if the caller got the old pair's answer, and the new pair's was
                computed for the comparison only. Then the new answer is counted, too.
        """
        with self._lock:
            self._similarity.count_pair(old, new)
            if is_new_mirrored:
                self._new.count_answer(new, None)
                self._errors.add_outcome(False, canary.most_errors)

    def count_skipped(self) -> None:
        """Count a query that was not compared, because too many waited."""
        with self._lock:
            self._skip_count += 1

    def record_feedback(self, request_id: str, item_id: str, kind: FeedbackKind) -> bool:
        """Record feedback about a hit.

        The first feedback of each kind in a session is evidence. It is still accepted after `end`.

        Args:
            request_id: id of the answer.
            item_id: id of the hit.
            kind: approved or rejected.

        Returns:
            False if the answer is unknown, or no longer remembered, or has no such hit. True
            otherwise, also if the session has sent feedback of this kind before.
        """
        with self._lock:
            return self._sessions.record_feedback(request_id, item_id, kind)

    def end(self, state: CanaryState, message: str) -> None:
        """End the comparison; a second call changes nothing.

        Counts go on for queries under way.

        Args:
            state: how the canary ended.
            message: why, for operators; may be empty.
        """
        with self._lock:
            self._ended = self._ended or (state, message)

    def stop_reason(self, canary: Canary) -> str | None:
        """Return why the canary must stop, as a sentence for operators; None while no bound is
        crossed.

        A bound is crossed once its evidence reaches EVIDENCE_LIMIT. If several are crossed, the
        first of BOUNDS is named. It does not end the comparison.

        Args:
            canary: the settings, for the sentence.
        """
        report = self.report()
        crossed = [bound for bound in BOUNDS if report.evidence_by_bound[bound] >= EVIDENCE_LIMIT]
        return _stop_reason(crossed[0], report, canary) if crossed else None

    def report(self) -> CanaryReport:
        """Return the figures so far.

        All figures are of one moment. Without queries shares and quantiles are None, and the
        evidence is 1.
        """
        with self._lock:
            state, message = self._ended or (CanaryState.RUNNING, "")
            return CanaryReport(
                release=self.release,
                state=state,
                message=message,
                old_pair=self._pair_report(new=False),
                new_pair=self._pair_report(new=True),
                compared_query_count=self._similarity.query_count,
                mean_overlap=self._similarity.mean_overlap,
                mean_rank_correlation=self._similarity.mean_rank_correlation,
                skipped_query_count=self._skip_count,
                evidence_by_bound={
                    "errors": self._errors.value,
                    "latency": self._latency.value,
                    **{
                        _EVIDENCE_OF[kind]: evidence.value
                        for kind, evidence in self._sessions.evidence.items()
                    },
                },
            )

    def _record_session(self, canary: Canary, answer: SearchResult, key: int, *, new: bool) -> None:
        setting = self._setting()
        if setting is None:
            return
        assignment = setting.share, setting.shadow
        if assignment != self._assignment:
            self._assignment = assignment
            self._sessions.reset()
        # A query that began under older settings may belong to the other pair now.
        if (canary.share, canary.shadow) == assignment:
            items = [hit.item.id for hit in answer.hits]
            self._sessions.count_answer(key, answer.request_id, items, is_new_pair=new)

    def _pair_figures(self, new: bool) -> AnsweredFigures:
        return self._new if new else self._old

    def _counts_for_latency(self, caller: "Caller") -> bool:
        """Tell whether a query counts for latency.

        A caller's key counts once in a while, and a token less often than all keys that it could
        have.
        """
        is_first = self._keys.take(caller.canary_key, _KEY_SECONDS)
        return is_first and (
            not caller.token_name or self._tokens.take(caller.token_name, _TOKEN_SECONDS)
        )

    def _update_p99(self) -> None:
        queries = self._old.query_count
        if queries >= _MIN_QUERIES and queries % _QUERIES_PER_UPDATE == 0:
            self._p99 = self._old.duration_quantile(0.99)

    def _pair_report(self, *, new: bool) -> PairReport:
        figures = self._pair_figures(new)
        return PairReport(
            query_count=figures.query_count,
            error_count=figures.error_count,
            empty_answer_count=figures.empty_answer_count,
            p50_latency_s=figures.duration_quantile(0.5),
            p99_latency_s=figures.duration_quantile(0.99),
            mean_score=figures.mean_score,
            session_count=self._sessions.session_counts[new],
            feedback_counts={
                kind: self._sessions.feedback_counts[kind][new] for kind in FEEDBACK_KINDS
            },
        )


EMPTY_REPORT = replace(CanaryComparison(0, lambda: None).report(), state=CanaryState.ENDED)


def _stop_reason(bound: str, report: CanaryReport, canary: Canary) -> str:
    old, new = report.old_pair, report.new_pair
    if bound == "errors":
        reason = (
            f"errors: {new.error_count} of {new.query_count} queries failed with the new release "
            f"where the old one answers; the bound is {canary.most_errors:.1%}"
        )
    elif bound == "latency":
        reason = (
            f"latency: the new release's p99 is {1000 * (new.p99_latency_s or 0):.1f} ms, the old "
            f"one's {1000 * (old.p99_latency_s or 0):.1f} ms; the bound is "
            f"{canary.largest_p99_ratio:g} times that"
        )
    else:
        kind: FeedbackKind = "approved" if bound == "approvals" else "rejected"
        reason = (
            f"feedback: {new.feedback_counts[kind]} of {new.session_count} sessions {kind} answers "
            f"of the new release, {old.feedback_counts[kind]} of {old.session_count} of the old one"
        )
    evidence = report.evidence_by_bound[bound]
    return f"{reason} (evidence {evidence:.0f}, stopped at {EVIDENCE_LIMIT:.0f})"
