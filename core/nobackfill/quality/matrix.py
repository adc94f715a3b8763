"""The compatibility matrix: every metric of a cell."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nobackfill.class_folders import Listing
from nobackfill.metrics.classes import worst_class
from nobackfill.metrics.distances import Metric, distances
from nobackfill.metrics.hubness import hubness
from nobackfill.metrics.identification import open_set_search, tpir_at_fpir
from nobackfill.metrics.ranking import Relevance
from nobackfill.metrics.retrieval import PerQuery, average_precision_at, mean
from nobackfill.metrics.verification import tar_at_far
from nobackfill.quality.cells import CellName
from nobackfill.quality.embedded import Embedded, cell_vectors
from nobackfill.quality.retrieval import measure
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


def _evaluate(
    name: CellName,
    queries: Embedded,
    gallery: Embedded,
    relevance: Relevance,
    *,
    neighbours: int,
    int8: bool,
) -> MatrixCell:
    vectors, metric = cell_vectors(name, queries, gallery, int8=int8), queries.metric(name.query)
    found = measure(*vectors, relevance, metric, neighbours=max(neighbours, HUB_NEIGHBOURS))
    worst, worst_map = worst_class(found.map, queries.listing.labels)
    items = len(gallery.listing)
    figures = {
        "cmc1": mean(found.cmc1),
        "cmc5": mean(found.cmc5),
        "map": mean(found.map),
        f"map_at_{MAP_AT}": mean(average_precision_at(found.ranking, MAP_AT)),
        "worst_class_map": worst_map,
        "hub_skewness": hubness(found.neighbours[:, :HUB_NEIGHBOURS], items).skewness,
        **_recognition(*vectors, relevance, metric),
        "queries": float(len(queries.listing)),
        "items": float(items),
    }
    return MatrixCell(
        name,
        figures,
        found.cmc1,
        found.map,
        found.neighbours[:, :neighbours],
        queries.listing.class_names[worst],
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


def neighbour_paths(
    cell: MatrixCell, queries: Listing, gallery: Listing
) -> Iterator[tuple[str, list[str]]]:
    """Each query's path with the paths of its nearest gallery images."""
    for path, row in zip(queries.paths, cell.neighbours, strict=True):
        yield path, [gallery.paths[position] for position in row]
