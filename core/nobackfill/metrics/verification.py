"""1:1 verification: true accepts at a rate of false accepts (the IJB-C protocol's TAR@FAR)."""

import numpy as np
from numpy.typing import NDArray

from nobackfill.metrics.distances import Floats


def tar_at_far(genuine: Floats, impostor: Floats, far: float) -> float:
    """Share of genuine pairs accepted when at most the share `far` of impostor pairs is.

    Both are distances of pairs, one-dimensional. A pair is accepted below a threshold; the largest
    threshold that keeps to `far` is taken, so impostors at one distance come in together or not
    at all. With fewer than 1/far impostors the threshold is the nearest of them: none comes in.
    Raises ValueError for an empty side or a rate outside 0..1.
    """
    if not len(genuine) or not len(impostor):
        raise ValueError("expected genuine and impostor pairs, got none of one kind")
    return float(np.mean(genuine < threshold_at(impostor, far)))


def threshold_at(wrong: Floats, rate: float) -> float:
    """The largest distance with at most the share `rate` of `wrong` below it; infinity for all."""
    if not 0 <= rate <= 1:
        raise ValueError(f"expected a rate of 0 to 1, got {rate}")
    ordered: NDArray[np.floating] = np.sort(wrong)
    # 0.29 * 100 is 28.999999999999996: the product of an exact share must count whole.
    allowed = int(np.floor(rate * len(ordered) + 1e-9))
    return float(ordered[allowed]) if allowed < len(ordered) else np.inf
