"""Compute distances between queries and gallery, block by block; smaller is nearer."""

from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Metric = Literal["l2", "cosine", "inner_product"]
Floats = NDArray[np.floating]
BLOCK_DISTANCES = 32 * 1024 * 1024


def distances(queries: Floats, gallery: Floats, metric: Metric = "l2") -> Floats:
    """Compute all distances between queries and a gallery.

    "l2" is the squared Euclidean distance (same order as the distance itself), "cosine" is 1 - cos,
    "inner_product" is the negative inner product. float32 inputs are computed in float32, others in
    float64. Rounding may leave tiny negative values, which are not clipped: that would create ties.

    The whole matrix is in memory; use `distance_blocks` for large galleries. The arguments are not
    changed.

    Args:
        queries: [q, dim].
        gallery: [g, dim].
        metric: l2, cosine or inner_product.

    Returns:
        [q, g].

    Raises:
        ValueError: Shapes that do not fit, values that are not finite, a zero vector with cosine,
            or an unknown metric.
    """
    queries, gallery = _check(queries, gallery, metric)
    return _block(queries, gallery, metric)


def distance_blocks(
    queries: Floats, gallery: Floats, metric: Metric = "l2"
) -> Iterator[tuple[int, Floats]]:
    """Yield the first query and the distances [b, g] of consecutive queries, 2^25 values for a
    block.

    A block has at least one query, however large the gallery is. Without queries nothing is
    yielded. The caller may overwrite a block.

    Args:
        queries: [q, dim].
        gallery: [g, dim].
        metric: l2 (squared), cosine (1 - cos) or inner_product (negative).

    Raises:
        ValueError: Shapes that do not fit, values that are not finite, a zero vector with cosine,
            or an unknown metric; raised at the first block.
    """
    queries, gallery = _check(queries, gallery, metric)
    size = max(1, BLOCK_DISTANCES // max(1, len(gallery)))
    for first in range(0, len(queries), size):
        yield first, _block(queries[first : first + size], gallery, metric)


def to_unit_norm(vectors: Floats) -> Floats:
    """Return vectors [n, dim] scaled to norm 1, as a new array of the same float type.

    Integers give float64. Without rows the result is empty.

    Raises:
        ValueError: A row is zero. NaN passes, and infinity becomes NaN.
    """
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not norms.all():
        raise ValueError(
            f"vectors to normalise: row {int(np.argmin(norms))} is a zero vector, which has no "
            "direction; leave it out"
        )
    result: Floats = vectors / norms
    return result


def _check(queries: Floats, gallery: Floats, metric: Metric) -> tuple[Floats, Floats]:
    if queries.ndim != 2 or gallery.ndim != 2 or queries.shape[1] != gallery.shape[1]:
        raise ValueError(
            "vectors to compare: expected queries [q, dim] and gallery [g, dim], got arrays of "
            f"the shapes {queries.shape} and {gallery.shape}; pass vectors of one dimension"
        )
    single = queries.dtype == gallery.dtype == np.float32
    dtype = np.float32 if single else np.float64
    queries, gallery = queries.astype(dtype, copy=False), gallery.astype(dtype, copy=False)
    if not (np.isfinite(queries).all() and np.isfinite(gallery).all()):
        raise ValueError(
            "vectors to compare: expected finite values, got NaN or infinity; leave these vectors "
            "out"
        )
    if metric == "cosine":
        return to_unit_norm(queries), to_unit_norm(gallery)
    if metric not in get_args(Metric):
        raise ValueError(
            f"metric must be one of {', '.join(get_args(Metric))}, got {metric!r}; pass one of "
            "these"
        )
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
