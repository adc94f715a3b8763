"""Results of a comparison from the cells of its rows: means over seeds, what is kept, claims."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from nobackfill.metrics.compatibility import (
    degradation,
    gap_closed,
    negative_flips,
    share_kept,
    upgrade_gain,
)
from nobackfill.metrics.retrieval import PerQuery, mean
from nobackfill.training.comparison.cells import Cells
from nobackfill.training.comparison.cost import Cost
from nobackfill.training.comparison.results import (
    CostResult,
    Figure,
    HeldTo,
    Made,
    Outcome,
    Results,
    RowResult,
    SplitResult,
)
from nobackfill.training.comparison.rows import TEST, Row, learned
from nobackfill.training.comparison.verdicts import FIGURES, Claim, Judged, judge

Figures = Mapping[str, Mapping[str, Figure]]


@dataclass(frozen=True)
class Measured:
    """A row with its cells, one entry a seed."""

    row: Row
    runs: list[Cells]


# By split and name, in the table's order.
Splits = Mapping[str, Mapping[str, Measured]]


def summarise(
    data: str,
    metric: str,
    seeds: Sequence[int],
    made: Made,
    splits: Splits,
    claims: Sequence[Claim],
    costs: Mapping[str, Cost],
) -> Results:
    """All that is told of a comparison."""
    return Results(
        data=data,
        metric=metric,
        seeds=tuple(seeds),
        made=made,
        splits={name: _split(rows, claims) for name, rows in splits.items()},
        costs={name: CostResult(**asdict(cost)) for name, cost in costs.items()},
    )


def _split(rows: Mapping[str, Measured], claims: Sequence[Claim]) -> SplitResult:
    bars = {name: held_to(name, rows) for name in rows}
    first = next(iter(rows.values()), None)
    told = {
        name: RowResult(
            seeds=len(one.runs),
            shared=first is not None and _shares(one.row, first.row),
            cells=_cells(one.runs),
            held_to=bars[name],
            extras=_extras(one.runs, bars[name]),
        )
        for name, one in rows.items()
    }
    runs = {name: one.runs for name, one in rows.items()}
    judged = judge(claims, runs)
    return SplitResult(rows=told, claims={text: outcomes(by) for text, by in judged.items()})


def _shares(row: Row, first: Row) -> bool:
    return row.old == first.old and row.tested == TEST and not row.limit


def held_to(name: str, rows: Mapping[str, Measured]) -> dict[str, HeldTo]:
    """By figure, the best new/new among the rows whose new model learned the same images, over the
    seeds of row `name` (BCT section 3.3: a compatible model that lost new/new must not look whole,
    nor a transform into a weak one).
    """
    own = rows[name]
    seeds = len(own.runs)
    rivals = {
        rival: one.runs[:seeds]
        for rival, one in rows.items()
        if learned(one.row) == learned(own.row) and len(one.runs) >= seeds
    }
    found = {}
    for figure in FIGURES:
        reached = {
            rival: _mean(run.by_query["new/new"][figure] for run in runs)
            for rival, runs in rivals.items()
        }
        best = max(reached, key=reached.__getitem__)
        found[figure] = HeldTo(row=best, value=reached[best])
    return found


def kept(cells: Figures, bars: Mapping[str, HeldTo]) -> dict[str, float]:
    """Derived figures, from means over seeds: `kept_cmc1` and, of mAP, `kept_map`, `gap_closed`
    (BCT's update gain, where that is defined), `degradation` and `upgrade_gain`.
    """
    old, served, new = (cells[cell]["map"][0] for cell in ("old/old", "new/served", "new/new"))
    told: dict[str, float | None] = {"upgrade_gain": upgrade_gain(served, old)}
    for figure, bar in bars.items():
        told[f"kept_{figure}"] = share_kept(cells["new/served"][figure][0], bar.value)
    if "map" in bars:
        told["gap_closed"] = gap_closed(served, old, bars["map"].value)
        told["degradation"] = degradation(new, bars["map"].value)
    return {name: value for name, value in told.items() if value is not None}


def outcomes(judged: Mapping[str, Judged]) -> dict[str, Outcome]:
    """A judged claim as it is told; of too few classes without bounds."""
    return {
        figure: Outcome(
            rival=one.rival,
            seeds=one.seeds,
            difference=one.difference.mean,
            bounds=(
                None
                if one.difference.of_these_classes
                else (one.difference.low, one.difference.high)
            ),
            verdict=one.verdict,
            classes=one.difference.classes,
        )
        for figure, one in judged.items()
    }


def _cells(runs: Sequence[Cells]) -> dict[str, dict[str, Figure]]:
    return {
        cell: {
            name: _mean_and_std([mean(run.by_query[cell][name]) for run in runs])
            for name in figures
        }
        for cell, figures in runs[0].by_query.items()
    }


def _extras(runs: Sequence[Cells], bars: Mapping[str, HeldTo]) -> dict[str, float]:
    told: dict[str, list[float]] = {}
    for run in runs:
        for name, value in {**run.extras, "negative_flips": _flips(run)}.items():
            told.setdefault(name, []).append(value)
    means = {name: float(np.mean(values)) for name, values in told.items()}
    return means | kept(_cells(runs), bars)


def _flips(run: Cells) -> float:
    return negative_flips(run.by_query["old/old"]["cmc1"], run.by_query["new/served"]["cmc1"])


def _mean(figures: Iterable[PerQuery]) -> float:
    return float(np.mean([mean(values) for values in figures]))


def _mean_and_std(values: Sequence[float]) -> Figure:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None
