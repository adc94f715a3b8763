"""Vectors, and the one check that each passes: at ingest, at query, at a transform's output."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill.errors import InvalidInputError, UnusableRowsError

Vectors = NDArray[np.float32]
Metric = Literal["squared_l2", "cosine"]
# What an item is to a model.
Kind = Literal["text", "image"]
# How an item's vector came into the space that it is in.
Origin = Literal["native", "direct", "upgraded", "re-embedded", "old-model"]

# Squared L2 distances of vectors within this norm stay finite in float32.
LARGEST_NORM = 1e15

_FLOAT32 = np.dtype(np.float32)
_TAKEN = (_FLOAT32, np.dtype(np.float64))


def check_vectors(vectors: ArrayLike, dim: int, *, what: str, unit: bool = False) -> Vectors:
    """Return `vectors` as a C-contiguous float32 array of shape [n, dim], or refuse them all.

    A single vector of shape [dim] is refused: callers say how many they mean. With `unit`, each
    norm must be 1 within 1e-3. `what` names the data in the message. Raises InvalidInputError for a
    wrong shape or another dtype than float32 or float64, UnusableRowsError for rows with NaN or
    infinity, a norm above 1e15, a zero vector where `unit` asks for direction.
    """
    array = np.asarray(vectors)
    if array.dtype not in _TAKEN:
        raise InvalidInputError(f"{what}: expected float32 values, got {array.dtype}")
    if array.ndim != 2 or array.shape[1] != dim:
        raise InvalidInputError(
            f"{what}: expected an array of shape [n, {dim}], got {list(array.shape)}; "
            "was it made by another release's model?"
        )
    if array.dtype == _FLOAT32 and _plainly_good(array, unit):
        return np.ascontiguousarray(array)
    with np.errstate(over="ignore"):
        checked = np.ascontiguousarray(array, dtype=np.float32)
        squared_norms = np.einsum("nd,nd->n", checked, checked, dtype=np.float64)
    # NaN fails every comparison, infinity this one.
    good = squared_norms <= LARGEST_NORM**2
    if unit:
        good &= np.abs(np.sqrt(squared_norms) - 1) <= 1e-3
    if not good.all():
        bad = np.flatnonzero(~good).tolist()
        expected = (
            "finite values and norm 1" if unit else f"finite values and a norm <= {LARGEST_NORM:g}"
        )
        raise UnusableRowsError(
            f"{what}: expected {expected} in every row; row {bad[0]} and {len(bad) - 1} more are "
            "not so",
            bad,
        )
    return checked


def _plainly_good(array: Vectors, unit: bool) -> bool:
    """Whether sums in float32, which every query passes in a few microseconds, leave no doubt."""
    squared_norms = np.einsum("nd,nd->n", array, array)
    # NaN fails every comparison; the margins are far beyond what float32 rounds away.
    if unit:
        return bool(np.abs(squared_norms - 1).max(initial=0) <= 1e-3)
    return bool(squared_norms.max(initial=0) <= LARGEST_NORM**2 / 10)


def normalised(vectors: Vectors) -> Vectors:
    """Scale the rows to norm 1; a row of zeros stays as it is."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = vectors / np.maximum(norms, np.float32(1e-12))
    return scaled


def from_bytes(values: bytes, dim: int, *, what: str, unit: bool = False) -> Vectors:
    """Read one vector of `dim` little-endian float32: [1, dim]. Raises InvalidInputError."""
    if len(values) != 4 * dim:
        raise InvalidInputError(
            f"{what}: expected {4 * dim} bytes (float32, dimension {dim}), got {len(values)}"
        )
    return check_vectors(np.frombuffer(values, "<f4").reshape(1, dim), dim, what=what, unit=unit)
