"""Evidence that holds under peeking: simulated lives of canaries, looked at after every event."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobackfill.digests import is_in_share, share_digest
from nobackfill.server.canary.comparison import overlap, rank_correlation
from nobackfill.server.canary.evidence import CanaryEvidence
from nobackfill.server.canary.sessions import CanarySessions, FeedbackKind

RUNS, ALPHA = 300, 0.05
# A rate of false alarms of ALPHA shows more than this once in a thousand times RUNS runs.
TOO_MANY = 0.093


def ever(outcomes: np.ndarray, bound: float) -> bool:
    """Whether somebody who looks after each outcome ever stops, at 1 / ALPHA."""
    evidence = CanaryEvidence()
    for outcome in outcomes.tolist():
        evidence.add_outcome(outcome, bound)
        if evidence.value >= 1 / ALPHA:
            return True
    return False


@pytest.mark.parametrize(("bound", "outcomes"), [(0.01, 600), (0.5, 300)])
def test_who_peeks_at_every_outcome_is_rarely_wrong(bound: float, outcomes: int) -> None:
    rng = np.random.default_rng(1)
    drawn = rng.random((RUNS, outcomes)) < bound
    assert np.mean([ever(run, bound) for run in drawn]) <= TOO_MANY


def test_a_rate_that_is_only_looked_at_often_is_wrong_often() -> None:
    """What the above is for: the usual test at 5%, taken after each outcome."""
    rng = np.random.default_rng(1)
    seen = np.cumsum(rng.random((RUNS, 300)) < 0.5, axis=1)
    n = np.arange(1, 301)
    z = (seen - n / 2) / np.sqrt(n / 4)
    assert np.mean((z[:, 10:] > 1.645).any(axis=1)) > 3 * ALPHA


def test_a_share_above_its_bound_is_found() -> None:
    rng = np.random.default_rng(2)
    assert np.mean([ever(run, 0.01) for run in rng.random((50, 600)) < 0.05]) > 0.95


@pytest.mark.slow
def test_who_peeks_for_long_is_rarely_wrong() -> None:
    """Healthy for long, then just as the bound allows."""
    rng = np.random.default_rng(5)
    chances = np.repeat([0.002, 0.01], [1500, 1500])
    assert np.mean([ever(run, 0.01) for run in rng.random((100, 3000)) < chances]) <= 0.13


def after(good: int) -> CanaryEvidence:
    evidence = CanaryEvidence()
    for _ in range(good):
        evidence.add_outcome(False, 0.01)
    return evidence


@pytest.mark.parametrize("good", [0, 1000, 100_000])
def test_what_breaks_late_is_found_as_soon(good: int) -> None:
    """All that is asked of it fails, or one query in twelve."""
    failed = after(good)
    for _ in range(20):
        failed.add_outcome(True, 0.01)
    assert failed.value >= 80
    failed = after(good)
    for broken in np.random.default_rng(6).random(2400) < 1 / 12:
        failed.add_outcome(bool(broken), 0.01)
        if failed.value >= 80:
            break
    assert failed.value >= 80


@given(st.lists(st.booleans(), max_size=8), st.floats(0.01, 0.99))
@settings(max_examples=60, deadline=None)
def test_evidence_is_fair_in_the_mean(before: list[bool], bound: float) -> None:
    """After anything that was seen, the next outcome leaves the mean as it is at the bound itself,
    and no higher below it."""
    for chance in (bound, bound / 2):
        values = []
        for outcome in (True, False):
            evidence = CanaryEvidence()
            for one in [*before, outcome]:
                evidence.add_outcome(one, bound)
            values.append(evidence.value)
        now = CanaryEvidence()
        for one in before:
            now.add_outcome(one, bound)
        mean = chance * values[0] + (1 - chance) * values[1]
        assert mean <= now.value * (1 + 1e-9)
        if chance == bound:
            assert mean == pytest.approx(now.value)


def life(
    rng: np.random.Generator, share: float, chances: tuple[float, float], kind: FeedbackKind
) -> bool:
    """200 to 400 sessions that search and send feedback in any order, some of them all the time;
    whether the canary ever stops."""
    sessions, request = CanarySessions(), itertools.count()
    often = rng.random(400) ** 4
    for step in range(1500):
        key = int(rng.integers(200 + 200 * (step > 700)))
        new = is_in_share(share_digest(7, f"session {key}"), share)
        name = str(next(request))
        sessions.count_answer(key, name, ["item"], is_new_pair=new)
        if rng.random() < chances[new] * often[key]:
            sessions.record_feedback(name, "item", kind)
            if sessions.evidence[kind].value >= 1 / ALPHA:
                return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["approved", "rejected"])
def test_feedback_about_equal_pairs_rarely_stops_a_canary(kind: FeedbackKind) -> None:
    rng = np.random.default_rng(3)
    assert np.mean([life(rng, 0.3, (0.5, 0.5), kind) for _ in range(100)]) <= 0.13


def test_feedback_about_a_worse_pair_stops_it() -> None:
    rng = np.random.default_rng(4)
    assert np.mean([life(rng, 0.5, (0.6, 0.1), "approved") for _ in range(20)]) > 0.9
    assert np.mean([life(rng, 0.5, (0.1, 0.6), "rejected") for _ in range(20)]) > 0.9
    # A better one goes on.
    assert not any(life(rng, 0.5, (0.1, 0.6), "approved") for _ in range(20))


def test_answers_are_remembered_without_the_texts_of_their_ids() -> None:
    sessions = CanarySessions()
    tracemalloc.start()
    for n in range(1000):
        sessions.count_answer(
            n, str(n), [f"{i} {n} {'x' * 500}" for i in range(100)], is_new_pair=False
        )
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1000 * 100 * 30
    assert sessions.record_feedback("7", f"99 7 {'x' * 500}", "approved")
    assert not sessions.record_feedback("7", f"100 7 {'x' * 500}", "approved")


def test_feedback_is_about_an_answer_that_was_given() -> None:
    sessions = CanarySessions()
    sessions.count_answer(1, "a", ["x", "y"], is_new_pair=True)
    assert sessions.record_feedback("a", "x", "approved")
    # Again, and about the other item: one session says one thing once.
    assert sessions.record_feedback("a", "y", "approved")
    assert sessions.feedback_counts["approved"] == [0, 1]
    assert not sessions.record_feedback("a", "z", "approved")
    assert not sessions.record_feedback("b", "x", "approved")
    sessions.reset()
    assert not sessions.record_feedback("a", "x", "approved")


@given(st.text(max_size=20), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=100)
def test_shares_only_grow(key: str, one: float, other: float) -> None:
    smaller, larger = sorted((one, other))
    assert is_in_share(share_digest(2, key), larger) or not is_in_share(
        share_digest(2, key), smaller
    )
    assert is_in_share(share_digest(2, key), 1.0)


def test_a_share_is_what_it_says() -> None:
    keys = [share_digest(2, str(n)) for n in range(10_000)]
    assert np.mean([is_in_share(key, 0.05) for key in keys]) == pytest.approx(0.05, abs=0.008)
    # Another release is tried on others.
    both = [
        is_in_share(share_digest(2, str(n)), 0.2) and is_in_share(share_digest(3, str(n)), 0.2)
        for n in range(9999)
    ]
    assert np.mean(both) == pytest.approx(0.04, abs=0.01)


def test_answers_are_compared_by_items_and_ranks() -> None:
    assert overlap("abcd", "abxy") == 0.5
    assert overlap("", "") == 1
    assert overlap("a", "") == 0
    assert rank_correlation("abcd", "abcd") == pytest.approx(1)
    assert rank_correlation("abcd", "dcba") == pytest.approx(-1)
    # Of those that both have: a and c, in the same order.
    assert rank_correlation("abc", "xayc") == pytest.approx(1)
    assert rank_correlation("ab", "bx") is None
