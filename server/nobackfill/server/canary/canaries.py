"""Run the canary of a gateway: one pair answers each of its queries, and both are compared."""

import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nobackfill.digests import is_in_share, share_digest
from nobackfill.errors import (
    BusyError,
    CancelledError,
    DeadlineError,
    InvalidInputError,
    NobackfillError,
    NoEncoderError,
)
from nobackfill.gallery.search.index import lower_thread_priority
from nobackfill.server.canary.comparison import (
    EMPTY_REPORT,
    Caller,
    CanaryComparison,
    CanaryReport,
    CanaryState,
)
from nobackfill.server.canary.sessions import FEEDBACK_KINDS, FeedbackKind
from nobackfill.server.galleries.answering import PlainAnswerer, can_read, single_answer
from nobackfill.server.galleries.hosted import HostedGallery
from nobackfill.server.galleries.plan import (
    PlanPart,
    Query,
    QueryAnswer,
    SearchRequest,
    SearchResult,
)
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import Canary, GatewayState, OutdatedPlanError

Answers = TypeVar("Answers")


# Most comparisons, and bytes of their queries, that may wait. More are skipped, as callers come
# first.
_MAX_WAITING = 64
_MAX_BYTES = 64 << 20


class ComparisonThread:
    """Run comparisons in one thread of low priority."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._waiting = 0
        self._bytes = 0
        self._pool = ThreadPoolExecutor(1, "canary", initializer=lower_thread_priority)

    def enqueue(self, work: Callable[[], None], byte_count: int) -> bool:
        """Queue work, without waiting.

        At most 64 works and 64 MiB wait or run. Any thread may call it. An error of the work is
        logged and counted.

        Args:
            work: the work; it runs later, in the thread of comparisons.
            byte_count: bytes that it holds in memory.

        Returns:
            False if too much waits, or no thread is left; the work is then not done.
        """
        with self._lock:
            if self._waiting >= _MAX_WAITING or self._bytes + byte_count > _MAX_BYTES:
                return False
            self._waiting += 1
            self._bytes += byte_count
        try:
            self._pool.submit(self._run_comparison, work, byte_count)
        except RuntimeError:
            # The system has no thread left, or the gateway is stopping.
            self._release_bytes(byte_count)
            return False
        return True

    def close(self) -> None:
        """Stop; waiting work is dropped.

        It waits for the work that runs. A later `enqueue` returns False.
        """
        self._pool.shutdown(cancel_futures=True)

    def _run_comparison(self, work: Callable[[], None], size: int) -> None:
        try:
            with error_boundary(self._metrics, "canary"):
                work()
        finally:
            self._release_bytes(size)

    def _release_bytes(self, size: int) -> None:
        with self._lock:
            self._waiting -= 1
            self._bytes -= size


# Errors that are no evidence: their cause is the caller, the load, or another gateway. For timeouts
# see CanaryComparison.count_timeout.
_NO_EVIDENCE = (BusyError, CancelledError, DeadlineError, NoEncoderError, OutdatedPlanError)

# Shortest time limit (seconds) of a slow query when it is run again.
_MIN_REPEAT_SECONDS = 1.0


class Canaries:
    """Keep the canary of a gateway, at most one at a time.

    Its settings come from the gateway's state, and hold from one query to the next.
    """

    def __init__(self, state: GatewayState, metrics: Metrics) -> None:
        self._state = state
        self._mirror = ComparisonThread(metrics)
        self._comparison: CanaryComparison | None = None

    def close(self) -> None:
        """Stop comparing; comparisons that wait are dropped.

        It waits for the comparison that runs. Queries are still answered.
        """
        self._mirror.close()

    def begin_comparison(self, release: int) -> None:
        """Start the comparison for a canary of a release; counts of an earlier canary are dropped,
        also those of the same release.

        The settings are those of the state, also if it has none yet.
        """
        self._comparison = CanaryComparison(release, self.running_settings)

    def end_comparison(self, state: CanaryState, message: str = "") -> None:
        """End the present comparison, if any; its report stays until the next canary begins.

        The first end counts: a later call does not change it.

        It changes nothing in the state: queries go on until the plan changes.

        Args:
            state: how the canary ended.
            message: why, as a sentence for operators; may be empty.
        """
        if self._comparison is not None:
            self._comparison.end(state, message)

    def running_settings(self) -> Canary | None:
        """Return the settings of the canary under way; None without one.

        It reads memory only. An activation without a canary gives None.
        """
        record = self._state.current.activation
        return None if record is None else record.canary

    def last_report(self) -> CanaryReport:
        """Return the report of the last canary since the gateway started; an empty one
        without any.

        It may be of a canary that has ended. The empty one has release 0 and state ENDED.
        """
        return EMPTY_REPORT if self._comparison is None else self._comparison.report()

    def has_answered(self, release: int) -> bool:
        """Tell whether a release has answered a query since its canary began at this gateway.

        Answers for comparison only count, too. It is False for another release than the last
        canary's.
        """
        report = self.last_report()
        return (
            report.release == release and report.new_pair.query_count > report.new_pair.error_count
        )

    def stop_reason(self) -> str | None:
        """Return why the canary under way must stop; None if it need not, or there is none.

        Returns:
            A sentence for operators; see CanaryComparison.stop_reason.
        """
        canary = self.running_settings()
        if canary is None or self._comparison is None:
            return None
        return self._comparison.stop_reason(canary)

    def record_feedback(self, request_id: str, item_id: str, kind: FeedbackKind) -> bool:
        """Record feedback about a hit.

        Feedback of both pairs' answers counts. It is kept in memory only.

        Args:
            request_id: id of the answer.
            item_id: id of the hit.
            kind: approved or rejected.

        Returns:
            False if no canary is under way, the answer is unknown or forgotten, or it has no such
            hit. True otherwise, also if the session has sent feedback of this kind before.
        """
        if self.running_settings() is None or self._comparison is None:
            return False
        return self._comparison.record_feedback(request_id, item_id, kind)

    def enqueue_comparison(self, query: "_MirroredQuery", compare: Callable[[], None]) -> None:
        """Queue a comparison of both pairs; it is counted as skipped if too many wait.

        It does not wait. The comparison runs only if the gallery and its plan are the same by then;
        otherwise it is dropped, and not counted as skipped. Its NobackfillErrors are dropped, and
        other errors are logged and counted.

        Args:
            query: the query.
            compare: compares the answers; it runs in the thread of comparisons.
        """

        def work() -> None:
            hosted = query.hosted
            if not hosted.use_counter.enter():
                return
            try:
                with suppress(NobackfillError), hosted.use_plan() as plan:
                    if plan.answerer is query.answerer:
                        compare()
            finally:
                hosted.use_counter.leave()

        if not self._mirror.enqueue(work, _query_bytes(query.query)):
            query.comparison.count_skipped()

    def comparison(self, release: int) -> CanaryComparison:
        """Return the comparison of a release; it starts again after a restart of the gateway.

        Another release drops the present comparison, and a new one begins, as without any.
        """
        comparison = self._comparison
        if comparison is None or comparison.release != release:
            comparison = self._comparison = CanaryComparison(release, self.running_settings)
        return comparison


class CanaryAnswerer:
    """Answer each query by one pair of query model and gallery.

    The new pair answers for a share of the callers. The old pair answers for the others, and where
    the new pair fails. It raises what the old pair raises.

    A single query is compared if both pairs can read it: an image, a text, or an embedding of each.
    Otherwise the old pair answers what the new one cannot read. All queries of one call are
    answered by the same pair, and are not compared.
    """

    def __init__(self, canaries: Canaries, old: PlainAnswerer, new: PlainAnswerer) -> None:
        self.old_answerer, self.new_answerer = old, new
        self._canaries = canaries
        self._new_release = new.parts[0].query_manifest

    def sole_image_part(self, hosted: HostedGallery) -> PlanPart | None:
        """Return None: more than one part may answer an image."""
        return None

    def sole_space_part(self, hosted: HostedGallery, space: str) -> PlanPart | None:
        """Return the old pair's part: a query by one embedding can be answered by no other pair.

        None if the old pair has no such part.
        """
        return self.old_answerer.sole_space_part(hosted, space)

    def answer(self, hosted: HostedGallery, request: SearchRequest) -> list[QueryAnswer]:
        """Answer each query of a request by one pair; see CanaryAnswerer for the choice.

        If the new pair fails, or takes more than its share of the call's time, the old one answers,
        and the failure is counted. For the share of callers that the canary chooses, a comparison
        of a single query is queued. A single answer has a `request_id` for feedback, unless only
        one pair can read it or the new pair failed.

        Args:
            hosted: the gallery; the caller uses it and its plan.
            request: the request.

        Returns:
            For each query, in order, the result, or the InvalidInputError that refused it. A single
            query that is refused raises instead.

        Raises:
            InvalidInputError: the filter is not valid; TooLargeError if the images together are too
                large.
            NoEncoderError, IncompatibleSpaceError, NeedsImageError, ReleaseRetiredError: a query
                does not suit the gallery; see GallerySearcher.search.
            OutdatedPlanError: another gateway has replaced the plan; the caller begins again.
            DeadlineError, CancelledError: the call's time is over, or its caller has gone.
            BusyError, UnavailableError: the store is busy, a server does not answer, or too many
                images are being decoded (OverloadedError).
            NotFoundError: the gallery was closed or deleted.
            VerificationError: the store, or a model's output, is damaged.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        canary = self._canaries.running_settings()
        if canary is None:
            return self.old_answerer.answer(hosted, request)
        key = share_digest(self._new_release.release, context.current_call().canary_key)
        is_chosen = is_in_share(key, canary.share)
        if request.is_single:
            return [self._single(hosted, request, canary, key, is_chosen=is_chosen)]
        if not is_chosen or canary.shadow:
            return self.old_answerer.answer(hosted, request)
        return self._batch(hosted, request, canary, key)

    def _single(
        self,
        hosted: HostedGallery,
        request: SearchRequest,
        canary: Canary,
        key: int,
        *,
        is_chosen: bool,
    ) -> SearchResult:
        call, (query,) = context.current_call(), request.queries
        by_new = is_chosen and not canary.shadow
        parts = (*self.new_answerer.parts, *self.old_answerer.parts)
        if not all(can_read(part.query_manifest, query) for part in parts):
            if not by_new or not can_read(self._new_release, query):
                return single_answer(self.old_answerer.answer(hosted, request))
            answer = single_answer(self.new_answerer.answer(hosted, request))
            self._canaries.comparison(self._new_release.release).count_unpaired()
            return answer
        comparison = self._canaries.comparison(self._new_release.release)
        began, caller = time.monotonic(), Caller(key, call.name)
        mirrored = _MirroredQuery(self, hosted, request, canary, comparison)
        if by_new:
            trial = _Trial(canary, comparison, query, caller)
            answer, failed = trial.answer(
                lambda: single_answer(self.new_answerer.answer(hosted, request)),
                lambda: single_answer(self.old_answerer.answer(hosted, request)),
            )
            if failed:
                if trial.timeout is not None:
                    seconds_allowed = trial.timeout
                    self._canaries.enqueue_comparison(
                        mirrored, lambda: mirrored.repeat(seconds_allowed)
                    )
                return answer
        else:
            answer = single_answer(self.old_answerer.answer(hosted, request))
        answer = replace(answer, request_id=call.request_id)
        seconds = time.monotonic() - began
        is_slow = comparison.count_answer(canary, answer, seconds, caller, is_new_pair=by_new)

        def compare() -> None:
            mirrored.compare(answer)
            if is_slow:
                mirrored.repeat(max(_MIN_REPEAT_SECONDS, 2 * seconds))

        if is_chosen:
            self._canaries.enqueue_comparison(mirrored, compare)
        return answer

    def _batch(
        self, hosted: HostedGallery, request: SearchRequest, canary: Canary, key: int
    ) -> list[QueryAnswer]:
        comparison = self._canaries.comparison(self._new_release.release)
        answers, failed = _Trial(canary, comparison, None, Caller(key)).answer(
            lambda: self.new_answerer.answer(hosted, request),
            lambda: self.old_answerer.answer(hosted, request),
        )
        if not failed:
            comparison.count_batch(canary)
        return answers


