"""Summarise a comparison from the cells of its rows: means over seeds, shares kept, and claims.

A claim says that one figure is larger than another, on the same queries of the same seeds. It is
judged by the paired bootstrap, separately for CMC-1 and mAP. It holds if the whole interval is
above 0 (for >=: if none of it is below), fails if all of it is below 0, and else is undecided.
Classes are resampled, because queries of one class are not independent. Fewer than 10 classes, or
one seed, decide nothing; the interval of one seed does not contain the randomness of the weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nobackfill.metrics.bootstrap import Difference, Verdict, paired_bootstrap
from nobackfill.metrics.compatibility import (
    closed_gap_share,
    degradation,
    negative_flips,
    retention,
    upgrade_gain,
)
from nobackfill.metrics.retrieval import PerQuery, mean_of_answerable
from nobackfill.research.cells import Cells
from nobackfill.research.results import (
    BestNewNew,
    ClaimOutcome,
    CostResult,
    Figure,
    Provenance,
    Results,
    RowResult,
    SplitResult,
)
from nobackfill.research.rows import TEST, MethodRow, upper_bound_key

FIGURES = ("cmc1", "map")
# With fewer seeds the interval lacks the training's randomness.
FEWEST_SEEDS = 2

Rows = Mapping[str, Sequence[Cells]]
# A row and a cell; of several rows, the one with the largest figure counts.
Side = tuple[str | tuple[str, ...], str]


@dataclass(frozen=True)
class Claim:
    """A claim that `better` > `worse`, for each figure and paired by query.

    Attributes:
        text: the claim as the table shows it; unique.
        better, worse: a row and a cell each; of several rows, the one with the largest mean counts.
        allows_equal: the claim is >=.
    """

    text: str
    better: Side
    worse: Side
    allows_equal: bool = False


def decide_claim(difference: Difference, seed_count: int, *, allows_equal: bool) -> Verdict:
    """Decide whether a claim holds.

    Args:
        difference: better minus worse.
        seed_count: the number of seeds that both rows have.
        allows_equal: as in the claim.

    Returns:
        undecided with fewer than FEWEST_SEEDS seeds or fewer than FEWEST_DECIDING_CLASSES classes.
        Otherwise the verdict of the difference. With `allows_equal`, a lower bound of 0 also holds.
    """
    if seed_count < FEWEST_SEEDS:
        return "undecided"
    ties = allows_equal and difference.low == 0 and not difference.is_limited_to_classes
    return "holds" if ties else difference.verdict


def judge_claims(claims: Sequence[Claim], rows: Rows) -> dict[str, dict[str, ClaimOutcome]]:
    """Judge the claims whose rows and cells were measured; others are left out.

    Args:
        claims: the claims.
        rows: the cells of each row by seed, in the same order of seeds for all rows. A row with
            fewer seeds is compared on those it has.

    Returns:
        Outcomes by text and by figure, cmc1 and map; without bounds if there are fewer than
        FEWEST_DECIDING_CLASSES classes.

    Raises:
        ValueError: the two sides answer different queries, or none.
        KeyError: a cell lacks cmc1 or map.
    """
    judged = {claim.text: _judge(claim, rows) for claim in claims}
    return {text: figures for text, figures in judged.items() if figures}


def _judge(claim: Claim, rows: Rows) -> dict[str, ClaimOutcome]:
    judged = {}
    for figure in FIGURES:
        sides = [_strongest(side, rows, figure) for side in (claim.better, claim.worse)]
        if not all(runs for _, runs in sides):
            continue
        seeds = min(len(runs) for _, runs in sides)
        (better, ours), (worse, theirs) = sides
        classes = [run.query_classes for run in rows[better][:seeds]]
        found = paired_bootstrap(ours[:seeds], theirs[:seeds], classes=classes)
        judged[figure] = ClaimOutcome(
            rival=None if isinstance(claim.worse[0], str) else worse,
            seeds=seeds,
            difference=found.mean,
            bounds=None if found.is_limited_to_classes else (found.low, found.high),
            verdict=decide_claim(found, seeds, allows_equal=claim.allows_equal),
            classes=found.class_count,
        )
    return judged


def _strongest(side: Side, rows: Rows, figure: str) -> tuple[str, list[PerQuery]]:
    """Return the side's row with the largest mean, and its figures by seed; empty without one."""
    names, cell = side
    candidates: dict[str, list[PerQuery]] = {}
    for name in (names,) if isinstance(names, str) else names:
        runs = [
            run.figures_by_query[cell][figure]
            for run in rows.get(name, ())
            if cell in run.figures_by_query
        ]
        if runs:
            candidates[name] = runs
    if not candidates:
        return "", []
    most = max(len(runs) for runs in candidates.values())
    complete = {name: runs for name, runs in candidates.items() if len(runs) == most}
    name = max(complete, key=lambda name: sum(mean_of_answerable(run) for run in complete[name]))
    return name, complete[name]


Figures = Mapping[str, Mapping[str, Figure]]


@dataclass(frozen=True)
class MeasuredRow:
    """A row with its cells, one entry per seed."""

    row: MethodRow
    cells_by_seed: list[Cells]


# By split and name, in the table's order.
Splits = Mapping[str, Mapping[str, MeasuredRow]]


