"""Rank the relevant items of each query in a gallery; all ranked metrics start from this.

Rule for ties: a relevant item ranks behind every irrelevant item at the same distance, in any order
of the gallery. The rule applies to computed distances. A matrix product may round those of two
equal vectors differently, so that an embedding that maps everything to one point need not get the
worst possible score.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill.metrics.distances import Floats, Metric, distance_blocks

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Relevance:
    """The items that each query should find, as gallery positions.

    Attributes:
        relevant: One array for each query.
        ignored: Items removed from the ranking, such as the query's own image or a protocol's junk;
            one array for each query.
    """

    relevant: Sequence[Ints]
    ignored: Sequence[Ints]


@dataclass(frozen=True)
class Ranking:
    """Ranks of the relevant items.

    Attributes:
        ranks: For each query, ascending 1-based ranks of the relevant items that were found.
        relevant_counts: For each query, how many relevant items exist, [q]; more than its ranks if
            a top-k list missed some.
    """

    ranks: Sequence[Ints]
    relevant_counts: Ints


def relevance_by_label(
    query_labels: ArrayLike,
    gallery_labels: ArrayLike,
    query_images: Sequence[str] | Ints | None = None,
    gallery_images: Sequence[str] | Ints | None = None,
) -> Relevance:
    """Make items with the query's label relevant.

    A query whose label is not in the gallery gets no relevant item. Labels are compared as values:
    1 and "1" differ, and NaN equals nothing. An ignored item stays in `relevant`; ranking leaves it
    out.

    Args:
        query_labels: [q]; q may be 0.
        gallery_labels: [g]; none give no relevant items.
        query_images: Identity of each query image, [q], if both sets overlap: all gallery items
            with the query's identity are ignored. None: nothing is ignored.
        gallery_images: Identity of each gallery image, [g]; give both or neither.

    Returns:
        Gallery positions for each query, ascending.

    Raises:
        ValueError: Labels of another shape, or identities of one side only or of another length.
        TypeError: Labels of the gallery that cannot be ordered, such as None among numbers.
    """
    query_labels, gallery_labels = np.asarray(query_labels), np.asarray(gallery_labels)
    if query_labels.ndim != 1 or gallery_labels.ndim != 1:
        raise ValueError(
            "query_labels and gallery_labels: expected one dimension each, got the shapes "
            f"{query_labels.shape} and {gallery_labels.shape}; pass one label for each query and "
            "item"
        )
    order = np.argsort(gallery_labels, kind="stable").astype(np.int64)
    values, starts = np.unique(gallery_labels[order], return_index=True)
    # Without labels, np.split would give one empty part.
    parts = np.split(order, starts[1:]) if len(values) else []
    by_label = dict(zip(values.tolist(), parts, strict=True))
    none = np.empty(0, np.int64)
    relevant = [by_label.get(label, none) for label in query_labels.tolist()]
    if query_images is None and gallery_images is None:
        return Relevance(relevant, [none] * len(relevant))
    if query_images is None or gallery_images is None:
        raise ValueError(
            "query_images and gallery_images: expected both or neither, got one of them; pass "
            "the other one, too"
        )
    if len(query_images) != len(query_labels) or len(gallery_images) != len(gallery_labels):
        raise ValueError(
            "query_images and gallery_images: expected one image identity for each label, "
            f"{len(query_labels)} and {len(gallery_labels)}, got {len(query_images)} and "
            f"{len(gallery_images)}; pass an identity for each query and item"
        )
    positions: dict[str | int, list[int]] = {}
    for position, image in enumerate(gallery_images):
        positions.setdefault(image, []).append(position)
    ignored = [np.array(positions.get(image, ()), np.int64) for image in query_images]
    return Relevance(relevant, ignored)


def rank(queries: Floats, gallery: Floats, relevance: Relevance, metric: Metric = "l2") -> Ranking:
    """Rank the whole gallery for each query, 2^25 distances at a time.

    If distances are equal, the relevant item ranks last.

    Args:
        queries: [q, dim]; q may be 0.
        gallery: [g, dim]; with none, no query has a rank.
        relevance: The relevant items of each query. A negative position counts from the end.
        metric: How distances are computed.

    Returns:
        The ranking; `relevant_counts` does not count ignored items.

    Raises:
        ValueError: Relevance for another number of queries, shapes that do not fit, values that are
            not finite, a zero vector with cosine, or an unknown metric.
        IndexError: A position outside the gallery.
    """
    if len(relevance.relevant) != len(queries) or len(relevance.ignored) != len(queries):
        raise ValueError(
            f"relevance: expected one entry for each of {len(queries)} queries, got "
            f"{len(relevance.relevant)}; pass the relevance of the same queries"
        )
    ranks: list[Ints] = []
    for first, block in distance_blocks(queries, gallery, metric):
        ranks.extend(rank_block(block, first, relevance))
    return Ranking(ranks, np.array([len(r) for r in ranks], np.int64))


def rank_block(distances: Floats, first_query: int, relevance: Relevance) -> list[Ints]:
    """Return the ranks of the relevant items of consecutive queries.

    Args:
        distances: Distances to the whole gallery, [b, g]; ignored items are overwritten with
            infinity.
        first_query: Number of the first query, from 0.
        relevance: The relevant items of all queries.

    Returns:
        For each query, ascending 1-based ranks, int64. Ignored items, and items at an infinite or
        NaN distance, have none.

    Raises:
        IndexError: Relevance for fewer queries, or a position outside the gallery.
    """
    for i, row in enumerate(distances):
        # Infinity sorts last, so that ignored items shift no rank.
        row[relevance.ignored[first_query + i]] = np.inf
    ordered = np.sort(distances, axis=1)
    ranks = []
    for i, row in enumerate(distances):
        own = row[relevance.relevant[first_query + i]]
        own = np.sort(own[np.isfinite(own)])
        # All irrelevant items up to and at the distance rank before it.
        others = np.searchsorted(ordered[i], own, "right")
        others -= np.searchsorted(own, own, "right")
        ranks.append((others + np.arange(1, len(own) + 1)).astype(np.int64))
    return ranks


def rank_neighbours(neighbours: Ints, relevance: Relevance) -> Ranking:
    """Build a ranking from the answers of an index.

    Ignored items are removed. Relevant items outside of the answers count only in
    `relevant_counts`.

    Args:
        neighbours: Gallery positions, int64 [q, k], nearest first, -1 for none. A position must not
            repeat in a row, and must lie inside the gallery; neither is checked.
        relevance: The relevant items of each query.

    Returns:
        The ranking; `relevant_counts` does not count ignored items. Ties are ranked as the index
        returned them.

    Raises:
        ValueError: Another shape, or answers for another number of queries than either part of
            `relevance`.
    """
    if neighbours.ndim != 2 or len(neighbours) != len(relevance.relevant):
        raise ValueError(
            f"neighbours: expected positions of the shape [{len(relevance.relevant)}, k], one row "
            f"for each query, got {neighbours.shape}; pass the answers of the same queries"
        )
    ranks, counts = [], []
    for row, relevant, ignored in zip(
        neighbours, relevance.relevant, relevance.ignored, strict=True
    ):
        answer = row[(row >= 0) & ~np.isin(row, ignored)]
        targets = relevant[~np.isin(relevant, ignored)]
        ranks.append(np.flatnonzero(np.isin(answer, targets)) + 1)
        counts.append(len(targets))
    return Ranking(ranks, np.array(counts, np.int64))