@dataclass(frozen=True)
class _MirroredQuery:
    """Run one query on either pair for the comparison; no caller waits for the answer."""

    answerer: CanaryAnswerer
    hosted: HostedGallery
    request: SearchRequest
    canary: Canary
    comparison: CanaryComparison

    @property
    def query(self) -> Query:
        return self.request.queries[0]

    def compare(self, answer: SearchResult) -> None:
        """Compare a caller's answer with the other pair's answer."""
        old_pair, new_pair = self.answerer.old_answerer, self.answerer.new_answerer
        by_new = answer.space == new_pair.parts[0].query_manifest.space
        try:
            other = self._answer(old_pair if by_new else new_pair)
        except NobackfillError as error:
            if not by_new and _is_evidence(error, self.query):
                # If the old pair now fails, too, a part that both share is away: no evidence.
                self._answer(old_pair)
                self.comparison.count_failure(self.canary)
            return
        old, new = (other, answer) if by_new else (answer, other)
        self.comparison.count_mirrored(self.canary, old, new, is_new_mirrored=not by_new)

    def repeat(self, limit: float) -> None:
        """Time both pairs on a slow query, one after the other.

        Args:
            limit: time limit of the new pair in seconds.
        """
        old = self._time_answer(self.answerer.old_answerer)
        try:
            new = _with_time_limit(limit, lambda: self._time_answer(self.answerer.new_answerer))
        except DeadlineError:
            new = limit
        self.comparison.count_rerun(self.canary, old, new)

    def _time_answer(self, pair: PlainAnswerer) -> float:
        began = time.monotonic()
        self._answer(pair)
        return time.monotonic() - began

    def _answer(self, pair: PlainAnswerer) -> SearchResult:
        return single_answer(pair.answer(self.hosted, replace(self.request, is_background=True)))


