"""What the queries of a cell find: figures by query, by exact search or as a gateway serves it."""

from dataclasses import dataclass

import numpy as np

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.index import Index, Neighbours
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.metrics.distances import Metric
from nobackfill.metrics.neighbours import nearest
from nobackfill.metrics.ranking import Ints, Ranking, Relevance, rank, rank_neighbours
from nobackfill.metrics.retrieval import PerQuery, average_precision, cmc, figures
from nobackfill.quality.cells import CellName
from nobackfill.quality.embedded import Embedded, Published, cell_vectors
from nobackfill.vectors import Vectors

# Answers asked of the index for mAP; relevant items beyond count as not found.
DEPTH = 1000
# Answers asked for CMC, as a served search asks: a deeper search of a graph finds more.
SERVED = 20
_QUERIES = 256


@dataclass(frozen=True)
class Measured:
    """A cell's figures by query (shares 0..1, NaN where a query has no answer in the gallery)."""

    cmc1: PerQuery
    cmc5: PerQuery
    map: PerQuery
    ranking: Ranking
    # Gallery positions [q,k] and distances [q,k], nearest first. A served search names ignored
    # items too, and -1 and infinity where it finds no more.
    neighbours: Ints
    distances: Vectors


def measure_cell(
    cell: CellName,
    queries: Embedded,
    gallery: Embedded,
    relevance: Relevance,
    *,
    neighbours: int = 0,
    int8: bool = False,
) -> Measured:
    """Measure a cell by exact search, in the metric of the query's release."""
    vectors = cell_vectors(cell, queries, gallery, int8=int8)
    return measure(*vectors, relevance, queries.metric(cell.query), neighbours=neighbours)


def measure(
    queries: Vectors,
    gallery: Vectors,
    relevance: Relevance,
    metric: Metric = "l2",
    *,
    neighbours: int = 0,
) -> Measured:
    """Search `gallery` [g,dim] with `queries` [q,dim] exactly; `neighbours` of each query's nearest
    are named, ignored items left out (fewer where there are no more)."""
    ranking = rank(queries, gallery, relevance, metric)
    near: Ints = np.empty((len(queries), 0), np.int64)
    apart: Vectors = np.empty((len(queries), 0), np.float32)
    if neighbours:
        own = max((len(ignored) for ignored in relevance.ignored), default=0)
        near, apart = nearest(queries, gallery, min(neighbours + own, len(gallery)), metric)
        near, apart = _without_ignored(near, apart, relevance, neighbours)
    return Measured(**figures(ranking), ranking=ranking, neighbours=near, distances=apart)


def _without_ignored(
    near: Ints, apart: Vectors, relevance: Relevance, most: int
) -> tuple[Ints, Vectors]:
    """Drop ignored positions from each row; rows keep one length."""
    kept = [~np.isin(row, ignored) for row, ignored in zip(near, relevance.ignored, strict=True)]
    width = min(most, *map(np.count_nonzero, kept))
    rows = [np.flatnonzero(row)[:width] for row in kept]
    return np.take_along_axis(near, np.stack(rows), 1), np.take_along_axis(apart, np.stack(rows), 1)


def search_cell(
    cell: CellName,
    queries: Published,
    gallery: Published,
    relevance: Relevance,
    *,
    int8: bool = False,
) -> Measured:
    """Measure a cell as a gateway serves it, through an HNSW index of the gallery room.

    Raises InvalidInputError for raw vectors of another dimension, which no gallery holds beside the
    query's own.
    """
    query_vectors, gallery_vectors = cell_vectors(cell, queries, gallery, int8=int8)
    spec = SpaceSpec.of(queries.manifest(cell.query))
    own = queries.native(cell.query).shape[1]
    if gallery_vectors.shape[1] != own:
        raise InvalidInputError(
            f"cell {cell}: a gallery's vectors have one dimension, got {own} and "
            f"{gallery_vectors.shape[1]}; carry the gallery along a route"
        )
    # One thread: the same graph, and so the same verdict, each time.
    index = hnsw.build(spec, np.arange(len(gallery_vectors)), gallery_vectors)
    found = _search(index, query_vectors, DEPTH)
    first = rank_neighbours(_search(index, query_vectors, SERVED).labels, relevance)
    ranking = rank_neighbours(found.labels, relevance)
    return Measured(
        cmc(first, 1),
        cmc(first, 5),
        average_precision(ranking),
        ranking,
        found.labels,
        found.distances,
    )


def _search(index: Index, queries: Vectors, k: int) -> Neighbours:
    """The `k` nearest, some queries at a time: each brings k candidate vectors into memory."""
    k = min(k, len(index.labels))
    parts = [
        index.search(queries[start : start + _QUERIES], k)
        for start in range(0, len(queries), _QUERIES)
    ]
    return Neighbours(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.distances for part in parts]),
    )
