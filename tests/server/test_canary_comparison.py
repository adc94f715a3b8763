"""One canary as far as it got, told what happened to it query by query."""

import itertools

import pytest

from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.server.canary.comparison import EVIDENCE_LIMIT, Caller, CanaryComparison
from nobackfill.server.galleries.plan import RankedHit, SearchResult
from nobackfill.server.state import Canary
from tests.support.clock import replace_clock


class Told:
    """A comparison of release 2, and the setting that holds now."""

    def __init__(self, canary: Canary) -> None:
        self.now = canary
        self.comparison = CanaryComparison(2, lambda: self.now)
        self._requests = map(str, itertools.count())
        self.token = ""
        # Whether the last answer may be too slow.
        self.slow = False

    def answered(
        self, key: int, *, new: bool, by: Canary | None = None, seconds: float = 0.01
    ) -> str:
        """A query that began `by` a setting, and ends now; its request id."""
        hit = RankedHit(StoredItem(0, "item", None, {}), 0.0, None, 2 if new else 1, "native")
        found = SearchResult([hit], 2 if new else 1, "space", next(self._requests))
        caller = Caller(key, self.token)
        self.slow = self.comparison.count_answer(
            by or self.now, found, seconds, caller, is_new_pair=new
        )
        return found.request_id

    def sessions(self) -> tuple[int, int]:
        report = self.comparison.report()
        return report.old_pair.session_count, report.new_pair.session_count


OTHERS = itertools.count(10_000)
SHADOW, CANARY = Canary(share=0.5, shadow=True), Canary(share=0.5)


@pytest.mark.parametrize(("first", "then"), [(SHADOW, CANARY), (CANARY, SHADOW)])
def test_sessions_begin_anew_where_others_answer_them(first: Canary, then: Canary) -> None:
    told = Told(first)
    requests = [told.answered(key, new=not first.shadow) for key in range(10)]
    assert sum(told.sessions()) == 10
    told.now = then
    told.answered(3, new=not then.shadow)
    assert told.sessions() == ((1, 0) if then.shadow else (0, 1))
    assert not told.comparison.record_feedback(requests[0], "item", "approved")
    # One that began before the change, and ends after it.
    late = told.answered(4, new=not first.shadow, by=first)
    assert sum(told.sessions()) == 1
    assert not told.comparison.record_feedback(late, "item", "approved")
    assert sum(told.sessions()) == 1
    assert (
        told.comparison.report().old_pair.query_count
        + told.comparison.report().new_pair.query_count
        == 12
    )


def test_a_shadow_that_becomes_a_canary_gives_no_evidence_of_feedback() -> None:
    """Of equal pairs: half of the sessions come back, and every tenth answer is rejected."""
    told = Told(SHADOW)
    for key in range(2000):
        told.answered(key, new=False)
    told.now = CANARY
    for n in range(2000):
        key = n if n % 4 == 0 else 2000 + n
        request = told.answered(key, new=key % 2 == 1 or key % 8 == 0)
        if n % 10 == 0:
            told.comparison.record_feedback(request, "item", "rejected")
            assert told.comparison.report().evidence_by_bound["rejections"] < EVIDENCE_LIMIT


def late(told: Told, given: float, took: float, *, single: bool = True) -> tuple[float, float]:
    """The evidence of errors and of latency after a query that came too late."""
    if told.comparison.count_timeout(
        CANARY, given, took, Caller(next(OTHERS)), is_single_query=single
    ):
        told.comparison.count_rerun(CANARY, took, given)
    evidence = told.comparison.report().evidence_by_bound
    return evidence["errors"], evidence["latency"]


def test_what_comes_too_late_counts_where_the_bound_allowed_no_more() -> None:
    told = Told(CANARY)
    # Nobody knows yet how long the old pair takes: a moment's patience says nothing.
    assert late(told, given=0.2, took=0.001) == (1, 1)
    assert late(told, given=4, took=2.5) == (1, 1)
    for key in range(200):
        told.answered(key, new=False, seconds=0.01)
    for hurried in (0.001, 0.019):
        assert late(told, given=hurried, took=0.001) == (1, 1)
    assert told.comparison.report().new_pair.query_count == 0
    errors, latency = late(told, given=0.1, took=0.01)
    assert (errors, latency > 10) == (1, True)
    report = told.comparison.report()
    assert (
        report.new_pair.query_count,
        report.new_pair.error_count,
        report.new_pair.p99_latency_s,
    ) == (1, 1, 0.1)
    # How long one query takes says nothing about several in a call.
    assert late(told, given=0.1, took=0.01, single=False) == (errors, latency)
    assert late(told, given=4, took=0.1, single=False)[0] > 10


def test_the_old_pair_is_left_time_to_answer() -> None:
    told = Told(CANARY)
    assert told.comparison.time_allowance(8) == 4
    for key in range(200):
        told.answered(key, new=False, seconds=0.01)
    assert told.comparison.time_allowance(8) == 6
    assert told.comparison.time_allowance(0.06) == pytest.approx(0.04)
    assert told.comparison.time_allowance(0.03) == 0.015


def told_of_ordinary_queries() -> Told:
    """Of 600, half of which the new pair has answered, each of another session."""
    told = Told(CANARY)
    for key in range(600):
        told.answered(key, new=key >= 300)
    assert told.comparison.report().evidence_by_bound["latency"] < 1
    return told


def latency(told: Told, key: int, old: float, new: float) -> float:
    """The evidence after a slow answer, which took each pair so long when it was repeated."""
    told.answered(key, new=True, seconds=0.5)
    if told.slow:
        told.comparison.count_rerun(CANARY, old, new)
    return told.comparison.report().evidence_by_bound["latency"]


def test_what_takes_both_pairs_as_long_says_nothing() -> None:
    """Seven searches of many hits, compared exactly, stopped any canary."""
    told = told_of_ordinary_queries()
    before = told.comparison.report().evidence_by_bound["latency"]
    for key in range(1000, 1100):
        assert latency(told, key, old=0.4, new=0.5) == before


def test_one_caller_is_counted_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    told, now = told_of_ordinary_queries(), 1000.0
    replace_clock(monkeypatch, CanaryComparison.__module__, monotonic=lambda: now)
    before = told.comparison.report().evidence_by_bound["latency"]
    once = latency(told, 1000, old=0.1, new=0.5)
    assert before < once < EVIDENCE_LIMIT
    for _ in range(20):
        assert latency(told, 1000, old=0.1, new=0.5) == once
    # One token that is many sessions is one caller for a moment, too.
    told.token = "app"
    twice = latency(told, 1001, old=0.1, new=0.5)
    assert twice > once
    for key in range(1002, 1022):
        assert latency(told, key, old=0.1, new=0.5) == twice
    # And a pair that stays slow is found.
    for key in range(1022, 1042):
        now += 1.5
        evidence = latency(told, key, old=0.1, new=0.5)
    assert evidence > EVIDENCE_LIMIT
