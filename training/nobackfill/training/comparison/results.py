"""The comparison as JSON and as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from nobackfill.metrics.compatibility import (
    degradation,
    gap_closed,
    negative_flips,
    share_kept,
    upgrade_gain,
)
from nobackfill.metrics.retrieval import mean
from nobackfill.training.comparison.cells import Cells
from nobackfill.training.comparison.claims import Judged
from nobackfill.training.comparison.cost import Cost
from nobackfill.training.comparison.curve import Point
from nobackfill.training.comparison.ranges import KNOWN, NEW, RANGED

Rows = Mapping[str, Sequence[Cells]]
MAIN, UNSEEN = "main", "unseen"
CELLS = ("old/old", "new/old", "new/new", "new/served", "served/served")


@dataclass(frozen=True)
class Comparison:
    """Rows by split and name, one entry a seed; claims by split and text; costs by row.

    `held_to`: by row of the main split, the one whose new/new its quality is a share of, or None.
    """

    data: str
    seeds: tuple[int, ...]
    metric: str
    rows: Mapping[str, Rows]
    claims: Mapping[str, Mapping[str, Judged]]
    costs: Mapping[str, Cost]
    held_to: Mapping[str, str | None]

    def reference(self, row: str) -> Sequence[Cells] | None:
        """The cells of the row that `row` is held to: a compatible model that lost new/new must not
        look whole.
        """
        name = self.held_to[row]
        return None if name is None else self.rows[MAIN][name]


def as_json(comparison: Comparison) -> dict[str, object]:
    """{"data", "seeds", "cells": {METHOD: {CELL: {FIGURE: [mean, std]}, "unseen": {…}}}, "claims"}.

    Figures are shares 0..1; std over seeds (0 for one seed). A method's `cost` is in bytes and
    microseconds an item. Of its `extras`, share_kept, gap_closed (BCT's update gain, where that is
    defined) and degradation are relative to the independent new/new.
    """
    cells: dict[str, dict[str, object]] = {}
    for name, runs in comparison.rows[MAIN].items():
        cells[name] = {
            **_cells(runs),
            "extras": _extras(runs, comparison.reference(name)),
            "cost": asdict(comparison.costs[name]),
        }
        unseen = comparison.rows.get(UNSEEN, {}).get(name)
        if unseen:
            cells[name][UNSEEN] = _cells(unseen)
    claims = {
        text + ("" if split == MAIN else f" ({split} classes)"): {
            "holds": {"holds": True, "fails": False, "undecided": None}[judged.verdict],
            "difference": [judged.difference.mean, judged.difference.low, judged.difference.high],
        }
        for split, by_text in comparison.claims.items()
        for text, judged in by_text.items()
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
    seeds = "seed" if len(comparison.seeds) == 1 else "seeds"
    lines = [
        f"# Methods compared on {comparison.data}",
        "",
        f"{len(comparison.seeds)} {seeds}; distance: {comparison.metric}; CMC-1 / mAP in percent, "
        "mean over seeds (± standard deviation of mAP). *Served* is what a user gets: the gallery "
        "as it is for backward-compatible models, carried over for transforms. *Kept* is served "
        "mAP over the independent new/new (-: no such model among the rows). *Unseen*: tested on "
        "classes that no model trained on.",
        "",
        "| method | old/old | new/old | new/new | served | kept | flips | unseen old/old | unseen "
        "served | unseen new/new |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in comparison.rows[MAIN].items():
        unseen = comparison.rows.get(UNSEEN, {}).get(name)
        fields = [_text(runs, cell) for cell in CELLS[:4]]
        kept = _kept(runs, comparison.reference(name))
        fields.append("-" if kept is None else f"{100 * kept:.1f}")
        fields.append(f"{100 * _mean_of(_flips(run) for run in runs):.1f}")
        fields += [_text(unseen, cell) for cell in ("old/old", "new/served", "new/new")]
        lines.append(f"| {name} | " + " | ".join(fields) + " |")
    lines += _further(comparison)
    for split, by_text in comparison.claims.items():
        lines += ["", f"## Claims, {split} classes", "", "| claim | verdict | difference of mAP |"]
        lines.append("|---|---|---|")
        for text, judged in by_text.items():
            d = judged.difference
            bounds = f"{100 * d.mean:+.2f} [{100 * d.low:+.2f}, {100 * d.high:+.2f}]"
            lines.append(f"| {text} | {judged.verdict} | {bounds} |")
    return "\n".join(lines) + "\n"


def points(comparison: Comparison) -> list[Point]:
    """The quality/cost curve's points: rows that serve the old model's vectors to queries of the
    test itself, so that all are kept shares of one new/new.
    """
    independent = comparison.rows[MAIN].get("independent")
    found = []
    for name, runs in comparison.rows[MAIN].items():
        kept = _kept(runs, comparison.reference(name))
        if independent is not None and kept is not None and _shares_old(runs, independent):
            cost = comparison.costs[name]
            found.append(Point(name, cost.stored, cost.microseconds, kept))
    return found


def _further(comparison: Comparison) -> list[str]:
    """What the first table has no room for, of the main split."""
    cells = ("served/served", *(f"{cell}, {part}" for cell in RANGED for part in (KNOWN, NEW)))
    lines = [
        "",
        "## Further figures, main classes",
        "",
        "mAP in percent. *Known* classes trained the old model, *new* ones did not (FCT appendix "
        "C). CKA: how alike the old embedding and the side-information are (0 to 1). Bytes: the "
        "old embedding and the side-information of an item, float32 or a bit a number; the "
        "gallery keeps float32 for either. µs: the transform of an item, the exported file, "
        "one thread.",
        "",
        f"| method | {' | '.join(cells)} | CKA | bytes | µs |",
        "|---" * (len(cells) + 4) + "|",
    ]
    for name, runs in comparison.rows[MAIN].items():
        fields = [_map(runs, cell) for cell in cells]
        cka = [run.extras["cka"] for run in runs if "cka" in run.extras]
        fields.append(f"{_mean_of(cka):.2f}" if cka else "-")
        cost = comparison.costs[name]
        fields += [f"{cost.stored:.0f}", f"{cost.microseconds:.2f}"]
        lines.append(f"| {name} | " + " | ".join(fields) + " |")
    return lines


def _map(runs: Sequence[Cells], cell: str) -> str:
    if cell not in runs[0].by_query:
        return "-"
    return f"{100 * _mean_of(mean(run.by_query[cell]['map']) for run in runs):.1f}"


def _cells(runs: Sequence[Cells]) -> dict[str, object]:
    told: dict[str, object] = {}
    for cell in runs[0].by_query:
        figures = runs[0].by_query[cell]
        told[cell] = {
            name: _mean_and_std([mean(run.by_query[cell][name]) for run in runs])
            for name in figures
        }
    return told


def _extras(runs: Sequence[Cells], reference: Sequence[Cells] | None) -> dict[str, float]:
    """Derived figures and those of cells.py, means over seeds."""
    told: dict[str, list[float]] = {}
    for seed, run in enumerate(runs):
        old, served, new = (mean(run.by_query[cell]["map"]) for cell in _ENDS)
        derived: dict[str, float | None] = {
            "upgrade_gain": upgrade_gain(served, old),
            "negative_flips": _flips(run),
            **run.extras,
        }
        if reference is not None:
            independent = mean(reference[seed].by_query["new/new"]["map"])
            derived |= {
                "share_kept": share_kept(served, independent),
                "gap_closed": gap_closed(served, old, independent),
                "degradation": degradation(new, independent),
            }
        for name, value in derived.items():
            if value is not None:
                told.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in told.items()}


_ENDS = ("old/old", "new/served", "new/new")


def _flips(run: Cells) -> float:
    return negative_flips(run.by_query["old/old"]["cmc1"], run.by_query["new/served"]["cmc1"])


def _kept(runs: Sequence[Cells], reference: Sequence[Cells] | None) -> float | None:
    """Served mAP over the independent new/new, mean over seeds; None without such a model."""
    return _extras(runs, reference).get("share_kept")


def _shares_old(runs: Sequence[Cells], reference: Sequence[Cells]) -> bool:
    """Whether the rows stand on the same old model and test."""
    pairs = zip(runs, reference, strict=True)
    return all(
        np.array_equal(run.by_query["old/old"]["map"], other.by_query["old/old"]["map"])
        for run, other in pairs
    )


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
