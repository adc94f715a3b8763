"""Compute the backfill curve: quality while a gallery is re-embedded item by item.

BCT's supplement (section 2) re-embeds class by class in steps of 2 %. FastFill orders items by
predicted uncertainty and reports the mean over the curve.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill.metrics.distances import Floats, Metric, distance_blocks
from nobackfill.metrics.neighbours import exact_neighbours
from nobackfill.metrics.ranking import Ints, Ranking, Relevance
from nobackfill.metrics.replaced import ReplacementSteps, rank_replacement_steps
from nobackfill.metrics.retrieval import PerQuery, average_precision, cmc, mean_of_answerable

TENTH_SHARES = np.linspace(0, 1, 11)
# Neighbours of an item that count as its searches.
GAIN_NEIGHBOURS = 10


@dataclass(frozen=True)
class DistanceLine:
    """Converts the distance of a migrated item to that of a re-embedded one as likely to match.

    The result is slope * distance + offset, with `slope` > 0.
    """

    slope: float = 1.0
    offset: float = 0.0


IDENTITY_LINE = DistanceLine()


@dataclass(frozen=True)
class BackfillCurve:
    """Quality at each share of re-embedded items.

    Attributes:
        reembedded_shares: [s], from 0 to 1.
        cmc1: CMC-1 at each share, [s].
        map: mAP at each share, [s].
        cmc1_areas: Area under each query's curve of CMC-1, [q]; NaN as in retrieval.py.
        map_areas: Area under each query's curve of average precision, [q]; NaN as in retrieval.py.
    """

    reembedded_shares: NDArray[np.float64]
    cmc1: NDArray[np.float64]
    map: NDArray[np.float64]
    cmc1_areas: PerQuery
    map_areas: PerQuery

    def area_under(self, figures: NDArray[np.float64]) -> float:
        """Return the area under one of the curves [s]: its mean over shares 0 to 1 (trapezium
        rule).

        With a single share the area is 0; NaN gives NaN.

        Args:
            figures: One figure at each share, [s].

        Raises:
            ValueError: Another number of values.
        """
        if figures.shape != self.reembedded_shares.shape:
            raise ValueError(
                "area under a backfill curve: expected one figure for each of "
                f"{len(self.reembedded_shares)} shares, got figures of the shape {figures.shape}; "
                "pass an array with one figure for each share"
            )
        return float(np.trapezoid(figures, self.reembedded_shares))


def random_order(item_count: int, seed: int) -> Ints:
    """Return items 0 to `item_count` - 1 in a random order, int64 [items].

    Args:
        item_count: Number of items; 0 gives an empty order.
        seed: Chooses the order, at least 0; a seed gives the same order again.

    Raises:
        ValueError: The seed is negative.
    """
    return np.random.default_rng(seed).permutation(item_count)


def class_order(labels: ArrayLike, seed: int) -> Ints:
    """Return items class by class, with the classes in a random order, as in BCT's supplement.

    Items of one class stay in their order.

    Args:
        labels: int [n]; none give an empty order.
        seed: Chooses the order of the classes, at least 0; a seed gives the same order again.

    Returns:
        int64 [n].

    Raises:
        ValueError: The seed is negative.
    """
    labels = np.asarray(labels)
    classes, positions = np.unique(labels, return_inverse=True)
    places = np.random.default_rng(seed).permutation(len(classes))
    return np.argsort(places[positions], kind="stable")


def uncertainty_order(uncertainty: NDArray[np.floating[Any]]) -> Ints:
    """Return items by falling uncertainty (FastFill); equal ones by position.

    Args:
        uncertainty: [n], larger is less certain; NaN comes last.

    Returns:
        int64 [n].
    """
    return np.argsort(-uncertainty, kind="stable")


def oracle_order(served_vectors: Floats, native_vectors: Floats) -> Ints:
    """Return items by falling true squared error: the order of a perfect uncertainty.

    Equal items are ordered by position; NaN comes last.

    Args:
        served_vectors: The vectors that are searched, [n, dim].
        native_vectors: The re-embedded vectors, [n, dim].

    Returns:
        int64 [n].

    Raises:
        ValueError: The shapes differ and do not broadcast.
    """
    return uncertainty_order(((served_vectors - native_vectors) ** 2).sum(axis=1))


def gain_order(served_vectors: Floats, uncertainty: Floats, metric: Metric = "l2") -> Ints:
    """Return items by falling expected gain: items that are uncertain and occur in many searches
    first.

    Gain = (times among the GAIN_NEIGHBOURS nearest of another served item) * variance^(1/4).
    Variance alone puts outliers first, which few searches meet. Yet a random tenth gives every
    search a re-embedded item nearby: CMC-1 over the curve is then below random order's, even with
    the true error. The root was chosen on development seeds of digits.

    Equal items are ordered by position.

    Args:
        served_vectors: The vectors that are searched, [n, dim].
        uncertainty: Predicted variance, [n], at least 0; an item with a negative or NaN variance
            comes last.
        metric: How distances are computed.

    Returns:
        int64 [n].

    Raises:
        ValueError: There are no items, the vectors are not finite, one is zero with cosine, the
            metric is unknown, or `uncertainty` has another length (1 counts for all items).
    """
    neighbours, _ = exact_neighbours(
        served_vectors, served_vectors, min(GAIN_NEIGHBOURS + 1, len(served_vectors)), metric
    )
    occurrences = np.bincount(
        neighbours[neighbours != np.arange(len(served_vectors))[:, None]],
        minlength=len(served_vectors),
    )
    # Items without occurrences are still ordered by their variance.
    return uncertainty_order((occurrences + 0.1) * np.asarray(uncertainty, np.float64) ** 0.25)


def class_shares(
    labels: ArrayLike, order: Ints, class_share_step: float = 0.02
) -> NDArray[np.float64]:
    """Return the shares of items that are re-embedded after each `class_share_step` of the classes.

    Args:
        labels: int [n], of at least one item; without any, the result is NaN.
        order: The order of the items, int64 [n], from `class_order`; an order that mixes classes
            gives wrong shares.
        class_share_step: Share of the classes between two points, above 0 and at most 1. The last
            share is 1 if 1 / class_share_step is a whole number.

    Returns:
        [s], ascending from 0; the last is 1, with the exception that `class_share_step` names.
        Steps that end in the same class are one point.

    Raises:
        ZeroDivisionError: The step is 0.
        IndexError: The order has a position outside of the labels.
    """
    labels = np.asarray(labels)
    _, firsts = np.unique(labels[order], return_index=True)
    # Where each class ends in the order, with 0 before the first.
    ends = np.append(np.sort(firsts), len(order))
    steps = np.arange(0, 1 + class_share_step / 2, class_share_step)
    class_counts = np.unique(np.round(steps * (len(ends) - 1)).astype(int))
    shares: NDArray[np.float64] = ends[class_counts] / len(order)
    return shares


@dataclass(frozen=True)
class ReembeddingOrder:
    """An order of re-embedding, and the shares at which quality is measured."""

    item_order: Ints
    measured_shares: ArrayLike = field(default_factory=lambda: TENTH_SHARES)


def backfill_curve(
    queries: Floats,
    served_vectors: Floats,
    native_vectors: Floats,
    order: Ints,
    relevance: Relevance,
    *,
    shares: ArrayLike = TENTH_SHARES,
    metric: Metric = "l2",
    served_queries: Floats | None = None,
    distance_line: DistanceLine = IDENTITY_LINE,
) -> BackfillCurve:
    """Measure search quality while a gallery is re-embedded in one order.

    At each share, the first items of `order` have their vector in `native_vectors`, the others in
    `served_vectors`. Both kinds are ranked together, with distances of served items converted by
    `distance_line`. At equal distances the relevant item ranks last. Ignored items have no rank.

    Args:
        queries: [q, dim].
        served_vectors: Vectors before re-embedding, [g, served dim].
        native_vectors: Vectors after re-embedding, [g, dim].
        order: A permutation of the items, [g].
        relevance: The relevant items of each query.
        shares: Where quality is measured, [s], at least one, ascending, each 0 to 1; order and
            bounds are not checked. Numbers of items are rounded. Areas need at least two points;
            with one they are 0.
        metric: How distances are computed.
        served_queries: Queries for served items, [q, served dim], if the dimensions differ (BCT's
            first K elements); None: `queries`.
        distance_line: Converts distances of served items.

    Returns:
        The quality at each share.

    Raises:
        ValueError: The order is no permutation of all items. Or there are no queries or no shares,
            no query has a relevant item, shapes do not fit, vectors are not finite, one is zero
            with cosine, or the metric is unknown.
        IndexError: Relevance for fewer queries, or a position outside the gallery. Relevance for
            more queries is not noticed.
    """
    orders = {"": ReembeddingOrder(order, shares)}
    return curves_by_order(
        queries, served_vectors, native_vectors, orders, relevance,
        metric=metric, served_queries=served_queries, distance_line=distance_line,
    )[""]  # fmt: skip


def curves_by_order(
    queries: Floats,
    served_vectors: Floats,
    native_vectors: Floats,
    orders: Mapping[str, ReembeddingOrder],
    relevance: Relevance,
    *,
    metric: Metric = "l2",
    served_queries: Floats | None = None,
    distance_line: DistanceLine = IDENTITY_LINE,
) -> dict[str, BackfillCurve]:
    """Measure `backfill_curve` for several orders, by name, computing distances only once.

    At equal distances the relevant item ranks last.

    Args:
        queries: [q, dim].
        served_vectors: Vectors before re-embedding, [g, served dim].
        native_vectors: Vectors after re-embedding, [g, dim].
        orders: The orders by name, each with its shares as in `backfill_curve`.
        relevance: The relevant items of each query.
        metric: How distances are computed.
        served_queries: Queries for served items, [q, served dim]; None: `queries`.
        distance_line: Converts distances of served items.

    Returns:
        A curve by name, in the order of `orders`; empty without orders, where the vectors are
        checked all the same.

    Raises:
        ValueError: An order is no permutation of all items. Or there are no queries or no shares,
            no query has a relevant item, shapes do not fit, vectors are not finite, one is zero
            with cosine, or the metric is unknown.
        IndexError: Relevance for fewer queries, or a position outside the gallery. Relevance for
            more queries is not noticed.
    """
    points = {name: np.asarray(order.measured_shares, np.float64) for name, order in orders.items()}
    replacements = []
    for name, order in orders.items():
        if not np.array_equal(np.sort(order.item_order), np.arange(len(native_vectors))):
            raise ValueError(
                f"order {name!r} of a backfill: expected each item from 0 to "
                f"{len(native_vectors) - 1} once, got missing, repeated or other items; pass a "
                "permutation of all items"
            )
        counts = np.round(points[name] * len(order.item_order)).astype(np.int64)
        replacements.append(ReplacementSteps(order.item_order, counts))
    meets_served = queries if served_queries is None else served_queries
    # For each order and each block: [steps, queries].
    cmc1: list[list[NDArray[np.float64]]] = [[] for _ in replacements]
    precision: list[list[NDArray[np.float64]]] = [[] for _ in replacements]
    for (first, old), (_, new) in zip(
        distance_blocks(meets_served, served_vectors, metric),
        distance_blocks(queries, native_vectors, metric),
        strict=True,
    ):
        carried = distance_line.slope * old + distance_line.offset
        for number, steps in enumerate(
            rank_replacement_steps(carried, new, first, replacements, relevance)
        ):
            rankings = [Ranking(r, np.array([len(one) for one in r], np.int64)) for r in steps]
            cmc1[number].append(np.stack([cmc(ranking, 1) for ranking in rankings]))
            precision[number].append(np.stack([average_precision(one) for one in rankings]))
    return {
        name: _curve(points[name], np.concatenate(firsts, axis=1), np.concatenate(areas, axis=1))
        for name, firsts, areas in zip(orders, cmc1, precision, strict=True)
    }


def _curve(
    shares: NDArray[np.float64], cmc1: NDArray[np.float64], precision: NDArray[np.float64]
) -> BackfillCurve:
    """Build a curve from figures [steps, queries]."""
    return BackfillCurve(
        shares,
        np.array([mean_of_answerable(values) for values in cmc1]),
        np.array([mean_of_answerable(values) for values in precision]),
        np.asarray(np.trapezoid(cmc1, shares, axis=0)),
        np.asarray(np.trapezoid(precision, shares, axis=0)),
    )
