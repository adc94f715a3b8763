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
CANDIDATES_PER_SEARCH = 100
# How many nearest queries of the crowd measure whether an item is a hub.
HUB_NEAREST = 10

Block = NDArray[np.float32]
Mask = NDArray[np.bool_]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class OddsLine:
    """The line log-odds = slope * nearness + share * (nearness as migrated) + intercept.

    Attributes:
        slope: log-odds of a match for one standard deviation of nearness.
        intercept: log-odds at nearness 0.
        migrated_weight: weight of an item's nearness as a migrated item; 0 ignores it.
    """

    slope: float = 1.0
    intercept: float = 0.0
    migrated_weight: float = 0.0

    def __call__(self, nearness: Block, carried: Block) -> Block:
        odds = self.slope * nearness + self.intercept
        return np.asarray(
            odds + self.migrated_weight * carried if self.migrated_weight else odds, np.float32
        )


@dataclass(frozen=True)
class FittedRankFusion:
    """A fitted rank fusion.

    Attributes:
        new_weight: the new model's share in the score of a migrated item, 0 to 1; 0 uses the old
            model alone.
        migrated_line: the line of migrated items.
        native_line: the line of native items.
        old_anchors: the m anchor items by the old model, float32 [m, a]; norm 1 if `metric` is
            cosine.
        migrated_anchors: the same items migrated, float32 [m, b].
        new_anchors: the same items by the new model, float32 [m, b].
        map_digest: the digest of the map that migrates.
        hub_queries: queries by the new model, float32 [q, b], that correct hubs among migrated
            items; empty: no correction.
        metric: the metric of the store.
    """

    new_weight: float
    migrated_line: OddsLine
    native_line: OddsLine
    old_anchors: Vectors
    migrated_anchors: Vectors
    new_anchors: Vectors
    map_digest: str = ""
    hub_queries: Vectors = field(default_factory=lambda: np.empty((0, 0), np.float32))
    metric: Metric = "cosine"

    def migrated_nearness(
        self, old_queries: Vectors, new_queries: Vectors, old: Vectors, carried: Vectors
    ) -> Block:
        """Return how near migrated items are to queries, by both models together.

        Hubs among the anchors are measured at the first call, and cached.

        Args:
            old_queries: queries by the old model, float32 [q, a].
            new_queries: the same queries by the new model, float32 [q, b].
            old: items by the old model, float32 [n, a], of any norm; n may be 0.
            carried: the same items migrated, float32 [n, b].

        Returns:
            float32 [q, n], in standard deviations over the anchors; larger is nearer. With cosine,
            a value that is not finite gives NaN.

        Raises:
            ValueError: the dimensions differ, or with l2 or inner_product a value is not finite.
        """
        near_old = standardised_nearness(old_queries, old, self.old_anchors, metric=self.metric)
        less = (measure_hubs(carried, self.hub_queries), self._hubs)
        near_new = standardised_nearness(
            new_queries, carried, self.migrated_anchors, less, self.metric
        )
        return fuse_nearness(self.new_weight, near_old, near_new)

    def match_log_odds(
        self, old_queries: Vectors, new_queries: Vectors, old: Vectors, carried: Vectors,
        native: Mapping[int, Vectors],
    ) -> Block:  # fmt: skip
        """Return the log-odds that items match queries, on one scale for both origins.

        Args:
            old_queries: queries by the old model, float32 [q, a]; q may be 0.
            new_queries: the same queries by the new model, float32 [q, b].
            old: items by the old model, float32 [n, a], of any norm; n may be 0.
            carried: the same items migrated, float32 [n, b].
            native: native vectors, float32 [b] each, by row 0 to n-1 of the items that have one;
                may be empty. `old` and `carried` of these rows count, too, with the
                `migrated_weight` of `native_line`.

        Returns:
            float32 [q, n]; larger is more probable. 0 is even odds. With cosine, a value that is
            not finite gives NaN.

        Raises:
            ValueError: the dimensions differ, or with l2 or inner_product a value is not finite.
            IndexError: `native` names a row that does not exist.
        """
        migrated = self.migrated_nearness(old_queries, new_queries, old, carried)
        log_odds = self.migrated_line(migrated, migrated)
        if native:
            rows, new = list(native), np.stack(list(native.values()))
            near_native = standardised_nearness(
                new_queries, new, self.new_anchors, metric=self.metric
            )
            log_odds[:, rows] = self.native_line(near_native, migrated[:, rows])
        return log_odds

    @cached_property
    def _hubs(self) -> Block:
        return measure_hubs(self.migrated_anchors, self.hub_queries)


