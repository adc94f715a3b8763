"""One self-contained HTML page that tells a person what an upgrade does to their gallery."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nobackfill.metrics.backfill import uncertainty_order
from nobackfill.pages.templates import environment
from nobackfill.release.manifest import Manifest
from nobackfill.report.charts import backfill_chart, gallery_map
from nobackfill.report.comparison import Comparison, best_route
from nobackfill.report.facts import downloads, facts, software
from nobackfill.report.figures import (
    GALLERIES,
    QUERIES,
    Matrix,
    basis_of_evidence,
    flips,
    kept,
    matrix_of_evidence,
    matrix_of_pictures,
)
from nobackfill.report.pictures import thumbnail

TITLES = {"old": "stored by the old model", "served": "after the upgrade", "new": "embedded again"}
# What a cell of the matrix is to a person; the others are only told by their row and column.
BOUNDS = {("old", "old"): "lower bound", ("new", "new"): "upper bound"}
MARKS = BOUNDS | {("new", "old"): "naive swap", ("new", "served"): "what you get"}
# Rows of the picture grid, and the cell of the matrix that each shows.
ROWS = {
    "before": "old/old",
    "naive swap": "new/old",
    "upgraded": "new/served",
    "embedded again": "new/new",
}
VERDICTS = {
    "first": "first release, nothing to beat",
    "passed": "passed",
    "failed": "failed, published by force",
    "not_measured": "not measured, published by force",
}
# Queries of each group, and least certain items, that the page shows.
SHOWN = 6
LEAST_CERTAIN = 16


@dataclass(frozen=True)
class Tile:
    """A small picture with its class."""

    picture: str
    label: str
    # Of a least certain item: its uncertainty in multiples of the median item's.
    times: float | None = None


@dataclass(frozen=True)
class Row:
    title: str
    hits: list[Tile]


@dataclass(frozen=True)
class Asked:
    """A query with its first hits by ROWS."""

    picture: str
    label: str
    rows: list[Row]


@dataclass(frozen=True)
class Group:
    title: str
    text: str
    queries: list[Asked]


def render(
    manifests: Mapping[int, Manifest],
    release: int,
    old: int | None,
    comparison: Comparison | None,
    basis: str | None,
    seed: int,
    links: Sequence[tuple[str, str]] = (),
) -> str:
    """The page. `old` None: a first release. Without `comparison` it shows what the manifests say.

    `basis` says in words what the comparison was measured on; `links`: what is served, its address.
    """
    new = manifests[release]
    found = None if old is None else best_route(manifests, old, release)
    route = () if found is None else found.releases
    matrix: Matrix = {}
    if comparison is not None:
        matrix = matrix_of_pictures(comparison.cells)
    elif old is not None:
        matrix = matrix_of_evidence(manifests[old], new, route)
    return (
        environment(Path(__file__).parent)
        .get_template("page.html.j2")
        .render(
            old=None if old is None else manifests[old],
            new=new,
            releases=[manifests[number] for number in route or sorted({old or release, release})],
            route=route,
            verdict=VERDICTS[new.gate.verdict],
            matrix=matrix,
            queries=QUERIES,
            galleries=GALLERIES,
            titles=TITLES,
            bounds=BOUNDS,
            marks=MARKS,
            kept=kept(matrix),
            basis=basis or basis_of_evidence(new, route),
            downloads={} if old is None else downloads(manifests, old, release, route),
            cost=comparison.cost if comparison else None,
            backfill=backfill_chart(comparison) if comparison and comparison.curves else None,
            map=gallery_map(comparison) if comparison else None,
            groups=_groups(comparison) if comparison else [],
            least=_least_certain(comparison) if comparison else [],
            facts=facts,
            seconds=_seconds,
            bytes=_bytes,
            software=software(),
            seed=seed,
            links=links,
        )
    )


def _groups(comparison: Comparison) -> list[Group]:
    changed = flips(comparison)
    asked = f"of {changed.answerable} searches"
    alone = len(comparison.pictures) - changed.answerable
    if alone:
        asked += f" (and {alone} with nothing to find, alone in their class)"
    return [
        Group(
            "What got better",
            f"{len(changed.improved)} {asked} now find the right class first, where the old model "
            "did not. Green is right, dotted red wrong.",
            [_asked(comparison, query) for query in changed.improved[:SHOWN]],
        ),
        Group(
            "What got worse",
            f"{len(changed.worsened)} {asked}, {changed.worsened_percent:.1f} %, found the right "
            "class first before and do not any more.",
            [_asked(comparison, query) for query in changed.worsened[:SHOWN]],
        ),
    ]


def _asked(comparison: Comparison, query: int) -> Asked:
    cells = comparison.cells
    rows = [
        Row(title, [_tile(comparison, hit) for hit in cells[name].neighbours[query].tolist()])
        for title, name in ROWS.items()
        if name in cells
    ]
    tile = _tile(comparison, query)
    return Asked(tile.picture, tile.label, rows)


def _tile(comparison: Comparison, row: int, times: float | None = None) -> Tile:
    pictures = comparison.pictures
    return Tile(thumbnail(pictures.root / pictures.paths[row]), pictures.class_of(row), times)


def _least_certain(comparison: Comparison) -> list[Tile]:
    if comparison.uncertainty is None:
        return []
    least = uncertainty_order(comparison.uncertainty)[:LEAST_CERTAIN]
    median = float(np.median(comparison.uncertainty))
    times = comparison.uncertainty[least] / median if median > 0 else [None] * len(least)
    return [_tile(comparison, row, over) for row, over in zip(least, times, strict=True)]


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _bytes(value: int) -> str:
    return f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value / 1e3:.0f} kB"
