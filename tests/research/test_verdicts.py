"""Verdicts on claims: by both figures, over paired seeds, against the strongest of several."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nobackfill.metrics.bootstrap import Difference
from nobackfill.research.cells import Cells
from nobackfill.research.claims import CLAIMS
from nobackfill.research.pages import format_claims
from nobackfill.research.results import ClaimOutcome, Provenance, read_results
from nobackfill.research.rows import MethodRow, TrainingRun
from nobackfill.research.summary import Claim, MeasuredRow, decide_claim, judge_claims, summarise

# Of the 200 queries.
CLASSES = np.repeat([f"class {number}" for number in range(20)], 10)
RESULTS = sorted((Path(__file__).parents[2] / "bench" / "results").glob("compare-*.json"))


def row(*gains: float, cmc1: float = 0.0, seed: int = 0) -> list[Cells]:
    """A seed a gain: as much more average precision on every query, `cmc1` more of CMC-1."""
    base = np.random.default_rng(seed).random(200)
    return [
        Cells({"new/old": {"map": base + gain, "cmc1": base + cmc1}}, {}, CLASSES) for gain in gains
    ]


def test_a_claim_is_judged_by_each_figure_on_its_own() -> None:
    rows = {"a": row(0.01, 0.01, cmc1=-0.01), "b": row(0.0, 0.0)}
    judged = judge_claims([Claim("a > b", ("a", "new/old"), ("b", "new/old"))], rows)["a > b"]
    assert (judged["map"].verdict, judged["cmc1"].verdict) == ("holds", "fails")
    assert judged["map"].difference == pytest.approx(0.01)
    assert judged["cmc1"].difference == pytest.approx(-0.01)


def test_claims_without_their_rows_or_cells_are_left_out() -> None:
    claims = [
        Claim("a > c", ("a", "new/old"), ("c", "new/old")),
        Claim("a's other cell", ("a", "new/new"), ("b", "new/old")),
        Claim("none of several", ("a", "new/old"), (("c", "d"), "new/old")),
    ]
    assert judge_claims(claims, {"a": row(0.1, 0.1), "b": row(0.0, 0.0)}) == {}


def test_one_seed_decides_nothing() -> None:
    rows = {"a": row(0.5), "b": row(0.0, 0.0)}
    judged = judge_claims([Claim("a > b", ("a", "new/old"), ("b", "new/old"))], rows)["a > b"][
        "map"
    ]
    assert judged.bounds is not None and judged.bounds[0] > 0
    assert judged.seeds == 1 and judged.verdict == "undecided"


def test_a_superlative_is_the_strongest_there_is_by_each_figure() -> None:
    rows = {
        "a": row(0.02, 0.02, cmc1=0.02),
        "by map": row(0.03, 0.03),
        "by cmc1": row(0.01, 0.01, cmc1=0.01),
        # Stronger, but of fewer seeds.
        "once": row(0.9, cmc1=0.9),
    }
    rivals = ("by map", "by cmc1", "once", "not there")
    judged = judge_claims([Claim("a > best", ("a", "new/old"), (rivals, "new/old"))], rows)[
        "a > best"
    ]
    assert (judged["map"].rival, judged["map"].verdict) == ("by map", "fails")
    assert (judged["cmc1"].rival, judged["cmc1"].verdict) == ("by cmc1", "holds")


@pytest.mark.parametrize(
    ("gains", "strict", "or_equal"),
    [
        ((0.01, 0.02), "holds", "holds"),
        ((0.0, 0.0), "undecided", "holds"),
        ((0.0, 0.01), "undecided", "holds"),
        ((-0.01, 0.01), "undecided", "undecided"),
        ((-0.01, 0.0), "undecided", "undecided"),
        ((-0.01, -0.02), "fails", "fails"),
    ],
)
def test_a_tie_keeps_a_claim_of_at_least_as_good(
    gains: tuple[float, ...], strict: str, or_equal: str
) -> None:
    """Seeds that gain each as much on every query: the interval ends at the least and the most."""
    rows = {"a": row(*gains), "b": row(*(0.0 for _ in gains))}
    ends = ("a", "new/old"), ("b", "new/old")
    judged = judge_claims([Claim("a > b", *ends), Claim("a >= b", *ends, allows_equal=True)], rows)
    assert judged["a > b"]["map"].verdict == strict
    assert judged["a >= b"]["map"].verdict == or_equal


def summary(gains: NDArray[np.float64], classes: NDArray[np.str_]) -> ClaimOutcome:
    """Of the claim that a row gains so much on queries of these classes, in each of ten seeds."""
    model = TrainingRun({"run_dir": Path(), "images": Path(), "classes": 10, "backbone": "none"})
    measured = {}
    for name, values in (("a", 0.5 + gains), ("b", np.full(len(gains), 0.5))):
        figures = {"map": values, "cmc1": values}
        cells = Cells(dict.fromkeys(("old/old", "new/new", "new/served"), figures), {}, classes)
        measured[name] = MeasuredRow(MethodRow(name, model, model), [cells] * 10)
    claim = Claim("a > b", ("a", "new/served"), ("b", "new/served"))
    made = Provenance(command="", machine="", configured="")
    found = summarise("few", "cosine", range(10), made, {"main": measured}, [claim], {})
    return found.main.claims["a > b"]["map"]


def test_claims_are_drawn_by_class() -> None:
    """Gains of whole classes, by chance above 0: neither their queries nor more seeds decide it."""
    by_class = np.random.default_rng(1).normal(0, 0.3, 20)
    by_class += 0.08 - by_class.mean()
    gains = by_class.repeat(10)
    assert summary(gains, CLASSES).verdict == "undecided"
    assert summary(gains, np.arange(200).astype(str)).verdict == "holds"
    assert summary(gains, CLASSES).classes == 20


def test_too_few_classes_decide_no_claim_and_have_no_interval() -> None:
    gains = np.full(90, 0.1)
    found = summary(gains, CLASSES[:90])
    assert (found.verdict, found.bounds, found.classes) == ("undecided", None, 9)
    assert found.difference == pytest.approx(0.1)
    assert "| undecided | +10.00 [9 classes] |" in format_claims({"a > b": {"map": found}})[-1]


def test_a_verdict_from_before_classes_were_drawn_is_withdrawn() -> None:
    """As earlier versions wrote it."""
    found = ClaimOutcome.model_validate_json(
        '{"rival": null, "seeds": 3, "difference": 0.1, "bounds": [0.05, 0.2], "verdict": "holds"}'
    )
    assert (found.verdict, found.bounds, found.difference) == ("withdrawn", None, 0.1)
    table = format_claims({"a > b": {"map": found}})
    assert table[-1] == "| a > b | - | - | withdrawn | +10.00 |"


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_kept_verdicts_are_those_of_their_bounds(file: Path) -> None:
    or_equal = {claim.text: claim.allows_equal for claim in CLAIMS}
    kept = [
        (text, figure, outcome, outcome.bounds)
        for split in read_results(file).splits.values()
        for text, figures in split.claims.items()
        for figure, outcome in figures.items()
        if outcome.bounds is not None
    ]
    for text, figure, outcome, (low, high) in kept:
        difference = Difference(outcome.difference, low, high)
        verdict = decide_claim(difference, outcome.seeds, allows_equal=or_equal[text])
        assert outcome.verdict == verdict, f"{text} by {figure}"
