"""Measure one upgrade on pictures: each picture is a query, and all others are its gallery.

`old` is the release of the stored gallery, `new` the release in question, `served` the gallery
after the upgrade (upgraded vectors, or the old ones if `new` searches them directly). The figures
are the matrix, the quality kept, and flips.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import ImageListing
from nobackfill.metrics.backfill import BackfillCurve
from nobackfill.metrics.compatibility import negative_flips, retention
from nobackfill.metrics.retrieval import PerQuery, mean_of_answerable
from nobackfill.quality.cells import upgrade_cells
from nobackfill.quality.embedded import PublishedListing
from nobackfill.quality.listing import relevance_among_others
from nobackfill.quality.retrieval import CellFigures, measure_cell
from nobackfill.quality.route_evidence import backfill_curves
from nobackfill.release.manifest import Manifest
from nobackfill.release.routes import Route, plan_route
from nobackfill.vectors import Vectors

SHOWN_HITS = 5
# Orders of a backfill that a reader could follow.
ORDERS = ("random", "uncertainty", "gain")


@dataclass(frozen=True)
class UpgradeSeconds:
    """Time of the upgrade on one core of this machine, and of re-embedding the images.

    Attributes:
        image_count: Number of images.
        upgrade_seconds: Time of the upgrade.
        reembed_seconds: Time of re-embedding.
    """

    image_count: int
    upgrade_seconds: float
    reembed_seconds: float


@dataclass(frozen=True)
class Comparison:
    """The figures of an upgrade on a set of pictures.

    Attributes:
        old_manifest: The old release.
        new_manifest: The new release.
        route: Releases of the route; empty if the old vectors are searched directly.
        pictures: The pictures.
        cells: Figures by query/gallery, such as new/served, with each picture's SHOWN_HITS
            nearest others. new/old is missing if the dimensions differ.
        old_vectors: [n, old dim].
        served_vectors: [n, served dim].
        new_vectors: [n, new dim].
        uncertainty: [n], larger is less certain; None if the upgrade predicts none.
        curves: Backfill curves by order; empty if served and new vectors differ in dimension.
        measured_seconds: Measured times.
    """

    old_manifest: Manifest
    new_manifest: Manifest
    route: tuple[int, ...]
    pictures: ImageListing
    cells: Mapping[str, CellFigures]
    old_vectors: Vectors
    served_vectors: Vectors
    new_vectors: Vectors
    uncertainty: NDArray[np.float32] | None
    curves: Mapping[str, BackfillCurve]
    measured_seconds: UpgradeSeconds


def best_route(
    manifests: Mapping[int, Manifest], old_release: int, new_release: int
) -> Route | None:
    """Return the best route between two releases for a gallery whose items all have
    side-information.

    Args:
        manifests: The releases by number.
        old_release: The source.
        new_release: The target.

    Returns:
        The route; empty if `old_release` and `new_release` are the same. None if there is no route.

    Raises:
        NotFoundError: `new_release` is not among the manifests.
        KeyError: `old_release` is not among the manifests.
    """
    return plan_route(manifests, old_release, new_release, manifests[old_release].side_space)


def predecessor(manifests: Mapping[int, Manifest], release: int) -> int | None:
    """Return the newest older release whose galleries a release can migrate or search.

    Releases that are not among the manifests, such as withdrawn ones, do not count. Items are taken
    to have the side-information of their release.

    Args:
        manifests: The releases by number.
        release: The newer release.

    Returns:
        Its number; None if there is no such release.

    Raises:
        NotFoundError: There are older releases, but `release` is not among the manifests.
    """
    for number in sorted((n for n in manifests if n < release), reverse=True):
        old = manifests[number]
        if plan_route(manifests, number, release, old.side_space, direct_search_space=old.space):
            return number
    return None


def compare(
    folder: Path,
    manifests: Mapping[int, Manifest],
    old_release: int,
    new_release: int,
    pictures: ImageListing,
) -> Comparison:
    """Measure an upgrade on pictures, with int8 files where they are published.

    Each picture is embedded by both models, on one core. Every picture is compared with every
    other, so memory and time grow with their square. Nothing is written. Cells whose query and
    gallery differ in dimension are left out. Without a route the old vectors are searched as they
    are.

    Args:
        folder: The publication folder.
        manifests: The releases by number, with all of the route.
        old_release: The old release.
        new_release: The new release.
        pictures: The pictures.

    Raises:
        VerificationError: A model differs from the published one, cannot be loaded, or returns no
            usable vectors.
        NoEncoderError: A release embeds no images.
        InvalidInputError: A file is no image, or the route reads side-information that the pictures
            lack.
        NotFoundError: `new_release`, or an upgrade of the route, is not among the manifests.
        KeyError: `old_release` is not among the manifests.
        ValueError: There are no pictures, or none shares its class with another one.
    """
    best = best_route(manifests, old_release, new_release)
    route = () if best is None else best.releases
    names = upgrade_cells(old_release, new_release, route)
    images = PublishedListing(pictures, folder, manifests, threads=1)
    relevance = relevance_among_others(pictures)
    old_vectors, native = images.native_vectors(old_release), images.native_vectors(new_release)
    served = images.vectors_along(names["new/served"].gallery_releases, int8=True)
    comparable = {
        "old/old": True,
        "new/old": old_vectors.shape[1] == native.shape[1],
        "new/served": served.embedding.shape[1] == native.shape[1],
        "new/new": True,
    }
    cells = {
        name: measure_cell(cell, images, images, relevance, neighbour_count=SHOWN_HITS, int8=True)
        for name, cell in names.items()
        if comparable[name]
    }
    curves = {}
    if comparable["new/served"]:
        cell = names["new/served"]
        curves = backfill_curves(cell, images, images, relevance, ORDERS, int8=True)
    return Comparison(
        old_manifest=manifests[old_release],
        new_manifest=manifests[new_release],
        route=route,
        pictures=pictures,
        cells=cells,
        old_vectors=old_vectors,
        served_vectors=served.embedding,
        new_vectors=native,
        uncertainty=served.uncertainty,
        curves=curves,
        measured_seconds=UpgradeSeconds(
            len(pictures),
            images.embedding_seconds.get(route, 0.0),
            images.embedding_seconds[new_release,],
        ),
    )


# Rows (query models) and columns (galleries) of the matrix.
QUERIES = ("old", "new")
GALLERIES = ("old", "served", "new")


@dataclass(frozen=True)
class ShadedCell:
    """Figures of a cell in percent, and its shade: 0 to 1 of the best cell."""

    map: float
    cmc1: float
    cmc5: float
    shade: float


Matrix = Mapping[tuple[str, str], ShadedCell]


def matrix_from_pictures(cells: Mapping[str, CellFigures]) -> Matrix:
    """Return the matrix of the cells that were measured on the pictures, in percent.

    Args:
        cells: Figures by query/gallery, such as new/served.

    Returns:
        The matrix in percent; empty without cells.

    Raises:
        ValueError: A cell has no query with an answer.
    """
    return _shade(
        {
            name: (mean_percent(cell.map), mean_percent(cell.cmc1), mean_percent(cell.cmc5))
            for name, cell in cells.items()
        }
    )


def matrix_from_manifest(old: Manifest, new: Manifest, route: tuple[int, ...]) -> Matrix:
    """Return the matrix of the release's manifest, without cells that were not measured.

    mAP of new/served is that with int8 files where they are published, as gateways and devices run
    them. CMC of older manifests is that of float32 files.

    Args:
        old: The old release.
        new: The new release.
        route: Releases of the route; empty if the old vectors are searched directly.

    Returns:
        The matrix in percent; empty without evidence.
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
    return _shade(figures)


