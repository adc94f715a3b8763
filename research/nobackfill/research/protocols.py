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


@dataclass(frozen=True)
class PaperTable:
    """A table that a paper prints of a published set, in percent.

    Attributes:
        source: the table.
        figures: names of its figures, as the protocol has them.
        rows: by our row and cell one value for each figure.
    """

    source: str
    figures: tuple[str, ...]
    rows: Mapping[str, Mapping[str, tuple[float, ...]]]


_LANDMARKS = ("gldv2 map_at_100", "roxford5k map_medium", "rparis6k map_medium")
_TAR = "ijbc tar@far=0.0001"
_BCT_FACES = (_TAR, "ijbc tpir@fpir=0.01")
_UNIBCT_FACES = (_TAR, "ijbc rank-1", "ijbc rank-5")
_PERSONS = ("market1501 map",)
_OLD, _SERVED, _NEW = "old/old", "new/served", "new/new"


def _dmu(table: str, **rows: tuple[float, ...]) -> PaperTable:
    """GLDv2's mAP@100 of DMU's first scenario: new/new, and new/served where it is printed."""
    cells = {
        f"scenario-extended-data:{name}": dict(
            zip((_NEW, _SERVED), ((value,) for value in values), strict=False)
        )
        for name, values in rows.items()
    }
    return PaperTable(f"DMU {table}", _LANDMARKS[:1], cells)


