"""The simulation of an upgrade against what can be reckoned by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path

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


def test_the_plan_tells_what_was_measured_and_what_is_simulated() -> None:
    root = Path(__file__).parents[2]
    told = (root / "docs" / "plan.md").read_text()
    rates = re.search(
        r"carries ([\d,]+) items a second fp32, ([\d,]+) int8; "
        r".* reads ([\d,]+) and writes ([\d,]+)",
        told,
    )
    assert rates is not None
    fp32, int8, read, write = (float(text.replace(",", "")) for text in rates.groups())
    # By two threads; runs on shared machines differ, and the plan says by how much.
    upgrade = json.loads((root / "bench" / "results" / "upgrade.json").read_text())["tables"][0]
    measured = {row["what"]: row["items/s"] for row in upgrade["rows"]}
    assert fp32 == pytest.approx(measured["bare transform, fp32"] / 2, rel=0.5)
    assert int8 == pytest.approx(measured["bare transform, int8"] / 2, rel=0.5)
    assert read == pytest.approx(measured["bare read, fp32"], rel=0.5)
    assert write == pytest.approx(measured["bare write, fp32"], rel=0.5)
    row = r"^\| (\d+), (\d+), (\w+) \| ([\d.]+) h \| ([\d.]+) h \| ([\d.]+), ([\d.]+) \| (\d+) \|$"
    rows = re.findall(row, told, re.MULTILINE)
    assert len(rows) == 4
    for workers, lanes, kind, *figures in rows:
        least, median, first, last, hours = map(float, figures)
        carry = {"fp32": fp32, "int8": int8}[kind]
        plan = Plan(10**9, 65_536, int(workers), int(lanes), read=read, carry=carry, write=write)
        assert f"{plan.windows:,} windows" in told
        assert plan.least_hours == pytest.approx(least, abs=0.006)
        assert first - 0.006 <= simulate(plan, 0).hours <= last + 0.006
        assert first <= median <= last and hours == pytest.approx(median * int(workers), abs=1)
