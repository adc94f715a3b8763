"""Ranks in a gallery whose items are replaced step by step, in several orders, from one look at
both kinds of distances: a sort for each step and order was two thirds of a curve's time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nobackfill.metrics.distances import Floats
from nobackfill.metrics.ranking import Ints, Relevance

# Into which the distances of one query are sorted.
CELLS = 4096


@dataclass(frozen=True)
class Steps:
    """At each of `counts`, that many items, the first of `order`, are replaced."""

    order: Ints
    counts: Ints

    @cached_property
    def places(self) -> Ints:
        """Of each item in the order."""
        places = np.empty(len(self.order), np.int64)
        places[self.order] = np.arange(len(self.order))
        return places

    @cached_property
    def bounds(self) -> Ints:
        """Between which places items are replaced together, from 0 to all."""
        return np.unique(np.concatenate([[0], self.counts, [len(self.order)]]))

    @cached_property
    def parts(self) -> Ints:
        """Of each item, with which others it is replaced."""
        return np.searchsorted(self.bounds, self.places, "right") - 1


def rank_steps(
    before: Floats, after: Floats, first: int, ways: Sequence[Steps], relevance: Relevance
) -> list[list[list[Ints]]]:
    """For each of `ways` and each of its counts, ranks as `rank_block` gives them where that many
    items are at the distances `after`, the others at `before` (both [b, g])."""
    found: list[list[list[Ints]]] = [[[] for _ in way.counts] for way in ways]
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        ignored = np.zeros(len(old), bool)
        ignored[relevance.ignored[first + i]] = True
        relevant = relevance.relevant[first + i]
        kept = ~ignored & np.isfinite(old) & np.isfinite(new)
        relevant = relevant[kept[relevant]]
        values = np.concatenate([old[relevant], new[relevant]])
        ascending = np.argsort(values)
        keys, standing = values[ascending], np.empty(len(values), np.int64)
        standing[ascending] = np.arange(len(values))
        nearer = [_among(keys, np.where(ignored, np.inf, kind)) for kind in (old, new)]
        for steps, way in zip(found, ways, strict=True):
            within = _within(nearer, way.parts, len(way.bounds) - 1, len(keys))
            # Of both values of each relevant item, the one that it has at each step.
            kind = way.places[relevant] < way.counts[:, None]
            at = np.sort(standing[np.arange(len(relevant)) + len(relevant) * kind], axis=1)
            replaced = np.searchsorted(way.bounds, way.counts)
            ranks = _ranks(keys[at], np.take_along_axis(within[replaced], at, axis=1))
            for step, row in zip(steps, ranks, strict=True):
                step.append(row)
    return found


def _among(keys: Floats, distances: Floats) -> Ints:
    """Of each distance, the first of the ascending keys that is as far; their number for none. As
    np.searchsorted, in a third of its time: the line is cut into cells, and a distance in a cell
    without a key needs no search."""
    width = float(keys[-1]) - float(keys[0]) if len(keys) else 0.0
    if not 1e-30 < width < 1e30:
        return np.searchsorted(keys, distances)
    # Monotone, so that a key of a cell before is nearer, and one of a cell behind is farther.
    cells, of_keys = (
        np.clip((values - keys[0]) * (CELLS / width), 0, CELLS).astype(np.int64)
        for values in (distances, keys)
    )
    held = np.bincount(of_keys, minlength=CELLS + 1)
    before = np.cumsum(held) - held
    found: Ints = before[cells]
    unsure = np.flatnonzero(held[cells])
    found[unsure] = np.searchsorted(keys, distances[unsure])
    return found


def _within(nearer: Sequence[Ints], parts: Ints, count: int, keys: int) -> Ints:
    """How many of all items are as near as each key [count + 1, keys] where the first 0, 1, … parts
    are new; `nearer`: by `_among`, of old distances and of new ones."""
    old, new = (
        np.bincount(parts * (keys + 1) + kind, minlength=count * (keys + 1))
        .reshape(count, keys + 1)[:, :-1]
        .cumsum(axis=1)
        for kind in nearer
    )
    begin = old.sum(axis=0)[None]
    return np.concatenate([begin, begin + np.cumsum(new - old, axis=0)])


def _ranks(distances: Floats, within: Ints) -> Ints:
    """Ranks [steps, items] of items at ascending `distances`: behind all that are as near, but for
    items of their own."""
    items = distances.shape[1]
    last = np.broadcast_to(np.arange(items), distances.shape)
    tied = distances[:, 1:] == distances[:, :-1]
    if tied.any():
        # Where the run of equal ones ends that an item is in.
        ends = np.where(np.pad(tied, ((0, 0), (0, 1))), items, last)
        last = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
    return within - last + np.arange(items)
