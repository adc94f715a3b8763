"""Rank in a gallery whose items are replaced step by step, for several orders at once.

Both kinds of distances are read once: a sort for each step and order took two thirds of a curve's
time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nobackfill.metrics.distances import Floats
from nobackfill.metrics.ranking import Ints, Relevance

# Number of cells into which the distances of one query are sorted.
DISTANCE_CELLS = 4096


@dataclass(frozen=True)
class ReplacementSteps:
    """Replacement in an order.

    Attributes:
        item_order: A permutation of the items, [n].
        replaced_counts: Number of replaced items at each step, [s], each 0 to n.
    """

    item_order: Ints
    replaced_counts: Ints

    @cached_property
    def positions(self) -> Ints:
        """Return the position of each item in the order, [n].

        Computed once, so do not change it. Call it only for a permutation; this is not checked.
        """
        places = np.empty(len(self.item_order), np.int64)
        places[self.item_order] = np.arange(len(self.item_order))
        return places

    @cached_property
    def group_bounds(self) -> Ints:
        """Return the positions between which items are replaced together, from 0 to all.

        Ascending, each once, [p + 1] for p groups; computed once. Steps may be in any order.
        """
        return np.unique(np.concatenate([[0], self.replaced_counts, [len(self.item_order)]]))

    @cached_property
    def groups(self) -> Ints:
        """Return for each item the number of the group with which it is replaced, [n].

        Groups are numbered from 0; computed once.
        """
        return np.searchsorted(self.group_bounds, self.positions, "right") - 1


def rank_replacement_steps(
    old_distances: Floats,
    new_distances: Floats,
    first_query: int,
    orders: Sequence[ReplacementSteps],
    relevance: Relevance,
) -> list[list[list[Ints]]]:
    """Rank the relevant items as `rank_block` does, for each order and each of its steps.

    Items with an infinite or NaN distance in either block have no rank, at any step. The blocks are
    not changed.

    Args:
        old_distances: Distances before replacement, [b, g].
        new_distances: Distances after replacement, [b, g].
        first_query: Number of the first query of the block, from 0.
        orders: The orders; none give an empty list.
        relevance: The relevant items of all queries.

    Returns:
        Ascending 1-based ranks, int64: by order, then by step, then by query.

    Raises:
        IndexError: Relevance for fewer queries, or a position outside the gallery.
        ValueError: The two blocks, or an order and the blocks, have different sizes.
    """
    ranks_by_way: list[list[list[Ints]]] = [[[] for _ in way.replaced_counts] for way in orders]
    for i, (old, new) in enumerate(zip(old_distances, new_distances, strict=True)):
        ignored = np.zeros(len(old), bool)
        ignored[relevance.ignored[first_query + i]] = True
        relevant = relevance.relevant[first_query + i]
        valid = ~ignored & np.isfinite(old) & np.isfinite(new)
        relevant = relevant[valid[relevant]]
        values = np.concatenate([old[relevant], new[relevant]])
        ascending = np.argsort(values)
        keys, standing = values[ascending], np.empty(len(values), np.int64)
        standing[ascending] = np.arange(len(values))
        nearer = [_among(keys, np.where(ignored, np.inf, kind)) for kind in (old, new)]
        for steps, way in zip(ranks_by_way, orders, strict=True):
            counts = _count_nearer(nearer, way.groups, len(way.group_bounds) - 1, len(keys))
            # The one of both values that a relevant item has at each step.
            kind = way.positions[relevant] < way.replaced_counts[:, None]
            at = np.sort(standing[np.arange(len(relevant)) + len(relevant) * kind], axis=1)
            replaced = np.searchsorted(way.group_bounds, way.replaced_counts)
            ranks = _ranks(keys[at], np.take_along_axis(counts[replaced], at, axis=1))
            for step, row in zip(steps, ranks, strict=True):
                step.append(row)
    return ranks_by_way


def _among(keys: Floats, distances: Floats) -> Ints:
    """Return for each distance the first of the ascending keys that is as far; their number for
    none.

    Does the same as np.searchsorted in a third of its time: the line is cut into cells, and a
    distance in a cell without a key needs no search.
    """
    width = float(keys[-1]) - float(keys[0]) if len(keys) else 0.0
    if not 1e-30 < width < 1e30:
        return np.searchsorted(keys, distances)
    # Monotone: a key of an earlier cell is nearer, one of a later cell is farther.
    cells, of_keys = (
        np.clip((values - keys[0]) * (DISTANCE_CELLS / width), 0, DISTANCE_CELLS).astype(np.int64)
        for values in (distances, keys)
    )
    counts = np.bincount(of_keys, minlength=DISTANCE_CELLS + 1)
    offsets = np.cumsum(counts) - counts
    positions: Ints = offsets[cells]
    unsure = np.flatnonzero(counts[cells])
    positions[unsure] = np.searchsorted(keys, distances[unsure])
    return positions


def _count_nearer(nearer: Sequence[Ints], parts: Ints, count: int, keys: int) -> Ints:
    """Count the items that are as near as each key, while the first 0, 1, ... groups are replaced.

    Args:
        nearer: Results of `_among` for old and for new distances.
        parts: Group of each item.
        count: Number of groups.
        keys: Number of keys.

    Returns:
        [count + 1, keys].
    """
    old, new = (
        np.bincount(parts * (keys + 1) + kind, minlength=count * (keys + 1))
        .reshape(count, keys + 1)[:, :-1]
        .cumsum(axis=1)
        for kind in nearer
    )
    begin = old.sum(axis=0)[None]
    return np.concatenate([begin, begin + np.cumsum(new - old, axis=0)])


def _ranks(distances: Floats, counts: Ints) -> Ints:
    """Return ranks [steps, items] at ascending distances: behind all items as near, except relevant
    ones."""
    items = distances.shape[1]
    last = np.broadcast_to(np.arange(items), distances.shape)
    tied = distances[:, 1:] == distances[:, :-1]
    if tied.any():
        # The end of each run of equal distances.
        ends = np.where(np.pad(tied, ((0, 0), (0, 1))), items, last)
        last = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
    return counts - last + np.arange(items)