@dataclass
class _Trial:
    """Let the new pair answer a query, or several of one call if `query` is None."""

    canary: Canary
    comparison: CanaryComparison
    query: Query | None
    caller: Caller
    # Seconds that the new pair had, if it may have been too slow.
    timeout: float | None = None

    def answer(
        self, ask_new: Callable[[], Answers], ask_old: Callable[[], Answers]
    ) -> tuple[Answers, bool]:
        """Ask the new pair, and the old one if that fails.

        Returns:
            The answers, and whether the new pair failed.
        """
        remaining, single = context.current_call().remaining(), self.query is not None
        allowance = self.comparison.time_allowance(remaining) if single else remaining / 2
        try:
            return _with_time_limit(allowance, ask_new), False
        except NobackfillError as error:
            began = time.monotonic()
            # If the old pair fails, too, its error is raised and nothing is counted.
            answers = ask_old()
            if isinstance(error, DeadlineError):
                took = time.monotonic() - began
                if self.comparison.count_timeout(
                    self.canary, allowance, took, self.caller, is_single_query=single
                ):
                    self.timeout = allowance
            elif _is_evidence(error, self.query):
                self.comparison.count_failure(self.canary)
            return answers, True


def _is_evidence(error: NobackfillError, query: Query | None) -> bool:
    """Tell whether an error is evidence against the new pair.

    Each pair gets its own embedding from the caller: an invalid one is the caller's fault.
    """
    by_embedding = isinstance(query, Mapping)
    of_caller = by_embedding and isinstance(error, InvalidInputError)
    return not of_caller and not isinstance(error, _NO_EVIDENCE)


