"""One upgrade, measured on pictures: every one of them asks, and all the others are the gallery.

`old` is the release that the gallery was stored with, `new` the release in question, `served` what
the gallery holds after the upgrade (upgraded vectors, or the old ones where `new` searches them
directly). The figures are the matrix, quality kept, and flips.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing
from nobackfill.metrics.backfill import BackfillCurve
from nobackfill.metrics.compatibility import negative_flips, share_kept
from nobackfill.metrics.retrieval import PerQuery, mean
from nobackfill.quality.cells import upgrade_cells
from nobackfill.quality.embedded import Published
from nobackfill.quality.listing import among_others
from nobackfill.quality.retrieval import Measured, measure_cell
from nobackfill.quality.route_evidence import backfill_curves
from nobackfill.release.manifest import Manifest
from nobackfill.release.routes import Route, plan_route
from nobackfill.vectors import Vectors

HITS = 5
# Orders of the backfill that a reader could follow.
ORDERS = ("random", "uncertainty", "gain")


@dataclass(frozen=True)
class UpgradeSeconds:
    """What the upgrade took here, on one core, against embedding the images again."""

    items: int
    upgrade_seconds: float
    reembed_seconds: float


@dataclass(frozen=True)
class Comparison:
    """Everything that the pictures tell about an upgrade."""

    old: Manifest
    new: Manifest
    # Releases on the way; empty where the old vectors are searched directly.
    route: tuple[int, ...]
    pictures: Listing
    # By query/gallery, as in "new/served", with each picture's nearest HITS others; new/old is
    # missing where the dimensions differ.
    cells: Mapping[str, Measured]
    old_vectors: Vectors
    served_vectors: Vectors
    new_vectors: Vectors
    # [n], larger is less certain; None where the upgrade predicts none.
    uncertainty: NDArray[np.float32] | None
    # By order of the backfill; empty where served and new vectors differ in dimension.
    curves: Mapping[str, BackfillCurve]
    cost: UpgradeSeconds


def best_route(manifests: Mapping[int, Manifest], old: int, new: int) -> Route | None:
    """The route that a gallery of `old`, whose items all have side-information, takes to `new`."""
    return plan_route(manifests, old, new, manifests[old].side_space)


def predecessor(manifests: Mapping[int, Manifest], release: int) -> int | None:
    """The newest older release whose galleries `release` can take over, or None."""
    for number in sorted((n for n in manifests if n < release), reverse=True):
        old = manifests[number]
        if plan_route(manifests, number, release, old.side_space, directly=old.space):
            return number
    return None


def compare(
    folder: Path, manifests: Mapping[int, Manifest], old: int, new: int, pictures: Listing
) -> Comparison:
    """Measure the upgrade from release `old` to `new` on pictures, with what gateways and devices
    run by default: int8 transforms where they are published.

    Raises VerificationError for models that are not the published ones, InvalidInputError for a
    file that is no image.
    """
    found = best_route(manifests, old, new)
    route = () if found is None else found.releases
    names = upgrade_cells(old, new, route)
    images = Published(pictures, folder, manifests, threads=1)
    relevance = among_others(pictures)
    before, native = images.native(old), images.native(new)
    served = images.along(names["new/served"].gallery, int8=True)
    comparable = {
        "old/old": True,
        "new/old": before.shape[1] == native.shape[1],
        "new/served": served.embedding.shape[1] == native.shape[1],
        "new/new": True,
    }
    cells = {
        name: measure_cell(cell, images, images, relevance, neighbours=HITS, int8=True)
        for name, cell in names.items()
        if comparable[name]
    }
    curves = {}
    if comparable["new/served"]:
        cell = names["new/served"]
        curves = backfill_curves(cell, images, images, relevance, ORDERS, int8=True)
    return Comparison(
        old=manifests[old],
        new=manifests[new],
        route=route,
        pictures=pictures,
        cells=cells,
        old_vectors=before,
        served_vectors=served.embedding,
        new_vectors=native,
        uncertainty=served.uncertainty,
        curves=curves,
        cost=UpgradeSeconds(len(pictures), images.seconds.get(route, 0.0), images.seconds[new,]),
    )


# Rows and columns of the matrix, as query model and gallery.
QUERIES = ("old", "new")
GALLERIES = ("old", "served", "new")


@dataclass(frozen=True)
class ShadedCell:
    """A cell in percent, and how dark it is drawn, 0 to 1 of the best cell."""

    map: float
    cmc1: float
    cmc5: float
    shade: float


Matrix = Mapping[tuple[str, str], ShadedCell]


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
        cells[query, gallery] = ShadedCell(*values, values[0] / best)
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
