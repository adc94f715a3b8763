"""Measure whether a new model is compatible with an old gallery, and what that gains or costs.

M is any retrieval metric as a share, larger is better. Cells are written query/gallery.
"""

from dataclasses import dataclass

import numpy as np

from nobackfill.metrics.distances import Floats, Metric, distance_blocks
from nobackfill.metrics.ranking import Relevance
from nobackfill.metrics.retrieval import PerQuery


def is_compatible(new_old: float, old_old: float) -> bool:
    """Test the empirical criterion M(new, old) > M(old, old): BCT Eq. 2, UniBCT Eq. 1, DMU Eq. 5.

    M is any figure of quality of which more is better; equal figures do not pass, and NaN does not.
    """
    return new_old > old_old


def update_gain(new_old: float, old_old: float, independent_new: float) -> float | None:
    """Compute BCT Eq. (9): (M(new, old) - M(old, old)) / (M(new*, new*) - M(old, old)).

    Args:
        new_old: M(new, old).
        old_old: M(old, old).
        independent_new: M(new*, new*) of the model trained without compatibility, never that of the
            compatible model.

    Returns:
        Above 0, and above 1 if M(new, old) exceeds M(new*, new*). None if Eq. (2) fails, or the
        independent model is not better than the old one. NaN of `independent_new` gives NaN,
        another NaN None.
    """
    if not is_compatible(new_old, old_old) or independent_new <= old_old:
        return None
    return (new_old - old_old) / (independent_new - old_old)


def upgrade_gain(new_served: float, old_old: float) -> float:
    """Compute DMU Eq. (6): (M(new, served) - M(old, old)) / M(old, old).

    Args:
        new_served: M(new, served), the gallery as it is searched after the upgrade; without an
            upgrade M(new, old), as in DMU.
        old_old: M(old, old).

    Returns:
        A share, not percent; negative if the upgrade is worse than staying. NaN gives NaN.

    Raises:
        ValueError: M(old, old) is not positive.
    """
    return (new_served - old_old) / _positive(
        old_old, "M(old, old), the quality of the old model in its own gallery"
    )


def degradation(new_new: float, independent_new: float) -> float:
    """Compute DMU Eq. (7): (M(new*, new*) - M(new, new)) / M(new*, new*).

    Args:
        new_new: M(new, new).
        independent_new: M(new*, new*).

    Returns:
        Negative if compatibility helps. NaN gives NaN.

    Raises:
        ValueError: M(new*, new*) is not positive.
    """
    return (independent_new - new_new) / _positive(
        independent_new, "M(new*, new*), the quality of the independent new model"
    )


def retention(new_served: float, new_new: float) -> float:
    """Compute M(new, served) / M(new, new): the share of a full backfill's quality without a
    backfill.

    Args:
        new_served: M(new, served).
        new_new: M(new, new).

    Returns:
        At least 0 for shares, and above 1 if the served gallery answers better. NaN gives NaN.

    Raises:
        ValueError: M(new, new) is not positive.
    """
    return new_served / _positive(
        new_new, "M(new, new), the quality of the new model in its own gallery"
    )


def closed_gap_share(new_served: float, old_old: float, new_new: float) -> float | None:
    """Compute (M(new, served) - M(old, old)) / (M(new, new) - M(old, old)).

    Args:
        new_served: M(new, served).
        old_old: M(old, old).
        new_new: M(new, new).

    Returns:
        Below 0 if quality fell, above 1 if it exceeds new/new; None if the new model is not better
        than the old one. NaN gives NaN.
    """
    if new_new <= old_old:
        return None
    return (new_served - old_old) / (new_new - old_old)


def negative_flips(old_cmc1: PerQuery, new_cmc1: PerQuery) -> float:
    """Return the share of answerable queries whose CMC-1 fell from 1 to 0.

    Args:
        old_cmc1: [q], NaN for queries without an answer.
        new_cmc1: [q], paired with it.

    Raises:
        ValueError: The sides have different shapes, answer different queries, or none.
    """
    if old_cmc1.shape != new_cmc1.shape or (np.isnan(old_cmc1) != np.isnan(new_cmc1)).any():
        raise ValueError(
            "old_cmc1 and new_cmc1: expected one value for each query, and NaN (no answer) for "
            f"the same queries in both; got shapes {old_cmc1.shape} and {new_cmc1.shape}, or NaN "
            "for different queries"
        )
    answerable = ~np.isnan(old_cmc1)
    if not answerable.any():
        raise ValueError(
            "no query has a relevant item in the gallery; check the labels of queries and gallery"
        )
    return float(np.mean((old_cmc1[answerable] == 1) & (new_cmc1[answerable] == 0)))


@dataclass(frozen=True)
class StrictCriterion:
    """Shares of pairs that satisfy BCT Eq. (1), which requires both to be 1.

    Attributes:
        different_class_share: Share of the pairs of two classes.
        same_class_share: Share of the pairs of one class.
    """

    different_class_share: float
    same_class_share: float


def strict_criterion(
    new_queries: Floats,
    old_queries: Floats,
    old_gallery: Floats,
    relevance: Relevance,
    metric: Metric = "cosine",
) -> StrictCriterion:
    """Measure the share of pairs (i, j) that satisfy BCT Eq. (1).

    For pairs of two classes: d(new_i, old_j) >= d(old_i, old_j). For pairs of one class (j is
    relevant to i): d(new_i, old_j) <= d(old_i, old_j). Ignored items, such as an image itself, form
    no pair.

    Distances are compared as they are computed, without a tolerance; equal ones satisfy both.

    Args:
        new_queries: [q, dim]; q may be 0.
        old_queries: The same items by the old model, [q, dim].
        old_gallery: [g, dim].
        relevance: The relevant items of each query. Entries for further queries are not noticed.
        metric: How distances are computed.

    Returns:
        Both shares; NaN without such pairs.

    Raises:
        ValueError: Shapes that do not fit, other numbers of queries, values that are not finite, a
            zero vector with cosine, or an unknown metric.
        IndexError: Relevance for fewer queries, or a position outside the gallery.
    """
    satisfied = np.zeros(2)
    pairs = np.zeros(2)
    for (first, new_distances), (_, old_distances) in zip(
        distance_blocks(new_queries, old_gallery, metric),
        distance_blocks(old_queries, old_gallery, metric),
        strict=True,
    ):
        same, valid = np.zeros(new_distances.shape, bool), np.ones(new_distances.shape, bool)
        for i in range(len(new_distances)):
            same[i, relevance.relevant[first + i]] = True
            valid[i, relevance.ignored[first + i]] = False
        other = valid & ~same
        same &= valid
        satisfied += [
            np.sum((new_distances >= old_distances) & other),
            np.sum((new_distances <= old_distances) & same),
        ]
        pairs += [np.sum(other), np.sum(same)]
    with np.errstate(invalid="ignore"):
        other_class, same_class = satisfied / pairs
    return StrictCriterion(float(other_class), float(same_class))


def _positive(value: float, what: str) -> float:
    if value <= 0:
        raise ValueError(
            f"{what}: expected a figure above 0, because another figure is divided by this one, "
            f"got {value}; measure on images that these models can find"
        )
    return value
