"""The simulation of an upgrade against what can be reckoned by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.simulation import UpgradePlan, simulate_upgrade

CALM = UpgradePlan(
    item_count=1_000_000, window=1_000, worker_count=4, lane_count=8, read=100_000, carry=1_000,
    write=50_000, straggle=0, lost_every=1e9,
)  # fmt: skip


def test_without_trouble_it_takes_what_the_slower_side_takes() -> None:
    # 250 windows a worker, each a second of carrying, .01 of reading, .02 of writing.
    assert simulate_upgrade(CALM, 1).hours == pytest.approx(250 * 1.03 / 3600)
    assert CALM.least_hours == pytest.approx(250 / 3600)
    # One lane for many quick workers: the store is always at work.
    narrow = replace(CALM, worker_count=16, lane_count=1, carry=1e6)
    assert simulate_upgrade(narrow, 1).hours == pytest.approx(narrow.least_hours, rel=0.01)


def test_stragglers_and_losses_cost_what_they_are() -> None:
    slow = replace(CALM, straggle=0.1, slow=11)
    assert simulate_upgrade(slow, 1).hours == pytest.approx(2 * CALM.least_hours, rel=0.15)
    lossy = replace(CALM, lost_every=0.01, back_after=36)
    found = simulate_upgrade(lossy, 1)
    # A worker is there for 36 s, away for 36 s.
    assert found.hours == pytest.approx(2 * CALM.least_hours, rel=0.3)
    assert found.lost_workers > 10 and 0 < found.repeated_windows <= found.lost_workers
    assert simulate_upgrade(lossy, 1) == found and simulate_upgrade(lossy, 2) != found


def test_a_window_that_was_lost_at_the_end_is_carried_by_who_is_idle() -> None:
    last = replace(
        CALM, item_count=2_000, worker_count=2, lost_every=2 / 3600, back_after=1e4, carry=500
    )
    runs = [simulate_upgrade(last, seed) for seed in range(40) if _ends(last, seed)]
    assert any(run.repeated_windows for run in runs)
    assert all(run.hours < 1 for run in runs)


def _ends(plan: UpgradePlan, seed: int) -> bool:
    """Both are lost before the end in some runs: those wait for a worker to come back."""
    return simulate_upgrade(plan, seed).lost_workers < 2


PLAN = (Path(__file__).parents[2] / "docs" / "lab" / "a-billion-items.md").read_text()


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_the_plan_tells_what_was_measured_and_what_is_simulated() -> None:
    rates = re.search(r"A core carries ([\d,]+) items .* takes ([\d.]+) us", PLAN)
    assert rates is not None
    carry, stored_us = map(number, rates.groups())
    results = Path(__file__).parents[2] / "bench" / "results"
    tables = json.loads((results / "scale-full.json").read_text())["tables"]
    (bare,) = (row["items/s"] for row in tables[0]["rows"] if row["way"] == "bare")
    first = tables[-1]["rows"][0]
    # There the lanes are the slower side.
    measured_us = first["least hours"] * 3600 * first["lanes"] / 1e9 * 1e6
    assert stored_us == pytest.approx(measured_us, rel=0.5)
    # By two threads; runs on shared machines differ, and the plan says by how much.
    assert 2e6 / carry == pytest.approx(2 * 2 * (1e6 / bare - measured_us), rel=0.5)
    row = r"^\| (\d+), (\d+) \| ([\d.]+) h \| ([\d.]+) h \| ([\d.]+), ([\d.]+) \| (\d+) \|$"
    rows = re.findall(row, PLAN, re.MULTILINE)
    assert len(rows) == 3
    for workers, lanes, *figures in rows:
        least, median, low, high, hours = map(float, figures)
        # How a lane's time is shared between them changes hardly anything.
        half = 2e6 / stored_us
        plan = UpgradePlan(
            10**9, 65_536, int(workers), int(lanes), read=half, carry=carry, write=half
        )
        assert f"{plan.windows:,} windows" in PLAN
        assert plan.least_hours == pytest.approx(least, abs=0.006)
        assert low - 0.006 <= simulate_upgrade(plan, 0).hours <= high + 0.006
        assert low <= median <= high
        assert hours == pytest.approx(median * (int(workers) + int(lanes)), abs=1)


def test_the_plans_costs_are_their_hours_times_a_price() -> None:
    core, gpu = (float(re.search(rf"(\.\d+) a {kind} hour", PLAN)[1]) for kind in ("core", "GPU"))  # type: ignore[index]
    for kind, price in (("core", core), ("GPU", gpu)):
        found = re.findall(rf"\| ([\d,]+) {kind} hours \|[^|]*?([\d,]+) \|$", PLAN, re.MULTILINE)
        assert len(found) == 2
        for hours, cost in found:
            assert number(cost) == pytest.approx(number(hours) * price, rel=0.05, abs=0.5)
    rates = re.findall(r"\| ([\d,]+) images/s( on two)?.*?\| ([\d,]+) (?:core|GPU) hours", PLAN)
    assert len(rates) == 3
    for rate, on_two, hours in rates:
        cores = 2 if on_two else 1
        assert number(hours) == pytest.approx(cores * 1e9 / number(rate) / 3600, rel=0.01)
