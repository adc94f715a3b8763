"""One ranking of items whose vectors come from two models: every score as the log-odds of a match.

A carried item's score joins old/old and new/carried, a native one's is new/new, and may keep a
share of what it scored while it was carried. Each distance is standardised per query over the same
few anchor items, so that "near" means the same in every space; a line per origin, fitted on
relevance, turns it into log-odds. Distances themselves are never compared between origins: a new
query is nearer to carried items than to native ones on average.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nobackfill.metrics.distances import Metric, distances
from nobackfill.vectors import Vectors, normalise

# Candidates of a query from each search, and those of them that are embedded again.
HITS = 100
# The nearest queries of a crowd that say how much of a hub an item is.
NEAREST = 10

Block = NDArray[np.float32]
Mask = NDArray[np.bool_]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class OddsLine:
    """log-odds = slope x nearness + share x nearness as a carried item + intercept."""

    slope: float = 1.0
    intercept: float = 0.0
    share: float = 0.0

    def __call__(self, nearness: Block, carried: Block) -> Block:
        odds = self.slope * nearness + self.intercept
        return np.asarray(odds + self.share * carried if self.share else odds, np.float32)


@dataclass(frozen=True)
class Joining:
    """`weight`: the new model's share in a carried item's score, 0 is the old model alone.

    `joined`, `native`: lines of the two origins. Anchors are the same items by the old model
    [m, a], carried [m, b] and by the new model [m, b], rows of norm 1 where `metric`, the store's,
    is cosine. `crowd`: queries by the new model [q, b] that correct hubs among carried items; none:
    they are not corrected. `mark`: the digest of the map that carries.
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
        """Both models' nearness [q, n] of items with vectors old [n, a] and carried [n, b] to
        queries by either model, [q, a] and [q, b]."""
        near_old = nearness(by_old, old, self.old, metric=self.metric)
        less = (hubs(carried, self.crowd), self._hubs)
        near_new = nearness(by_new, carried, self.carried, less, self.metric)
        return fused(self.weight, near_old, near_new)

    def odds(
        self, by_old: Vectors, by_new: Vectors, old: Vectors, carried: Vectors,
        native: Mapping[int, Vectors],
    ) -> Block:  # fmt: skip
        """Log-odds [q, n] of a match; arguments as in `near`. `native`: the new model's own vectors
        [b], by the rows of the items that have one."""
        near = self.near(by_old, by_new, old, carried)
        found = self.joined(near, near)
        if native:
            rows, new = list(native), np.stack(list(native.values()))
            near_native = nearness(by_new, new, self.new, metric=self.metric)
            found[:, rows] = self.native(near_native, near[:, rows])
        return found

    @cached_property
    def _hubs(self) -> Block:
        return hubs(self.carried, self.crowd)


def candidates(*searches: Callable[[int], Iterable[Key]], count: int = HITS) -> list[Key]:
    """Collect the items that are ranked for a query, each once: the `count` nearest of each search.

    `nobackfill.serve.Dual` searches a store, the gateway its galleries, and `fit` the judged items:
    what is predicted is what is served.
    """
    return list(dict.fromkeys(key for search in searches for key in search(count)))


def fused(weight: float, near_old: Block, near_new: Block) -> Block:
    """Join both models' nearness [q, n] of carried items; `weight` is the new model's share."""
    return np.asarray(weight * near_new + (1 - weight) * near_old, np.float32)


def hubs(vectors: Vectors, crowd: Vectors) -> Block:
    """How near vectors [n, d] are to any query at all: half the mean cosine to the 10 nearest of
    `crowd` [q, d], 0 without one; [n].

    Taken from a cosine it leaves what is near to one query (CSLS: Conneau et al. 2018, Eq. 3,
    without the term that all items of a query share).
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
    """Deviations [q, n] by which vectors are nearer to queries [q, d] than anchors on average;
    `less` is taken from the cosines of either."""
    if metric == "cosine":
        unit = normalise(queries)
        block = np.concatenate([unit @ normalise(vectors).T, unit @ anchors.T], axis=1)
    else:
        sides = [distances(queries, side, metric) for side in (vectors, anchors)]
        block = -np.concatenate(sides, axis=1).astype(np.float32)
    if less is not None:
        block -= np.concatenate(less)
    columns = np.arange(len(vectors), block.shape[1])
    standard: Block = standardised(-block, columns)[:, : len(vectors)]
    return standard


def standardised(block: Block, anchors: NDArray[np.int64]) -> Block:
    """Nearness [q, g] from distances [q, g]: how far below the mean of the anchors' columns, in
    their deviations."""
    some = block[:, anchors]
    spread = np.maximum(some.std(1, keepdims=True), 1e-12)
    return np.asarray((some.mean(1, keepdims=True) - block) / spread, np.float32)
