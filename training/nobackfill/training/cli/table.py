"""Tables for the terminal: rows are query models, columns galleries, figures in percent."""

import io
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from nobackfill.metrics.backfill import TENTH_SHARES, BackfillCurve
from nobackfill.quality.criterion import Judgement
from nobackfill.quality.gate import GainRow, ReleaseEvidence
from nobackfill.quality.retrieval import MatrixCell
from nobackfill.release.manifest import UnlabelledCell
from nobackfill.training.protocols.evaluation import ProtocolCurve


def gate_table(evidence: ReleaseEvidence) -> str:
    """Format every measured cell, with its gains over old/old and the gate's verdict.

    Figures are in percent, gains in percentage points with the bounds of their 95 % interval. With
    measurements without labels, the columns are R@1, R@5 and MRR instead of CMC-1, CMC-5 and mAP,
    and each such cell has a line below the table. A cell without a gate has empty gains. Rows have
    the order of the evidence; without cells the table has only its header. The result has no
    newline at its end.
    """
    known = any(row.agreement_gain is not None for row in evidence.gain_rows)
    first, fifth, mean = ("R@1", "R@5", "MRR") if known else ("CMC-1", "CMC-5", "mAP")
    gained = [first, mean, *(["agreement@10"] if known else [])]
    table = Table("cell", first, fifth, mean, *(f"gain {name}" for name in gained), "gate")
    rows = {str(row): row for row in evidence.gain_rows}
    for cell in evidence.cells:
        row = rows.get(cell.name)
        figures = (f"{100 * value:.2f}" for value in (cell.cmc1, cell.cmc5, cell.map))
        table.add_row(cell.name, *figures, *_gains(row))
    for cell in evidence.text_query_cells:
        figures = (f"{100 * value:.2f}" for value in (cell.cmc1, cell.cmc5, cell.map))
        name = f"{cell.name} by text"
        table.add_row(name, *figures, *_gains(rows.get(name)))
    for row in evidence.gain_rows:
        if row.float32_only or row.mixture:
            table.add_row(str(row), "", "", "", *_gains(row))
    return "\n".join([render_table(table), *map(_without_labels, evidence.unlabelled_cells)])


def _without_labels(cell: UnlabelledCell) -> str:
    """Describe in one line a cell that was measured without labels."""
    pairs = {
        "agreement@10": (cell.stayed_agreement, cell.agreement),
        "R@1 of the very item": (cell.stayed_recall1, cell.recall1),
        "MRR": (cell.stayed_mrr, cell.mrr),
    }
    texts = (f"{name} {100 * old:.1f} to {100 * new:.1f}" for name, (old, new) in pairs.items())
    return f"{cell.name} without labels, {cell.queries} queries: {', '.join(texts)}"


# Keys of shares in quality/criterion.py, with their column titles.
_SHARES = {
    "share_kept": "kept",
    "gap_closed": "gap\nclosed",
    "negative_flips": "flips",
    "update_gain": "update\ngain",
    "upgrade_gain": "upgrade\ngain",
    "degradation": "degra-\ndation",
}


def matrix_table(
    cells: Sequence[MatrixCell], criteria: Mapping[str, Mapping[str, float | bool | None]]
) -> str:
    """Format every cell, with the criteria (mAP) of cells with an older gallery.

    The strict criterion (BCT Eq. 1) is shown as two shares of pairs: different classes/same class.
    "BCT Eq. 2" says "met" if the mean of these images satisfies it, which is no claim about others.
    The result has no newline at its end.

    Args:
        cells: the measured cells.
        criteria: the criteria by the name of a cell, as `nobackfill.quality.criterion` computes
            them. Cells without them have empty columns, and a criterion of None is shown as "-".

    Raises:
        KeyError: the criteria of a cell lack one of the columns.
    """
    titles = (*_SHARES.values(), "BCT\nEq. 1", "BCT\nEq. 2")
    table = Table("cell", "CMC-1", "CMC-5", "mAP", *titles)
    for cell in cells:
        figures = (f"{100 * cell.figures[name]:.2f}" for name in ("cmc1", "cmc5", "map"))
        texts = criteria.get(str(cell.name))
        if texts is None:
            table.add_row(str(cell.name), *figures)
            continue
        shares = (_percent(texts[name]) for name in _SHARES)
        strict = "/".join(_percent(texts[f"strict_{kind}"]) for kind in ("apart", "together"))
        met = "met" if texts["compatible"] else "not met"
        table.add_row(str(cell.name), *figures, *shares, strict, met)
    return render_table(table)


