"""The simulation of an upgrade against what can be reckoned by hand."""

from dataclasses import replace

import pytest

from bench.simulation import Plan, simulate

CALM = Plan(
    items=1_000_000, window=1_000, workers=4, lanes=8, read=100_000, carry=1_000, write=50_000,
    straggle=0, lost_every=1e9,
)  # fmt: skip


def test_without_trouble_it_takes_what_the_slower_side_takes() -> None:
    # 250 windows a worker, each a second of carrying, .01 of reading, .02 of writing.
    assert simulate(CALM, 1).hours == pytest.approx(250 * 1.03 / 3600)
    assert CALM.least_hours == pytest.approx(250 / 3600)
    # One lane for many quick workers: the store is always at work.
    narrow = replace(CALM, workers=16, lanes=1, carry=1e6)
    assert simulate(narrow, 1).hours == pytest.approx(narrow.least_hours, rel=0.01)


def test_stragglers_and_losses_cost_what_they_are() -> None:
    slow = replace(CALM, straggle=0.1, slow=11)
    assert simulate(slow, 1).hours == pytest.approx(2 * CALM.least_hours, rel=0.15)
    lossy = replace(CALM, lost_every=0.01, back_after=36)
    found = simulate(lossy, 1)
    # A worker is there for 36 s, away for 36 s.
    assert found.hours == pytest.approx(2 * CALM.least_hours, rel=0.3)
    assert found.lost > 10 and 0 < found.again <= found.lost
    assert simulate(lossy, 1) == found and simulate(lossy, 2) != found


def test_a_window_that_was_lost_at_the_end_is_carried_by_who_is_idle() -> None:
    last = replace(CALM, items=2_000, workers=2, lost_every=2 / 3600, back_after=1e4, carry=500)
    runs = [simulate(last, seed) for seed in range(40) if _ends(last, seed)]
    assert any(run.again for run in runs)
    assert all(run.hours < 1 for run in runs)


def _ends(plan: Plan, seed: int) -> bool:
    """Both are lost before the end in some runs: those wait for a worker to come back."""
    return simulate(plan, seed).lost < 2
