"""Queries, and what an order of the gallery is worth to them.

Known items (queries whose answer is known): R@1, R@10, MRR. Similar things (each item asks for its
neighbours, itself left out): agreement@10, the share of the new model's own ten neighbours.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.joining import Block, Mask
from nobackfill.metrics.distances import Metric, distances
from nobackfill.metrics.ranking import Ints
from nobackfill.vectors import Vectors

NEIGHBOURS = 10

PerQuery = NDArray[np.float64]
# Figures by name, one number a query.
Figures = dict[str, PerQuery]


@dataclass(frozen=True)
class Queries:
    """Queries by both models, old [q, a] and new [q, b], and a gallery row for each: what it should
    find, or, with `own`, the query's own item, which is left out. `metric`: the store's."""

    old: Vectors
    new: Vectors
    rows: Ints
    own: bool
    metric: Metric = "cosine"

    def part(self, rows: Ints) -> "Queries":
        return Queries(self.old[rows], self.new[rows], self.rows[rows], self.own, self.metric)


def blocked(queries: Vectors, items: Vectors, metric: Metric = "cosine") -> Block:
    """Distances [q, g]."""
    return distances(queries, items, metric).astype(np.float32)


def measure(native: Block, queries: Queries) -> tuple[Callable[[Block], Figures], Mask]:
    """What turns a block of distances [q, g] into figures; the new model's own neighbours."""
    rows = np.arange(len(queries.rows))

    def top(block: Block) -> Ints:
        shown = block.copy() if queries.own else block
        if queries.own:
            shown[rows, queries.rows] = np.inf
        count = min(NEIGHBOURS, block.shape[1] - queries.own)
        return np.argpartition(shown, count - 1, axis=1)[:, :count].astype(np.int64)

    truth = np.zeros(native.shape, bool)
    np.put_along_axis(truth, top(native), True, 1)

    def figures(block: Block) -> Figures:
        found = top(block)
        agreement = np.take_along_axis(truth, found, 1).mean(1)
        if queries.own:
            return {"agreement@10": agreement}
        # As nobackfill.metrics.ranking has it: whatever is as near stands before what is asked for.
        place = (block <= block[rows, queries.rows][:, None]).sum(1)
        return {
            "R@1": (place <= 1).astype(np.float64),
            "R@10": (place <= 10).astype(np.float64),
            "MRR": 1 / place,
            "agreement@10": agreement,
        }

    return figures, truth


def chosen_by(figures: Mapping[str, PerQuery], own: bool) -> PerQuery:
    return figures["agreement@10" if own else "MRR"]
