"""Verdicts on claims: by both figures, over paired seeds, against the strongest of several."""

from pathlib import Path

import numpy as np
import pytest

from nobackfill.metrics.bootstrap import Difference
from nobackfill.training.comparison.cells import Cells
from nobackfill.training.comparison.claims import CLAIMS
from nobackfill.training.comparison.development import TABLE_SEEDS
from nobackfill.training.comparison.recipe import Run
from nobackfill.training.comparison.results import Made, read_results
from nobackfill.training.comparison.rows import Row
from nobackfill.training.comparison.summary import Measured, summarise
from nobackfill.training.comparison.verdicts import Claim, Judged, judge

RESULTS = sorted((Path(__file__).parents[3] / "bench" / "results").glob("compare-*.json"))


def row(*gains: float, cmc1: float = 0.0, seed: int = 0) -> list[Cells]:
    """A seed a gain: as much more average precision on every query, `cmc1` more of CMC-1."""
    base = np.random.default_rng(seed).random(200)
    return [Cells({"new/old": {"map": base + gain, "cmc1": base + cmc1}}, {}) for gain in gains]


def test_a_claim_is_judged_by_each_figure_on_its_own() -> None:
    rows = {"a": row(0.01, 0.01, cmc1=-0.01), "b": row(0.0, 0.0)}
    judged = judge([Claim("a > b", ("a", "new/old"), ("b", "new/old"))], rows)["a > b"]
    assert (judged["map"].verdict, judged["cmc1"].verdict) == ("holds", "fails")
    assert judged["map"].difference.mean == pytest.approx(0.01)
    assert judged["cmc1"].difference.mean == pytest.approx(-0.01)


def test_claims_without_their_rows_or_cells_are_left_out() -> None:
    claims = [
        Claim("a > c", ("a", "new/old"), ("c", "new/old")),
        Claim("a's other cell", ("a", "new/new"), ("b", "new/old")),
        Claim("none of several", ("a", "new/old"), (("c", "d"), "new/old")),
    ]
    assert judge(claims, {"a": row(0.1, 0.1), "b": row(0.0, 0.0)}) == {}


def test_one_seed_decides_nothing() -> None:
    rows = {"a": row(0.5), "b": row(0.0, 0.0)}
    judged = judge([Claim("a > b", ("a", "new/old"), ("b", "new/old"))], rows)["a > b"]["map"]
    assert judged.difference.low > 0
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
    judged = judge([Claim("a > best", ("a", "new/old"), (rivals, "new/old"))], rows)["a > best"]
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
    judged = judge([Claim("a > b", *ends), Claim("a >= b", *ends, or_equal=True)], rows)
    assert judged["a > b"]["map"].verdict == strict
    assert judged["a >= b"]["map"].verdict == or_equal


def test_seeds_of_a_table_are_judged_on_one_draw_of_queries() -> None:
    """Ten seeds that gain by the choice of 200 images; a development split has others each time."""
    by_choice = np.random.default_rng(1).normal(0, 0.3, 200)
    by_choice += 0.53 - by_choice.mean()
    model = Run({"run_dir": Path(), "images": Path(), "classes": 10, "backbone": "none"})
    measured = {}
    for name, values in (("a", by_choice), ("b", np.full(200, 0.5))):
        figures = {"map": values, "cmc1": values}
        cells = Cells(dict.fromkeys(("old/old", "new/new", "new/served"), figures), {})
        measured[name] = Measured(Row(name, model, model), [cells] * 10)
    claim = Claim("a > b", ("a", "new/served"), ("b", "new/served"))
    made = Made(command="", machine="", configured="")
    for first, verdict in ((TABLE_SEEDS, "undecided"), (0, "holds")):
        seeds = range(first, first + 10)
        found = summarise("few", "cosine", seeds, made, {"main": measured}, [claim], {})
        assert found.main.claims["a > b"]["map"].verdict == verdict


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_kept_verdicts_are_those_of_their_bounds(file: Path) -> None:
    or_equal = {claim.text: claim.or_equal for claim in CLAIMS}
    kept = [
        (text, figure, outcome, outcome.bounds)
        for split in read_results(file).splits.values()
        for text, figures in split.claims.items()
        for figure, outcome in figures.items()
        if outcome.bounds is not None
    ]
    assert kept
    for text, figure, outcome, (low, high) in kept:
        difference = Difference(outcome.difference, low, high)
        judged = Judged(outcome.rival, difference, outcome.seeds, or_equal[text])
        assert outcome.verdict == judged.verdict, f"{text} by {figure}"
