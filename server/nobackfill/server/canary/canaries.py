"""The canary of a gateway: each query that takes part is answered by one pair, and compared."""

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

from nobackfill.digests import in_share, share_digest
from nobackfill.errors import (
    BusyError,
    CancelledError,
    DeadlineError,
    InvalidInputError,
    NobackfillError,
    NoEncoderError,
)
from nobackfill.gallery.search.index import give_way
from nobackfill.server.canary.comparison import (
    NOTHING,
    Caller,
    CanaryComparison,
    CanaryReport,
    CanaryState,
)
from nobackfill.server.canary.sessions import KINDS, Kind
from nobackfill.server.galleries.answering import PlainAnswerer, only, reads
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.plan import Query, QueryAnswer, SearchRequest
from nobackfill.server.galleries.ranking import PlanPart, SearchResult
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import Canary, GatewayState, OutdatedError

Answers = TypeVar("Answers")

# Queries answered once more by the other pair, off their callers' path.

# What may wait; more is passed over, as callers come first.
_MOST_WAITING = 64
_MOST_BYTES = 64 << 20


class Mirror:
    """One thread, which lets all others go first."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._waiting = 0
        self._bytes = 0
        self._pool = ThreadPoolExecutor(1, "canary", initializer=give_way)

    def offer(self, work: Callable[[], None], size: int) -> bool:
        """Do `work`, which holds `size` bytes, some time; False: too much waits. Never waits."""
        with self._lock:
            if self._waiting >= _MOST_WAITING or self._bytes + size > _MOST_BYTES:
                return False
            self._waiting += 1
            self._bytes += size
        try:
            self._pool.submit(self._do, work, size)
        except RuntimeError:
            # No thread is to be had, or the gateway ends.
            self._left(size)
            return False
        return True

    def close(self) -> None:
        """What waits is not done any more."""
        self._pool.shutdown(cancel_futures=True)

    def _do(self, work: Callable[[], None], size: int) -> None:
        try:
            with error_boundary(self._metrics, "canary"):
                work()
        finally:
            self._left(size)

    def _left(self, size: int) -> None:
        with self._lock:
            self._waiting -= 1
            self._bytes -= size


# Of these the caller is the reason, or how many there are, or another gateway: they would have met
# the old pair as well, a moment before. Of what came too late, see Comparison.late.
_NO_EVIDENCE = (BusyError, CancelledError, DeadlineError, NoEncoderError, OutdatedError)

# A query that was slow has so long at least when it is repeated.
_REPEAT_S = 1.0


class Canaries:
    """At most one at a time: what the gateway's state says of it holds, from one query to the
    next."""

    def __init__(self, state: GatewayState, metrics: Metrics) -> None:
        self._state = state
        self._mirror = Mirror(metrics)
        self._now: CanaryComparison | None = None

    def close(self) -> None:
        self._mirror.close()

    def begin(self, release: int) -> None:
        """One of this release begins: nothing of an earlier one counts."""
        self._now = CanaryComparison(release, self.setting)

    def end(self, state: CanaryState, message: str = "") -> None:
        """The one under way has ended."""
        if self._now is not None:
            self._now.end(state, message)

    def setting(self) -> Canary | None:
        """Of the canary under way; None without one."""
        record = self._state.now.activation
        return None if record is None else record.canary

    def report(self) -> CanaryReport:
        """Of the last one since the start."""
        return NOTHING if self._now is None else self._now.report()

    def met(self, release: int) -> bool:
        """Whether the release has answered a query since its canary began here."""
        now = self.report()
        return now.release == release and now.new.queries > now.new.errors

    def verdict(self) -> str | None:
        """Why the one under way is to be stopped, if it is."""
        canary = self.setting()
        return None if canary is None or self._now is None else self._now.verdict(canary)

    def feedback(self, request_id: str, item: str, kind: Kind) -> bool:
        """Whether it is about an answer that is remembered, while one is under way."""
        going_on = self.setting() is not None and self._now is not None
        return going_on and self._now is not None and self._now.feedback(request_id, item, kind)

    def answerer(self, old: PlainAnswerer, new: PlainAnswerer) -> "CanaryAnswerer":
        """What answers by a plan with a release on trial."""
        return CanaryAnswerer(self, old, new)

    def offer(self, mirrored: "_MirroredQuery", compare: Callable[[], None]) -> None:
        """Compare both pairs some time, off the callers' path."""

        def work() -> None:
            hosted = mirrored.hosted
            if not hosted.users.enter():
                return
            try:
                with suppress(NobackfillError), hosted.using() as now:
                    if now.answerer is mirrored.answerer:
                        compare()
            finally:
                hosted.users.leave()

        if not self._mirror.offer(work, _size(mirrored.query)):
            mirrored.comparison.skipped()

    def comparison(self, release: int) -> CanaryComparison:
        """Of the release on trial: after a restart it begins anew."""
        now = self._now
        if now is None or now.release != release:
            now = self._now = CanaryComparison(release, self.setting)
        return now


