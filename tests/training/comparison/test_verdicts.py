"""Verdicts on claims: by both figures, over paired seeds, against the strongest of several."""

import numpy as np
import pytest

from nobackfill.training.comparison.cells import Cells
from nobackfill.training.comparison.verdicts import Claim, judge


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
        ((0.0, 0.0), "fails", "holds"),
        ((0.0, 0.01), "undecided", "holds"),
        ((-0.01, 0.01), "undecided", "undecided"),
        ((-0.01, 0.0), "fails", "undecided"),
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
