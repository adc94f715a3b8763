"""Measure cells of the compatibility matrix, by exact search or as a gateway serves them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import ImageListing
from nobackfill.errors import InvalidInputError
from nobackfill.gallery.search.index import Index, Neighbours, concatenate_neighbours
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.metrics.classes import worst_class
from nobackfill.metrics.distances import Metric, distances
from nobackfill.metrics.hubness import hubness
from nobackfill.metrics.identification import open_set_search, tpir_at_fpir
from nobackfill.metrics.neighbours import exact_neighbours
from nobackfill.metrics.ranking import Ints, Ranking, Relevance, rank, rank_neighbours
from nobackfill.metrics.retrieval import (
    PerQuery,
    average_precision,
    average_precision_at,
    cmc,
    compute_figures,
    mean_of_answerable,
)
from nobackfill.metrics.verification import tar_at_far
from nobackfill.quality.cells import CellName
from nobackfill.quality.embedded import EmbeddedListing, PublishedListing, cell_vectors
from nobackfill.release.calibration import Curve, match_probabilities
from nobackfill.vectors import Vectors

# Hits that are requested from the index for mAP; relevant items beyond count as not found.
DEPTH = 1000
# Hits that are requested for CMC, as in production: a deeper search of a graph finds more.
SERVED = 20
_QUERIES = 256


@dataclass(frozen=True)
class CellFigures:
    """The figures of a cell by query: shares 0 to 1, NaN if a query has no answer in the gallery.

    Attributes:
        cmc1: [q].
        cmc5: [q].
        map: Average precision, [q].
        ranking: Ranks of the relevant items.
        neighbours: Gallery positions [q, k], nearest first. A served search includes ignored items,
            and -1 where it finds no more.
        distances: Distances of the neighbours [q, k].
    """

    cmc1: PerQuery
    cmc5: PerQuery
    map: PerQuery
    ranking: Ranking
    neighbours: Ints
    distances: Vectors


def measure_cell(
    cell: CellName,
    queries: EmbeddedListing,
    gallery: EmbeddedListing,
    relevance: Relevance,
    *,
    neighbour_count: int = 0,
    int8: bool = False,
) -> CellFigures:
    """Measure a cell by exact search, in the metric of the searched space.

    Args:
        cell: The cell.
        queries: The queries.
        gallery: The gallery.
        relevance: The relevant items of each query.
        neighbour_count: Number of nearest items to return for each query, without ignored ones; 0:
            none. All queries get as many as the one that has fewest.
        int8: Use int8 files where they exist.

    Raises:
        InvalidInputError: The vectors of the two releases cannot be compared, the route reads
            side-information that the items lack, or a file is no image.
        NotFoundError: A release or an upgrade of the cell does not exist.
        VerificationError: A file differs from its manifest, cannot be loaded, or returns no usable
            vectors.
        ValueError: Relevance for another number of queries, vectors that are not finite, a zero
            vector with cosine, or an empty listing.
        NoEncoderError: A release has no model for this kind of item, images or texts.
        ConfigurationError: The library for a tokenizer is not installed.
        IndexError: Relevance names a position outside the gallery.
    """
    vectors = cell_vectors(cell, queries, gallery, int8=int8)
    return search_and_measure(
        *vectors, relevance, queries.search_metric(cell), neighbour_count=neighbour_count
    )


def search_and_measure(
    queries: Vectors,
    gallery: Vectors,
    relevance: Relevance,
    metric: Metric = "l2",
    *,
    neighbour_count: int = 0,
) -> CellFigures:
    """Search a gallery exactly, and measure the answers.

    Args:
        queries: [q, dim]; q may be 0.
        gallery: [g, dim]; g may be 0 if `neighbour_count` is 0.
        relevance: The relevant items of each query.
        metric: How distances are computed.
        neighbour_count: Number of nearest items to return for each query without ignored ones;
            fewer if there are no more. All queries get as many as the one that has fewest. 0: none.

    Returns:
        The figures; without queries each is empty.

    Raises:
        ValueError: Relevance for another number of queries, shapes that do not fit, values that are
            not finite, a zero vector with cosine, or an unknown metric. Also `neighbour_count`
            without items.
        IndexError: Relevance names a position outside the gallery.
    """
    ranking = rank(queries, gallery, relevance, metric)
    nearest_items: Ints = np.empty((len(queries), 0), np.int64)
    near_distances: Vectors = np.empty((len(queries), 0), np.float32)
    if neighbour_count:
        own = max((len(ignored) for ignored in relevance.ignored), default=0)
        nearest_items, near_distances = exact_neighbours(
            queries, gallery, min(neighbour_count + own, len(gallery)), metric
        )
        nearest_items, near_distances = _without_ignored(
            nearest_items, near_distances, relevance, neighbour_count
        )
    return CellFigures(
        **compute_figures(ranking),
        ranking=ranking,
        neighbours=nearest_items,
        distances=near_distances,
    )


def _without_ignored(
    positions: Ints, distances_: Vectors, relevance: Relevance, most: int
) -> tuple[Ints, Vectors]:
    """Drop ignored positions from each row; all rows keep the same length."""
    masks = [
        ~np.isin(row, ignored) for row, ignored in zip(positions, relevance.ignored, strict=True)
    ]
    if not masks:
        return positions[:, :most], distances_[:, :most]
    width = min(most, *map(np.count_nonzero, masks))
    rows = [np.flatnonzero(row)[:width] for row in masks]
    return np.take_along_axis(positions, np.stack(rows), 1), np.take_along_axis(
        distances_, np.stack(rows), 1
    )


def search_cell(
    cell: CellName,
    queries: PublishedListing,
    gallery: PublishedListing,
    relevance: Relevance,
    *,
    int8: bool = False,
) -> CellFigures:
    """Measure a cell as a gateway serves it, through an HNSW index.

    The graph is built with one thread, so that the figures are the same each time; it is not kept.
    Relevant items beyond 1000 hits count as not found for mAP, and beyond 20 for CMC. Ignored items
    are among these hits. A relevant position outside of the gallery counts as not found.

    Args:
        cell: The cell.
        queries: The queries.
        gallery: The gallery.
        relevance: The relevant items of each query.
        int8: Use int8 files where they exist.

    Returns:
        The figures; `neighbours` and `distances` have up to 1000 columns.

    Raises:
        InvalidInputError: Raw vectors of another dimension, which no gallery can search; the route
            reads side-information that the items lack; or a file is no image.
        NotFoundError: A release or an upgrade of the cell does not exist.
        VerificationError: A file differs from its manifest, cannot be loaded, or returns no usable
            vectors.
        ValueError: Relevance for another number of queries, or a listing is empty.
        NoEncoderError: A release has no model for this kind of item, images or texts.
        ConfigurationError: The library for a tokenizer is not installed.
    """
    query_vectors, gallery_vectors = cell_vectors(cell, queries, gallery, int8=int8)
    adapted = queries.query_adapter(cell) is not None
    spec = SpaceSpec.of(
        queries.release_manifest(cell.gallery_releases[0] if adapted else cell.query_release)
    )
    if gallery_vectors.shape[1] != spec.dim:
        raise InvalidInputError(
            f"cell {cell}: a gateway's gallery has vectors of one dimension, got {spec.dim} of "
            f"the queries and {gallery_vectors.shape[1]} of the gallery; measure a cell with an "
            "upgrade, such as 2/1>2"
        )
    # One thread: the same graph, and so the same verdict, each time.
    # Imported here: the index is compiled, and a comparison of methods needs none.
    from nobackfill.gallery.search import hnsw

    index = hnsw.build_index(spec, np.arange(len(gallery_vectors)), gallery_vectors)
    answers = _search(index, query_vectors, DEPTH)
    first = rank_neighbours(_search(index, query_vectors, SERVED).labels, relevance)
    ranking = rank_neighbours(answers.labels, relevance)
    return CellFigures(
        cmc(first, 1),
        cmc(first, 5),
        average_precision(ranking),
        ranking,
        answers.labels,
        answers.distances,
    )


def _search(index: Index, queries: Vectors, k: int) -> Neighbours:
    """Return the k nearest, in blocks of queries: each query needs memory for k candidate
    vectors."""
    k = min(k, len(index.labels))
    parts = [
        index.search(queries[start : start + _QUERIES], k)
        for start in range(0, len(queries), _QUERIES)
    ]
    return concatenate_neighbours(parts)


def rank_mixture(
    cells: tuple[CellFigures, CellFigures],
    curves: tuple[Curve, Curve],
    replaced_mask: NDArray[np.bool_],
    relevance: Relevance,
) -> CellFigures:
    """Measure a gallery that has some vectors of each of two cells, as a gateway ranks it.

    Distances of two spaces do not compare. So hits are ranked by their scores, and equal scores by
    the distance, then by the position.

    Args:
        cells: Two served cells of the same queries and items, from `search_cell`.
        curves: The calibration of each.
        replaced_mask: Whether an item has its vector of the second cell, bool [items].
        relevance: The relevant items of each query.

    Returns:
        The figures; `neighbours` and `distances` have up to 1000 columns, with -1 where there are
        no more hits.

    Raises:
        ValueError: The cells have different numbers of queries, or relevance is for another number.
        IndexError: `replaced_mask` lacks an item.
    """
    labels = np.concatenate([cell.neighbours for cell in cells], axis=1)
    distances = np.concatenate([cell.distances for cell in cells], axis=1)
    values = np.concatenate(
        [
            match_probabilities(curve, cell.distances)
            for cell, curve in zip(cells, curves, strict=True)
        ],
        axis=1,
    )
    is_second = np.arange(labels.shape[1]) >= cells[0].neighbours.shape[1]
    served = (labels >= 0) & (replaced_mask[labels] == is_second)
    labels = np.where(served, labels, -1)
    order = np.lexsort((labels, distances, np.where(served, -values, np.inf)), axis=1)[:, :DEPTH]
    labels = np.take_along_axis(labels, order, 1)
    ranking = rank_neighbours(labels, relevance)
    return CellFigures(
        **compute_figures(ranking),
        ranking=ranking,
        neighbours=labels,
        distances=np.take_along_axis(distances, order, 1),
    )


# Neighbours for hubness, and the k of mAP@k.
HUB_NEIGHBOURS = 10
MAP_AT = 100
# Rates of false accepts (1:1) and of false positives (1:N), and the number of pairs for the former.
FAR = 1e-3
FPIR = 0.01
PAIRS = 4_000_000


@dataclass(frozen=True)
class MatrixCell:
    """A measured cell.

    Attributes:
        name: Its name.
        figures: Its figures by name; shares 0 to 1.
        cmc1: By query, [q].
        map: Average precision by query, [q].
        neighbours: Nearest gallery positions, [q, k].
        worst_class: Name of the class with the lowest mAP.
    """

    name: CellName
    figures: Mapping[str, float]
    cmc1: PerQuery
    map: PerQuery
    neighbours: np.ndarray
    worst_class: str


def evaluate_cells(
    cells: Sequence[CellName],
    queries: EmbeddedListing,
    gallery: EmbeddedListing,
    relevance: Relevance,
    *,
    neighbour_count: int,
    int8: bool = False,
) -> list[MatrixCell]:
    """Measure cells by exact search, in the metric of the searched space.

    Verification pairs are those of a fixed random draw of queries, about four million pairs.

    Args:
        cells: The cells.
        queries: The queries.
        gallery: The gallery.
        relevance: The relevant items of each query.
        neighbour_count: Number of nearest items to return for each query, without ignored ones; 0:
            none.
        int8: Use int8 files where they exist.

    Returns:
        The cells in this order, with the same figures each. Recognition figures are left out where
        there are no such pairs.

    Raises:
        InvalidInputError: The vectors of two releases cannot be compared, a route reads
            side-information that the items lack, or a file is no image.
        NotFoundError: A release or an upgrade of a cell does not exist.
        VerificationError: A file differs from its manifest, cannot be loaded, or returns no usable
            vectors.
        ValueError: No query has a relevant item, relevance is for another number of queries,
            vectors are not finite or zero with cosine, or a listing is empty.
        NoEncoderError: A release has no model for this kind of item, images or texts.
        ConfigurationError: The library for a tokenizer is not installed.
        IndexError: Relevance names a position outside the gallery.
    """
    matrix = []
    for name in cells:
        vectors = cell_vectors(name, queries, gallery, int8=int8)
        metric = queries.search_metric(name)
        cell = search_and_measure(
            *vectors, relevance, metric, neighbour_count=max(neighbour_count, HUB_NEIGHBOURS)
        )
        worst, worst_map = worst_class(cell.map, queries.listing.labels)
        items = len(gallery.listing)
        figures = {
            "cmc1": mean_of_answerable(cell.cmc1),
            "cmc5": mean_of_answerable(cell.cmc5),
            "map": mean_of_answerable(cell.map),
            f"map_at_{MAP_AT}": mean_of_answerable(average_precision_at(cell.ranking, MAP_AT)),
            "worst_class_map": worst_map,
            "hub_skewness": hubness(cell.neighbours[:, :HUB_NEIGHBOURS], items),
            **_recognition(*vectors, relevance, metric),
            "queries": float(len(queries.listing)),
            "items": float(items),
        }
        nearest, worst_name = (
            cell.neighbours[:, :neighbour_count],
            queries.listing.class_names[worst],
        )
        matrix.append(MatrixCell(name, figures, cell.cmc1, cell.map, nearest, worst_name))
    return matrix


def _recognition(
    queries: Vectors, gallery: Vectors, relevance: Relevance, metric: Metric
) -> dict[str, float]:
    """Compute TAR@FAR over pairs of a seeded draw of queries, and TPIR@FPIR if some queries have no
    mate."""
    mated = np.array([len(relevant) > 0 for relevant in relevance.relevant])
    figures = {}
    if not mated.all():
        search = open_set_search(queries, gallery, relevance, metric)
        figures[f"tpir_at_fpir_{FPIR:g}"] = tpir_at_fpir(search, FPIR)
    order = np.random.default_rng(0).permutation(np.flatnonzero(mated))
    sample = order[: max(1, PAIRS // len(gallery))]
    genuine, impostor = [], []
    for row, query in zip(distances(queries[sample], gallery, metric), sample, strict=True):
        stranger = np.ones(len(gallery), bool)
        stranger[relevance.relevant[query]] = False
        own = np.isin(np.arange(len(gallery)), relevance.ignored[query])
        genuine.append(row[~stranger & ~own])
        impostor.append(row[stranger & ~own])
    pairs = np.concatenate(genuine), np.concatenate(impostor)
    if len(pairs[0]) and len(pairs[1]):
        figures[f"tar_at_far_{FAR:g}"] = tar_at_far(*pairs, FAR)
    return figures


def neighbour_paths(
    cell: MatrixCell, queries: ImageListing, gallery: ImageListing
) -> Iterator[tuple[str, list[str]]]:
    """Yield each query's path with the paths of its nearest gallery images, nearest first.

    Yields:
        The query's path, and up to as many paths as the cell has neighbours; none where it was
        measured without.

    Raises:
        ValueError: The listing has another number of queries than the cell; raised after the last
            pair.
        IndexError: A neighbour is outside of the gallery.
    """
    for path, row in zip(queries.paths, cell.neighbours, strict=True):
        yield path, [gallery.paths[position] for position in row]
