"""`--beside`: two tiny checkouts whose real difference is known, each run by its own code."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from bench import pairs, record

# Seconds and calls are of `cost.txt`; the machine becomes three times slower after six runs.
TOPIC = """
from pathlib import Path

from bench.harness import Table


def run(bench):
    cost = float(Path("cost.txt").read_text())
    if not cost:
        raise ValueError("cost.txt is zero")
    order = bench.shared.parent.parent / "order"
    with order.open("a") as file:
        file.write(Path.cwd().name + " ")
    number = len(order.read_text().split())
    machine = (3 if number > 6 else 1) * (1 + 0.001 * (number * 7 % 5))
    rows = [
        {"server": "gateway", "clients": bench.size(1, 2, 3), "queries/s": 900 / cost / machine,
         "p99 ms": cost * machine, "of echo": 0.5, "spread": "+-1 %"},
        {"server": "echo aio", "clients": bench.size(1, 2, 3), "queries/s": 950 / machine},
    ]
    more = [
        {"what": "seconds of a swap", "value": 2 * cost * machine},
        {"what": "gateway MiB at its peak", "value": 300.0},
        {"what": "failures", "value": 0},
        {"what": Path.cwd().name + " MiB", "value": 1.0},
    ]
    return [Table("Search", rows), Table("What it cost", more)]
"""


def _checkout(root: Path, cost: float) -> Path:
    """A repository with a bench of one topic, an environment, and a package of its own."""
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (root / "bench" / "topics").mkdir(parents=True)
    (root / "nobackfill").mkdir()
    (root / "nobackfill" / "__init__.py").touch()
    here = Path(pairs.__file__).parent
    for name in ("__init__", "harness", "record", "run", "pairs", "one_run"):
        shutil.copy(here / f"{name}.py", root / "bench")
    (root / "bench" / "topics" / "__init__.py").touch()
    (root / "bench" / "topics" / "search.py").write_text(TOPIC)
    (root / "cost.txt").write_text(str(cost))
    (root / ".gitignore").write_text("build\n.venv\n__pycache__\n")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", root.name], check=True)
    return root


def _by_name(found: pairs.CheckoutComparison) -> dict[str, pairs.Figure]:
    return {one.name: one for one in found.figures}


def test_a_known_difference_is_found_on_a_machine_that_becomes_slower(tmp_path: Path) -> None:
    new, old = _checkout(tmp_path / "new", 1.1), _checkout(tmp_path / "old", 1.0)
    found = pairs.compare_checkouts("search", new, old, 4, tmp_path / "scratch")
    order = (tmp_path / "scratch" / "order").read_text().split()
    assert order == ["old", "new", "new", "old"] * 2 + ["old", "new"]
    figures = _by_name(found)
    swap = figures["seconds of a swap"]
    assert pairs.student_interval(swap.logs).ratio == pytest.approx(1.1, abs=0.005)
    # The medians alone would be 1 or 3.
    assert max(swap.new) > 2.5 * min(swap.new)
    rate = figures["gateway, 2 clients, queries/s"]
    assert not rate.less_is_better
    assert pairs.student_interval(rate.logs).ratio == pytest.approx(1.1, abs=0.005)
    assert pairs.student_interval(figures["gateway MiB at its peak"].logs).verdict == "met"
    kinds = {one.kind: name for name, one in figures.items() if one.kind != "judged"}
    assert kinds == {
        "control": "echo aio, 2 clients, queries/s",
        "tail": "gateway, 2 clients, p99 ms",
    }
    assert found.left_out == ["What it cost: new MiB", "What it cost: old MiB"]
    together = [float(np.mean(logs)) for logs in zip(swap.logs, rate.logs, strict=True)]
    assert found.wholes["speed"] == pairs.student_interval(together)
    assert found.wholes["memory"] == pairs.Interval(1, 1, 1)
    assert not found.met


@pytest.mark.long
def test_the_command_says_both_commits_and_whether_the_limit_is_met(tmp_path: Path) -> None:
    new, old = _checkout(tmp_path / "new", 1.0), _checkout(tmp_path / "old", 1.3)
    heads = {
        root.name: subprocess.check_output(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], text=True
        ).strip()
        for root in (new, old)
    }
    for first, second, code in ((new, old, 0), (old, new, 1)):
        answer = tmp_path / "answer.json"
        done = subprocess.run(
            [sys.executable, "-m", "bench.run", "search", "--beside", second, "--pairs", "2",
             "--json", answer], cwd=first, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        told = json.loads(answer.read_text())
        assert told["met"] is (code == 0)
        assert told["pairs"] == 2
        assert told["new"]["commit"] == heads[first.name]
        assert told["old"]["commit"] == heads[second.name]
        assert heads[first.name] in done.stdout and heads[second.name] in done.stdout
        assert told["machine"]["processor"] == record.describe_machine()["processor"]
        assert told["machine"]["card"] in done.stdout
        (swap,) = (one for one in told["figures"] if one["name"] == "seconds of a swap")
        expected = 1 / 1.3 if code == 0 else 1.3
        assert swap["ratio"] == pytest.approx(expected, rel=0.05)
        assert swap["verdict"] == ("met" if code == 0 else "missed")


def test_an_environment_of_another_checkout_is_refused(tmp_path: Path) -> None:
    new = _checkout(tmp_path / "new", 1.0)
    shutil.rmtree(new / ".venv")
    (new / ".venv").symlink_to(sys.prefix)
    shutil.rmtree(new / "nobackfill")
    with pytest.raises(RuntimeError, match=r"must import nobackfill from .*make setup"):
        pairs.compare_checkouts("search", new, new, 2, tmp_path / "scratch")
    (new / ".venv").unlink()
    with pytest.raises(RuntimeError, match=r"virtual environment \.venv: run `make setup`"):
        pairs.compare_checkouts("search", new, new, 2, tmp_path / "scratch")


def test_a_run_that_fails_ends_the_comparison_with_its_words(tmp_path: Path) -> None:
    new, old = _checkout(tmp_path / "new", 1.0), _checkout(tmp_path / "old", 0)
    with pytest.raises(RuntimeError, match=r"failed in .*old: (.|\n)*cost.txt is zero"):
        pairs.compare_checkouts("search", new, old, 2, tmp_path / "scratch")


def test_an_interval_is_that_of_scipys_test() -> None:
    logs = np.random.default_rng(1).normal(0.02, 0.05, 10)
    found = pairs.student_interval(list(logs))
    low, high = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert found.ratio == pytest.approx(stats.gmean(np.exp(logs)))
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))


@pytest.mark.slow
def test_nineteen_intervals_of_twenty_hold_the_true_ratio() -> None:
    rng = np.random.default_rng(2)
    found = [pairs.student_interval(list(rng.normal(math.log(1.03), 0.1, 10))) for _ in range(2000)]
    share = np.mean([one.low <= 1.03 <= one.high for one in found])
    # Four standard errors.
    assert share == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 2000))


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.9, 1.05, "met"), (1.01, 1.06, "open"), (0.9, 1.2, "open"), (1.051, 1.06, "missed")],
)
def test_a_verdict_is_about_the_bounds(low: float, high: float, verdict: str) -> None:
    assert pairs.Interval((low * high) ** 0.5, low, high).verdict == verdict


@pytest.mark.parametrize("topic", pairs.SIZES)
def test_every_committed_result_has_figures_of_ours(topic: str) -> None:
    """The rules for names find what the topic is about, in the results of earlier commits."""
    result = json.loads((record.RESULTS / f"{topic}.json").read_text())
    kinds = [kind for _, _, kind, _, _ in pairs._figures(result)]
    assert "judged" in kinds