# By data set; bct.txt with its supplement, unibct.txt and dmu.txt.
PAPER_TABLES: Mapping[str, tuple[PaperTable, ...]] = {
    "gldv2": (
        PaperTable("DMU Table 1", _LANDMARKS, {
            "scenario-extended-data:independent": {
                _OLD: (18.93, 64.33, 82.94), _NEW: (25.58, 75.88, 86.09),
            },
            "scenario-extended-data:bct_sys": {
                _NEW: (24.55, 73.74, 85.73), _SERVED: (21.12, 64.75, 83.53),
            },
            "scenario-extended-data:dmu": {
                _NEW: (25.00, 74.07, 86.59), _SERVED: (22.56, 66.68, 84.48),
            },
            "scenario-open-data:independent": {
                _OLD: (18.93, 64.33, 82.94), _NEW: (23.66, 72.20, 86.64),
            },
            "scenario-open-data:bct_sys": {
                _NEW: (23.47, 72.91, 86.44), _SERVED: (20.74, 63.73, 83.40),
            },
            "scenario-open-data:dmu": {
                _NEW: (23.76, 73.01, 85.90), _SERVED: (21.70, 64.14, 84.64),
            },
            "scenario-extended-class:independent": {
                _OLD: (17.53, 70.07, 83.62), _NEW: (25.58, 75.88, 86.09),
            },
            "scenario-extended-class:bct_sys": {
                _NEW: (25.10, 73.99, 85.64), _SERVED: (24.39, 73.34, 83.97),
            },
            "scenario-extended-class:dmu": {
                _NEW: (25.45, 74.13, 86.64), _SERVED: (25.01, 73.78, 84.52),
            },
            "scenario-deeper:independent": {
                _OLD: (18.93, 64.33, 82.94), _NEW: (27.42, 75.89, 86.62),
            },
            "scenario-deeper:bct_sys": {
                _NEW: (25.56, 75.70, 87.35), _SERVED: (21.68, 66.12, 85.59),
            },
            "scenario-deeper:dmu": {
                _NEW: (25.92, 76.49, 88.08), _SERVED: (22.38, 66.35, 85.93),
            },
        }),
        _dmu("Table 3", dmu_confidence=(24.88, 22.25)),
        _dmu("Table 4", dmu_selective=(24.75, 21.60), dmu_forward=(24.72, 22.42)),
        _dmu("Table 5", dmu_width_half=(24.78, 22.12), dmu_width_double=(24.96, 22.77)),
        PaperTable("DMU Table 6", _LANDMARKS[:1], {
            "growing-50:independent": {_OLD: (17.89,), _NEW: (22.39,)},
            "growing-50:bct_sys": {_NEW: (21.47,), _SERVED: (18.88,)},
            "growing-50:dmu": {_NEW: (22.66,), _SERVED: (19.84,)},
            "growing-75:independent": {_OLD: (17.89,), _NEW: (24.04,)},
            "growing-75:bct_sys": {_NEW: (23.52,), _SERVED: (19.82,)},
            "growing-75:dmu": {_NEW: (23.88,), _SERVED: (21.16,)},
        }),
        _dmu("Table 7", bct_regression=(25.11, 19.96), dmu_regression=(25.27, 21.23)),
        _dmu("Table 8", focal=(25.24, 20.02), unibct=(24.60, 21.77)),
        PaperTable("DMU Table 11", _LANDMARKS[:1], {
            "scenario-swin:independent": {_NEW: (26.80,)},
            "scenario-swin:bct_sys": {_NEW: (25.53,), _SERVED: (21.62,)},
            "scenario-swin:dmu": {_NEW: (25.89,), _SERVED: (22.47,)},
        }),
    ),
    "ijbc": (
        PaperTable("BCT Table 1", _BCT_FACES, {
            "independent": {_OLD: (77.86, 59.34), _SERVED: (0.0, 0.0), _NEW: (86.96, 76.88)},
            "l2": {_SERVED: (3.10, 0.50)},
            "lwf_new_data": {_SERVED: (77.26, 59.27)},
            "bct": {_SERVED: (80.25, 67.23)},
            "bct_kd": {_SERVED: (80.34, 69.02)},
            "bct_sys": {_SERVED: (80.59, 70.70)},
        }),
        PaperTable("BCT Table 2", _BCT_FACES, {
            "bct": {_NEW: (85.36, 73.86)},
            "bct_kd": {_NEW: (84.95, 73.56)},
            "bct_sys": {_NEW: (85.58, 74.40)},
        }),
        PaperTable("BCT Table 3", _BCT_FACES, {
            "bct_deeper": {_SERVED: (80.54, 68.71)},
            "bct_wide": {_SERVED: (80.92, 69.45)},
            "bct_relu": {_SERVED: (34.70, 17.73)},
            "bct_norm_softmax_to_cosine": {_OLD: (80.10, 64.32), _SERVED: (81.81, 71.16)},
            "bct_softmax_to_cosine": {_OLD: (73.27, 54.16), _SERVED: (67.11, 45.46)},
        }),
        PaperTable("BCT Table 4", _BCT_FACES, {
            "bct_chain": {_OLD: (41.45, 22.57), _SERVED: (53.98, 36.10)},
            "bct_first_hop": {_SERVED: (56.34, 39.00), _NEW: (75.96, 56.07)},
            "bct_second_hop": {_SERVED: (80.40, 66.09)},
            "independent_first_hop": {_NEW: (77.86, 59.34)},
        }),
        PaperTable("BCT supplement, Table 4", _BCT_FACES, {
            "bct_second_hop": {_NEW: (85.66, 74.12)},
        }),
    ),
    "ms1mv3": (
        PaperTable("UniBCT Table 2", _UNIBCT_FACES, {
            "extended-data:independent": {
                _OLD: (93.36, 69.90, 75.88), _NEW: (96.35, 80.67, 85.14),
            },
            "extended-data:regress": {
                _SERVED: (0.12, 8.12, 10.43), _NEW: (94.78, 76.34, 80.88),
            },
            "extended-data:contrastive": {
                _SERVED: (92.26, 73.36, 81.35), _NEW: (94.58, 80.90, 85.99),
            },
            "extended-data:vanilla": {
                _SERVED: (93.88, 72.46, 81.25), _NEW: (94.62, 80.51, 84.78),
            },
            "extended-data:refined": {
                _SERVED: (94.13, 72.89, 81.77), _NEW: (94.85, 80.83, 85.95),
            },
            "open-data:independent": {
                _OLD: (93.36, 69.90, 75.88), _NEW: (94.28, 75.55, 80.24),
            },
            "open-data:regress": {
                _SERVED: (0.02, 7.36, 9.12), _NEW: (94.51, 73.21, 78.84),
            },
            "open-data:contrastive": {
                _SERVED: (92.23, 70.34, 78.20), _NEW: (94.42, 76.69, 81.75),
            },
            "open-data:vanilla": {
                _SERVED: (93.75, 70.35, 77.68), _NEW: (94.37, 76.54, 81.69),
            },
            "open-data:refined": {
                _SERVED: (94.18, 71.42, 79.14), _NEW: (94.52, 76.88, 81.92),
            },
            "extended-class:independent": {
                _OLD: (92.95, 68.84, 74.72), _NEW: (96.35, 80.67, 85.14),
            },
            "extended-class:regress": {
                _SERVED: (0.08, 7.55, 9.67), _NEW: (93.21, 74.15, 78.72),
            },
            "extended-class:contrastive": {
                _SERVED: (92.70, 71.83, 79.26), _NEW: (94.53, 78.43, 83.76),
            },
            "extended-class:vanilla": {
                _SERVED: (93.54, 71.67, 79.33), _NEW: (94.32, 78.51, 84.14),
            },
            "extended-class:refined": {
                _SERVED: (93.75, 72.02, 79.13), _NEW: (94.55, 78.84, 84.33),
            },
            "open-class:independent": {
                _OLD: (92.95, 68.84, 74.72), _NEW: (94.28, 75.55, 80.24),
            },
            "open-class:regress": {
                _SERVED: (0.01, 6.88, 8.12), _NEW: (92.78, 70.26, 75.95),
            },
            "open-class:contrastive": {
                _SERVED: (92.51, 66.51, 75.82), _NEW: (94.24, 73.63, 79.96),
            },
            "open-class:vanilla": {
                _SERVED: (93.35, 67.14, 76.38), _NEW: (93.96, 74.21, 80.28),
            },
            "open-class:refined": {
                _SERVED: (93.46, 67.47, 77.01), _NEW: (94.10, 74.79, 81.22),
            },
            "identical-data:independent": {
                _OLD: (93.36, 69.90, 75.88), _NEW: (94.97, 70.21, 76.34),
            },
            "identical-data:regress": {
                _SERVED: (0.11, 7.73, 9.35), _NEW: (93.78, 67.41, 73.43),
            },
            "identical-data:contrastive": {
                _SERVED: (92.53, 64.67, 74.69), _NEW: (95.58, 70.49, 77.13),
            },
            "identical-data:vanilla": {
                _SERVED: (94.40, 67.38, 73.25), _NEW: (95.42, 70.57, 78.34),
            },
            "identical-data:refined": {
                _SERVED: (94.59, 67.71, 73.81), _NEW: (95.63, 70.66, 78.76),
            },
        }),
        PaperTable("UniBCT Table 3", _UNIBCT_FACES, {
            "extended-data:drop": {_SERVED: (94.03, 72.35, 80.97)},
        }),
        PaperTable("UniBCT Table 4", _UNIBCT_FACES, {
            "extended-data:bct": {_SERVED: (94.01, 72.64, 81.49)},
        }),
        PaperTable("DMU Table 2", (_TAR,), {
            "scenario-extended-data:independent": {_OLD: (91.67,), _NEW: (93.89,)},
            "scenario-extended-data:bct_sys": {_NEW: (93.96,), _SERVED: (92.82,)},
            "scenario-extended-data:dmu": {_NEW: (94.17,), _SERVED: (92.96,)},
            "scenario-open-data:independent": {_OLD: (91.67,), _NEW: (93.79,)},
            "scenario-open-data:bct_sys": {_NEW: (93.69,), _SERVED: (92.61,)},
            "scenario-open-data:dmu": {_NEW: (93.96,), _SERVED: (92.77,)},
        }),
    ),
    "market1501": (
        PaperTable("BCT Table 5", _PERSONS, {
            "independent": {_OLD: (42.9,), _NEW: (60.3,)},
            "bct": {_NEW: (60.1,)},
        }),
        # Elsewhere the paper names the model of the queries first.
        PaperTable("BCT Table 5, as (old, new)", _PERSONS, {
            "independent": {_SERVED: (26.7,)},
            "bct": {_SERVED: (45.0,)},
        }),
    ),
}  # fmt: skip


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
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
        AssertionError: the preset has no published set, or an upgrade lacks side-information that
            it reads.
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

    Raises:
        KeyError: a row lacks new/new, or one with new/served lacks old/old.
        IndexError: a row has no seed.
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
    published = _published(PAPER_TABLES.get(title, ()), rows)
    return "\n".join([*lines, "", f"{seeds} seeds. {origin}", "", *published])


def _published(tables: Sequence[PaperTable], rows: Mapping[str, ProtocolRow]) -> list[str]:
    """Return the papers' figures next to ours, in percent, of the rows that were run."""
    lines = []
    for table in tables:
        for name, cells in table.rows.items():
            for cell, values in cells.items() if name in rows else ():
                for figure, value in zip(table.figures, values, strict=True):
                    ours = _percent(rows[name].cells.get(cell, {}).get(figure))
                    fields = (name, figure, cell, f"{value:.2f}", ours, table.source)
                    lines.append(f"| {' | '.join(fields)} |")
    if not lines:
        return []
    columns = ("row", "figure", "cell", "published", "ours", "source")
    head = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return ["## Published figures", "", *head, *lines, ""]


def _percent(value: Figure | float | None) -> str:
    mean, deviation = value if isinstance(value, tuple) else (value, None)
    if mean is None:
        return "-"
    return f"{100 * mean:.2f}" + (f" ±{100 * deviation:.2f}" if deviation is not None else "")
