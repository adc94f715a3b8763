"""One self-contained HTML page that tells a person what an upgrade does to their gallery."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from metrics.backfill import uncertainty_order
from release.manifest import Manifest
from release.routes import plan_route
from report.charts import backfill_chart, map_chart
from report.comparison import Comparison
from report.figures import (
    GALLERIES,
    QUERIES,
    Matrix,
    facts,
    flips,
    kept,
    matrix_of_evidence,
    matrix_of_pictures,
    upgrade_bytes,
)
from report.pictures import thumbnail

TITLES = {"old": "stored by the old model", "served": "after the upgrade", "new": "embedded again"}
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
    uncertainty: float = 0.0


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
    basis: str,
    seed: int,
) -> str:
    """The page. `old` None: a first release. Without `comparison` it shows what the manifests say.

    `basis` says in words what the matrix was measured on.
    """
    new = manifests[release]
    route = _route(manifests, release, old, comparison)
    matrix: Matrix = {}
    if comparison is not None:
        matrix = matrix_of_pictures(comparison.cells)
    elif old is not None:
        matrix = matrix_of_evidence(manifests[old], new, route)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html.j2").render(
        old=None if old is None else manifests[old],
        new=new,
        route=route,
        verdict=VERDICTS[new.gate.verdict],
        matrix=matrix,
        queries=QUERIES,
        galleries=GALLERIES,
        titles=TITLES,
        kept=kept(matrix),
        basis=basis,
        transform_bytes=upgrade_bytes(manifests, route),
        cost=comparison.cost if comparison else None,
        backfill=backfill_chart(comparison) if comparison and comparison.curves else None,
        map=map_chart(comparison) if comparison else None,
        groups=_groups(comparison) if comparison else [],
        least=_least_certain(comparison) if comparison else [],
        facts=facts,
        seconds=_seconds,
        bytes=_bytes,
        version=version("nobackfill"),
        seed=seed,
    )


def _route(
    manifests: Mapping[int, Manifest],
    release: int,
    old: int | None,
    comparison: Comparison | None,
) -> tuple[int, ...]:
    if comparison is not None:
        return comparison.route
    if old is None:
        return ()
    source = manifests[old]
    planned = plan_route(manifests, old, release, has_side=source.side_encoder is not None)
    return planned.releases if planned else ()


def _groups(comparison: Comparison) -> list[Group]:
    changed = flips(comparison)
    better = f"{len(changed.improved)} of {len(comparison.pictures)} searches now find the right "
    worse = f"{len(changed.worsened)} of {len(comparison.pictures)} searches "
    return [
        Group(
            "What got better",
            better + "class first, where the old model did not. Green is right, dotted red wrong.",
            [_asked(comparison, query) for query in changed.improved[:SHOWN]],
        ),
        Group(
            "What got worse",
            worse + f"({changed.worsened_percent:.1f} %) were right before and are wrong now.",
            [_asked(comparison, query) for query in changed.worsened[:SHOWN]],
        ),
    ]


def _asked(comparison: Comparison, query: int) -> Asked:
    cells = comparison.cells
    rows = [
        Row(title, [_tile(comparison, hit) for hit in cells[name].hits[query].tolist() if hit >= 0])
        for title, name in ROWS.items()
        if name in cells
    ]
    tile = _tile(comparison, query)
    return Asked(tile.picture, tile.label, rows)


def _tile(comparison: Comparison, position: int) -> Tile:
    picture = comparison.pictures[position]
    return Tile(thumbnail(picture), picture.label)


def _least_certain(comparison: Comparison) -> list[Tile]:
    if comparison.uncertainty is None:
        return []
    order = uncertainty_order(comparison.uncertainty)[:LEAST_CERTAIN]
    return [
        Tile(
            thumbnail(comparison.pictures[item]),
            comparison.pictures[item].label,
            float(comparison.uncertainty[item]),
        )
        for item in order
    ]


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _bytes(value: int) -> str:
    return f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value / 1e3:.0f} kB"
