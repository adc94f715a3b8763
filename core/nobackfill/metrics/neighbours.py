"""The k nearest gallery items of each query, exactly, a block of queries at a time."""

import numpy as np

from nobackfill.metrics.distances import Floats, Metric, distance_blocks
from nobackfill.metrics.ranking import Ints


def nearest(queries: Floats, gallery: Floats, k: int, metric: Metric = "l2") -> tuple[Ints, Floats]:
    """Gallery positions [q, k] and distances [q, k], nearest first, equal distances by position."""
    if not 1 <= k <= len(gallery):
        raise ValueError(f"k must be 1 to {len(gallery)} (the gallery), got {k}")
    positions, values = [], []
    for _, block in distance_blocks(queries, gallery, metric):
        kth = np.partition(block, k - 1, axis=1)[:, k - 1]
        for row, limit in zip(block, kth, strict=True):
            # Ties at the k-th distance may be more than k items: take them all, then order.
            close = np.flatnonzero(row <= limit)
            close = close[np.lexsort((close, row[close]))][:k]
            positions.append(close)
            values.append(row[close])
    if not positions:
        return np.empty((0, k), np.int64), np.empty((0, k), queries.dtype)
    return np.stack(positions).astype(np.int64), np.stack(values)
