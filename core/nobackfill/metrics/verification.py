"""Measure 1:1 verification: true accepts at a rate of false accepts (TAR@FAR of IJB-C)."""

import numpy as np
from numpy.typing import NDArray

from nobackfill.metrics.distances import Floats


def tar_at_far(genuine_distances: Floats, impostor_distances: Floats, far: float) -> float:
    """Return the share of genuine pairs that are accepted when at most `far` of the impostors are.

    A pair is accepted below a threshold; the largest threshold within `far` is used. Impostors at
    one distance are accepted together or not at all. With fewer than 1/far impostors none is
    accepted.

    At the threshold itself no pair is accepted. NaN is never accepted. NaN among the impostors
    counts as the largest distance; if the threshold is NaN, no pair is accepted.

    Args:
        genuine_distances: Distances of genuine pairs, [n].
        impostor_distances: Distances of impostor pairs, [m].
        far: 0 to 1; 0 accepts no impostor, 1 accepts all pairs at a finite distance.

    Raises:
        ValueError: No pairs of one kind, or a rate out of range.
    """
    if not len(genuine_distances) or not len(impostor_distances):
        raise ValueError(
            "verification: expected distances of at least one genuine pair (same identity) and "
            f"one impostor pair (different identities), got {len(genuine_distances)} genuine and "
            f"{len(impostor_distances)} impostor pairs; add pairs of the missing kind"
        )
    return float(np.mean(genuine_distances < threshold_at_error_rate(impostor_distances, far)))


def threshold_at_error_rate(wrong_distances: Floats, error_rate: float) -> float:
    """Return the largest distance with at most a share of wrong pairs below it.

    Args:
        wrong_distances: Distances of wrong pairs, [n], in any order; with none, the result is
            infinity. NaN counts as the largest distance, and may be the result.
        error_rate: The share, 0 to 1.

    Returns:
        Infinity if all may be below it.

    Raises:
        ValueError: The rate is out of range.
    """
    if not 0 <= error_rate <= 1:
        raise ValueError(
            f"false accept rate: expected a rate of 0 to 1, got {error_rate}; pass a fraction, not "
            "a percentage"
        )
    ordered: NDArray[np.floating] = np.sort(wrong_distances)
    # 0.29 * 100 is 28.999999999999996: the product of an exact share must round to the whole
    # number.
    count = int(np.floor(error_rate * len(ordered) + 1e-9))
    return float(ordered[count]) if count < len(ordered) else np.inf
