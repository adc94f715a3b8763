"""The compatibility matrix: every metric of a cell, and what each served cell keeps and gains."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from metrics.classes import worst_class
from metrics.compatibility import (
    gap_closed,
    is_compatible,
    negative_flips,
    share_kept,
    update_gain,
    upgrade_gain,
)
from metrics.distances import Metric
from metrics.hubness import hubness
from metrics.neighbours import nearest
from metrics.ranking import Relevance, rank
from metrics.retrieval import PerQuery, average_precision, average_precision_at, cmc, mean
from release.manifest import Manifest
from training.data import Listing
from training.measure import CellName, Embedded, cell_vectors, served_cells

# Neighbours that hubness counts, and the k of mAP@k.
HUB_NEIGHBOURS = 10
MAP_AT = 100


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
    spec = queries.manifest(name.query).embedder
    metric: Metric = "cosine" if spec.metric == "cosine" else "l2"
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
        "queries": float(len(query_vectors)),
        "items": float(len(gallery_vectors)),
    }
    return MatrixCell(
        name, figures, first, precision, near[:, :neighbours], queries.listing.class_names[worst]
    )


def _without_ignored(near: np.ndarray, relevance: Relevance) -> np.ndarray:
    """Drop ignored positions from each row; rows keep one length."""
    kept = [
        row[~np.isin(row, ignored)] for row, ignored in zip(near, relevance.ignored, strict=True)
    ]
    width = min(map(len, kept))
    return np.stack([row[:width] for row in kept])


def criterion(cells: Sequence[MatrixCell]) -> dict[str, dict[str, float | bool | None]]:
    """For each cell of an older gallery, where both bounds were measured: BCT Eq. (2) and what
    follows from it, in mAP.
    """
    by_name = {cell.name: cell for cell in cells}
    found: dict[str, dict[str, float | bool | None]] = {}
    for cell in cells:
        source = cell.name.gallery[0]
        old = by_name.get(CellName(source, (source,)))
        new = by_name.get(CellName(cell.name.query, (cell.name.query,)))
        if source == cell.name.query or old is None or new is None:
            continue
        served, before, upper = (c.figures["map"] for c in (cell, old, new))
        found[str(cell.name)] = {
            "compatible": is_compatible(served, before),
            "update_gain": update_gain(served, before, upper),
            "upgrade_gain": upgrade_gain(served, before),
            "share_kept": share_kept(served, upper),
            "gap_closed": gap_closed(served, before, upper),
            "negative_flips": negative_flips(old.cmc1, cell.cmc1),
        }
    return found


def neighbour_paths(
    cell: MatrixCell, queries: Listing, gallery: Listing
) -> Iterator[tuple[str, list[str]]]:
    """Each query's path with the paths of its nearest gallery images."""
    for path, row in zip(queries.paths, cell.neighbours, strict=True):
        yield path, [gallery.paths[position] for position in row]
