"""The comparison as JSON and as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from metrics.bootstrap import Difference
from metrics.compatibility import degradation, gap_closed, negative_flips, share_kept, upgrade_gain
from metrics.retrieval import mean
from training.comparison.cells import Cells

Rows = Mapping[str, Sequence[Cells]]
MAIN, UNSEEN = "main", "unseen"
CELLS = ("old/old", "new/old", "new/new", "new/served", "served/served")


@dataclass(frozen=True)
class Comparison:
    """Rows by split and name, one entry a seed; differences of claims by split."""

    data: str
    seeds: tuple[int, ...]
    metric: str
    rows: Mapping[str, Rows]
    claims: Mapping[str, Mapping[str, Difference]]


def as_json(comparison: Comparison) -> dict[str, object]:
    """{"data", "seeds", "cells": {METHOD: {CELL: {FIGURE: [mean, std]}, "unseen": {…}}}, "claims"}.

    Figures are shares 0..1; std over seeds (0 for one seed).
    """
    cells: dict[str, dict[str, object]] = {}
    for name, runs in comparison.rows[MAIN].items():
        cells[name] = {**_cells(runs), "extras": _extras(runs)}
        unseen = comparison.rows.get(UNSEEN, {}).get(name)
        if unseen:
            cells[name][UNSEEN] = _cells(unseen)
    claims = {
        text + ("" if split == MAIN else f" ({split} classes)"): {
            "holds": {"holds": True, "fails": False, "undecided": None}[difference.verdict],
            "difference": [difference.mean, difference.low, difference.high],
        }
        for split, judged in comparison.claims.items()
        for text, difference in judged.items()
    }
    return {
        "data": comparison.data,
        "seeds": len(comparison.seeds),
        "metric": comparison.metric,
        "cells": cells,
        "claims": claims,
    }


def as_markdown(comparison: Comparison) -> str:
    """The table and the claims, figures in percent, the better half of a row's meaning in words."""
    lines = [
        f"# Methods compared on {comparison.data}",
        "",
        f"{len(comparison.seeds)} seeds; distance: {comparison.metric}; CMC-1 / mAP in percent, "
        "mean over seeds (± standard deviation of mAP). *Served* is what a user gets: the gallery "
        "as it is for backward-compatible models, carried over for transforms. *Kept* is served "
        "mAP over the independent new/new. *Unseen*: tested on classes that no model trained on.",
        "",
        "| method | old/old | new/old | new/new | served | kept | flips | unseen old/old | unseen "
        "served | unseen new/new |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    reference = comparison.rows[MAIN].get("independent")
    for name, runs in comparison.rows[MAIN].items():
        unseen = comparison.rows.get(UNSEEN, {}).get(name)
        fields = [_text(runs, cell) for cell in CELLS[:4]]
        fields.append(_kept(runs, reference))
        fields.append(f"{100 * _mean_of(_flips(run) for run in runs):.1f}")
        fields += [_text(unseen, cell) for cell in ("old/old", "new/served", "new/new")]
        lines.append(f"| {name} | " + " | ".join(fields) + " |")
    for split, judged in comparison.claims.items():
        lines += ["", f"## Claims, {split} classes", "", "| claim | verdict | difference of mAP |"]
        lines.append("|---|---|---|")
        for text, d in judged.items():
            bounds = f"{100 * d.mean:+.2f} [{100 * d.low:+.2f}, {100 * d.high:+.2f}]"
            lines.append(f"| {text} | {d.verdict} | {bounds} |")
    return "\n".join(lines) + "\n"


def _cells(runs: Sequence[Cells]) -> dict[str, object]:
    told: dict[str, object] = {}
    for cell in runs[0].by_query:
        figures = runs[0].by_query[cell]
        told[cell] = {
            name: _mean_and_std([mean(run.by_query[cell][name]) for run in runs])
            for name in figures
        }
    return told


def _extras(runs: Sequence[Cells]) -> dict[str, float]:
    """Derived figures and those of cells.py, means over seeds."""
    told: dict[str, list[float]] = {}
    for run in runs:
        old, served, new = (mean(run.by_query[cell]["map"]) for cell in _ENDS)
        derived = {
            "share_kept": share_kept(served, new),
            "gap_closed": gap_closed(served, old, new),
            "upgrade_gain": upgrade_gain(served, old),
            "negative_flips": _flips(run),
            **run.extras,
        }
        for name, value in derived.items():
            if value is not None:
                told.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in told.items()}


_ENDS = ("old/old", "new/served", "new/new")


def _flips(run: Cells) -> float:
    return negative_flips(run.by_query["old/old"]["cmc1"], run.by_query["new/served"]["cmc1"])


def _kept(runs: Sequence[Cells], reference: Sequence[Cells] | None) -> str:
    """Served mAP over the independent model's new/new: a compatible model that lost new/new must
    not look whole. Rows of other models (chains, allocations) are measured against their own.
    """
    ends = []
    for place, run in enumerate(runs):
        own = reference is not None and np.array_equal(
            reference[place].by_query["old/old"]["map"], run.by_query["old/old"]["map"]
        )
        base = reference[place] if own and reference is not None else run
        new = mean(base.by_query["new/new"]["map"])
        ends.append(1 - degradation(mean(run.by_query["new/served"]["map"]), new))
    return f"{100 * _mean_of(ends):.1f}"


def _text(runs: Sequence[Cells] | None, cell: str) -> str:
    if not runs or cell not in runs[0].by_query:
        return "-"
    cmc1 = 100 * _mean_of(mean(run.by_query[cell]["cmc1"]) for run in runs)
    map_, std = _mean_and_std([100 * mean(run.by_query[cell]["map"]) for run in runs])
    return f"{cmc1:.1f} / {map_:.1f} ± {std:.1f}"


def _mean_of(values: object) -> float:
    return float(np.mean(list(values)))  # type: ignore[call-overload]


def _mean_and_std(values: Sequence[float]) -> list[float]:
    return [float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0]
