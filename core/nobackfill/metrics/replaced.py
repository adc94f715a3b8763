"""Ranks in a gallery whose items are replaced step by step, from one sort of both kinds of
distances: a sort for each step was two thirds of a backfill curve's time.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from nobackfill.metrics.distances import Floats
from nobackfill.metrics.ranking import Ints, Relevance


def rank_steps(
    before: Floats, after: Floats, first: int, order: Ints, counts: Ints, relevance: Relevance
) -> list[list[Ints]]:
    """For each of `counts`, ranks as `rank_block` gives them where that many items, the
    first of `order`, are at the distances `after`, the others at `before` (both [b, g])."""
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    # By place, so that what a step replaces lies side by side.
    old, new = before[:, order], after[:, order]
    found = []
    for i in range(len(old)):
        old[i, places[relevance.ignored[first + i]]] = np.inf
        new[i, places[relevance.ignored[first + i]]] = np.inf
        relevant = places[relevance.relevant[first + i]]
        relevant = relevant[np.isfinite(old[i, relevant]) & np.isfinite(new[i, relevant])]
        found.append((relevant, old[i, relevant], new[i, relevant]))
    bounds = np.unique(np.concatenate([[0], counts, [len(order)]])).tolist()
    parts = [slice(begin, end) for begin, end in pairwise(bounds)]
    for part in parts:
        old[:, part].sort(axis=1)
        new[:, part].sort(axis=1)
    replaced = np.searchsorted(bounds, counts)
    steps: list[list[Ints]] = [[] for _ in counts]
    for i, (relevant, olds, news) in enumerate(found):
        values = np.concatenate([olds, news])
        ascending = np.argsort(values)
        keys, standing = values[ascending], np.empty(len(values), np.int64)
        standing[ascending] = np.arange(len(values))
        within = _within([old[i, part] for part in parts], [new[i, part] for part in parts], keys)
        # Of both values of each relevant item, the one that it has at each step.
        kind = relevant < counts[:, None]
        at = np.sort(standing[np.arange(len(relevant)) + len(relevant) * kind], axis=1)
        ranks = _ranks(keys[at], np.take_along_axis(within[replaced], at, axis=1))
        for step, row in zip(steps, ranks, strict=True):
            step.append(row)
    return steps


def _within(old: Sequence[Floats], new: Sequence[Floats], keys: Floats) -> Ints:
    """How many of all items are as near as each of the ascending keys [parts + 1, keys] where the
    first 0, 1, … of the parts, each sorted, are new."""
    nearer = [np.stack([part.searchsorted(keys, "right") for part in p]) for p in (old, new)]
    begin = nearer[0].sum(axis=0)[None]
    return np.concatenate([begin, begin + np.cumsum(nearer[1] - nearer[0], axis=0)])


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