def _query_bytes(query: Query) -> int:
    return len(query) if isinstance(query, bytes | str) else sum(map(len, query.values()))


def _with_time_limit(seconds: float, ask: Callable[[], Answers]) -> Answers:
    """Run a function with a deadline that is at most so many seconds away."""

    def shortened() -> Answers:
        context.set_current_call(
            replace(context.current_call(), deadline=time.monotonic() + seconds)
        )
        return ask()

    return contextvars.copy_context().run(shortened)


class CanaryMetrics(Collector):
    """Export the figures of the last canary to Prometheus; counters start again with each."""

    def __init__(self, canaries: Canaries) -> None:
        self._canaries = canaries

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the last canary.

        Without a canary the share is 0 and the counters are 0; means without data are left out.

        Yields:
            The share, queries, quantiles in seconds, scores, feedback, comparisons and evidence.
        """
        canary, report = self._canaries.running_settings(), self._canaries.last_report()
        yield GaugeMetricFamily(
            "nobackfill_canary_share",
            "Share of callers' keys whose queries meet the release on trial, 0 to 1.",
            value=0.0 if canary is None else canary.share,
        )
        queries = CounterMetricFamily(
            "nobackfill_canary_queries", "Queries by pair and outcome: answered, empty, error.",
            labels=["pair", "outcome"],
        )  # fmt: skip
        seconds = GaugeMetricFamily(
            "nobackfill_canary_seconds", "Quantiles of the last answers' durations, by pair.",
            labels=["pair", "quantile"],
        )  # fmt: skip
        score = GaugeMetricFamily(
            "nobackfill_canary_score", "Mean calibrated score of first hits, by pair.",
            labels=["pair"],
        )  # fmt: skip
        feedback = GaugeMetricFamily(
            "nobackfill_canary_feedback", "Sessions that sent feedback, by pair and kind.",
            labels=["pair", "kind"],
        )  # fmt: skip
        for name, pair in (("old", report.old_pair), ("new", report.new_pair)):
            queries.add_metric([name, "error"], pair.error_count)
            queries.add_metric([name, "empty"], pair.empty_answer_count)
            queries.add_metric(
                [name, "answered"], pair.query_count - pair.error_count - pair.empty_answer_count
            )
            for quantile, value in (("0.5", pair.p50_latency_s), ("0.99", pair.p99_latency_s)):
                if value is not None:
                    seconds.add_metric([name, quantile], value)
            if pair.mean_score is not None:
                score.add_metric([name], pair.mean_score)
            for kind in FEEDBACK_KINDS:
                feedback.add_metric([name, kind], pair.feedback_counts[kind])
        yield from (queries, seconds, score, feedback)
        yield CounterMetricFamily(
            "nobackfill_canary_compared", "Queries that both pairs have answered.",
            value=report.compared_query_count,
        )  # fmt: skip
        yield CounterMetricFamily(
            "nobackfill_canary_skipped", "Queries not compared, since too many waited.",
            value=report.skipped_query_count,
        )  # fmt: skip
        for name, text, value in (
            ("overlap", "Mean share of items that both answers have, 0 to 1.", report.mean_overlap),
            ("rank_correlation", "Mean rank correlation of both answers, -1 to 1.",
             report.mean_rank_correlation),
        ):  # fmt: skip
            if value is not None:
                yield GaugeMetricFamily(f"nobackfill_canary_{name}", text, value=value)
        evidence = GaugeMetricFamily(
            "nobackfill_canary_evidence", "Evidence that a bound is crossed; it stops at 80.",
            labels=["bound"],
        )  # fmt: skip
        for bound, value in report.evidence_by_bound.items():
            evidence.add_metric([bound], value)
        yield evidence