def describe_manifest_matrix(new: Manifest, route: tuple[int, ...]) -> str:
    """Describe in sentences how a manifest's matrix was measured.

    Its numbers of searches and images are those of the first measured cell.

    Args:
        new: The release.
        route: Releases of the route; it decides whether int8 is mentioned.

    Returns:
        The sentences; empty without evidence.
    """
    if not new.evidence:
        return ""
    cell = new.evidence[0]
    text = (
        f"Measured when the release was published: {cell.queries} searches in {cell.items} images "
        "of the publisher's choice. The release does not tell which images, and whether a model "
        "had been trained on them."
    )
    if _int8_map(new, route) is not None:
        text += (
            " Precision after the upgrade is measured with the int8 transform, which gateways and "
            "devices run."
        )
    return text


def _int8_map(new: Manifest, route: tuple[int, ...]) -> float | None:
    return next((known.int8_map for known in new.routes if known.releases == route), None)


def mean_percent(values: PerQuery) -> float:
    """Return the mean in percent over answerable queries.

    Args:
        values: [q], 0 to 1; NaN for queries without an answer.

    Raises:
        ValueError: No query is answerable.
    """
    return 100 * mean_of_answerable(values)


def _shade(figures: Mapping[str, tuple[float, float, float]]) -> Matrix:
    best = max((values[0] for values in figures.values()), default=0) or 1
    cells = {}
    for name, values in figures.items():
        query, _, gallery = name.partition("/")
        cells[query, gallery] = ShadedCell(*values, values[0] / best)
    return cells


def retention_percent(matrix: Matrix) -> float | None:
    """Return mAP of new/served as a percentage of new/new.

    Returns:
        Above 100 if the served vectors answer better; None if one of them was not measured, or
        new/new is 0.
    """
    served, bound = matrix.get(("new", "served")), matrix.get(("new", "new"))
    if served is None or bound is None or bound.map <= 0:
        return None
    return 100 * retention(served.map, bound.map)


@dataclass(frozen=True)
class Flips:
    """Pictures whose first hit became right or wrong, the largest change in average precision
    first.

    Attributes:
        improved_rows: Positions of pictures whose first hit became right.
        worsened_rows: Positions of pictures whose first hit became wrong.
        answerable_count: Pictures that share their class with another one.
        worsened_percent: Share of the answerable pictures, in percent.
    """

    improved_rows: list[int]
    worsened_rows: list[int]
    answerable_count: int
    worsened_percent: float


def find_flips(comparison: Comparison) -> Flips:
    """Compare the first hit of each picture after the upgrade with that of the old model.

    Raises:
        ValueError: No picture shares its class with another one.
        KeyError: The cells lack new/served, as where served and new vectors differ in dimension.
    """
    old, served = comparison.cells["old/old"], comparison.cells["new/served"]
    change = served.map - old.map
    improved = np.flatnonzero((old.cmc1 == 0) & (served.cmc1 == 1))
    worsened = np.flatnonzero((old.cmc1 == 1) & (served.cmc1 == 0))
    return Flips(
        improved_rows=improved[np.argsort(-change[improved], kind="stable")].tolist(),
        worsened_rows=worsened[np.argsort(change[worsened], kind="stable")].tolist(),
        answerable_count=int((~np.isnan(old.cmc1)).sum()),
        worsened_percent=100 * negative_flips(old.cmc1, served.cmc1),
    )
