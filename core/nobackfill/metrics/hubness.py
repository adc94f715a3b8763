"""Measure hubness: whether a few gallery items crowd into most answers.

A transform that compresses its outputs creates hubs, which means of CMC and mAP hide.
"""

import numpy as np

from nobackfill.metrics.ranking import Ints


def hubness(neighbours: Ints, gallery_size: int) -> float:
    """Compute the hubness of answers (Radovanovic et al. 2010).

    It is the skewness, the third standardised moment, of how often each item occurs; 0 if all occur
    equally often, or k is 0. A repeated position in a row counts twice.

    Args:
        neighbours: Gallery positions, [q, k], each from 0; -1 for "no item" is not allowed.
        gallery_size: Number of items, at least 1.

    Raises:
        ValueError: No query, another shape, a position outside the gallery or below 0, or an empty
            gallery. With k 0, an empty gallery gives NaN instead.
        TypeError: Positions that are no integers.
    """
    if neighbours.ndim != 2 or not len(neighbours):
        raise ValueError(
            "neighbours: expected positions [q, k] of at least one query, got an array of the "
            f"shape {neighbours.shape}; pass one row of positions for each query"
        )
    counts = np.bincount(neighbours.ravel(), minlength=gallery_size).astype(np.float64)
    if len(counts) > gallery_size:
        raise ValueError(
            f"neighbours: expected positions below {gallery_size}, the size of the gallery, got "
            f"{len(counts) - 1}; pass the size of the gallery that was searched"
        )
    deviations = counts - counts.mean()
    spread = float(np.mean(deviations**2)) ** 0.5
    return float(np.mean(deviations**3)) / spread**3 if spread else 0.0
