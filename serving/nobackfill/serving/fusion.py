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

# Candidates that each search contributes to a query; the same number may be embedded again.
HITS = 100
# How many nearest queries of the crowd measure whether an item is a hub.
NEAREST = 10

Block = NDArray[np.float32]
Mask = NDArray[np.bool_]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class OddsLine:
    """The line log-odds = slope * nearness + share * nearness as migrated + intercept."""

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
        weight: the new model's share in the score of a migrated item; 0 uses the old model alone.
        joined: the line of migrated items.
        native: the line of native items.
        old: the m anchor items by the old model [m, a]; norm 1 if `metric` is cosine.
        carried: the same items migrated [m, b].
        new: the same items by the new model [m, b].
        mark: the digest of the map that migrates.
        crowd: queries by the new model [q, b] that correct hubs among migrated items; empty: no
            correction.
        metric: the metric of the store.
    """

    weight: float
    joined: OddsLine
    native: OddsLine
    old: Vectors
    carried: Vectors
    new: Vectors
    mark: str = ""
    crowd: Vectors = field(default_factory=lambda: np.empty((0, 0), np.float32))
    metric: Metric = "cosine"

    def near(self, by_old: Vectors, by_new: Vectors, old: Vectors, carried: Vectors) -> Block:
        """Return both models' nearness of migrated items.

        Args:
            by_old: queries by the old model [q, a].
            by_new: the same queries by the new model [q, b].
            old: items by the old model [n, a].
            carried: the same items migrated [n, b].

        Returns:
            float32 [q, n].
        """
        near_old = nearness(by_old, old, self.old, metric=self.metric)
        less = (hubs(carried, self.crowd), self._hubs)
        near_new = nearness(by_new, carried, self.carried, less, self.metric)
        return fuse(self.weight, near_old, near_new)

    def odds(
        self, by_old: Vectors, by_new: Vectors, old: Vectors, carried: Vectors,
        native: Mapping[int, Vectors],
    ) -> Block:  # fmt: skip
        """Return the log-odds of a match.

        Args:
            by_old, by_new, old, carried: as in `near`.
            native: the new model's own vectors [b], by row, of the items that have one.

        Returns:
            float32 [q, n].
        """
        near = self.near(by_old, by_new, old, carried)
        log_odds = self.joined(near, near)
        if native:
            rows, new = list(native), np.stack(list(native.values()))
            near_native = nearness(by_new, new, self.new, metric=self.metric)
            log_odds[:, rows] = self.native(near_native, near[:, rows])
        return log_odds

    @cached_property
    def _hubs(self) -> Block:
        return hubs(self.carried, self.crowd)


def candidates(*searches: Callable[[int], Iterable[Key]], count: int = HITS) -> list[Key]:
    """Collect the candidates of a query, each once: the `count` nearest of each search.

    `nobackfill.serve.Dual`, the gateway and `fit` all use this rule, so `fit` predicts what
    searches return.

    Args:
        searches: functions that return the given number of nearest keys.
        count: how many keys to take from each.
    """
    return list(dict.fromkeys(key for search in searches for key in search(count)))


def fuse(weight: float, near_old: Block, near_new: Block) -> Block:
    """Combine both models' nearness [q, n] of migrated items; `weight` is the new model's share."""
    return np.asarray(weight * near_new + (1 - weight) * near_old, np.float32)


def hubs(vectors: Vectors, crowd: Vectors) -> Block:
    """Measure how near vectors are to all queries: half the mean cosine to their 10 nearest.

    Subtracting this from a cosine removes the advantage of hubs (CSLS: Conneau et al. 2018, Eq. 3,
    without the term that all items of a query share).

    Args:
        vectors: [n, d].
        crowd: queries [q, d] of norm 1.

    Returns:
        float32 [n]; zeros if `crowd` is empty.
    """
    if not len(crowd):
        return np.zeros(len(vectors), np.float32)
    near = normalise(vectors) @ crowd.T
    count = min(NEAREST, len(crowd))
    return np.asarray(np.partition(near, -count, axis=1)[:, -count:].mean(1) / 2, np.float32)


def nearness(
    queries: Vectors,
    vectors: Vectors,
    anchors: Vectors,
    less: tuple[Block, Block] | None = None,
    metric: Metric = "cosine",
) -> Block:
    """Return by how many standard deviations vectors are nearer to queries than anchors are.

    Args:
        queries: [q, d].
        vectors: [n, d].
        anchors: [m, d]; of norm 1 if `metric` is cosine.
        less: values to subtract from the cosines of vectors [n] and of anchors [m].
        metric: the metric of the store.

    Returns:
        float32 [q, n].
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
    """Standardise distances over anchors: how far below their mean, in standard deviations.

    Args:
        block: distances [q, g].
        anchors: the columns of the anchors.

    Returns:
        Nearness, float32 [q, g]; larger is nearer.
    """
    anchor_block = block[:, anchors]
    spread = np.maximum(anchor_block.std(1, keepdims=True), 1e-12)
    return np.asarray((anchor_block.mean(1, keepdims=True) - block) / spread, np.float32)
