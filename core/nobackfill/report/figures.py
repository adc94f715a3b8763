"""The report's figures as people read them: the matrix, quality kept, flips."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nobackfill.metrics.compatibility import negative_flips, share_kept
from nobackfill.metrics.retrieval import PerQuery, mean
from nobackfill.quality.cells import upgrade_cells
from nobackfill.quality.retrieval import Measured
from nobackfill.release.manifest import Manifest
from nobackfill.report.comparison import Comparison

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


def matrix_of_pictures(cells: Mapping[str, Measured]) -> Matrix:
    """The matrix as the pictures give it."""
    return _shaded(
        {
            name: (percent(cell.map), percent(cell.cmc1), percent(cell.cmc5))
            for name, cell in cells.items()
        }
    )


def matrix_of_evidence(old: Manifest, new: Manifest, route: tuple[int, ...]) -> Matrix:
    """The matrix that the release was published with; cells that were not measured are missing.

    What is served is told with int8 transforms where they are published, as they are what gateways
    and devices run; the CMC of older manifests is that of exact ones.
    """
    cells = upgrade_cells(old.release, new.release, route)
    names = {str(cell): name for name, cell in cells.items()}
    figures = {
        names[cell.name]: (100 * cell.map, 100 * cell.cmc1, 100 * cell.cmc5)
        for cell in new.evidence
        if cell.name in names
    }
    int8_map = _int8_map(new, route)
    if int8_map is not None and "new/served" in figures:
        figures["new/served"] = (100 * int8_map, *figures["new/served"][1:])
    return _shaded(figures)


def basis_of_evidence(new: Manifest, route: tuple[int, ...]) -> str:
    """What the manifest tells of how its matrix was measured; it names no images."""
    if not new.evidence:
        return ""
    cell = new.evidence[0]
    text = (
        f"Measured when the release was published: {cell.queries} searches in {cell.items} images "
        "of the publisher's choice. Which images, and whether a model had been trained on them, "
        "the release does not tell."
    )
    if _int8_map(new, route) is not None:
        text += (
            " Precision after the upgrade is that of the int8 transform, which gateways and "
            "devices run."
        )
    return text


def _int8_map(new: Manifest, route: tuple[int, ...]) -> float | None:
    return next((known.int8_map for known in new.routes if known.releases == route), None)


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
    # Queries that share their class with another picture; the others have nothing to find.
    answerable: int
    # Share of the answerable queries in percent.
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
        answerable=int((~np.isnan(before.cmc1)).sum()),
        worsened_percent=100 * negative_flips(before.cmc1, after.cmc1),
    )
