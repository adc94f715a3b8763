"""How engines hold vectors, and the distances that exact answers carry.

Distances are computed in float64 and rounded once: the same numbers on every machine, and equal
distances for equal vectors.
"""

import numpy as np

from nobackfill.gallery.spec import Metric
from nobackfill.vectors import Vectors

# Larger than what rounding leaves of a norm after one scaling.
UNIT_TOLERANCE = 2.5e-7


def prepare(metric: Metric, vectors: Vectors) -> Vectors:
    """Vectors [n, dim] as engines hold them: with the cosine metric at norm 1 (zero stays zero)."""
    if metric == "squared_l2":
        return vectors
    norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64))
    if (np.abs(norms - 1) <= UNIT_TOLERANCE).all():
        return vectors
    # What was prepared once stays as it is, bit for bit.
    norms[np.abs(norms - 1) <= UNIT_TOLERANCE] = 1
    scaled: Vectors = vectors / np.maximum(norms, 1e-30)[:, None].astype(np.float32)
    return scaled


def between(metric: Metric, queries: Vectors, candidates: Vectors) -> Vectors:
    """Distances float32 [q, c] from queries [q, dim] to candidates [q, c, dim], both prepared."""
    if metric == "squared_l2":
        apart = np.subtract(candidates, queries[:, None, :], dtype=np.float64)
        found = np.vecdot(apart, apart)
    else:
        wide = candidates.astype(np.float64)
        # Norms of 1 are rounded, too: a vector is at distance 0 from itself, not below it.
        found = np.maximum(1 - np.vecdot(wide, queries.astype(np.float64)[:, None, :]), 0)
    rounded: Vectors = found.astype(np.float32)
    return rounded


def to_one(metric: Metric, query: Vectors, vectors: Vectors) -> Vectors:
    """Distances float32 [n] from one query [1, dim] to vectors [n, dim], as they were stored."""
    found: Vectors = between(metric, prepare(metric, query), prepare(metric, vectors)[None])[0]
    return found