def protocol_table(cells: Mapping[str, Mapping[str, float]]) -> str:
    """Format a protocol's figures in percent: one row per figure, one column per cell.

    Rows have the order of the first cell's figures. The result has no newline at its end.

    Args:
        cells: shares 0 to 1 by cell and figure; each cell has the same figures.

    Raises:
        KeyError: a cell lacks a figure that another one has.
    """
    names = list(dict.fromkeys(name for figures in cells.values() for name in figures))
    table = Table("figure", *cells)
    for name in names:
        table.add_row(name, *(f"{100 * figures[name]:.2f}" for figures in cells.values()))
    return render_table(table)


def backfill_table(curves: Mapping[str, Mapping[str, BackfillCurve]]) -> str:
    """Format CMC-1 and mAP in percent at each tenth of a backfill, and the mean of the curve.

    Values between measured shares are interpolated linearly. The result has no newline at its end;
    without curves it is a header.

    Args:
        curves: the curve by cell and by order of re-embedding.

    Raises:
        ValueError: a curve has another number of figures than of shares.
    """
    return _share_table(
        (cell, order, title, curve.reembedded_shares, values)
        for cell, orders in curves.items()
        for order, curve in orders.items()
        for title, values in (("CMC-1", curve.cmc1), ("mAP", curve.map))
    )


def protocol_backfill_table(curves: Mapping[str, Mapping[str, ProtocolCurve]]) -> str:
    """Format a protocol's figures in percent at each tenth of a backfill, and their mean.

    Values between measured shares are interpolated linearly. The result has no newline at its end;
    without curves it is a header.

    Args:
        curves: the curve by cell and by order of re-embedding.
    """
    return _share_table(
        (cell, order, title, curve.reembedded_shares, values)
        for cell, orders in curves.items()
        for order, curve in orders.items()
        for title, values in curve.figures.items()
    )


def protocol_criteria_table(criteria: Mapping[str, Mapping[str, Judgement]]) -> str:
    """Format the papers' criteria by cell and figure, in percent; "-" where one is not defined.

    The result has no newline at its end; without cells it is a header.

    Args:
        criteria: as in `ProtocolReport`.

    Raises:
        KeyError: the criteria of a figure lack one of the columns.
    """
    keys = ("update_gain", "upgrade_gain", "degradation")
    titles = (_SHARES[key].replace("-\n", "").replace("\n", " ") for key in keys)
    table = Table("cell", "figure", "BCT Eq. 2", *titles)
    for cell, figures in criteria.items():
        for name, values in figures.items():
            met = "met" if values["compatible"] else "not met"
            table.add_row(cell, name, met, *(_percent(values[key]) for key in keys))
    return render_table(table)


def _share_table(
    rows: Iterable[tuple[str, str, str, NDArray[np.float64], NDArray[np.float64]]],
) -> str:
    """Format curves: cell, order and figure, then shares [s] and values [s]."""
    shares = (f"{100 * share:.0f} %" for share in TENTH_SHARES)
    table = Table("cell", "order", "figure", *shares, "mean", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for cell, order, title, points, values in rows:
        tenths = [*np.interp(TENTH_SHARES, points, values), np.trapezoid(values, points)]
        table.add_row(cell, order, title, *(f"{100 * value:.1f}" for value in tenths))
    return f"Share of the gallery that is re-embedded, in percent:\n{render_table(table)}"


def _percent(share: float | bool | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def render_table(table: Table) -> str:
    """Render a table as plain text, 110 characters wide, without colours and without a newline at
    its end.

    Longer cells are wrapped.
    """
    text = io.StringIO()
    Console(file=text, width=110, color_system=None).print(table)
    return text.getvalue().rstrip("\n")


def _gains(row: GainRow | None) -> list[str]:
    if row is None:
        return []
    gains = [row.cmc1_gain, row.map_gain]
    if row.agreement_gain is not None:
        gains.append(row.agreement_gain)
    texts = [f"{100 * g.mean:+.2f} [{100 * g.low:+.2f}, {100 * g.high:+.2f}]" for g in gains]
    return [*texts, "passed" if row.passes else "FAILED"]