class CanaryAnswerer:
    """Each query is answered wholly by one pair of query model and gallery: by `new` for a share of
    the callers, by `old` for the others and where `new` fails.

    A single query takes part in the comparison if either pair can answer it: an image, a text, or
    an embedding of each. Of others `old` answers what `new` cannot. Queries of one call are all
    answered by the same pair; they are not compared. It raises what `old` does.
    """

    def __init__(self, canaries: Canaries, old: PlainAnswerer, new: PlainAnswerer) -> None:
        self.old, self.new = old, new
        self._canaries = canaries
        self._trial = new.parts[0].query

    def image_part(self, hosted: Hosted) -> PlanPart | None:
        return None

    def space_part(self, hosted: Hosted, space: str) -> PlanPart | None:
        """A query by one embedding could be answered by no other pair."""
        return self.old.space_part(hosted, space)

    def answer(self, hosted: Hosted, request: SearchRequest) -> list[QueryAnswer]:
        canary = self._canaries.setting()
        if canary is None:
            return self.old.answer(hosted, request)
        key = share_digest(self._trial.release, context.current().key)
        chosen = in_share(key, canary.share)
        if request.single:
            return [self._single(hosted, request, canary, key, chosen=chosen)]
        if not chosen or canary.shadow:
            return self.old.answer(hosted, request)
        return self._batch(hosted, request, canary, key)

    def _single(
        self, hosted: Hosted, request: SearchRequest, canary: Canary, key: int, *, chosen: bool
    ) -> SearchResult:
        call, (query,) = context.current(), request.queries
        by_new = chosen and not canary.shadow
        if not all(reads(part.query, query) for part in (*self.new.parts, *self.old.parts)):
            if not by_new or not reads(self._trial, query):
                return only(self.old.answer(hosted, request))
            found = only(self.new.answer(hosted, request))
            self._canaries.comparison(self._trial.release).answered_alone()
            return found
        comparison = self._canaries.comparison(self._trial.release)
        began, caller = time.monotonic(), Caller(key, call.name)
        mirrored = _MirroredQuery(self, hosted, request, canary, comparison)
        if by_new:
            trial = _Trial(canary, comparison, query, caller)
            found, failed = trial.answer(
                lambda: only(self.new.answer(hosted, request)),
                lambda: only(self.old.answer(hosted, request)),
            )
            if failed:
                if trial.too_late is not None:
                    late = trial.too_late
                    self._canaries.offer(mirrored, lambda: mirrored.repeat(late))
                return found
        else:
            found = only(self.old.answer(hosted, request))
        found = replace(found, request_id=call.request_id)
        seconds = time.monotonic() - began
        slow = comparison.answered(canary, found, seconds, caller, new=by_new)

        def compare() -> None:
            mirrored.compare(found)
            if slow:
                mirrored.repeat(max(_REPEAT_S, 2 * seconds))

        if chosen:
            self._canaries.offer(mirrored, compare)
        return found

    def _batch(
        self, hosted: Hosted, request: SearchRequest, canary: Canary, key: int
    ) -> list[QueryAnswer]:
        comparison = self._canaries.comparison(self._trial.release)
        answers, failed = _Trial(canary, comparison, None, Caller(key)).answer(
            lambda: self.new.answer(hosted, request), lambda: self.old.answer(hosted, request)
        )
        if not failed:
            comparison.batched(canary)
        return answers


@dataclass(frozen=True)
class _MirroredQuery:
    """One query, for each of the pairs; nobody waits for it any more."""

    answerer: CanaryAnswerer
    hosted: Hosted
    request: SearchRequest
    canary: Canary
    comparison: CanaryComparison

    @property
    def query(self) -> Query:
        return self.request.queries[0]

    def compare(self, found: SearchResult) -> None:
        """Return one pair's answer, and compare it with the other pair's."""
        old_pair, new_pair = self.answerer.old, self.answerer.new
        by_new = found.space == new_pair.parts[0].query.space
        try:
            other = self._aside(old_pair if by_new else new_pair)
        except NobackfillError as error:
            if not by_new and _is_evidence(error, self.query):
                # A shared part may be away since the old pair answered: not if it answers again.
                self._aside(old_pair)
                self.comparison.failed(self.canary)
            return
        old, new = (other, found) if by_new else (found, other)
        self.comparison.mirrored(self.canary, old, new, by_new=not by_new)

    def repeat(self, most: float) -> None:
        """Time both on what was slow, one after the other; the new one for `most` seconds."""
        old = self._timed(self.answerer.old)
        try:
            new = _within(most, lambda: self._timed(self.answerer.new))
        except DeadlineError:
            new = most
        self.comparison.repeated(self.canary, old, new)

    def _timed(self, pair: PlainAnswerer) -> float:
        began = time.monotonic()
        self._aside(pair)
        return time.monotonic() - began

    def _aside(self, pair: PlainAnswerer) -> SearchResult:
        return only(pair.answer(self.hosted, replace(self.request, aside=True)))


