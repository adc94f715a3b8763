"""The command evaluate.py: measure cells of the compatibility matrix of published releases."""

import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from nobackfill.class_folders import list_images
from nobackfill.durable import make_dir, write_file
from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.metrics.backfill import BackfillCurve
from nobackfill.metrics.ranking import Relevance
from nobackfill.quality.cells import CellName, list_cells, parse_cell
from nobackfill.quality.criterion import compute_criteria
from nobackfill.quality.embedded import EmbeddedListing, PublishedListing
from nobackfill.quality.listing import relevance_without_copies
from nobackfill.quality.retrieval import MatrixCell, evaluate_cells, neighbour_paths
from nobackfill.quality.route_evidence import backfill_curves
from nobackfill.release.manifest import Manifest
from nobackfill.release.trust.trust import read_publication
from nobackfill.training.cli.command import command_app
from nobackfill.training.cli.table import (
    backfill_table,
    matrix_table,
    protocol_backfill_table,
    protocol_criteria_table,
    protocol_table,
)
from nobackfill.training.protocols.evaluation import ProtocolReport, evaluate_protocol
from nobackfill.training.protocols.persons import OperatingPoints


def write_picture(cells: Sequence[MatrixCell], path: Path) -> None:
    """Draw a matrix with the mAP and CMC-1 of every cell into a PNG file.

    Rows are query releases, columns are galleries. A cell that was not measured stays white.
    matplotlib's backend becomes Agg for the whole process. A figure of NaN is drawn as white.

    Args:
        cells: the measured cells; at least one.
        path: the file. It is replaced if it exists, and its folder is created.

    Raises:
        CannotWriteError: the file or its folder cannot be written.
        KeyError: a cell has no figure `map` or `cmc1`.
    """
    # Imported here: only --picture needs matplotlib, which takes a second to import.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rows = sorted({cell.name.query_release for cell in cells})
    columns = sorted(
        {cell.name.gallery_releases for cell in cells}, key=lambda g: (g[-1], len(g), g)
    )
    values = np.full((len(rows), len(columns)), np.nan)
    figure = Figure(figsize=(2 + 1.5 * len(columns), 1.5 + 0.9 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for cell in cells:
        row, column = rows.index(cell.name.query_release), columns.index(cell.name.gallery_releases)
        values[row, column] = cell.figures["map"]
        text = f"mAP {100 * cell.figures['map']:.1f}\nCMC-1 {100 * cell.figures['cmc1']:.1f}"
        colour = "white" if cell.figures["map"] < 0.5 else "black"
        axes.text(column, row, text, ha="center", va="center", color=colour)
    axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(columns)), [" > ".join(map(str, gallery)) for gallery in columns])
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    axes.set_xlabel("gallery: release whose vectors are searched, and the upgrades they took")
    axes.set_ylabel("query: release")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    make_dir(path.parent)
    write_file(path, image.getvalue())


# By cell and by order of re-embedding.
Curves = dict[str, dict[str, BackfillCurve]]

_EPILOG = """
Cells: a cell is one measurement, written QUERY/GALLERY with the releases of the queries and of the
gallery's vectors. 2/2 is release 2 on both sides, as after re-embedding everything (the upper
bound). 1/1 is the lower bound. 2/1 searches vectors of release 1 directly with queries of release
2. 2/1>2 searches vectors of release 1 after the upgrade 1 -> 2; 3/1>2>3 after two upgrades.

Search is exact, by each release's own metric. A query's own picture, and copies of it, are left out
of its answers. JSON shares are 0..1: {"left_out": N, "cells": {CELL: {"cmc1", "cmc5", "map", ...}},
"criterion": {CELL: {"compatible", "strict_apart", "strict_together", "update_gain", "upgrade_gain",
"degradation", ...}}, "backfill": {CELL: {ORDER: {"mean_map", "shares", "map", ...}}}, "neighbours":
{CELL: {QUERY PATH: [GALLERY PATHS, nearest first]}}}. "left_out" counts the queries that are in the
gallery too.

Criteria: update gain (BCT Eq. 9) and degradation (DMU Eq. 7) compare a compatible model with one
trained independently on the same images: release N of --independent N. BCT Eq. 1 is measured where
old vectors are searched directly. Its two figures are the shares of pairs of images of different
classes, and of pairs of the same class, that satisfy it.

Published test protocols: --protocol NAME --root FOLDER replaces --queries and --gallery. Names:
ijbc, gldv2, roxford5k, rparis6k, market1501, vggface2; docs/training.md lists the files that each
expects below FOLDER. Criteria are told for each figure, and --backfill measures each figure. JSON:
{"protocol": NAME, "cells": {CELL: {FIGURE: share}}, "criterion": {CELL: {FIGURE: {...}}},
"backfill": {CELL: {ORDER: {"shares", "figures", "means"}}}}.

Examples:

python training/evaluate.py --model-repo model_repo --queries photos/queries --gallery photos/all
--cells "1/1,2/1,2/1>2,2/2" --json build/cells.json --picture build/cells.png

python training/evaluate.py --model-repo model_repo --protocol market1501 --root Market-1501

Exit codes: 0 measured, 65 refused data or failed verification, 66 a cell names a release that is
not published, 78 wrong configuration.
"""

