"""`python -m bench.run TOPIC --beside CHECKOUT`: compare this checkout with another one.

Each run is a process of its checkout's own environment and code. Runs come in pairs whose order
alternates, so that a machine that becomes slower does so for both. A figure's ratio is the
geometric mean over the pairs; its interval is Student's, over the logarithms.
"""

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness import Row, Table

RUNNER = Path(__file__).with_name("one_run.py")
# The goal of issue O: the upper bound of a ratio's interval.
LIMIT = 1.05
CONFIDENCE = 0.95
# For each topic, numbers of its small scale and what pairs take instead: a run of half a minute.
SIZES: Mapping[str, Mapping[Any, Any]] = {
    "search": {(10_000, 100_000): (10_000,)},
    "image": {10_000: 3000, 3: 2},
    "swap": {20_000: 5000, 10: 4, 10_000: 2000, 5.0: 2.0},
    "filter": {200_000: 50_000},
    "memory": {(40_000, 512): (20_000, 512)},
    "upgrade": {100_000: 20_000},
    "edge": {(1000, 10_000, 100_000): (10_000,)},
    "startup": {(100_000,): (10_000,), 7: 3},
}
# What a figure measures, by its name, and whether less of it is better. A rate of items is left
# out: it is the inverse of a time in the same row.
_MEASURES = (
    ("recall", re.compile(r"^recall@"), False),
    ("speed", re.compile(r"(queries|calls)/s\Z"), False),
    ("memory", re.compile(r"\bMiB\b|times the vectors\Z"), True),
    ("speed", re.compile(r"(?<!/)\b(s|seconds|ms|us)\b"), True),
)
# Columns of numbers that say which row it is.
_SIZES = ("clients", "items", "ef")
# Rows and columns of what a topic measures beside our code: they show how the machine changed.
_CONTROLS = ("bare ", "echo ", "triton", "python")
# Single calls decide these, so ten pairs cannot tell 5 % of them.
_TAILS = ("p99", "worst")


@dataclass(frozen=True)
class Interval:
    """A ratio new to old, below 1 where new is better, and the bounds of its interval."""

    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`met`, `missed`, or `open` where more pairs are needed."""
        if self.high <= LIMIT:
            return "met"
        return "missed" if self.low > LIMIT else "open"


@dataclass(frozen=True)
class Figure:
    """One number of a topic in both checkouts, a value for each pair.

    `kind` is `judged`, `control` (of what is not our code) or `tail`; only the first counts.
    """

    table: str
    name: str
    kind: str
    measure: str
    less_is_better: bool
    new: tuple[float, ...]
    old: tuple[float, ...]

    @property
    def logs(self) -> list[float]:
        """Logarithms of the paired ratios, negative where new is better."""
        sign = 1 if self.less_is_better else -1
        return [sign * math.log(n / o) for n, o in zip(self.new, self.old, strict=True)]


@dataclass(frozen=True)
class CheckoutComparison:
    """A topic's figures in both checkouts."""

    topic: str
    results: Mapping[str, Sequence[Mapping[str, Any]]]
    figures: Sequence[Figure]
    left_out: Sequence[str]
    card: str

    @property
    def judged(self) -> list[Figure]:
        """The figures that count."""
        return [one for one in self.figures if one.kind == "judged"]

    @property
    def wholes(self) -> dict[str, Interval]:
        """All judged figures of speed together, and all of memory, each of the same weight."""
        logs = {
            measure: [one.logs for one in self.judged if one.measure == measure]
            for measure in ("speed", "memory")
        }
        return {
            measure: student_interval([statistics.mean(pair) for pair in zip(*some, strict=True)])
            for measure, some in logs.items()
            if some
        }

    @property
    def failures(self) -> float:
        """Calls that failed in the new checkout."""
        return sum(_failures(one) for one in self.results["new"])

    @property
    def met(self) -> bool:
        """Whether the wholes are within the limit, no figure is beyond it, and no call failed."""
        missed = any(student_interval(one.logs).verdict == "missed" for one in self.judged)
        wholes = all(one.verdict == "met" for one in self.wholes.values())
        return wholes and not missed and not self.failures

    def answer(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "topic": self.topic,
            "pairs": len(self.results["new"]),
            "limit": LIMIT,
            "confidence": CONFIDENCE,
            **{side: _origin(runs) for side, runs in self.results.items()},
            "machine": {**self.results["new"][0]["machine"], "card": self.card},
            "seconds": {side: [r["seconds"] for r in runs] for side, runs in self.results.items()},
            "met": self.met,
            "failures": self.failures,
            "wholes": {measure: _shown(one) for measure, one in self.wholes.items()},
            "figures": [asdict(one) | _shown(student_interval(one.logs)) for one in self.figures],
            "left_out": self.left_out,
        }

    def tables(self) -> list[Table]:
        """What people read."""
        first = self.results["new"][0]["machine"]
        note = (
            f"New is commit {_origin(self.results['new'])['commit']}, old is "
            f"{_origin(self.results['old'])['commit']}; {len(self.results['new'])} pairs on "
            f"{first['processor']}, {first['cores']} cores, card: {self.card}. A ratio below 1 "
            f"means that new is better; the goal is an upper bound of at most {LIMIT}."
        )
        titles = dict.fromkeys(one.table for one in self.figures)
        parts = [
            Table(title, [_row(one) for one in self.figures if one.table == title])
            for title in titles
        ]
        wholes: list[Row] = [
            {"all judged figures": measure, **_texts(one)} for measure, one in self.wholes.items()
        ]
        return [*parts, Table(f"{self.topic}, new beside old", wholes, note)]


