"""Distances between queries and gallery, smaller = nearer, a block of queries at a time."""

from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Metric = Literal["l2", "cosine", "inner_product"]
Floats = NDArray[np.floating]
BLOCK_VALUES = 32 * 1024 * 1024


def distances(queries: Floats, gallery: Floats, metric: Metric = "l2") -> Floats:
    """Distances [q, g] between queries [q, dim] and gallery [g, dim].

    "l2" is the squared Euclidean distance (same order as the distance itself), "cosine" is 1 - cos,
    "inner_product" is the negative inner product, as larger is nearer there.
    float32 inputs are computed in float32, else in float64. Rounding may leave tiny negative
    values; they are not clipped, which would make ties that are none. Raises ValueError for shapes
    that do not fit, non-finite values, a zero vector under "cosine", an unknown metric.
    """
    queries, gallery = _checked(queries, gallery, metric)
    return _block(queries, gallery, metric)


def distance_blocks(
    queries: Floats, gallery: Floats, metric: Metric = "l2"
) -> Iterator[tuple[int, Floats]]:
    """Yield (first query, distances [b, g]) for consecutive queries, 2^25 values a block."""
    queries, gallery = _checked(queries, gallery, metric)
    size = max(1, BLOCK_VALUES // max(1, len(gallery)))
    for first in range(0, len(queries), size):
        yield first, _block(queries[first : first + size], gallery, metric)


def unit(vectors: Floats) -> Floats:
    """`vectors` [n, dim] with rows of norm 1. Raises ValueError for a zero row."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not norms.all():
        raise ValueError(f"row {int(np.argmin(norms))} is a zero vector: it has no direction")
    result: Floats = vectors / norms
    return result


def _checked(queries: Floats, gallery: Floats, metric: Metric) -> tuple[Floats, Floats]:
    if queries.ndim != 2 or gallery.ndim != 2 or queries.shape[1] != gallery.shape[1]:
        raise ValueError(
            "expected queries [q, dim] and gallery [g, dim], "
            f"got {queries.shape} and {gallery.shape}"
        )
    single = queries.dtype == gallery.dtype == np.float32
    dtype = np.float32 if single else np.float64
    queries, gallery = queries.astype(dtype, copy=False), gallery.astype(dtype, copy=False)
    if not (np.isfinite(queries).all() and np.isfinite(gallery).all()):
        raise ValueError("embeddings hold NaN or infinity")
    if metric == "cosine":
        return unit(queries), unit(gallery)
    if metric not in get_args(Metric):
        raise ValueError(f"metric must be one of {get_args(Metric)}, got {metric!r}")
    return queries, gallery


def _block(queries: Floats, gallery: Floats, metric: Metric) -> Floats:
    products: Floats = queries @ gallery.T
    if metric == "cosine":
        return np.subtract(1, products, out=products)
    if metric == "inner_product":
        return np.negative(products, out=products)
    products *= -2
    products += np.einsum("gd,gd->g", gallery, gallery)
    products += np.einsum("qd,qd->q", queries, queries)[:, None]
    return products