def collect_candidates(
    *searches: Callable[[int], Iterable[Key]], count: int = CANDIDATES_PER_SEARCH
) -> list[Key]:
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


def fuse_nearness(new_weight: float, near_old: Block, near_new: Block) -> Block:
    """Return the weighted mean of both models' nearness.

    Args:
        new_weight: the new model's share, 0 to 1; not checked.
        near_old: nearness by the old model, float32 [q, n].
        near_new: nearness by the new model, float32 [q, n].

    Returns:
        float32 [q, n].

    Raises:
        ValueError: the two shapes do not fit.
    """
    return np.asarray(new_weight * near_new + (1 - new_weight) * near_old, np.float32)


def measure_hubs(vectors: Vectors, queries: Vectors) -> Block:
    """Measure how near each vector is to queries: half the mean cosine to its 10 nearest ones.

    Subtracting this from a cosine removes the advantage of hubs (CSLS: Conneau et al. 2018, Eq. 3,
    without the term that all items of a query share).

    Args:
        vectors: float32 [n, d], of any norm; a zero vector gives 0.
        queries: queries, float32 [q, d], of norm 1. With fewer than 10, all of them count.

    Returns:
        float32 [n], -0.5 to 0.5; zeros if `queries` is empty.

    Raises:
        ValueError: the dimensions differ.
    """
    if not len(queries):
        return np.zeros(len(vectors), np.float32)
    cosines = normalise(vectors) @ queries.T
    count = min(HUB_NEAREST, len(queries))
    return np.asarray(np.partition(cosines, -count, axis=1)[:, -count:].mean(1) / 2, np.float32)


def standardised_nearness(
    queries: Vectors,
    vectors: Vectors,
    anchors: Vectors,
    offsets: tuple[Block, Block] | None = None,
    metric: Metric = "cosine",
) -> Block:
    """Return by how many standard deviations vectors are nearer to queries than anchors are.

    Args:
        queries: float32 [q, d], of any norm.
        vectors: float32 [n, d], of any norm.
        anchors: float32 [m, d], m at least 1; of norm 1 if `metric` is cosine.
        offsets: values to subtract from the cosines of vectors [n] and of anchors [m]; None: none.
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
    if offsets is not None:
        block -= np.concatenate(offsets)
    columns = np.arange(len(vectors), block.shape[1])
    standard: Block = standardise_distances(-block, columns)[:, : len(vectors)]
    return standard


def standardise_distances(block: Block, anchors: NDArray[np.int64]) -> Block:
    """Convert distances to standard deviations below the mean distance of anchors, per query.

    Args:
        block: distances, float32 [q, g].
        anchors: the columns of the anchors, int64 [m], m at least 1. If they are all equally far,
            1e-12 stands for their standard deviation.

    Returns:
        Nearness, float32 [q, g]; larger is nearer, 0 is the anchors' mean. A distance of NaN to an
        anchor gives NaN for the whole query.

    Raises:
        IndexError: `anchors` names a column that does not exist.
    """
    anchor_block = block[:, anchors]
    spread = np.maximum(anchor_block.std(1, keepdims=True), 1e-12)
    return np.asarray((anchor_block.mean(1, keepdims=True) - block) / spread, np.float32)
