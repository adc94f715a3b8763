"""Define vectors and the check that each passes: at ingest, at query, after a transform."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill.errors import InvalidInputError, UnusableRowsError

Vectors = NDArray[np.float32]
Metric = Literal["squared_l2", "cosine"]
# The input of a model.
InputKind = Literal["text", "image"]
# How an item's vector was made in its space.
Origin = Literal["native", "direct", "upgraded", "re-embedded", "old-model"]

# Squared L2 distances of vectors within this norm stay finite in float32.
LARGEST_NORM = 1e15

_FLOAT32 = np.dtype(np.float32)
_FLOATS = (_FLOAT32, np.dtype(np.float64))


def check_vectors(
    vectors: ArrayLike, dim: int, *, error_name: str, unit_norm: bool = False
) -> Vectors:
    """Return vectors as a C-contiguous float32 array of shape [n, dim], or refuse them all.

    Nothing is scaled: with `unit_norm`, a vector of another norm is refused. A zero vector passes
    without `unit_norm`.

    Args:
        vectors: float32 or float64 [n, dim], or nested lists of floats; n may be 0. A single vector
            of shape [dim] is refused. An empty list is refused, because it has no dimension.
        dim: The expected dimension, at least 1.
        error_name: The name of the data in error messages.
        unit_norm: Whether each norm must be 1 within 1e-3.

    Returns:
        float32 [n, dim]; the same array where it is that already.

    Raises:
        InvalidInputError: Wrong shape, or a dtype other than float32 and float64, such as float16
            or integers.
        UnusableRowsError: Rows with NaN or infinity, a norm above 1e15, or with `unit_norm` a norm
            that is not 1. The error lists all their indices.
        ValueError: Nested lists of unequal lengths.
    """
    array = np.asarray(vectors)
    if array.dtype not in _FLOATS:
        raise InvalidInputError(
            f"{error_name}: expected float32 or float64 values, got {array.dtype}; convert the "
            "array by astype(numpy.float32)"
        )
    if array.ndim != 2 or array.shape[1] != dim:
        raise InvalidInputError(
            f"{error_name}: expected an array of shape [n, {dim}], got {list(array.shape)}; "
            "use vectors that the same release's model computed"
        )
    if array.dtype == _FLOAT32 and _surely_valid(array, unit_norm):
        return np.ascontiguousarray(array)
    with np.errstate(over="ignore"):
        checked = np.ascontiguousarray(array, dtype=np.float32)
        squared_norms = np.einsum("nd,nd->n", checked, checked, dtype=np.float64)
    # NaN fails every comparison, infinity this one.
    valid = squared_norms <= LARGEST_NORM**2
    if unit_norm:
        valid &= np.abs(np.sqrt(squared_norms) - 1) <= 1e-3
    if not valid.all():
        invalid = np.flatnonzero(~valid).tolist()
        expected = (
            "finite values and norm 1"
            if unit_norm
            else f"finite values and a norm <= {LARGEST_NORM:g}"
        )
        raise UnusableRowsError(
            f"{error_name}: expected {expected} in every row; {len(invalid)} of {len(checked)} "
            f"rows differ, the first is row {invalid[0]}: correct them, or leave them out",
            invalid,
        )
    return checked


def _surely_valid(array: Vectors, unit: bool) -> bool:
    """Check, from sums in float32, whether the rows are valid beyond doubt; takes a few
    microseconds."""
    squared_norms = np.einsum("nd,nd->n", array, array)
    # NaN fails every comparison; the margins are far beyond what float32 rounds away.
    if unit:
        return bool(np.abs(squared_norms - 1).max(initial=0) <= 1e-3)
    return bool(squared_norms.max(initial=0) <= LARGEST_NORM**2 / 10)


def normalise(vectors: Vectors) -> Vectors:
    """Scale each row to norm 1; a row of zeros stays as it is.

    A row whose norm is below 1e-12 does not reach norm 1. NaN stays NaN; nothing is checked. Above
    a norm of 1.8e19 float32 overflows, and the row becomes zeros. A row with infinity gets NaN.

    Args:
        vectors: float32 [n, dim]; n may be 0.

    Returns:
        float32 [n, dim], a new array.
    """
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = vectors / np.maximum(norms, np.float32(1e-12))
    return scaled


def vector_from_bytes(
    values: bytes, dim: int, *, error_name: str, unit_norm: bool = False
) -> Vectors:
    """Read one vector from little-endian float32 bytes.

    Args:
        values: 4 * dim bytes.
        dim: The expected dimension.
        error_name: The name of the data in error messages.
        unit_norm: Whether its norm must be 1 within 1e-3.

    Returns:
        float32 [1, dim]; it may be a read-only view of `values`.

    Raises:
        InvalidInputError: Another number of bytes.
        UnusableRowsError: NaN or infinity, a norm above 1e15, or with `unit_norm` a norm that is
            not 1.
    """
    if len(values) != 4 * dim:
        raise InvalidInputError(
            f"{error_name}: expected {4 * dim} bytes (float32, dimension {dim}), got "
            f"{len(values)}; send a vector of this dimension"
        )
    return check_vectors(
        np.frombuffer(values, "<f4").reshape(1, dim),
        dim,
        error_name=error_name,
        unit_norm=unit_norm,
    )