_NO_CURVE = (
    "--backfill measured no curve, because no cell of --cells has an older gallery whose vectors "
    "can be searched together with new ones; add one such as 2/1"
)

_Queries = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder with the query images, one folder in it for each class; it is only read. "
        "Required together with --gallery, unless --protocol is given.",
    ),
]
_Gallery = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder with the images that the queries search, one folder in it for each class; it "
        "is only read and may be the folder of --queries. Required together with --queries, unless "
        "--protocol is given.",
    ),
]
_Name = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Measure a published test protocol: ijbc, gldv2, roxford5k, rparis6k, market1501 or "
        "vggface2. Without it, --queries and --gallery are measured.",
    ),
]
_Root = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder with the files and images of the test protocol, which are only read. Required "
        "with --protocol, refused without it.",
    ),
]
_Picture = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.png",
        help="Draw mAP and CMC-1 of each cell into this PNG file, one row per query release; an "
        "existing file is replaced. Without it, no picture is drawn.",
    ),
]
_Far = Annotated[
    list[float] | None,
    typer.Option(
        min=0,
        max=1,
        help="Measure the true accept rate of protocol ijbc at this false accept rate, a share "
        "from 0 to 1; repeat it for more rates.",
        show_default="0.0001",
    ),
]
_Fpir = Annotated[
    list[float] | None,
    typer.Option(
        min=0,
        max=1,
        help="Measure the true positive identification rate of protocol ijbc at this false "
        "positive identification rate, a share from 0 to 1; repeat it for more rates.",
        show_default="0.01",
    ),
]
_Independent = Annotated[
    int | None,
    typer.Option(
        metavar="RELEASE",
        help="Number of a published release that was trained without any older model. Update gain "
        "and degradation compare the other releases with it. Without it, these two figures are "
        "measured only for queries of an independently trained release.",
    ),
]


def main(
    model_repo: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Publication folder with the releases to measure, as export.py writes it; it is "
            "only read.",
        ),
    ],
    queries: _Queries = None,
    gallery: _Gallery = None,
    protocol: _Name = None,
    root: _Root = None,
    far: _Far = None,
    fpir: _Fpir = None,
    cells: Annotated[
        str | None,
        typer.Option(
            help="Cells of the matrix to measure, separated by commas, each QUERY/GALLERY as in "
            "1/1,2/1,2/1>2,2/2. The numbers are releases; 1>2 are vectors of release 1 that were "
            "upgraded to release 2.",
            show_default="every cell",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Also write every figure to this file as JSON; an existing file is replaced. "
            "Without it, only tables are printed.",
        ),
    ] = None,
    picture: _Picture = None,
    independent: _Independent = None,
    neighbours: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of nearest gallery images that the file of --json lists for each query; "
            "with 0 it lists none.",
        ),
    ] = 0,
    backfill: Annotated[
        bool,
        typer.Option(
            "--backfill",
            help="Also measure mAP and CMC-1, or the figures of --protocol, while a growing share "
            "of each older gallery is re-embedded. Without this flag, no such curve is measured.",
        ),
    ] = False,
    int8: Annotated[
        bool,
        typer.Option(
            "--int8",
            help="Migrate vectors by the quantised (int8) model of each upgrade that has one. "
            "Without this flag, the float32 models are used.",
        ),
    ] = False,
) -> None:
    """Measure cells of the compatibility matrix and print them as a table."""
    if root is not None and protocol is None:
        raise typer.BadParameter(
            "--root is the folder of a protocol's files; also give --protocol NAME"
        )
    manifests = read_publication(model_repo).manifests
    if not manifests:
        raise ConfigurationError(
            f"--model-repo {model_repo} has no published release to measure; publish one with "
            f"python training/export.py --model-repo {model_repo}"
        )
    names = _names(cells, manifests, independent)
    points = _points(protocol, far, fpir)
    if protocol is not None:
        others = (queries, gallery, picture, neighbours or None)
        if root is None or any(other is not None for other in others):
            raise typer.BadParameter(
                "--protocol needs --root FOLDER, and may be combined only with --cells, "
                "--independent, --backfill, --far, --fpir, --int8 and --json; leave other options "
                "out"
            )
        report = evaluate_protocol(
            protocol, root, model_repo, manifests, names, int8=int8, points=points,
            independent_release=independent, with_backfill_curves=backfill,
        )  # fmt: skip
        print(protocol_table(report.cells))
        if report.criteria:
            print(protocol_criteria_table(report.criteria))
        if backfill:
            print(
                protocol_backfill_table(report.backfill_curves)
                if report.backfill_curves
                else _NO_CURVE
            )
        _write(json_file, lambda: _protocol_report(protocol, report))
        return
    if queries is None or gallery is None:
        raise typer.BadParameter(
            "expected two folders of images, --queries FOLDER and --gallery FOLDER, or a test "
            "protocol, --protocol NAME and --root FOLDER"
        )
    sets = _sets(queries, gallery, model_repo, manifests)
    matrix = evaluate_cells(names, *sets.sides, neighbour_count=neighbours, int8=int8)
    criteria = compute_criteria(matrix, *sets.sides, independent)
    print(matrix_table(matrix, criteria))
    if picture is not None:
        write_picture(matrix, picture)
    curves = _curves(matrix, *sets.sides) if backfill else {}
    if backfill:
        print(backfill_table(curves) if curves else _NO_CURVE)
    _write(json_file, lambda: _report(sets, matrix, criteria, neighbours > 0, curves))


