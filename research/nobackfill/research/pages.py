"""Results as Markdown: a full table next to the results file, and shorter tables in documents.

A mark in a document is a comment on its own line, `<!-- results: PATH -->` or
`<!-- results: PATH in brief -->`, with PATH relative to the document. `rewrite_tables` writes the
text up to `<!-- end of results -->`. *In brief* means only the fixed rows, and no claims. The
results of `compare.py --vectors` have the mark `<!-- vectors: PATH PATH… -->`, and share one table.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nobackfill.durable import write_file
from nobackfill.errors import ConfigurationError, InvalidInputError, NotFoundError
from nobackfill.metrics.bootstrap import FEWEST_DECIDING_CLASSES
from nobackfill.research.catalogue import EMBEDDING_SIZES, digest_of_rows
from nobackfill.research.cells import KNOWN_CLASSES, NEW_CLASSES, RANGED
from nobackfill.research.presets import PRESETS
from nobackfill.research.results import MAIN, UNSEEN, ClaimOutcome, Results, RowResult, read_results
from nobackfill.research.rows import OURS, RowName
from nobackfill.research.settings import LIMIT
from nobackfill.research.summary import FEWEST_SEEDS, FIGURES
from nobackfill.research.vector_bench import (
    MEASURES,
    REEMBED,
    STAY,
    BenchDifference,
    BenchResults,
    BenchRow,
    bench_page,
    describe_bench_seeds,
    format_points,
    read_bench,
)

ENDS = ("old/old", "new/old", "new/new", "new/served")
TITLES = (*ENDS[:3], "served", "kept", "flips")
UNSEEN_TITLES = ("unseen old/old", "unseen new/new", "unseen served", "unseen kept")
WITHDRAWN = (
    "The claims are withdrawn: their verdicts took queries of one class as independent, and no "
    "figures by query are kept to draw classes from. `compare.py` decides them when it is run "
    "again."
)
FEW_CLASSES = (
    f"Fewer than {FEWEST_DECIDING_CLASSES} classes are no sample of others: claims on them are "
    "undecided."
)
FIGURE_NAMES = {"cmc1": "CMC-1", "map": "mAP"}


@dataclass(frozen=True)
class PaperFigure:
    """A figure that others print for a cell of one of our rows: CMC-1 and mAP in percent.

    mAP is None where they print CMC-1 alone.
    """

    row: str
    cell: str
    cmc1: float
    map: float | None
    source: str


_FCT = "FCT and FastFill, the authors' code"
_BT2_CODE = "BT2, the authors' code"


def _fct(table: str, *cells: tuple[str, str, float, float | None]) -> tuple[PaperFigure, ...]:
    return tuple(PaperFigure(*cell, f"FCT {table}") for cell in cells)


def _embedding_sizes(*figures: tuple[float, float]) -> tuple[PaperFigure, ...]:
    """List FCT Table 10: CMC-1 of old/old and of new/new by size of the embedding."""
    return _fct(
        "Table 10",
        *(
            (f"embedding_{dim}", cell, cmc1, None)
            for dim, pair in zip(EMBEDDING_SIZES, figures, strict=True)
            for cell, cmc1 in zip(("old/old", "new/new"), pair, strict=True)
        ),
    )


# By data set. The last table of apple/ml-fct's README, the one of YifeiZhou02/BT-2, and fct.txt.
PAPER_FIGURES: Mapping[str, tuple[PaperFigure, ...]] = {
    "cifar100-fct": (
        PaperFigure(RowName.INDEPENDENT, "old/old", 34.2, 16.5, _FCT),
        PaperFigure(RowName.INDEPENDENT, "new/new", 56.5, 36.3, _FCT),
        PaperFigure(RowName.FCT_NONE, "new/served", 47.2, 25.8, _FCT),
        PaperFigure(RowName.FCT_SIMCLR, "new/served", 50.2, 32.2, _FCT),
        PaperFigure(RowName.FCT_NONE, "backfill random", 49.1, 29.1, _FCT),
        PaperFigure("fastfill_joint_none", "backfill uncertainty", 53.6, 32.5, _FCT),
        PaperFigure(RowName.INDEPENDENT, "old/old", 33.6, 24.4, _BT2_CODE),
        PaperFigure(RowName.INDEPENDENT, "new/old", 0.8, 1.5, _BT2_CODE),
        PaperFigure(RowName.INDEPENDENT, "new/new", 62.7, 49.9, _BT2_CODE),
        PaperFigure(RowName.BCT, "new/old", 25.0, 24.7, _BT2_CODE),
        PaperFigure(RowName.BCT, "new/new", 60.0, 47.3, _BT2_CODE),
        PaperFigure(RowName.BT2, "new/old", 38.7, 27.7, _BT2_CODE),
        PaperFigure(RowName.BT2, "new/new", 62.4, 50.5, _BT2_CODE),
    ),
    "imagenet": (
        *_fct(
            "Tables 1 and 7",
            (RowName.INDEPENDENT, "old/old", 46.5, 29.9),
            (RowName.INDEPENDENT, "new/new", 68.1, 45.0),
            (RowName.BCT, "new/old", 46.9, 30.1),
            (RowName.BCT, "new/new", 62.4, 41.1),
            (RowName.FCT_NONE, "new/served", 61.8, 39.9),
            (RowName.FCT_NONE, "served/served", 51.9, 36.1),
            (RowName.FCT_SIMCLR, "new/served", 65.0, 43.6),
            (RowName.FCT_SIMCLR, "served/served", 59.3, 41.3),
            (RowName.FCT_DOUBLED, "new/served", 62.0, 38.7),
            (RowName.FCT_DOUBLED, "served/served", 53.8, 35.8),
        ),
        *_fct(
            "Table 4",
            ("old_resnet18:fct_simclr", "old/old", 40.1, 19.9),
            ("old_resnet18:fct_simclr", "new/served", 64.2, 42.6),
            ("old_resnet18:fct_simclr", "served/served", 57.0, 39.4),
            ("old_mobilenet:fct_simclr", "old/old", 42.3, 20.3),
            ("old_mobilenet:fct_simclr", "new/served", 64.3, 42.9),
            ("old_mobilenet:fct_simclr", "served/served", 57.6, 39.8),
            ("old_half:fct_simclr", "old/old", 44.7, 30.6),
            ("old_half:fct_simclr", "new/served", 63.6, 42.0),
            ("old_half:fct_simclr", "served/served", 56.6, 39.0),
        ),
        *_fct(
            "Tables 5 and 8",
            ("first_hop", "old/old", 29.6, 15.5),
            ("first_hop", "new/new", 46.5, 28.7),
            ("first_hop", "new/served", 40.5, 26.4),
            ("second_hop", "new/served", 65.0, 43.6),
            (RowName.TWO_HOP, "new/served", 57.4, 33.5),
            (RowName.DIRECT, "new/served", 59.9, 37.0),
            ("first_hop_none", "new/served", 36.5, 23.7),
            ("second_hop_none", "new/served", 61.8, 39.9),
            (RowName.TWO_HOP_NONE, "new/served", 44.9, 26.4),
            ("direct_none", "new/served", 53.9, 30.6),
        ),
        *_fct(
            "Table 6",
            (RowName.FCT_AUTOENCODER, "new/served", 62.0, 40.5),
            (RowName.FCT_ALTERNATE, "new/served", 63.5, 42.1),
            (RowName.FCT_MIXUP, "new/served", 63.8, 42.4),
            (RowName.FCT_SIMCLR_UNLABELLED, "new/served", 66.5, 46.6),
        ),
        *_embedding_sizes((46.5, 68.0), (48.0, 67.8), (49.1, 67.4), (49.0, 67.1), (48.5, 67.9)),
        *_fct(
            "Tables 11 to 13",
            (RowName.FCT_SMALL, "new/served", 62.9, None),
            ("fct_width_half", "new/served", 64.1, None),
            ("fct_width_double", "new/served", 65.0, None),
            (RowName.KL, "new/served", 60.7, None),
            (RowName.REVERSED_KL, "new/served", 55.7, None),
            (RowName.FCT_BINARY_SIMCLR, "new/served", 64.1, 42.7),
            (RowName.FCT_BINARY_SIMCLR, "served/served", 57.2, 40.0),
        ),
    ),
    "places365": (
        *_fct(
            "Tables 2 and 7",
            (RowName.INDEPENDENT, "old/old", 29.6, 11.6),
            (RowName.INDEPENDENT, "new/new", 37.0, 17.0),
            (RowName.BCT, "new/old", 30.4, 12.6),
            (RowName.BCT, "new/new", 34.9, 16.0),
            (RowName.FCT_NONE, "new/served", 34.8, 17.5),
            (RowName.FCT_NONE, "served/served", 31.9, 16.4),
            (RowName.FCT_SIMCLR, "new/served", 35.8, 18.1),
            (RowName.FCT_SIMCLR, "served/served", 34.0, 17.3),
        ),
        *_fct(
            "Table 9",
            ("imagenet:independent", "old/old", 14.5, 3.7),
            ("imagenet:independent", "new/new", 21.9, 7.1),
            ("imagenet:fct_none", "new/served", 16.9, 5.6),
            ("imagenet:fct_autoencoder", "new/served", 17.4, 5.8),
            ("imagenet:fct_alternate", "new/served", 18.4, 6.3),
            ("imagenet:fct_simclr", "new/served", 20.3, 7.1),
        ),
        *_embedding_sizes((29.5, 21.9), (29.7, 23.2), (29.6, 37.0), (29.5, 36.7), (29.8, 37.0)),
        *_fct(
            "Table 14",
            ("disjoint:independent", "old/old", 21.9, 7.1),
            ("disjoint:independent", "new/old", 0.3, 0.1),
            ("disjoint:independent", "new/new", 37.0, 17.0),
            ("disjoint:fct_none", "new/served", 33.3, 16.9),
            ("disjoint:fct_simclr", "new/served", 35.1, 17.5),
            ("disjoint:fct_simclr", "served/served", 31.7, 16.1),
        ),
    ),
    "vggface2": (
        *_fct(
            "Tables 3 and 7",
            (RowName.INDEPENDENT, "old/old", 84.0, 44.6),
            (RowName.INDEPENDENT, "new/new", 96.6, 77.8),
            (RowName.BCT, "new/old", 84.2, 45.0),
            (RowName.BCT, "new/new", 95.1, 74.3),
            (RowName.FCT_NONE, "new/served", 91.5, 60.1),
            (RowName.FCT_NONE, "served/served", 84.0, 47.7),
            (RowName.FCT_ALTERNATE, "new/served", 92.5, 62.6),
            (RowName.FCT_ALTERNATE, "served/served", 87.2, 53.4),
        ),
        *_embedding_sizes((84.0, 96.6), (83.8, 95.7), (83.6, 96.4), (84.1, 95.9), (83.9, 95.1)),
    ),
}


def paper_table(data: str, rows: Mapping[str, RowResult]) -> list[str]:
    """Return a table of published figures next to ours, CMC-1 / mAP in percent.

    Args:
        data: the name of the data set.
        rows: our rows by name; "-" stands for a missing one.

    Returns:
        The lines without ends; none if nobody prints figures for this data set.

    Raises:
        KeyError: a cell of our rows lacks cmc1 or map.
    """
    if data not in PAPER_FIGURES:
        return []
    lines = ["| row | cell | published | ours | source |", "|---|---|---|---|---|"]
    for figure in PAPER_FIGURES[data]:
        map_ = "-" if figure.map is None else f"{figure.map:.1f}"
        published = f"{figure.cmc1:.1f} / {map_}"
        ours = format_cmc1_and_map(rows.get(figure.row), figure.cell)
        lines.append(f"| {figure.row} | {figure.cell} | {published} | {ours} | {figure.source} |")
    return lines


def results_page(results: Results) -> str:
    """Format results as the page next to their file: every row, every figure and every claim.

    Args:
        results: the results.

    Returns:
        Markdown, with an end of line at its end.

    Raises:
        KeyError: the main split is missing, one of its rows has no cost or no `negative_flips`, a
            row with a reference lacks a kept share, or a cell or reference lacks cmc1 or map.
        IndexError: the results have no seeds.
    """
    lines = [f"# Methods compared on {results.data}", "", *_about(results), "", *_table(results)]
    if published := paper_table(results.data, results.main.rows):
        lines += ["", "## Published figures", "", *published]
    lines += _further(results)
    lines += _backfills(results)
    for split, part in results.splits.items():
        lines += ["", f"## Claims, {split} classes", "", *_notes_of(part.claims)]
        lines += format_claims(part.claims)
    return "\n".join(lines) + "\n"


def table_head(*titles: str) -> list[str]:
    """Return the first two lines of a Markdown table whose first column is the method."""
    return [f"| {' | '.join(('method', *titles))} |", "|---" * (len(titles) + 1) + "|"]


def format_cmc1_and_map(method_row: RowResult | None, cell: str) -> str:
    """Format CMC-1 and mAP of a cell in percent, such as "45.1 / 32.0 ± 0.4".

    The deviation is mAP's over seeds; it is left out for one seed.

    Args:
        method_row: the row; None if it was not run.
        cell: the cell, such as "new/old".

    Returns:
        The text; "-" without a row, or without this cell.

    Raises:
        KeyError: the cell lacks cmc1 or map.
    """
    if method_row is None or cell not in method_row.cells:
        return "-"
    (cmc1, _), (map_, deviation) = (method_row.cells[cell][figure] for figure in FIGURES)
    spread = "" if deviation is None else f" ± {100 * deviation:.1f}"
    return f"{100 * cmc1:.1f} / {100 * map_:.1f}{spread}"


def format_kept_share(row: RowResult | None) -> str:
    """Format the share preserved of the best new/new, CMC-1 / mAP in percent.

    It is "-" without a row, or for a row that is compared with no new/new.

    Args:
        row: the row; None if it was not run.

    Returns:
        The text, such as "91.2 / 88.4".

    Raises:
        KeyError: the row has a reference, but lacks `kept_cmc1` or `kept_map`.
    """
    if row is None or not row.held_to:
        return "-"
    return " / ".join(f"{100 * row.extras[f'kept_{figure}']:.1f}" for figure in FIGURES)


def row_label(name: str, row: RowResult | None, results: Results) -> str:
    """Return a row's name, with its number of seeds if that differs from the table's.

    Args:
        row: its result; None: the name alone.
    """
    if row is None or row.seeds == len(results.seeds):
        return name
    return f"{name} ({row.seeds} seed{'s' if row.seeds > 1 else ''})"


def describe_seeds(results: Results) -> str:
    """Describe in one sentence the seeds of results, and what their deviation is.

    For one seed it says that there is no deviation, and that no claim is decided. Seeds must
    increase: only the first and the last decide whether they are consecutive.

    Raises:
        IndexError: the results have no seeds.
    """
    count = len(results.seeds)
    if count < FEWEST_SEEDS:
        return f"One seed ({results.seeds[0]}): no deviation, and no claim is decided."
    first, last = results.seeds[0], results.seeds[-1]
    consecutive = last - first + 1 == count
    seeds = f"{first} to {last}" if consecutive else ", ".join(map(str, results.seeds))
    return f"{count} seeds ({seeds}), ± the standard deviation of mAP."


def describe_reference_rows(results: Results) -> str:
    """Describe the rows with the best new/new, to which the column *kept* refers, by split.

    Returns:
        "" if no row that shares the table's old model has such a reference.

    Raises:
        KeyError: a reference lacks cmc1 or map.
    """
    parts = []
    for split, part in results.splits.items():
        row = next((r for r in part.rows.values() if r.shared and r.held_to), None)
        if row is None:
            continue
        best = [row.held_to[figure] for figure in FIGURES]
        names = [f"`{one.row}` by {FIGURE_NAMES[f]}" for f, one in zip(FIGURES, best, strict=True)]
        label = f"`{best[0].row}`" if best[0].row == best[1].row else " and ".join(names)
        values = " / ".join(f"{100 * one.value:.1f}" for one in best)
        parts.append(f"{label} on {split} classes ({values})")
    return ", ".join(parts)


def _about(results: Results) -> list[str]:
    return [
        f"{describe_seeds(results)} Distance: {results.metric}; CMC-1 / mAP in percent, means over "
        "seeds. *Served* is what a user gets: the gallery as it is for backward-compatible models, "
        "carried over for transforms. *Kept* is its share of the best new/new of all rows that "
        f"learned the same: {describe_reference_rows(results) or 'there is none'}. *Flips*: "
        "queries answered by the old model alone and no longer. *Unseen*: tested on classes that "
        f"no model trained on.{_limits(results)}",
        "",
        f"`{results.provenance.command}`, {results.provenance.machine}.",
    ]


def _limits(results: Results) -> str:
    """Explain the limits, if there are any."""
    if not any(name.startswith(f"{LIMIT}:") for name, _, _ in _both(results)):
        return ""
    return (
        f" *{LIMIT}*: no methods, bounds on what any transform of the stored vectors can reach: an "
        "affine map solved on the tested items themselves, and on unseen classes ours trained on "
        "other images of them."
    )


def _table(results: Results) -> list[str]:
    lines = table_head(*TITLES, *UNSEEN_TITLES)
    for name, row, unseen in _both(results):
        fields = [format_cmc1_and_map(row, cell) for cell in ENDS]
        flips = None if row is None else row.extras["negative_flips"]
        fields += [format_kept_share(row), _percent(flips)]
        fields += [
            format_cmc1_and_map(unseen, cell) for cell in ("old/old", "new/new", "new/served")
        ]
        label = row_label(name, row or unseen, results)
        lines.append(f"| {label} | {' | '.join((*fields, format_kept_share(unseen)))} |")
    return lines


def _both(results: Results) -> list[tuple[str, RowResult | None, RowResult | None]]:
    """Return every row by name, on main and on unseen classes; a limit may lack the former."""
    main, other = results.main.rows, results.splits.get(UNSEEN)
    names = dict.fromkeys((*main, *(other.rows if other else ())))
    return [(name, main.get(name), results.unseen(name)) for name in names]


def _further(results: Results) -> list[str]:
    cells = (
        "served/served",
        *(f"{cell}, {part}" for cell in RANGED for part in (KNOWN_CLASSES, NEW_CLASSES)),
    )
    lines = [
        "",
        "## Further figures, main classes",
        "",
        "mAP in percent. *Known* classes trained the old model, *new* ones did not (FCT appendix "
        "C). *Held to*: the row with the best new/new by mAP. CKA: how alike the old embedding and "
        "the side-information are (0 to 1). Bytes: the old embedding and the side-information of "
        "an item, float32 or a bit a number; the gallery keeps float32 for either. µs: the "
        "transform of an item, the exported file, one thread.",
        "",
        *table_head(*cells, "held to", "CKA", "bytes", "µs"),
    ]
    for name, row in results.main.rows.items():
        fields = [_percent(row.mean(cell, "map")) for cell in cells]
        fields.append(row.held_to["map"].row if row.held_to else "-")
        fields.append(f"{row.extras['cka']:.2f}" if "cka" in row.extras else "-")
        cost = results.costs[name]
        fields += [f"{cost.stored_bytes:.0f}", f"{cost.microseconds:.2f}"]
        lines.append(f"| {name} | {' | '.join(fields)} |")
    return lines


_ORDERS = ("random", "uncertainty", "gain", "oracle")


def _backfills(results: Results) -> list[str]:
    """Return the mean over the curve of a backfill, for every row that has one."""
    cells = {f"backfill {order}": order for order in _ORDERS}
    measured = {
        name: row for name, row in results.main.rows.items() if cells.keys() & row.cells.keys()
    }
    if not measured:
        return []
    return [
        "",
        "## Backfill, main classes",
        "",
        "CMC-1 / mAP in percent: the mean over the curve from *served* to *new/new*, while the "
        "gallery is re-embedded in this order. *Oracle* knows the true error of each item.",
        "",
        *table_head("served", *cells.values(), "new/new"),
        *(
            f"| {name} | "
            + " | ".join(
                format_cmc1_and_map(row, cell) for cell in ("new/served", *cells, "new/new")
            )
            + " |"
            for name, row in measured.items()
        ),
    ]


def _notes_of(claims: Mapping[str, Mapping[str, ClaimOutcome]]) -> list[str]:
    """Return the sentences that precede a table of claims."""
    if is_withdrawn(claims):
        return [WITHDRAWN, ""]
    few = any(one.bounds is None for figures in claims.values() for one in figures.values())
    return [FEW_CLASSES, ""] if few else []


def is_withdrawn(claims: Mapping[str, Mapping[str, ClaimOutcome]]) -> bool:
    """Return whether the verdict of any claim is withdrawn; False without claims.

    It is withdrawn if an older version judged the claim without resampling classes (ClaimOutcome).
    """
    outcomes = (one for figures in claims.values() for one in figures.values())
    return any(one.verdict == "withdrawn" for one in outcomes)


def format_claims(claims: Mapping[str, Mapping[str, ClaimOutcome]]) -> list[str]:
    """Format each claim's verdict by CMC-1 and by mAP as a Markdown table.

    Differences are in percentage points, with the bounds of their interval in brackets.

    Args:
        claims: outcomes by the claim's text and by figure; "-" stands for a missing figure.

    Returns:
        The lines; two without claims.
    """
    lines = ["| claim | CMC-1 | difference | mAP | difference |", "|---|---|---|---|---|"]
    for text, figures in claims.items():
        fields = [field for figure in FIGURES for field in _outcome(figures.get(figure))]
        lines.append(f"| {text}{_against(figures)} | {' | '.join(fields)} |")
    return lines


def _outcome(outcome: ClaimOutcome | None) -> tuple[str, str]:
    if outcome is None:
        return "-", "-"
    difference = f"{100 * outcome.difference:+.2f}"
    if outcome.bounds is None:
        few = "" if outcome.classes is None else f" [{outcome.classes} classes]"
        return outcome.verdict, f"{difference}{few}"
    low, high = outcome.bounds
    return outcome.verdict, f"{difference} [{100 * low:+.2f}, {100 * high:+.2f}]"


def _against(figures: Mapping[str, ClaimOutcome]) -> str:
    rivals = dict.fromkeys(outcome.rival for outcome in figures.values() if outcome.rival)
    return f" ({', '.join(rivals)})" if rivals else ""


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


SERVED, ALONE = "new/served", "old/old"
# Rows that are always shown.
SHOWN = (
    RowName.INDEPENDENT,
    RowName.BCT,
    RowName.BCT_SYS,
    RowName.UNIBCT,
    RowName.DMU,
    RowName.AFFINE_SIMCLR,
    RowName.SOFT_PROTOTYPES_SIMCLR,
    RowName.FCT_SIMCLR,
    RowName.FASTFILL_SIMCLR,
    OURS,
)
_END = "<!-- end of results -->"
_MARKED = re.compile(
    rf"(?m)^<!-- (?:results: (\S+)( in brief)?|vectors: (\S+(?: \S+)*)) -->\n(?s:.*?)^{_END}$"
)


def rewrite_tables(page: Path) -> list[Path]:
    """Write the tables of results again: those of a document, and the full page of each result.

    Args:
        page: a Markdown document with marks, which is replaced, with the pages next to the results
            files that it names; or a results file, of which only the full page is written.

    Returns:
        The results files, in the order of the document; one that is named twice comes twice.

    Raises:
        NotFoundError: the document or a results file does not exist.
        InvalidInputError: the document has no mark, or a results file has other content. In a
            document that is refused, the full pages of earlier marks are written already.
        CannotWriteError: a page cannot be written; the document stays as it was, or has the new
            text.
        OSError: the document or a results file cannot be read.
        UnicodeDecodeError: the document is not UTF-8.
        KeyError, IndexError, StopIteration: results lack a figure or have no seeds or rows, as in
            `results_page`, `format_short_table` and `bench_page`.
        ValueError: results of --vectors have no map besides old/old and new/new.
    """
    if not page.is_file():
        raise NotFoundError(
            f"--page {page}: there is no such file; name a Markdown page or a JSON file of results"
        )
    if page.suffix == ".json":
        _write_full_page(page)
        return [page]
    text = page.read_text("utf-8")
    files: list[Path] = []

    def replacement(mark: re.Match[str]) -> str:
        if mark[3] is not None:
            names = mark[3].split(" ")
            files.extend(page.parent / name for name in names)
            measured = [_write_bench_page(page.parent / name) for name in names]
            links = [name.removesuffix(".json") + ".md" for name in names]
            first = f"<!-- vectors: {mark[3]} -->"
            return "\n".join([first, *format_benches(measured, links), _END])
        file = page.parent / mark[1]
        results = _write_full_page(file)
        files.append(file)
        link = mark[1].removesuffix(".json") + ".md"
        first = f"<!-- results: {mark[1]}{mark[2] or ''} -->"
        return "\n".join([first, *format_short_table(results, link, brief=bool(mark[2])), _END])

    text = _MARKED.sub(replacement, text)
    if not files:
        raise InvalidInputError(
            f"--page {page}: found no place for a table; expected a line "
            f"`<!-- results: FILE.json -->` and a later line `{_END}`"
        )
    write_file(page, text.encode(), 0o644)
    return files


def _write_full_page(file: Path) -> Results:
    results = read_results(file)
    write_file(file.with_suffix(".md"), results_page(results).encode(), 0o644)
    return results


def _write_bench_page(file: Path) -> BenchResults:
    results = read_bench(file)
    write_file(file.with_suffix(".md"), bench_page(results).encode(), 0o644)
    return results


@dataclass(frozen=True)
class _Column:
    """A figure of a part of one file of results."""

    results: BenchResults
    part: str
    figure: str

    @property
    def title(self) -> str:
        # Without classes there is one part, and files differ in their pairs.
        part = (
            self.part.removesuffix(" classes")
            if self.results.classes[self.part]
            else f"{self.results.pairs:,} pairs"
        )
        return f"{part} {MEASURES[self.figure]}"

    def row(self, name: str) -> BenchRow | None:
        row = self.results.rows.get(name)
        return None if row is None or row.refusal else row

    def value(self, name: str) -> float | None:
        row = self.row(name)
        return None if row is None else row.figures[self.part].get(self.figure)

    def difference(self, name: str, *, to_ours: bool) -> BenchDifference | None:
        row = self.row(name)
        if row is None:
            return None
        differences = row.against_ours if to_ours else row.differences
        return differences.get(self.part, {}).get(self.figure)


def format_benches(benches: Sequence[BenchResults], links: Sequence[str]) -> list[str]:
    """Format results of `compare.py --vectors` as one table of figures and one of differences.

    Args:
        benches: the results of one or more files, all with labels, or all without and then with
            other numbers of pairs. Rows have the order of the first; rows that only others have
            follow.
        links: the addresses of their full pages, as the document links to them.

    Returns:
        The lines: both tables, how they were made, and the rows that are measurably above or below
        the old model and our own row.

    Raises:
        IndexError: there are no results.
        ValueError: `links` has another number of entries, or results have no map besides old/old
            and new/new.
        KeyError: a row lacks a part of its test.
    """
    parts = [(results, part) for results in benches for part in results.queries]
    has_classes = all(results.classes[part] for results, part in parts)
    deciding = FIGURES if has_classes else ("agreement", "known_item")
    figures = dict.fromkeys((*deciding, "known_item"))
    columns = [_Column(*one, figure) for one in parts for figure in figures]
    names = list(dict.fromkeys(name for results in benches for name in results.rows))
    lines = table_head("maps", *(one.title for one in columns), "fit", "parameters")
    lines[0] = lines[0].replace("| method |", "| row |")
    for name in names:
        rows = [results.rows[name] for results in benches if name in results.rows]
        fits = " / ".join(
            f"{results.rows[name].seconds:.0f}" if name in results.rows else "-"
            for results in benches
        )
        last = [f"{fits} s", f"{rows[0].parameters:,}"] if rows[0].parameters else ["-", "-"]
        label = f"**{name}**" if name == benches[0].our_row else name
        cells = [_percent(one.value(name)) for one in columns]
        lines.append(f"| {' | '.join((label, rows[0].maps, *cells, *last))} |")
    compared = [one for one in columns if one.figure in deciding]
    over = "classes" if has_classes else "queries"
    lines += ["", f"In points, with 95 % intervals over {over}:", ""]
    # A search without a map has no known items, so nothing is compared with it by them.
    differences = [
        (base, one, ours)
        for base, ours in ((STAY, False), (benches[0].our_row, True))
        for one in compared
        if base is not None and (ours or one.figure != "known_item")
    ]
    lines += table_head(*(f"{one.title} less {base}" for base, one, _ in differences))
    lines[-2] = lines[-2].replace("| method |", "| row |")
    for name in names[1:]:
        cells = [format_points(one.difference(name, to_ours=ours)) for _, one, ours in differences]
        lines.append(f"| {' | '.join((name, *cells))} |")
    return [*lines, "", *_about_vectors(benches, links, names, compared), ""]


def _about_vectors(
    benches: Sequence[BenchResults],
    links: Sequence[str],
    names: Sequence[str],
    columns: Sequence[_Column],
) -> list[str]:
    """Say how the results were made, and which rows measurably differ from which."""
    made = []
    for results, link in zip(benches, links, strict=True):
        tests = " and ".join(
            f"{count} queries of {results.classes[part]} {part}"
            if results.classes[part]
            else f"{count} queries"
            for part, count in results.queries.items()
        )
        minutes = results.seeds * sum(row.seconds for row in results.rows.values()) / 60
        made.append(
            f"`{results.command}`: {results.pairs} training pairs, {tests}; all maps were fitted "
            f"in {minutes:.0f} minutes ([every figure]({link}))."
        )
    made.append(f"{benches[0].machine}; {describe_bench_seeds(benches[0])}.")
    maps = [name for name in names if name not in (STAY, REEMBED)]
    notes = [_wrapped(" ".join(made)), "", _wrapped(f"Best: {_best_maps(columns, maps)}.", "- ")]
    if not all(one.results.classes[one.part] for one in columns):
        return notes
    for base, to_ours in ((STAY, False), (benches[0].our_row, True)):
        for side, word in ((1, "above"), (-1, "below")) if base is not None else ():
            found = []
            for one in columns:
                signs = {name: one.difference(name, to_ours=to_ours) for name in maps}
                those = [f"`{name}`" for name, sign in signs.items() if sign and sign.sign == side]
                found.append(f"{one.title} {', '.join(those) or 'none'}")
            notes.append(_wrapped(f"Measurably {word} `{base}`: {'; '.join(found)}.", "- "))
    return notes


def _best_maps(columns: Sequence[_Column], maps: Sequence[str]) -> str:
    texts = []
    for one in columns:
        values = {name: value for name in maps if (value := one.value(name)) is not None}
        best = max(values, key=lambda name: values[name])
        texts.append(f"{one.title} `{best}` ({_percent(values[best])})")
    return ", ".join(texts)


def format_short_table(results: Results, link: str, *, brief: bool = False) -> list[str]:
    """Format the table of results in a document, and its notes.

    Args:
        results: the results. Without a row of our method, no row is compared with it.
        link: the address of the full page, as the document links to it.
        brief: leave out rows that only beat or tie ours, and the claims.

    Returns:
        The lines: the fixed rows of SHOWN, rows that beat or tie ours, then notes and claims.

    Raises:
        KeyError: the main split is missing, or a row lacks new/served, `negative_flips` or, with a
            reference, a kept share.
        IndexError: the results have no seeds.
        StopIteration: without `brief`, a split has no rows.
    """
    lines = table_head("served", "kept", "flips", "unseen served", "unseen kept")
    shown = list_shown_rows(results)
    for name in [name for name in shown if name in SHOWN] if brief else shown:
        row, unseen = results.main.rows[name], results.unseen(name)
        label = row_label(name, row, results)
        label = f"**{label}**" if name == OURS else label
        fields = [
            format_cmc1_and_map(row, SERVED),
            format_kept_share(row),
            f"{100 * row.extras['negative_flips']:.1f}",
        ]
        fields += [format_cmc1_and_map(unseen, SERVED), format_kept_share(unseen)]
        lines.append(f"| {label} | {' | '.join(fields)} |")
    left_out = len(results.main.rows) - len(shown)
    caption = _rivals(results, link) if brief else _caption(results, link, left_out)
    return [*lines, "", *caption, ""]


def is_outdated(results: Results) -> bool:
    """Return whether rows were trained on other splits or configurations than today's.

    It is unknown, and False, for results of a folder of images. An unknown row, or a configuration
    that is invalid today, counts as outdated.
    """
    if results.data not in PRESETS:
        return False
    rows = {split: tuple(part.rows) for split, part in results.splits.items()}
    try:
        return digest_of_rows(PRESETS[results.data], rows) != results.provenance.configured
    except ConfigurationError:
        return True


def list_shown_rows(results: Results) -> list[str]:
    """Return the names of the rows that a document shows, in the order of the results.

    They are those of SHOWN that were run, and rows that beat or tie ours.

    Raises:
        KeyError: the main split is missing, or as in `list_rows_reaching_ours`.
    """
    names = {*SHOWN, *list_rows_reaching_ours(results)}
    return [name for name in results.main.rows if name in names]


def list_rows_reaching_ours(results: Results) -> dict[str, list[str]]:
    """Return by row the columns in which it beats or, as rounded, ties ours.

    Returns:
        Only rows with such a column that share the data of ours; empty if ours has no row. The
        order is that of the results.

    Raises:
        KeyError: a row that shares the data of ours, or ours, lacks new/served or
            `negative_flips`; or the main split is missing.
    """
    if OURS not in results.main.rows:
        return {}
    ours = _columns(results, OURS)
    reached = {}
    for name, row in results.main.rows.items():
        if name == OURS or not row.shared:
            continue
        own = _columns(results, name)
        columns = [column for column in own if column in ours and own[column] >= ours[column]]
        if columns:
            reached[name] = columns
    return reached


def _columns(results: Results, name: str) -> dict[str, float]:
    """Return the displayed columns, larger = better; *kept* belongs to *served*."""
    values = {}
    for split, part in ((MAIN, results.main.rows[name]), (UNSEEN, results.unseen(name))):
        for figure in FIGURES if part else ():
            assert part is not None
            values[f"{split} {FIGURE_NAMES[figure]}"] = part.cells[SERVED][figure][0]
    values["flips"] = -results.main.rows[name].extras["negative_flips"]
    # As the table prints them.
    return {column: round(100 * value, 1) for column, value in values.items()}


def _caption(results: Results, link: str, left_out: int) -> list[str]:
    made = results.provenance
    notes = [f"`{made.command}`, {made.machine}. {describe_seeds(results)}"]
    if is_outdated(results):
        notes.append("Measured by other splits or configurations than today's.")
    if best := describe_reference_rows(results):
        notes.append(f"*Kept* is held to the best new/new: {best}.")
    old = [part.rows[next(iter(part.rows))] for part in results.splits.values()]
    alone = ", on unseen classes ".join(format_cmc1_and_map(row, ALONE) for row in old)
    notes.append(f"The old model alone: {alone}.")
    link_text = (
        f"{left_out} rows, below ours in each of these columns or in settings of their own, are "
        f"left out: [the whole table]({link})"
        if left_out
        else f"[More figures]({link})"
    )
    notes.append(f"{link_text}, with every claim.")
    points = [
        f"Best row by column: {_best(results)}.{_tested(results)}",
        f"Rows that beat or tie ours: {_reaching_named(results)}.",
        *_claims(results),
    ]
    return [_wrapped(" ".join(notes)), "", *(_wrapped(point, "- ") for point in points)]


def _best(results: Results) -> str:
    """Name the rows with the largest figure of each column, as rounded, with the figure."""
    by_row = {
        name: _columns(results, name) for name, row in results.main.rows.items() if row.shared
    }
    texts = []
    for column in dict.fromkeys(column for columns in by_row.values() for column in columns):
        values = {name: columns[column] for name, columns in by_row.items() if column in columns}
        largest = max(values.values())
        names = " and ".join(f"`{name}`" for name, value in values.items() if value == largest)
        texts.append(f"{column} {names} ({abs(largest):.1f})")
    return ", ".join(texts)


def _tested(results: Results) -> str:
    """Say how many classes each split tests; empty for a folder of unknown size."""
    if results.data not in PRESETS:
        return ""
    counts = {
        split.name: split.tested_class_end - split.first_tested_class
        for split in PRESETS[results.data].splits
    }
    texts = [f"{split} tests {counts[split]} classes" for split in results.splits]
    few = [split for split in results.splits if counts[split] < FEWEST_DECIDING_CLASSES]
    decides = f"; {' and '.join(few)} classes are too few to judge others by" if few else ""
    return f" {'; '.join(texts)}{decides}.".replace(" main tests", " Main tests", 1)


def _rivals(results: Results, link: str) -> list[str]:
    text = (
        f"{describe_seeds(results)} Rows that beat or tie ours: {_reaching_named(results)}. "
        f"[All rows, and every claim of the papers]({link})."
    )
    return [_wrapped(text)]


def _reaching_named(results: Results) -> str:
    rivals = [
        f"`{name}` ({', '.join(by)})" for name, by in list_rows_reaching_ours(results).items()
    ]
    return "; ".join(rivals) or "none"


def _wrapped(text: str, mark: str = "") -> str:
    return textwrap.fill(
        mark + text,
        118,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _claims(results: Results) -> list[str]:
    """Count the claims that hold by split and figure, and name those that fail."""
    if any(is_withdrawn(part.claims) for part in results.splits.values()):
        return [WITHDRAWN]
    lines = []
    for split, part in results.splits.items() if len(results.seeds) >= FEWEST_SEEDS else ():
        for figure in FIGURES:
            judged = {text: by[figure] for text, by in part.claims.items() if figure in by}
            failed = [text for text, one in judged.items() if one.verdict == "fails"]
            holds = sum(one.verdict == "holds" for one in judged.values())
            undecided = len(judged) - holds - len(failed)
            counts = [f"{holds} of {len(judged)} claims hold", f"{undecided} are undecided"]
            counts.append(f"{len(failed)} fail" + (f": {'; '.join(failed)}" if failed else ""))
            lines.append(f"On {split} classes by {FIGURE_NAMES[figure]} {', '.join(counts)}.")
    return lines
