"""Rank fusion of items whose vectors come from two models, by the log-odds of a match.

The score of a migrated item combines old/old and new/migrated distances. The score of a native item
is new/new, plus a fitted share of its score as a migrated item. Each distance is standardised per
query over the same few anchor items, so that nearness has the same scale in every space. One line
per origin, fitted on relevance, converts nearness to log-odds. Distances are never compared between
origins, because a new query is on average nearer to migrated items than to native ones.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nobackfill.metrics.distances import Metric, distances
from nobackfill.vectors import Vectors, normalise

# Candidates that each search contributes to a query; the same number may be re-embedded.
HITS = 100
# How many nearest queries of the crowd measure whether an item is a hub.
NEAREST = 10

Block = NDArray[np.float32]
Mask = NDArray[np.bool_]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class OddsLine:
    """The line log-odds = slope * nearness + share * (nearness as migrated) + intercept.

    Attributes:
        slope: log-odds of a match for one standard deviation of nearness.
        intercept: log-odds at nearness 0.
        share: weight of an item's nearness as a migrated item; 0 ignores it.
    """

    slope: float = 1.0
    intercept: float = 0.0
    share: float = 0.0

    def __call__(self, nearness: Block, carried: Block) -> Block:
        odds = self.slope * nearness + self.intercept
        return np.asarray(odds + self.share * carried if self.share else odds, np.float32)


@dataclass(frozen=True)
class Joining:
    """A fitted rank fusion.

    Attributes:
        weight: the new model's share in the score of a migrated item, 0 to 1; 0 uses the old model
            alone.
        migrated: the line of migrated items.
        native: the line of native items.
        old: the m anchor items by the old model, float32 [m, a]; norm 1 if `metric` is cosine.
        carried: the same items migrated, float32 [m, b].
        new: the same items by the new model, float32 [m, b].
        mark: the digest of the map that migrates.
        crowd: queries by the new model, float32 [q, b], that correct hubs among migrated items;
            empty: no correction.
        metric: the metric of the store.
    """

    weight: float
    migrated: OddsLine
    native: OddsLine
    old: Vectors
    carried: Vectors
    new: Vectors
    mark: str = ""
    crowd: Vectors = field(default_factory=lambda: np.empty((0, 0), np.float32))
    metric: Metric = "cosine"

    def migrated_nearness(
        self, by_old: Vectors, by_new: Vectors, old: Vectors, carried: Vectors
    ) -> Block:
        """Return how near migrated items are to queries, by both models together.

        Hubs among the anchors are measured at the first call, and cached.

        Args:
            by_old: queries by the old model, float32 [q, a].
            by_new: the same queries by the new model, float32 [q, b].
            old: items by the old model, float32 [n, a], of any norm; n may be 0.
            carried: the same items migrated, float32 [n, b].

        Returns:
            float32 [q, n], in standard deviations over the anchors; larger is nearer.

        Raises:
            ValueError: the dimensions differ, or with l2 or inner_product a value is not finite.
        """
        near_old = nearness(by_old, old, self.old, metric=self.metric)
        less = (measure_hubs(carried, self.crowd), self._hubs)
        near_new = nearness(by_new, carried, self.carried, less, self.metric)
        return fuse_nearness(self.weight, near_old, near_new)

    def odds(
        self, by_old: Vectors, by_new: Vectors, old: Vectors, carried: Vectors,
        native: Mapping[int, Vectors],
    ) -> Block:  # fmt: skip
        """Return the log-odds that items match queries, on one scale for both origins.

        Args:
            by_old: queries by the old model, float32 [q, a]; q may be 0.
            by_new: the same queries by the new model, float32 [q, b].
            old: items by the old model, float32 [n, a], of any norm; n may be 0.
            carried: the same items migrated, float32 [n, b].
            native: native vectors, float32 [b] each, by row 0 to n-1 of the items that have one;
                may be empty. `old` and `carried` of these rows count, too, with the share of the
                line of native items.

        Returns:
            float32 [q, n]; larger is more probable. 0 is even odds.

        Raises:
            ValueError: the dimensions differ, or with l2 or inner_product a value is not finite.
            IndexError: `native` names a row that does not exist.
        """
        migrated = self.migrated_nearness(by_old, by_new, old, carried)
        log_odds = self.migrated(migrated, migrated)
        if native:
            rows, new = list(native), np.stack(list(native.values()))
            near_native = nearness(by_new, new, self.new, metric=self.metric)
            log_odds[:, rows] = self.native(near_native, migrated[:, rows])
        return log_odds

    @cached_property
    def _hubs(self) -> Block:
        return measure_hubs(self.carried, self.crowd)


def collect_candidates(*searches: Callable[[int], Iterable[Key]], count: int = HITS) -> list[Key]:
    """Collect the candidates of a query, each once: the `count` nearest of each search.

    `nobackfill.serve.Dual`, the gateway and `fit` all use this rule, so `fit` predicts what
    searches return.

    Args:
        searches: functions that return the given number of nearest keys; their errors pass through.
        count: how many keys to take from each, 100 by default.

    Returns:
        Up to count times the number of searches, those of the first search first; empty without
        searches. A search that returns more keys is not cut.
    """
    return list(dict.fromkeys(key for search in searches for key in search(count)))


def fuse_nearness(weight: float, near_old: Block, near_new: Block) -> Block:
    """Return the weighted mean of both models' nearness.

    Args:
        weight: the new model's share, 0 to 1; not checked.
        near_old: nearness by the old model, float32 [q, n].
        near_new: nearness by the new model, float32 [q, n].

    Returns:
        float32 [q, n].
    """
    return np.asarray(weight * near_new + (1 - weight) * near_old, np.float32)


def measure_hubs(vectors: Vectors, crowd: Vectors) -> Block:
    """Measure how near each vector is to queries: half the mean cosine to its 10 nearest ones.

    Subtracting this from a cosine removes the advantage of hubs (CSLS: Conneau et al. 2018, Eq. 3,
    without the term that all items of a query share).

    Args:
        vectors: float32 [n, d], of any norm; a zero vector gives 0.
        crowd: queries, float32 [q, d], of norm 1. With fewer than 10, all of them count.

    Returns:
        float32 [n], -0.5 to 0.5; zeros if `crowd` is empty.

    Raises:
        ValueError: the dimensions differ.
    """
    if not len(crowd):
        return np.zeros(len(vectors), np.float32)
    cosines = normalise(vectors) @ crowd.T
    count = min(NEAREST, len(crowd))
    return np.asarray(np.partition(cosines, -count, axis=1)[:, -count:].mean(1) / 2, np.float32)


def nearness(
    queries: Vectors,
    vectors: Vectors,
    anchors: Vectors,
    less: tuple[Block, Block] | None = None,
    metric: Metric = "cosine",
) -> Block:
    """Return by how many standard deviations vectors are nearer to queries than anchors are.

    Args:
        queries: float32 [q, d], of any norm.
        vectors: float32 [n, d], of any norm.
        anchors: float32 [m, d], m at least 1; of norm 1 if `metric` is cosine.
        less: values to subtract from the cosines of vectors [n] and of anchors [m]; None: none.
        metric: the metric of the store: cosine, l2 or inner_product.

    Returns:
        float32 [q, n]; larger is nearer, 0 is the mean of the anchors. With cosine, a query or
        vector that is not finite gives NaN.

    Raises:
        ValueError: the dimensions differ, the metric is another one, or with l2 or inner_product a
            value is not finite.
    """
    if metric == "cosine":
        unit = normalise(queries)
        block = np.concatenate([unit @ normalise(vectors).T, unit @ anchors.T], axis=1)
    else:
        sides = [distances(queries, side, metric) for side in (vectors, anchors)]
        block = -np.concatenate(sides, axis=1).astype(np.float32)
    if less is not None:
        block -= np.concatenate(less)
    columns = np.arange(len(vectors), block.shape[1])
    standard: Block = standardise(-block, columns)[:, : len(vectors)]
    return standard


def standardise(block: Block, anchors: NDArray[np.int64]) -> Block:
    """Convert distances to standard deviations below the mean distance of anchors, per query.

    Args:
        block: distances, float32 [q, g].
        anchors: the columns of the anchors, int64 [m], m at least 1. If they are all equally far,
            1e-12 stands for their standard deviation.

    Returns:
        Nearness, float32 [q, g]; larger is nearer, 0 is the anchors' mean. A distance of NaN to an
        anchor gives NaN for the whole query.
    """
    anchor_block = block[:, anchors]
    spread = np.maximum(anchor_block.std(1, keepdims=True), 1e-12)
    return np.asarray((anchor_block.mean(1, keepdims=True) - block) / spread, np.float32)
