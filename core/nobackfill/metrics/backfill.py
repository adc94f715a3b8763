"""The backfill curve: quality while a gallery is re-embedded item by item, in a chosen order.

BCT's supplement (section 2) goes by class in steps of 2 %; FastFill orders items by predicted
uncertainty and reports the mean over the curve.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill.metrics.distances import Floats, Metric, distance_blocks
from nobackfill.metrics.neighbours import nearest
from nobackfill.metrics.ranking import Ints, Ranking, Relevance
from nobackfill.metrics.replaced import Steps, rank_steps
from nobackfill.metrics.retrieval import PerQuery, average_precision, cmc, mean

TENTHS = np.linspace(0, 1, 11)
# Neighbours of an item whose searches it stands in.
NEAR = 10


@dataclass(frozen=True)
class Line:
    """What brings the distance of a carried item to that of a re-embedded one which is as likely to
    match: slope * distance + offset. `slope` > 0.
    """

    slope: float = 1.0
    offset: float = 0.0


AS_THEY_ARE = Line()


@dataclass(frozen=True)
class BackfillCurve:
    """Quality at each share of re-embedded items, from 0 to 1."""

    shares: NDArray[np.float64]
    cmc1: NDArray[np.float64]
    map: NDArray[np.float64]
    # The area under each query's curve of CMC-1 and of average precision; NaN as in retrieval.py.
    cmc1_areas: PerQuery
    map_areas: PerQuery

    def mean_over(self, values: NDArray[np.float64]) -> float:
        """The area under one of the curves: its mean over shares 0 to 1 (trapezium rule)."""
        return float(np.trapezoid(values, self.shares))


def random_order(items: int, seed: int) -> Ints:
    """Items in a random order."""
    return np.random.default_rng(seed).permutation(items)


def class_order(labels: ArrayLike, seed: int) -> Ints:
    """Whole classes one after the other, classes in a random order, as in BCT's supplement."""
    labels = np.asarray(labels)
    classes, positions = np.unique(labels, return_inverse=True)
    places = np.random.default_rng(seed).permutation(len(classes))
    return np.argsort(places[positions], kind="stable")


def uncertainty_order(uncertainty: NDArray[np.floating[Any]]) -> Ints:
    """The most uncertain item first (FastFill); equal ones by position."""
    return np.argsort(-uncertainty, kind="stable")


def oracle_order(served: Floats, backfilled: Floats) -> Ints:
    """The item with the largest true squared error first: the order of a perfect uncertainty."""
    return uncertainty_order(((served - backfilled) ** 2).sum(axis=1))


def gain_order(served: Floats, uncertainty: Floats, metric: Metric = "l2") -> Ints:
    """The item first that re-embedding is expected to help most: that stands in most searches and
    is uncertain.

    Gain = (times among the NEAR nearest of another served item) * variance^(1/4). By variance alone
    a backfill does outliers first, which few searches meet, while a random tenth gives every search
    a re-embedded item near: CMC-1 over the curve is then below random order's, as it is by the true
    error. The root was chosen on development seeds of digits.
    """
    near, _ = nearest(served, served, min(NEAR + 1, len(served)), metric)
    met = np.bincount(near[near != np.arange(len(served))[:, None]], minlength=len(served))
    # What no item is near to is still done by its variance.
    return uncertainty_order((met + 0.1) * np.asarray(uncertainty, np.float64) ** 0.25)


def class_shares(labels: ArrayLike, order: Ints, step: float = 0.02) -> NDArray[np.float64]:
    """The shares of items that are done after each `step` of the classes of `class_order`."""
    labels = np.asarray(labels)
    _, firsts = np.unique(labels[order], return_index=True)
    # Where each class ends in the order, with 0 before the first.
    ends = np.append(np.sort(firsts), len(order))
    steps = np.arange(0, 1 + step / 2, step)
    done = np.unique(np.round(steps * (len(ends) - 1)).astype(int))
    shares: NDArray[np.float64] = ends[done] / len(order)
    return shares


@dataclass(frozen=True)
class Order:
    """Items in the order in which they are re-embedded, and the shares at which is measured."""

    items: Ints
    shares: ArrayLike = field(default_factory=lambda: TENTHS)


def backfill_curve(
    queries: Floats,
    served: Floats,
    backfilled: Floats,
    order: Ints,
    relevance: Relevance,
    *,
    shares: ArrayLike = TENTHS,
    metric: Metric = "l2",
    served_queries: Floats | None = None,
    line: Line = AS_THEY_ARE,
) -> BackfillCurve:
    """Search a gallery of which the first share of `order` holds `backfilled` [g, dim], the rest
    `served` [g, served dim], with `queries` [q, dim].

    `served_queries` [q, served dim] are the queries as they meet served items, where the dimensions
    differ (BCT's first K elements); otherwise `queries` meets both. The distances of both kinds are
    ranked together, those of served items along `line`.
    """
    orders = {"": Order(order, shares)}
    return curves_by_order(
        queries, served, backfilled, orders, relevance,
        metric=metric, served_queries=served_queries, line=line,
    )[""]  # fmt: skip


def curves_by_order(
    queries: Floats,
    served: Floats,
    backfilled: Floats,
    orders: Mapping[str, Order],
    relevance: Relevance,
    *,
    metric: Metric = "l2",
    served_queries: Floats | None = None,
    line: Line = AS_THEY_ARE,
) -> dict[str, BackfillCurve]:
    """`backfill_curve` of each order, by name: distances are looked at once for all."""
    points = {name: np.asarray(order.shares, np.float64) for name, order in orders.items()}
    ways = []
    for name, order in orders.items():
        if not np.array_equal(np.sort(order.items), np.arange(len(backfilled))):
            raise ValueError(f"expected an order of all {len(backfilled)} items")
        counts = np.round(points[name] * len(order.items)).astype(np.int64)
        ways.append(Steps(order.items, counts))
    meets_served = queries if served_queries is None else served_queries
    # By order, of each block: at each step, of each query.
    cmc1: list[list[NDArray[np.float64]]] = [[] for _ in ways]
    precision: list[list[NDArray[np.float64]]] = [[] for _ in ways]
    for (first, old), (_, new) in zip(
        distance_blocks(meets_served, served, metric),
        distance_blocks(queries, backfilled, metric),
        strict=True,
    ):
        carried = line.slope * old + line.offset
        for number, steps in enumerate(rank_steps(carried, new, first, ways, relevance)):
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
    """Of figures [steps, queries]."""
    return BackfillCurve(
        shares,
        np.array([mean(values) for values in cmc1]),
        np.array([mean(values) for values in precision]),
        np.asarray(np.trapezoid(cmc1, shares, axis=0)),
        np.asarray(np.trapezoid(precision, shares, axis=0)),
    )
