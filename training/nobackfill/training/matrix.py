"""The compatibility matrix: every metric of a cell."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nobackfill.metrics.classes import worst_class
from nobackfill.metrics.distances import Metric, distances
from nobackfill.metrics.hubness import hubness
from nobackfill.metrics.identification import open_set_search, tpir_at_fpir
from nobackfill.metrics.neighbours import nearest
from nobackfill.metrics.ranking import Relevance, rank
from nobackfill.metrics.retrieval import (
    PerQuery,
    average_precision,
    average_precision_at,
    cmc,
    mean,
)
from nobackfill.metrics.verification import tar_at_far
from nobackfill.release.manifest import Manifest
from nobackfill.training.data.folders import Listing
from nobackfill.training.measure import CellName, Embedded, cell_vectors, served_cells
from nobackfill.vectors import Vectors

# Neighbours that hubness counts, and the k of mAP@k.
HUB_NEIGHBOURS = 10
MAP_AT = 100
# Rates of false accepts (1:1) and of false positives (1:N), and the pairs drawn for the former.
FAR = 1e-3
FPIR = 0.01
PAIRS = 4_000_000


@dataclass(frozen=True)
class MatrixCell:
    """A measured cell: figures by name (shares 0..1) and by query, and the nearest
    positions [q,k].
    """

    name: CellName
    figures: Mapping[str, float]
    cmc1: PerQuery
    map: PerQuery
    neighbours: np.ndarray
    worst_class: str


def every_cell(manifests: Mapping[int, Manifest]) -> list[CellName]:
    """Each release on its own, every way in which old vectors are served, and the naive swaps."""
    cells: list[CellName] = []
    for number, manifest in sorted(manifests.items()):
        cells.append(CellName(number, (number,)))
        cells += list(served_cells(manifest, manifests))
        cells += [
            CellName(number, (old,))
            for old in sorted(manifests)
            if old < number and manifests[old].embedder.dim == manifest.embedder.dim
        ]
    return list(dict.fromkeys(cells))


def evaluate_cells(
    cells: Sequence[CellName],
    queries: Embedded,
    gallery: Embedded,
    relevance: Relevance,
    *,
    neighbours: int,
    int8: bool = False,
) -> list[MatrixCell]:
    """Measure cells by exact search in the metric of the query's release."""
    return [
        _evaluate(name, queries, gallery, relevance, neighbours=neighbours, int8=int8)
        for name in cells
    ]


def metric_of(embedded: Embedded, release: int) -> Metric:
    """The metric that a release's space is searched by."""
    return "cosine" if embedded.manifest(release).embedder.metric == "cosine" else "l2"


def _evaluate(
    name: CellName,
    queries: Embedded,
    gallery: Embedded,
    relevance: Relevance,
    *,
    neighbours: int,
    int8: bool,
) -> MatrixCell:
    query_vectors, gallery_vectors = cell_vectors(name, queries, gallery, int8=int8)
    metric = metric_of(queries, name.query)
    ranking = rank(query_vectors, gallery_vectors, relevance, metric)
    own = max((len(ignored) for ignored in relevance.ignored), default=0)
    k = min(max(neighbours, HUB_NEIGHBOURS) + own, len(gallery_vectors))
    near = _without_ignored(nearest(query_vectors, gallery_vectors, k, metric)[0], relevance)
    first, precision = cmc(ranking, 1), average_precision(ranking)
    worst, worst_map = worst_class(precision, queries.listing.labels)
    figures = {
        "cmc1": mean(first),
        "cmc5": mean(cmc(ranking, 5)),
        "map": mean(precision),
        f"map_at_{MAP_AT}": mean(average_precision_at(ranking, MAP_AT)),
        "worst_class_map": worst_map,
        "hub_skewness": hubness(near[:, :HUB_NEIGHBOURS], len(gallery_vectors)).skewness,
        **_recognition(query_vectors, gallery_vectors, relevance, metric),
        "queries": float(len(query_vectors)),
        "items": float(len(gallery_vectors)),
    }
    return MatrixCell(
        name, figures, first, precision, near[:, :neighbours], queries.listing.class_names[worst]
    )


def _recognition(
    queries: Vectors, gallery: Vectors, relevance: Relevance, metric: Metric
) -> dict[str, float]:
    """TAR@FAR over the pairs of a seeded draw of queries, and TPIR@FPIR where some queries have no
    mate in the gallery.
    """
    mated = np.array([len(relevant) > 0 for relevant in relevance.relevant])
    figures = {}
    if not mated.all():
        search = open_set_search(queries, gallery, relevance, metric)
        figures[f"tpir_at_fpir_{FPIR:g}"] = tpir_at_fpir(search, FPIR)
    order = np.random.default_rng(0).permutation(np.flatnonzero(mated))
    drawn = order[: max(1, PAIRS // len(gallery))]
    genuine, impostor = [], []
    for row, query in zip(distances(queries[drawn], gallery, metric), drawn, strict=True):
        stranger = np.ones(len(gallery), bool)
        stranger[relevance.relevant[query]] = False
        own = np.isin(np.arange(len(gallery)), relevance.ignored[query])
        genuine.append(row[~stranger & ~own])
        impostor.append(row[stranger & ~own])
    pairs = np.concatenate(genuine), np.concatenate(impostor)
    if len(pairs[0]) and len(pairs[1]):
        figures[f"tar_at_far_{FAR:g}"] = tar_at_far(*pairs, FAR)
    return figures


def _without_ignored(near: np.ndarray, relevance: Relevance) -> np.ndarray:
    """Drop ignored positions from each row; rows keep one length."""
    kept = [
        row[~np.isin(row, ignored)] for row, ignored in zip(near, relevance.ignored, strict=True)
    ]
    width = min(map(len, kept))
    return np.stack([row[:width] for row in kept])


def neighbour_paths(
    cell: MatrixCell, queries: Listing, gallery: Listing
) -> Iterator[tuple[str, list[str]]]:
    """Each query's path with the paths of its nearest gallery images."""
    for path, row in zip(queries.paths, cell.neighbours, strict=True):
        yield path, [gallery.paths[position] for position in row]