def _points(
    protocol: str | None, far: Sequence[float] | None, fpir: Sequence[float] | None
) -> OperatingPoints | None:
    """Return the given rates, with defaults for the others; None if none is given."""
    if protocol is None and (far or fpir):
        raise typer.BadParameter(
            "--far and --fpir are operating points of one protocol; add --protocol ijbc --root "
            "FOLDER"
        )
    options = {"far": far, "fpir": fpir}
    rates_of = {name: tuple(rates) for name, rates in options.items() if rates}
    return OperatingPoints(**rates_of) if rates_of else None


@dataclass(frozen=True)
class _Sets:
    """Query and gallery images with their relevance; `left_out` counts the queries whose own
    picture is left out of their answers."""

    sides: tuple[PublishedListing, PublishedListing, Relevance]
    left_out: int


def _sets(
    queries: Path, gallery: Path, model_repo: Path, manifests: Mapping[int, Manifest]
) -> _Sets:
    query_images, gallery_images = list_images(queries), list_images(gallery)
    relevance, own = relevance_without_copies(query_images, gallery_images)
    pairs = zip(relevance.relevant, relevance.ignored, strict=True)
    if not any(len(np.setdiff1d(relevant, ignored)) for relevant, ignored in pairs):
        raise InvalidInputError(
            f"--queries {queries}, --gallery {gallery}: expected another image of a query's class "
            "folder in the gallery, found none for any query; add images to the gallery's folders"
        )
    if own:
        print(
            f"{own} of {len(query_images)} query images are in the gallery too; the gallery's copy "
            "of a query is left out of the answers to that query",
            file=sys.stderr,
        )
    embedded = PublishedListing(query_images, model_repo, manifests)
    if queries.resolve() == gallery.resolve():
        return _Sets((embedded, embedded, relevance), own)
    return _Sets(
        (embedded, PublishedListing(gallery_images, model_repo, manifests), relevance), own
    )


def _report(
    sets: _Sets,
    matrix: Sequence[MatrixCell],
    criteria: Mapping[str, object],
    neighbours: bool,
    curves: Curves,
) -> dict[str, object]:
    query_images, gallery_images = (side.listing for side in sets.sides[:2])
    return {
        "left_out": sets.left_out,
        "cells": {
            str(cell.name): {**cell.figures, "worst_class": cell.worst_class} for cell in matrix
        },
        "criterion": criteria,
        "backfill": {
            cell: {order: _figures(curve) for order, curve in orders.items()}
            for cell, orders in curves.items()
        },
        "neighbours": {
            str(cell.name): dict(neighbour_paths(cell, query_images, gallery_images))
            for cell in matrix
            if neighbours
        },
    }


def _protocol_report(name: str, report: ProtocolReport) -> dict[str, object]:
    return {
        "protocol": name,
        "cells": report.cells,
        "criterion": report.criteria,
        "backfill": {
            cell: {
                order: {
                    "shares": curve.reembedded_shares.tolist(),
                    "figures": {key: values.tolist() for key, values in curve.figures.items()},
                    "means": {key: curve.mean_of(key) for key in curve.figures},
                }
                for order, curve in orders.items()
            }
            for cell, orders in report.backfill_curves.items()
        },
    }


def _write(file: Path | None, report: Callable[[], Mapping[str, object]]) -> None:
    if file is not None:
        make_dir(file.parent)
        write_file(file, json.dumps(report(), indent=1).encode())


def _names(
    cells: str | None, manifests: Mapping[int, Manifest], independent: int | None
) -> list[CellName]:
    """Return the requested cells, or all, and the cell of the independent release."""
    names = list_cells(manifests) if cells is None else [parse_cell(c) for c in cells.split(",")]
    own = [] if independent is None else [CellName(independent, (independent,))]
    return list(dict.fromkeys([*names, *own]))


def _curves(
    cells: Sequence[MatrixCell],
    queries: EmbeddedListing,
    gallery: EmbeddedListing,
    relevance: Relevance,
) -> Curves:
    return {
        str(cell.name): backfill_curves(cell.name, queries, gallery, relevance)
        for cell in cells
        if cell.name.gallery_releases[0] != cell.name.query_release
    }


def _figures(curve: BackfillCurve) -> dict[str, float | list[float]]:
    """Return the figures of a curve at `shares` of the gallery, and their mean."""
    return {
        "mean_map": curve.area_under(curve.map),
        "mean_cmc1": curve.area_under(curve.cmc1),
        "shares": curve.reembedded_shares.tolist(),
        "map": curve.map.tolist(),
        "cmc1": curve.cmc1.tolist(),
    }


app = command_app("evaluate.py", main, _EPILOG)

if __name__ == "__main__":
    app()
