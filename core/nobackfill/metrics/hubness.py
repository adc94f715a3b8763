"""Measure hubness: whether a few gallery items crowd into most answers.

A transform that compresses its outputs creates hubs, which means of CMC and mAP hide.
"""

from dataclasses import dataclass

import numpy as np

from nobackfill.metrics.ranking import Ints


@dataclass(frozen=True)
class Hubness:
    """How unevenly items occur in answers.

    Attributes:
        skewness: Skewness of the k-occurrences; 0 is even.
        orphan_share: Share of items in no answer.
        largest_hub_share: The most frequent item's share of the queries.
    """

    skewness: float
    orphan_share: float
    largest_hub_share: float


def hubness(neighbours: Ints, gallery_size: int) -> Hubness:
    """Compute the hubness of answers (Radovanovic et al. 2010).

    Skewness is the third standardised moment of how often each item occurs; 0 if all occur equally
    often, or k is 0. With k = 0 every item is an orphan. A repeated position in a row counts twice.

    Args:
        neighbours: Gallery positions, [q, k], each from 0; -1 for "no item" is not allowed.
        gallery_size: Number of items, at least 1.

    Raises:
        ValueError: No query, another shape, a position outside the gallery or below 0, or an empty
            gallery.
        TypeError: Positions that are no integers.
    """
    if neighbours.ndim != 2 or not len(neighbours):
        raise ValueError(
            "neighbours: expected positions [q, k] of at least one query, got an array of the "
            f"shape {neighbours.shape}"
        )
    counts = np.bincount(neighbours.ravel(), minlength=gallery_size).astype(np.float64)
    if len(counts) > gallery_size:
        raise ValueError(
            f"neighbours: expected positions below {gallery_size}, the size of the gallery, got "
            f"{len(counts) - 1}; pass the size of the gallery that was searched"
        )
    deviations = counts - counts.mean()
    spread = float(np.mean(deviations**2)) ** 0.5
    skewness = float(np.mean(deviations**3)) / spread**3 if spread else 0.0
    return Hubness(skewness, float(np.mean(counts == 0)), float(counts.max()) / len(neighbours))
