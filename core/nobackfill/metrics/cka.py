"""Linear centred kernel alignment: how alike two representations of the same images are."""

import numpy as np

from nobackfill.metrics.distances import Floats


def linear_cka(x: Floats, y: Floats) -> float:
    """Linear CKA of x [n, a] and y [n, b], 0..1 (FCT section 5.3; Kornblith et al. 2019).

    |Yc' Xc|_F^2 / (|Xc' Xc|_F |Yc' Yc|_F) with centred columns; never a matrix of n x n. 0 where
    one side is constant (FCT's "no side-information").
    """
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise ValueError(f"expected the same images on both sides, got {x.shape} and {y.shape}")
    xc = x.astype(np.float64) - x.mean(axis=0, dtype=np.float64)
    yc = y.astype(np.float64) - y.mean(axis=0, dtype=np.float64)
    scale = np.linalg.norm(xc.T @ xc) * np.linalg.norm(yc.T @ yc)
    return float(np.linalg.norm(yc.T @ xc) ** 2 / scale) if scale else 0.0
