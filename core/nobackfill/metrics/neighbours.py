"""Find the k nearest gallery items of each query exactly, block by block."""

import numpy as np

from nobackfill.metrics.distances import Floats, Metric, distance_blocks
from nobackfill.metrics.ranking import Ints


def exact_neighbours(
    queries: Floats, gallery: Floats, k: int, metric: Metric = "l2"
) -> tuple[Ints, Floats]:
    """Return the k nearest items of each query, nearest first, equal distances by position.

    Args:
        queries: [q, dim]; q may be 0.
        gallery: [g, dim], g at least 1.
        k: 1 to g.
        metric: How distances are computed.

    Returns:
        Gallery positions, int64 [q, k], and distances, [q, k] in the float type of the vectors.
        Without queries both have shape [0, k].

    Raises:
        ValueError: k is out of range, which it always is for an empty gallery. Or shapes do not
            fit, values are not finite, a vector is zero with cosine, or the metric is unknown.
    """
    if not 1 <= k <= len(gallery):
        raise ValueError(
            f"k, the number of neighbours, must be 1 to {len(gallery)}, the size of the gallery, "
            f"got {k}; pass another k"
        )
    positions, values = [], []
    for _, block in distance_blocks(queries, gallery, metric):
        kth = np.partition(block, k - 1, axis=1)[:, k - 1]
        for row, limit in zip(block, kth, strict=True):
            # More than k items may be within the k-th distance: take all, then sort.
            close = np.flatnonzero(row <= limit)
            close = close[np.lexsort((close, row[close]))][:k]
            positions.append(close)
            values.append(row[close])
    if not positions:
        return np.empty((0, k), np.int64), np.empty((0, k), queries.dtype)
    return np.stack(positions).astype(np.int64), np.stack(values)