@dataclass
class _Trial:
    """A query, None for several of one call, that the new pair is to answer."""

    canary: Canary
    comparison: CanaryComparison
    query: Query | None
    caller: Caller
    # Seconds in which it did not answer, where that may be too slow.
    too_late: float | None = None

    def answer(
        self, ask_new: Callable[[], Answers], ask_old: Callable[[], Answers]
    ) -> tuple[Answers, bool]:
        """What the new pair answers; what it fails, the old one does, and it is counted. And
        whether it failed."""
        left, single = context.current().remaining(), self.query is not None
        given = self.comparison.share_of_time(left) if single else left / 2
        try:
            return _within(given, ask_new), False
        except NobackfillError as error:
            began = time.monotonic()
            # What neither can answer says nothing about either.
            answers = ask_old()
            if isinstance(error, DeadlineError):
                took = time.monotonic() - began
                if self.comparison.late(self.canary, given, took, self.caller, single=single):
                    self.too_late = given
            elif _is_evidence(error, self.query):
                self.comparison.failed(self.canary)
            return answers, True


def _is_evidence(error: NobackfillError, query: Query | None) -> bool:
    """Whether it speaks against the new pair. Of vectors each pair is sent its own: who sends it
    none that it can use says nothing by that."""
    by_embedding = isinstance(query, Mapping)
    of_caller = by_embedding and isinstance(error, InvalidInputError)
    return not of_caller and not isinstance(error, _NO_EVIDENCE)


def _size(query: Query) -> int:
    return len(query) if isinstance(query, bytes | str) else sum(map(len, query.values()))


def _within(seconds: float, ask: Callable[[], Answers]) -> Answers:
    """Ask as the call under way does, with less time than it has left."""

    def shortened() -> Answers:
        context.begin(replace(context.current(), deadline=time.monotonic() + seconds))
        return ask()

    return contextvars.copy_context().run(shortened)


# What Prometheus reads of a canary, counted when it asks.


class CanarySeries(Collector):
    """Of the last canary since the start; counters begin anew with each."""

    def __init__(self, canaries: Canaries) -> None:
        self._canaries = canaries

    def collect(self) -> Iterator[Metric]:
        canary, report = self._canaries.setting(), self._canaries.report()
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
        for name, pair in (("old", report.old), ("new", report.new)):
            queries.add_metric([name, "error"], pair.errors)
            queries.add_metric([name, "empty"], pair.empty)
            queries.add_metric([name, "answered"], pair.queries - pair.errors - pair.empty)
            for quantile, value in (("0.5", pair.p50), ("0.99", pair.p99)):
                if value is not None:
                    seconds.add_metric([name, quantile], value)
            if pair.score is not None:
                score.add_metric([name], pair.score)
            for kind in KINDS:
                feedback.add_metric([name, kind], pair.said[kind])
        yield from (queries, seconds, score, feedback)
        yield from self._likeness()

    def _likeness(self) -> Iterator[Metric]:
        report = self._canaries.report()
        yield CounterMetricFamily(
            "nobackfill_canary_compared", "Queries that both pairs have answered.",
            value=report.compared,
        )  # fmt: skip
        yield CounterMetricFamily(
            "nobackfill_canary_skipped", "Queries not compared, since too many waited.",
            value=report.skipped,
        )  # fmt: skip
        for name, text, value in (
            ("overlap", "Mean share of items that both answers have, 0 to 1.", report.overlap),
            ("rank_correlation", "Mean rank correlation of both answers, -1 to 1.",
             report.rank_correlation),
        ):  # fmt: skip
            if value is not None:
                yield GaugeMetricFamily(f"nobackfill_canary_{name}", text, value=value)
        evidence = GaugeMetricFamily(
            "nobackfill_canary_evidence", "Evidence that a bound is crossed; it stops at 80.",
            labels=["bound"],
        )  # fmt: skip
        for bound, value in report.evidence.items():
            evidence.add_metric([bound], value)
        yield evidence
