"""The report's figures as people read them: the matrix, quality kept, flips, bytes, facts."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from metrics.compatibility import negative_flips, share_kept
from metrics.retrieval import PerQuery, mean
from release.manifest import Manifest
from report.comparison import Cell, Comparison

# Rows and columns of the matrix, as query model and gallery.
QUERIES = ("old", "new")
GALLERIES = ("old", "served", "new")


@dataclass(frozen=True)
class MatrixCell:
    """A cell in percent, and how dark it is drawn, 0 to 1 of the best cell."""

    map: float
    cmc1: float
    cmc5: float
    shade: float


Matrix = Mapping[tuple[str, str], MatrixCell]


def matrix_of_pictures(cells: Mapping[str, Cell]) -> Matrix:
    """The matrix as the pictures give it."""
    return _shaded(
        {
            name: (percent(cell.map), percent(cell.cmc1), percent(cell.cmc5))
            for name, cell in cells.items()
        }
    )


def matrix_of_evidence(old: Manifest, new: Manifest, route: tuple[int, ...]) -> Matrix:
    """The matrix that the release was published with; cells that were not measured are missing."""
    served = ">".join(map(str, route)) if route else str(old.release)
    names = {
        f"{old.release}/{old.release}": "old/old",
        f"{new.release}/{old.release}": "new/old",
        f"{new.release}/{served}": "new/served",
        f"{new.release}/{new.release}": "new/new",
    }
    return _shaded(
        {
            names[f"{cell.query}/{cell.gallery}"]: (
                100 * cell.map,
                100 * cell.cmc1,
                100 * cell.cmc5,
            )
            for cell in new.evidence
            if f"{cell.query}/{cell.gallery}" in names
        }
    )


def percent(values: PerQuery) -> float:
    """The mean over the queries that can be answered."""
    return 100 * mean(values)


def _shaded(figures: Mapping[str, tuple[float, float, float]]) -> Matrix:
    best = max((values[0] for values in figures.values()), default=0) or 1
    cells = {}
    for name, values in figures.items():
        query, _, gallery = name.partition("/")
        cells[query, gallery] = MatrixCell(*values, values[0] / best)
    return cells


def kept(matrix: Matrix) -> float | None:
    """Quality kept in percent: mAP of new/served as a share of new/new; None where unmeasured."""
    served, bound = matrix.get(("new", "served")), matrix.get(("new", "new"))
    if served is None or bound is None or bound.map <= 0:
        return None
    return 100 * share_kept(served.map, bound.map)


@dataclass(frozen=True)
class Flips:
    """Queries whose first hit became right or wrong, positions, the largest change in AP first."""

    improved: list[int]
    worsened: list[int]
    # Share of all queries in percent.
    worsened_percent: float


def flips(comparison: Comparison) -> Flips:
    """What the upgrade changed for each picture asked, against the old model on its own gallery."""
    before, after = comparison.cells["old/old"], comparison.cells["new/served"]
    change = after.map - before.map
    improved = np.flatnonzero((before.cmc1 == 0) & (after.cmc1 == 1))
    worsened = np.flatnonzero((before.cmc1 == 1) & (after.cmc1 == 0))
    return Flips(
        improved=improved[np.argsort(-change[improved], kind="stable")].tolist(),
        worsened=worsened[np.argsort(change[worsened], kind="stable")].tolist(),
        worsened_percent=100 * negative_flips(before.cmc1, after.cmc1),
    )


def upgrade_bytes(manifests: Mapping[int, Manifest], route: tuple[int, ...]) -> int:
    """Bytes a device downloads for the transforms of a route; 0 for none."""
    total = 0
    for source, target in itertools.pairwise(route):
        upgrade = manifests[target].upgrade_from(source)
        assert upgrade is not None, "a route is made of published upgrades"
        total += upgrade.file.length
    return total


def facts(manifest: Manifest) -> list[tuple[str, str]]:
    """Version, method, digests and recipe of a release, as rows of name and value."""
    embedder = manifest.embedder
    rows = [
        ("release", str(manifest.release)),
        ("created", manifest.created),
        ("method", manifest.method),
        ("space", manifest.space),
        ("input", f"{embedder.width} x {embedder.height} pixels"),
        ("embedding", f"{embedder.dim} numbers, {embedder.metric.replace('_', ' ')}"),
        ("side-information", manifest.side_space or "none"),
        *((f"sha256 of {file.path}", file.sha256) for file in manifest.files()),
        *((f"recipe: {key}", str(value)) for key, value in manifest.recipe.items()),
    ]
    return [(name, value) for name, value in rows if value]
