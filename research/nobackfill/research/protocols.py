"""Rows of a comparison that published test protocols measure, and their page.

A figure of a protocol, such as TAR at a FAR, need not be a mean over queries. So its cells have one
value each, and no interval: the spread over seeds is all that a table says about chance.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from nobackfill.class_folders import ImageListing
from nobackfill.durable import make_dir, write_file
from nobackfill.metrics.retrieval import PerQuery
from nobackfill.quality.cells import upgrade_cells
from nobackfill.quality.criterion import INDEPENDENT, Judgement
from nobackfill.quality.embedded import cell_vectors
from nobackfill.research.cells import Cells, Evaluation, embed_row_images
from nobackfill.research.images import PROTOCOLS, available_protocols
from nobackfill.research.results import Figure
from nobackfill.research.rows import ComparisonPlace, MethodRow, upper_bound_key
from nobackfill.research.serve import NEW, OLD, TrainedImages
from nobackfill.research.summary import MeasuredRow, mean_and_std
from nobackfill.training.protocols.evaluation import figure_criteria, protocol_named

_SHOWN = ("old/old", "new/old", "new/served", "new/new")
_CRITERIA = {
    "compatible": "BCT Eq. 2",
    "update_gain": "update gain",
    "upgrade_gain": "upgrade gain",
    "degradation": "degradation",
}
# GLDv2's mAP@100 in percent as DMU prints it: new/new and new/served by row, or new/new alone.
GLDV2_FIGURE = "gldv2 map_at_100"
GLDV2_PAPER: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "Table 1": {
        "scenario-extended-data:independent": (25.58,),
        "scenario-extended-data:bct_sys": (24.55, 21.12),
        "scenario-extended-data:dmu": (25.00, 22.56),
        "scenario-open-data:independent": (23.66,),
        "scenario-open-data:bct_sys": (23.47, 20.74),
        "scenario-open-data:dmu": (23.76, 21.70),
        "scenario-extended-class:independent": (25.58,),
        "scenario-extended-class:bct_sys": (25.10, 24.39),
        "scenario-extended-class:dmu": (25.45, 25.01),
        "scenario-deeper:independent": (27.42,),
        "scenario-deeper:bct_sys": (25.56, 21.68),
        "scenario-deeper:dmu": (25.92, 22.38),
    },
    "Table 3": {"scenario-extended-data:dmu_confidence": (24.88, 22.25)},
    "Table 4": {
        "scenario-extended-data:dmu_selective": (24.75, 21.60),
        "scenario-extended-data:dmu_forward": (24.72, 22.42),
    },
    "Table 5": {
        "scenario-extended-data:dmu_width_half": (24.78, 22.12),
        "scenario-extended-data:dmu_width_double": (24.96, 22.77),
    },
    "Table 6": {
        "growing-50:independent": (22.39,),
        "growing-50:bct_sys": (21.47, 18.88),
        "growing-50:dmu": (22.66, 19.84),
        "growing-75:independent": (24.04,),
        "growing-75:bct_sys": (23.52, 19.82),
        "growing-75:dmu": (23.88, 21.16),
    },
    "Table 7": {
        "scenario-extended-data:bct_regression": (25.11, 19.96),
        "scenario-extended-data:dmu_regression": (25.27, 21.23),
    },
    "Table 8": {
        "scenario-extended-data:focal": (25.24, 20.02),
        "scenario-extended-data:unibct": (24.60, 21.77),
    },
    "Table 11": {
        "scenario-swin:independent": (26.80,),
        "scenario-swin:bct_sys": (25.53, 21.62),
        "scenario-swin:dmu": (25.89, 22.47),
    },
}


@dataclass(frozen=True)
class ProtocolRow:
    """A row's figures by protocols.

    Attributes:
        seeds: the number of trainings.
        cells: mean and deviation over them by cell and by figure, shares 0..1.
        criteria: the papers' criteria of new/served by figure, from the means.
    """

    seeds: int
    cells: Mapping[str, Mapping[str, Figure]]
    criteria: Mapping[str, Judgement]


def protocol_cells(place: ComparisonPlace, row: MethodRow) -> Cells:
    """Measure a row whose models are trained by the published protocols of its data set.

    Vectors of images are stored in the place's cache of features. A cell that compares vectors of
    different dimensions is omitted.

    Args:
        place: the seed and split; its preset has protocols, and its images link to their files.
        row: the row.

    Returns:
        One value [1] for each cell and figure, named `PROTOCOL FIGURE`, and no extras.

    Raises:
        ConfigurationError: a run is missing, unfinished or of another kind.
        VerificationError: a checkpoint is damaged, or an exported file computes other vectors.
        NotFoundError, InvalidInputError: a file or image of a protocol is missing or wrong.
        CannotWriteError: the cache cannot be written.
        ValueError: a figure has no query with an answer.
        OSError: a checkpoint or a protocol's file cannot be read.
        NobackfillError: a process that reads images was killed.
    """
    published = place.preset.published_set
    assert published is not None
    root, metric = place.images_folder / PROTOCOLS, place.preset.metric
    by_query: dict[str, dict[str, PerQuery]] = {}

    def vectors(listing: ImageListing) -> TrainedImages:
        return embed_row_images(row, Evaluation(listing, metric, place.runs_folder / "features"))

    for name in available_protocols(published, root):
        with tempfile.TemporaryDirectory(prefix="nobackfill-protocol-") as scratch:
            protocol = protocol_named(name)(root / published.protocol_folders[name], Path(scratch))
            queries = gallery = vectors(protocol.queries)
            if protocol.gallery is not protocol.queries:
                gallery = vectors(protocol.gallery)
        old, new = gallery.native_vectors(OLD), gallery.native_vectors(NEW)
        for cell, ends in upgrade_cells(OLD, NEW, (OLD, NEW) if row.upgrade_runs else ()).items():
            # First elements of a longer embedding (BCT section 3.6).
            if ends.searches_unmigrated and new.shape[1] < old.shape[1]:
                continue
            figures = protocol.measure(
                *cell_vectors(ends, queries, gallery, int8=row.uses_int8), metric
            )
            stored = by_query.setdefault(cell, {})
            stored |= {f"{name} {figure}": np.array([share]) for figure, share in figures.items()}
    return Cells(by_query, {}, np.array(["all"]))


def summarise_protocols(rows: Mapping[str, MeasuredRow]) -> dict[str, ProtocolRow]:
    """Return means over seeds, and the papers' criteria for each figure.

    M(new*, new*) is that of the first row with an independent new model that learned the same.

    Args:
        rows: the measured rows by name, with cells of `protocol_cells`.
    """
    means = {name: _means(one.cells_by_seed) for name, one in rows.items()}
    summary = {}
    for name, one in rows.items():
        cells = means[name]
        bound = next(
            (
                _shares(means[other]["new/new"])
                for other, rival in rows.items()
                if upper_bound_key(rival.row) == upper_bound_key(one.row)
                and rival.row.new_run.config_values.get("method", INDEPENDENT) == INDEPENDENT
            ),
            None,
        )
        criteria = {}
        if "new/served" in cells:
            old, served, new = (
                _shares(cells[cell]) for cell in ("old/old", "new/served", "new/new")
            )
            criteria = figure_criteria(served, old, new, bound)
        summary[name] = ProtocolRow(len(one.cells_by_seed), cells, criteria)
    return summary


def _means(runs: Sequence[Cells]) -> dict[str, dict[str, Figure]]:
    return {
        cell: {
            figure: mean_and_std([float(run.figures_by_query[cell][figure][0]) for run in runs])
            for figure in figures
        }
        for cell, figures in runs[0].figures_by_query.items()
    }


def _shares(figures: Mapping[str, Figure]) -> dict[str, float]:
    return {name: mean for name, (mean, _) in figures.items()}


def write_protocols(
    out: Path, title: str, rows: Mapping[str, ProtocolRow], command: str, machine: str
) -> str:
    """Write OUT/TITLE.json and OUT/TITLE.md, and return the page.

    Args:
        out: the folder, made if missing.
        title: the name of the comparison.
        rows: the summary by row.
        command, machine: how and where it was made.

    Raises:
        CannotWriteError: a file cannot be written.
    """
    values = {"data": title, "command": command, "machine": machine}
    content = values | {"rows": {name: asdict(row) for name, row in rows.items()}}
    page = _page(title, rows, f"`{command}`\n{machine}")
    make_dir(out)
    write_file(out / f"{title}.json", json.dumps(content, indent=1).encode(), 0o644)
    write_file(out / f"{title}.md", page.encode(), 0o644)
    return page


def _page(title: str, rows: Mapping[str, ProtocolRow], origin: str) -> str:
    """Format one line for each row and figure, in percent, with the deviation over seeds."""
    columns = ("row", "figure", *_SHOWN, *_CRITERIA.values())
    lines = [f"# {title}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name, row in rows.items():
        for figure, criteria in row.criteria.items():
            cells = (_percent(row.cells.get(cell, {}).get(figure)) for cell in _SHOWN)
            met = "met" if criteria["compatible"] else "not met"
            gains = (_percent(criteria[key]) for key in _CRITERIA if key != "compatible")
            lines.append("| " + " | ".join((name, figure, *cells, met, *gains)) + " |")
    seeds = max((row.seeds for row in rows.values()), default=0)
    published = _published(rows) if title == "gldv2" else []
    return "\n".join([*lines, "", f"{seeds} seeds. {origin}", "", *published])


def _published(rows: Mapping[str, ProtocolRow]) -> list[str]:
    """Return DMU's figures next to ours, in percent, of the rows that were run."""
    columns = ("row", "new/new published", "ours", "new/served published", "ours", "source")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for table, figures in GLDV2_PAPER.items():
        for name, printed in figures.items():
            if name not in rows:
                continue
            cells = [name]
            for number, cell in enumerate(("new/new", "new/served")):
                cells.append(f"{printed[number]:.2f}" if number < len(printed) else "-")
                cells.append(_percent(rows[name].cells.get(cell, {}).get(GLDV2_FIGURE)))
            lines.append("| " + " | ".join((*cells, f"DMU {table}")) + " |")
    return [f"## Published figures, {GLDV2_FIGURE}", "", *lines, ""]


def _percent(value: Figure | float | None) -> str:
    mean, deviation = value if isinstance(value, tuple) else (value, None)
    if mean is None:
        return "-"
    return f"{100 * mean:.2f}" + (f" ±{100 * deviation:.2f}" if deviation is not None else "")
