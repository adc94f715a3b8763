"""Where the relevant items of each query stand in the gallery: ranked metrics are made from it.

The rule for ties: a relevant item stands behind every irrelevant item at the same distance,
whatever the order of the gallery. It holds for distances that are equal as they were computed: a
matrix product may round those of two equal vectors apart, so an embedding that maps everything to
one point need not score the worst that is possible: rounding breaks its ties.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill.metrics.distances import Floats, Metric, distance_blocks

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Relevance:
    """What each query should find. Gallery positions, one array a query.

    `ignored` items (the query's own image, a protocol's junk) are taken out of the ranking.
    """

    relevant: Sequence[Ints]
    ignored: Sequence[Ints]


@dataclass(frozen=True)
class Ranking:
    """`ranks[i]`: ascending 1-based ranks of the relevant items that were found for query i.
    `relevant[i]`: how many exist; larger than `len(ranks[i])` where a top-k list missed some."""

    ranks: Sequence[Ints]
    relevant: Ints


def same_label(
    query_labels: ArrayLike,
    gallery_labels: ArrayLike,
    query_images: Sequence[str] | Ints | None = None,
    gallery_images: Sequence[str] | Ints | None = None,
) -> Relevance:
    """Relevant = the same label.

    Give both sides' image identities when the sets overlap: the query's own image is then ignored,
    and nothing else is (removing by label would remove the answers).
    """
    query_labels, gallery_labels = np.asarray(query_labels), np.asarray(gallery_labels)
    if query_labels.ndim != 1 or gallery_labels.ndim != 1:
        raise ValueError("labels must be one-dimensional")
    order = np.argsort(gallery_labels, kind="stable").astype(np.int64)
    values, starts = np.unique(gallery_labels[order], return_index=True)
    by_label = dict(zip(values.tolist(), np.split(order, starts[1:]), strict=True))
    none = np.empty(0, np.int64)
    relevant = [by_label.get(label, none) for label in query_labels.tolist()]
    if query_images is None and gallery_images is None:
        return Relevance(relevant, [none] * len(relevant))
    if query_images is None or gallery_images is None:
        raise ValueError("give the image identities of both sides, or of neither")
    if len(query_images) != len(query_labels) or len(gallery_images) != len(gallery_labels):
        raise ValueError("expected one image identity a label, on both sides")
    positions: dict[str | int, list[int]] = {}
    for position, image in enumerate(gallery_images):
        positions.setdefault(image, []).append(position)
    ignored = [np.array(positions.get(image, ()), np.int64) for image in query_images]
    return Relevance(relevant, ignored)


def rank(queries: Floats, gallery: Floats, relevance: Relevance, metric: Metric = "l2") -> Ranking:
    """Rank the whole gallery [g, dim] for each query [q, dim], 2^25 distances at a time."""
    if len(relevance.relevant) != len(queries) or len(relevance.ignored) != len(queries):
        raise ValueError(
            f"expected relevance for {len(queries)} queries, got {len(relevance.relevant)}"
        )
    ranks: list[Ints] = []
    for first, block in distance_blocks(queries, gallery, metric):
        ranks.extend(rank_block(block, first, relevance))
    return Ranking(ranks, np.array([len(r) for r in ranks], np.int64))


def rank_block(block: Floats, first: int, relevance: Relevance) -> list[Ints]:
    """Ranks of the relevant items of consecutive queries, `first` the number of the first of them.

    `block` [b, g] holds their distances to the whole gallery; ignored items are overwritten in it.
    """
    for i, row in enumerate(block):
        # Infinity sorts behind everything finite, so ignored items shift no rank.
        row[relevance.ignored[first + i]] = np.inf
    ordered = np.sort(block, axis=1)
    ranks = []
    for i, row in enumerate(block):
        found = row[relevance.relevant[first + i]]
        found = np.sort(found[np.isfinite(found)])
        # Everything up to and at the distance, less the relevant items there, stands before it.
        others = np.searchsorted(ordered[i], found, "right")
        others -= np.searchsorted(found, found, "right")
        ranks.append((others + np.arange(1, len(found) + 1)).astype(np.int64))
    return ranks


def rank_neighbours(neighbours: Ints, relevance: Relevance) -> Ranking:
    """The ranking in an index's answers: gallery positions [q, k], nearest first, -1 for none.

    Ignored items are taken out; relevant items outside the k count in `relevant` only.
    """
    if neighbours.ndim != 2 or len(neighbours) != len(relevance.relevant):
        raise ValueError(
            f"expected neighbours [{len(relevance.relevant)}, k], got {neighbours.shape}"
        )
    ranks, counts = [], []
    for row, relevant, ignored in zip(
        neighbours, relevance.relevant, relevance.ignored, strict=True
    ):
        kept = row[(row >= 0) & ~np.isin(row, ignored)]
        wanted = relevant[~np.isin(relevant, ignored)]
        ranks.append(np.flatnonzero(np.isin(kept, wanted)) + 1)
        counts.append(len(wanted))
    return Ranking(ranks, np.array(counts, np.int64))