def summarise(
    data: str,
    metric: str,
    seeds: Sequence[int],
    provenance: Provenance,
    splits: Splits,
    claims: Sequence[Claim],
    costs: Mapping[str, CostResult],
) -> Results:
    """Summarise a comparison: means over seeds, shares preserved, claims and costs.

    Nothing is written.

    Args:
        data: the title of the comparison.
        metric: how vectors were compared.
        seeds: the seeds; with one, no claim is decided and figures have no deviation.
        provenance: how to reproduce the results.
        splits: the measured rows by split and name; the first row of a split has the table's old
            model.
        claims: the claims to judge.
        costs: the cost by row; every row of the main split needs one.

    Raises:
        ValueError: a row's mAP is 0 where a relative figure is computed. Or two rows of a claim do
            not answer the same queries, or a cell has no query with an answer.
        KeyError: a row lacks old/old, new/served or new/new.
    """
    return Results(
        data=data,
        metric=metric,
        seeds=tuple(seeds),
        made=provenance,
        splits={name: _split(rows, claims) for name, rows in splits.items()},
        costs=dict(costs),
    )


def _split(rows: Mapping[str, MeasuredRow], claims: Sequence[Claim]) -> SplitResult:
    references = {name: best_new_new(name, rows) for name in rows}
    first = next(iter(rows.values()), None)
    row_results = {
        name: RowResult(
            seeds=len(one.cells_by_seed),
            shared=first is not None and _shares(one.row, first.row),
            cells=_cells(one.cells_by_seed),
            held_to=references[name],
            extras=_extras(one.cells_by_seed, references[name]),
        )
        for name, one in rows.items()
    }
    runs = {name: one.cells_by_seed for name, one in rows.items()}
    return SplitResult(rows=row_results, claims=judge_claims(claims, runs))


def _shares(row: MethodRow, first: MethodRow) -> bool:
    return row.old_run == first.old_run and row.test_folder == TEST and not row.is_upper_bound


def best_new_new(name: str, rows: Mapping[str, MeasuredRow]) -> dict[str, BestNewNew]:
    """Return, by figure, the best new/new among rows whose new model learned the same images.

    The means use the seeds of row `name`. (BCT section 3.3: a compatible model that lost new/new
    must not look perfect, nor must a transform into a weak one.)

    A row with fewer seeds than row `name` does not count.

    Args:
        name: a row of `rows`, which may be its own reference.
        rows: the measured rows of one split by name.

    Returns:
        The row of the best mean by figure, cmc1 and map; of equal ones the first.

    Raises:
        KeyError: `name` is no row, or a row lacks new/new.
        ValueError: a cell has no query with an answer.
    """
    own = rows[name]
    seeds = len(own.cells_by_seed)
    rivals = {
        rival: one.cells_by_seed[:seeds]
        for rival, one in rows.items()
        if upper_bound_key(one.row) == upper_bound_key(own.row) and len(one.cells_by_seed) >= seeds
    }
    references = {}
    for figure in FIGURES:
        means = {
            rival: _mean(run.figures_by_query["new/new"][figure] for run in runs)
            for rival, runs in rivals.items()
        }
        best = max(means, key=means.__getitem__)
        references[figure] = BestNewNew(row=best, value=means[best])
    return references


def relative_figures(cells: Figures, references: Mapping[str, BestNewNew]) -> dict[str, float]:
    """Derive relative figures of a row from means over seeds.

    Args:
        cells: means and deviations by cell and figure; old/old, new/served and new/new are needed.
        references: the best new/new by figure; may be empty.

    Returns:
        `upgrade_gain` of mAP, and `kept_FIGURE` for each reference. With a reference of mAP also
        `degradation`, and `gap_closed` unless it is not defined.

    Raises:
        ValueError: a mean that is divided by is 0.
        KeyError: a cell or figure is missing.
    """
    old, served, new = (cells[cell]["map"][0] for cell in ("old/old", "new/served", "new/new"))
    figures: dict[str, float | None] = {"upgrade_gain": upgrade_gain(served, old)}
    for figure, reference in references.items():
        figures[f"kept_{figure}"] = retention(cells["new/served"][figure][0], reference.value)
    if "map" in references:
        figures["gap_closed"] = closed_gap_share(served, old, references["map"].value)
        figures["degradation"] = degradation(new, references["map"].value)
    return {name: value for name, value in figures.items() if value is not None}


def _cells(runs: Sequence[Cells]) -> dict[str, dict[str, Figure]]:
    return {
        cell: {
            name: mean_and_std(
                [mean_of_answerable(run.figures_by_query[cell][name]) for run in runs]
            )
            for name in figures
        }
        for cell, figures in runs[0].figures_by_query.items()
    }


def _extras(runs: Sequence[Cells], references: Mapping[str, BestNewNew]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for run in runs:
        for name, value in {**run.row_figures, "negative_flips": _flips(run)}.items():
            by_name.setdefault(name, []).append(value)
    means = {name: float(np.mean(values)) for name, values in by_name.items()}
    return means | relative_figures(_cells(runs), references)


def _flips(run: Cells) -> float:
    return negative_flips(
        run.figures_by_query["old/old"]["cmc1"], run.figures_by_query["new/served"]["cmc1"]
    )


def _mean(figures: Iterable[PerQuery]) -> float:
    return float(np.mean([mean_of_answerable(values) for values in figures]))


def mean_and_std(values: Sequence[float]) -> Figure:
    """Return the mean of one value per seed, and the deviation, which one seed does not have.

    Without values the mean is NaN.
    """
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None
