"""The canary before plans carried answerers: the oracle of test_answerers.

The canary of a gateway: each query that takes part is answered by one pair, and compared."""

import contextvars
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

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
from nobackfill.server.canary.sessions import Kind
from nobackfill.server.galleries.plan import Plan
from nobackfill.server.galleries.ranking import PlanPart, SearchResult
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import Canary, GatewayState, OutdatedError
from tests.server.old_searching import Answers, Query, Search, SearchRequest

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

    def search(
        self, asked: SearchRequest, plan: Plan, on_trial: PlanPart, search: Search
    ) -> SearchResult:
        """Answer one query, wholly by one pair: what the new one fails, the old one answers.

        A query takes part that either pair can answer: an image, a text, or an embedding of each;
        of others the old pair answers what the new one cannot. Raises what `search` of the old pair
        does.
        """
        canary = self.setting()
        if canary is None:
            return search(asked, plan, None)
        call = context.current()
        key = share_digest(on_trial.query.release, call.key)
        chosen = in_share(key, canary.share)
        by_new = chosen and not canary.shadow
        if not _takes_part(asked, plan, on_trial):
            by_new = by_new and _reads(on_trial, asked.query)
            found = search(asked, plan, on_trial if by_new else None)
            if by_new:
                self._comparison(on_trial.query.release).answered_alone()
            return found
        comparison, began = self._comparison(on_trial.query.release), time.monotonic()
        caller = Caller(key, call.name)
        both = _Both(asked, plan, on_trial, search, canary, comparison)
        if by_new:
            trial = _Trial(canary, comparison, on_trial, asked.query, caller)
            found, failed = trial.answer(lambda part: search(asked, plan, part))
            if failed:
                if trial.too_late is not None:
                    self._offer(both, lambda: both.repeat(trial.too_late or 0.0))
                return found
        else:
            found = search(asked, plan, None)
        found = replace(found, request_id=call.request_id)
        seconds = time.monotonic() - began
        slow = comparison.answered(canary, found, seconds, caller, new=by_new)

        def compare() -> None:
            both.compare(found)
            if slow:
                both.repeat(max(_REPEAT_S, 2 * seconds))

        if chosen:
            self._offer(both, compare)
        return found

    def batch(self, on_trial: PlanPart, answer: Callable[[PlanPart | None], Answers]) -> Answers:
        """Answer several queries of one call, all of them by the same pair; they are not compared.
        Raises what `answer` by the old pair does."""
        canary = self.setting()
        if canary is None or canary.shadow:
            return answer(None)
        release = on_trial.query.release
        key = share_digest(release, context.current().key)
        if not in_share(key, canary.share):
            return answer(None)
        comparison = self._comparison(release)
        found, failed = _Trial(canary, comparison, on_trial, None, Caller(key)).answer(answer)
        if not failed:
            comparison.batched(canary)
        return found

    def _offer(self, both: "_Both", compare: Callable[[], None]) -> None:
        """Compare both pairs some time, off the callers' path."""

        def work() -> None:
            hosted = both.asked.hosted
            if not hosted.users.enter():
                return
            try:
                with suppress(NobackfillError), hosted.using() as now:
                    if now is both.plan:
                        compare()
            finally:
                hosted.users.leave()

        if not self._mirror.offer(work, _size(both.asked.query)):
            both.comparison.skipped()

    def _comparison(self, release: int) -> CanaryComparison:
        """Of the release on trial: after a restart it begins anew."""
        now = self._now
        if now is None or now.release != release:
            now = self._now = CanaryComparison(release, self.setting)
        return now


@dataclass(frozen=True)
class _Both:
    """One query, for each of the pairs; nobody waits for it any more."""

    asked: SearchRequest
    plan: Plan
    on_trial: PlanPart
    search: Search
    canary: Canary
    comparison: CanaryComparison

    def compare(self, found: SearchResult) -> None:
        """Return one pair's answer, and compare it with the other pair's."""
        by_new = found.space == self.on_trial.query.space
        try:
            other = self._aside(None if by_new else self.on_trial)
        except NobackfillError as error:
            if not by_new and _is_evidence(error, self.asked.query):
                # A shared part may be away since the old pair answered: not if it answers again.
                self._aside(None)
                self.comparison.failed(self.canary)
            return
        old, new = (other, found) if by_new else (found, other)
        self.comparison.mirrored(self.canary, old, new, by_new=not by_new)

    def repeat(self, most: float) -> None:
        """Time both on what was slow, one after the other; the new one for `most` seconds."""
        old = self._timed(None)
        try:
            new = _within(most, lambda: self._timed(self.on_trial))
        except DeadlineError:
            new = most
        self.comparison.repeated(self.canary, old, new)

    def _timed(self, part: PlanPart | None) -> float:
        began = time.monotonic()
        self._aside(part)
        return time.monotonic() - began

    def _aside(self, part: PlanPart | None) -> SearchResult:
        return self.search(replace(self.asked, aside=True), self.plan, part)


@dataclass
class _Trial:
    """A query, None for several of one call, that the new pair is to answer."""

    canary: Canary
    comparison: CanaryComparison
    on_trial: PlanPart
    query: Query | None
    caller: Caller
    # Seconds in which it did not answer, where that may be too slow.
    too_late: float | None = None

    def answer(self, ask: Callable[[PlanPart | None], Answers]) -> tuple[Answers, bool]:
        """What the new pair answers; what it fails, the old one does, and it is counted. And
        whether it failed."""
        left, single = context.current().remaining(), self.query is not None
        given = self.comparison.share_of_time(left) if single else left / 2
        try:
            return _within(given, lambda: ask(self.on_trial)), False
        except NobackfillError as error:
            began = time.monotonic()
            # What neither can answer says nothing about either.
            answers = ask(None)
            if isinstance(error, DeadlineError):
                took = time.monotonic() - began
                if self.comparison.late(self.canary, given, took, self.caller, single=single):
                    self.too_late = given
            elif _is_evidence(error, self.query):
                self.comparison.failed(self.canary)
            return answers, True


def _takes_part(asked: SearchRequest, plan: Plan, on_trial: PlanPart) -> bool:
    return all(_reads(part, asked.query) for part in (on_trial, *plan.parts))


def _reads(part: PlanPart, query: Query) -> bool:
    if isinstance(query, str):
        return part.query.text_encoder is not None
    if isinstance(query, bytes):
        return part.query.embedder.file is not None
    return part.query.space in query


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
