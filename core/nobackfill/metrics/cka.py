"""Compute linear centred kernel alignment: how similar two representations of the same images
are."""

import numpy as np

from nobackfill.metrics.distances import Floats


def linear_cka(x: Floats, y: Floats) -> float:
    """Compute linear CKA of two representations of the same images.

    With centred columns Xc and Yc, this is |Yc' Xc|_F^2 / (|Xc' Xc|_F |Yc' Yc|_F). No matrix of
    n x n is made (FCT section 5.3; Kornblith et al. 2019).

    Args:
        x: [n, a].
        y: [n, b], of the same images.

    Returns:
        0 to 1; 0 if one side is constant (FCT's "no side-information"), and without images; NaN if
        a value is NaN or infinite.

    Raises:
        ValueError: A side is not two-dimensional, or they have different numbers of rows.
    """
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise ValueError(
            "CKA: expected embeddings [n, a] and [n, b] of the same images by both models, got "
            f"arrays of the shapes {x.shape} and {y.shape}; embed the same images with both"
        )
    xc = x.astype(np.float64) - x.mean(axis=0, dtype=np.float64)
    yc = y.astype(np.float64) - y.mean(axis=0, dtype=np.float64)
    scale = np.linalg.norm(xc.T @ xc) * np.linalg.norm(yc.T @ yc)
    return float(np.linalg.norm(yc.T @ xc) ** 2 / scale) if scale else 0.0