def student_interval(logs: Sequence[float]) -> Interval:
    """Student's interval of the mean of at least two logarithms, as ratios."""
    # Imported here: other topics need not spend the time.
    from scipy.special import stdtrit

    mean = statistics.mean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    half = float(stdtrit(len(logs) - 1, (1 + CONFIDENCE) / 2)) * error
    return Interval(*(math.exp(one) for one in (mean, mean - half, mean + half)))


def compare_checkouts(
    topic: str, new: Path, old: Path, pair_count: int, scratch: Path
) -> CheckoutComparison:
    """Run a topic in both checkouts, pair after pair, after one run of each that is not counted.

    Raises RuntimeError if a run fails, or if the two have no figure in common.
    """
    sides = {"new": new.resolve(), "old": old.resolve()}
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    shutil.rmtree(scratch, ignore_errors=True)
    for number in range(-1, pair_count):
        # The first run of each makes what the later ones share, and compiles what they import.
        for side in ("new", "old") if number % 2 == 0 else ("old", "new"):
            result = _run(topic, sides[side], scratch / side)
            if number >= 0:
                results[side].append(result)
        told = f"pair {number + 1} of {pair_count}" if number >= 0 else "first runs, not counted"
        print(f"{topic}: {told}", file=sys.stderr, flush=True)
    values = {side: [_figures(one) for one in runs] for side, runs in results.items()}
    runs = [*values["new"], *values["old"]]
    named = dict.fromkeys(name for run in runs for name in run)
    common = [name for name in named if all(name in run for run in runs)]
    figures = [
        Figure(*name, *(tuple(run[name] for run in values[side]) for side in ("new", "old")))
        for name in common
    ]
    left_out = [f"{name[0]}: {name[1]}" for name in named if name not in common]
    found = CheckoutComparison(topic, results, figures, left_out, _card())
    if not found.judged:
        raise RuntimeError(
            f"{topic}: the two checkouts must have a figure of the same name to be compared; "
            f"found only {', '.join(left_out)}"
        )
    return found


def _run(topic: str, root: Path, scratch: Path) -> dict[str, Any]:
    folder, result = scratch / topic, scratch / "result.json"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    python = root / ".venv" / "bin" / "python"
    if not python.exists():
        raise RuntimeError(f"{root} must have a virtual environment .venv: run `make setup` there")
    paths = (folder, scratch / "shared", result)
    command = [str(python), str(RUNNER), topic, repr(SIZES[topic]), *map(str, paths)]
    done = subprocess.run(
        command, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{topic} failed in {root}: {done.stderr.strip()[-2000:]}")
    shutil.rmtree(folder)
    answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return answer


def _figures(result: Mapping[str, Any]) -> dict[tuple[str, str, str, str, bool], float]:
    """Positive numbers that measure something, by the first fields of their `Figure`."""
    found = {}
    for table in result["tables"]:
        for row in table["rows"]:
            label = _label(row)
            for column, value in row.items():
                if not isinstance(value, int | float) or value <= 0:
                    continue
                named = label if column == "value" else column
                name = label if column == "value" else f"{label}, {column}"
                for measure, pattern, less in _MEASURES:
                    if pattern.search(named):
                        key = (table["title"], name, _kind(row, column), measure, less)
                        found[key] = float(value)
                        break
    return found


def _label(row: Mapping[str, Any]) -> str:
    """A row's texts and sizes: what says which row it is."""
    parts = [
        value if isinstance(value, str) else f"{value} {column}"
        for column, value in row.items()
        if column in _SIZES or (isinstance(value, str) and column != "spread")
    ]
    return ", ".join(parts)


def _kind(row: Mapping[str, Any], column: str) -> str:
    texts = [column, *(value for value in row.values() if isinstance(value, str))]
    if any(text.startswith(_CONTROLS) for text in texts):
        return "control"
    return "tail" if column.startswith(_TAILS) else "judged"


def _failures(result: Mapping[str, Any]) -> float:
    rows = (row for table in result["tables"] for row in table["rows"])
    return sum(float(row["value"]) for row in rows if row.get("what") == "failures")


def _origin(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The commit and the versions of one side, which must not change between its runs."""
    commits = dict.fromkeys(run["commit"] for run in runs)
    return {"commit": " then ".join(commits), "versions": runs[0]["versions"]}


def _card() -> str:
    """The graphics cards, as NVIDIA's driver names them."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    names = dict.fromkeys(done.stdout.strip().splitlines()) if done.returncode == 0 else {}
    return ", ".join(names) or "none"


def _row(figure: Figure) -> Row:
    return {
        "figure": figure.name,
        "new": statistics.median(figure.new),
        "old": statistics.median(figure.old),
        **_texts(student_interval(figure.logs)),
        **({} if figure.kind == "judged" else {"verdict": f"({figure.kind})"}),
    }


def _texts(found: Interval) -> dict[str, str]:
    return {
        "new/old": f"{found.ratio:.3f}",
        "95 % interval": f"{found.low:.3f} to {found.high:.3f}",
        "verdict": found.verdict,
    }


def _shown(found: Interval) -> dict[str, Any]:
    return asdict(found) | {"verdict": found.verdict}
