"""How a claim is judged: by the paired bootstrap, by CMC-1 and by mAP, each on its own.

A claim is that one figure is larger than another on the same queries of the same seeds. Verdicts:
holds (the whole interval above 0; for a claim of >=, none of it below), fails (all of it below 0),
undecided. Classes are drawn, as queries of one class are not independent; fewer than 10 decide
nothing. Nor does one seed: its interval leaves the choice of weights out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nobackfill.metrics.bootstrap import Difference, Verdict, paired_bootstrap
from nobackfill.metrics.retrieval import PerQuery, mean
from nobackfill.training.comparison.cells import Cells

FIGURES = ("cmc1", "map")
# Fewer leave the training's randomness out of the interval.
FEWEST_SEEDS = 2

Rows = Mapping[str, Sequence[Cells]]
# A row and a cell; of several rows, the one with the largest figure.
Side = tuple[str | tuple[str, ...], str]


@dataclass(frozen=True)
class Claim:
    """`better` > `worse`, figure by figure and query by query; `better` >= `worse` with
    `or_equal`.
    """

    text: str
    better: Side
    worse: Side
    or_equal: bool = False


@dataclass(frozen=True)
class Judged:
    """One figure of a claim: the difference that was found over `seeds`. `rival`: which of several
    rows `worse` turned out to be.
    """

    rival: str | None
    difference: Difference
    seeds: int
    or_equal: bool = False

    @property
    def verdict(self) -> Verdict:
        """Holds, fails or undecided."""
        if self.seeds < FEWEST_SEEDS or self.difference.of_these_classes:
            return "undecided"
        if not self.or_equal:
            return self.difference.verdict
        if self.difference.low >= 0:
            return "holds"
        return "fails" if self.difference.high < 0 else "undecided"


def judge(claims: Sequence[Claim], rows: Rows) -> dict[str, dict[str, Judged]]:
    """Each claim whose rows are there, by its text and figure.

    `rows` holds a row's cells of each seed, the same seeds in the same order for all rows; a row of
    fewer seeds is compared on those that it has.
    """
    judged = {claim.text: _judge(claim, rows) for claim in claims}
    return {text: figures for text, figures in judged.items() if figures}


def _judge(claim: Claim, rows: Rows) -> dict[str, Judged]:
    found = {}
    for figure in FIGURES:
        sides = [_strongest(side, rows, figure) for side in (claim.better, claim.worse)]
        if not all(runs for _, runs in sides):
            continue
        seeds = min(len(runs) for _, runs in sides)
        (better, ours), (worse, theirs) = sides
        rival = None if isinstance(claim.worse[0], str) else worse
        classes = [run.classes for run in rows[better][:seeds]]
        difference = paired_bootstrap(ours[:seeds], theirs[:seeds], classes=classes)
        found[figure] = Judged(rival, difference, seeds, claim.or_equal)
    return found


def _strongest(side: Side, rows: Rows, figure: str) -> tuple[str, list[PerQuery]]:
    """The side's row with the largest mean, and its figures by seed; none where it has none."""
    names, cell = side
    found: dict[str, list[PerQuery]] = {}
    for name in (names,) if isinstance(names, str) else names:
        runs = [run.by_query[cell][figure] for run in rows.get(name, ()) if cell in run.by_query]
        if runs:
            found[name] = runs
    if not found:
        return "", []
    most = max(len(runs) for runs in found.values())
    whole = {name: runs for name, runs in found.items() if len(runs) == most}
    name = max(whole, key=lambda name: sum(mean(run) for run in whole[name]))
    return name, whole[name]
