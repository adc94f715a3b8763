"""Is a new model compatible with an old gallery, and what does that gain or cost?

M is any retrieval metric where larger = better, in shares; cells are written query/gallery.
"""

from dataclasses import dataclass

import numpy as np

from nobackfill.metrics.distances import Floats, Metric, distance_blocks
from nobackfill.metrics.ranking import Relevance
from nobackfill.metrics.retrieval import PerQuery


def is_compatible(new_old: float, old_old: float) -> bool:
    """The empirical criterion, M(new, old) > M(old, old): BCT Eq. 2, UniBCT Eq. 1, DMU Eq. 5."""
    return new_old > old_old


def update_gain(new_old: float, old_old: float, independent: float) -> float | None:
    """BCT Eq. (9): (M(new, old) - M(old, old)) / (M(new*, new*) - M(old, old)).

    `independent` is M(new*, new*) of the model trained without compatibility, never that of the
    compatible model. None where Eq. (2) fails or the independent model is no better than the old.
    """
    if not is_compatible(new_old, old_old) or independent <= old_old:
        return None
    return (new_old - old_old) / (independent - old_old)


def upgrade_gain(new_served: float, old_old: float) -> float:
    """DMU Eq. (6): (M(new, old) - M(old, old)) / M(old, old); negative where the upgrade hurts."""
    return (new_served - old_old) / _positive(old_old, "M(old, old)")


def degradation(new_new: float, independent: float) -> float:
    """DMU Eq. (7): (M(new*, new*) - M(new, new)) / M(new*, new*); negative where it helps."""
    return (independent - new_new) / _positive(independent, "M(new*, new*)")


def share_kept(new_served: float, new_new: float) -> float:
    """M(new, served) / M(new, new): how much of a full backfill's quality is there without it."""
    return new_served / _positive(new_new, "M(new, new)")


def gap_closed(new_served: float, old_old: float, new_new: float) -> float | None:
    """(M(new, served) - M(old, old)) / (M(new, new) - M(old, old)), below 0 where it got worse.

    None where there is no gap to close: the new model is not better than the old one.
    """
    if new_new <= old_old:
        return None
    return (new_served - old_old) / (new_new - old_old)


def negative_flips(before: PerQuery, after: PerQuery) -> float:
    """Share of answerable queries with CMC-1 of 1 `before` and 0 `after`."""
    if before.shape != after.shape or (np.isnan(before) != np.isnan(after)).any():
        raise ValueError("the two sides do not answer the same queries")
    answerable = ~np.isnan(before)
    if not answerable.any():
        raise ValueError("no query has a relevant item in the gallery")
    return float(np.mean((before[answerable] == 1) & (after[answerable] == 0)))


@dataclass(frozen=True)
class StrictCriterion:
    """BCT Eq. (1) asks both shares to be 1."""

    apart: float
    together: float


def strict_criterion(
    new_queries: Floats,
    old_queries: Floats,
    old_gallery: Floats,
    relevance: Relevance,
    metric: Metric = "cosine",
) -> StrictCriterion:
    """Share of pairs (i, j) that satisfy BCT Eq. (1), for each kind of pair.

    `apart`: of the pairs of two classes, those with d(new_i, old_j) >= d(old_i, old_j).
    `together`: of the pairs of one class (j relevant to i), those with
    d(new_i, old_j) <= d(old_i, old_j). NaN without such pairs. Ignored items, an image with itself
    among them, are no pair.
    """
    kept = np.zeros(2)
    pairs = np.zeros(2)
    for (first, crossed), (_, before) in zip(
        distance_blocks(new_queries, old_gallery, metric),
        distance_blocks(old_queries, old_gallery, metric),
        strict=True,
    ):
        same, counted = np.zeros(crossed.shape, bool), np.ones(crossed.shape, bool)
        for i in range(len(crossed)):
            same[i, relevance.relevant[first + i]] = True
            counted[i, relevance.ignored[first + i]] = False
        other = counted & ~same
        same &= counted
        kept += [np.sum((crossed >= before) & other), np.sum((crossed <= before) & same)]
        pairs += [np.sum(other), np.sum(same)]
    with np.errstate(invalid="ignore"):
        apart, together = kept / pairs
    return StrictCriterion(float(apart), float(together))


def _positive(value: float, what: str) -> float:
    if value <= 0:
        raise ValueError(f"{what} is {value}: a relative figure has no meaning")
    return value
