"""Drift-Adapter (EMNLP 2025, arXiv 2509.23471): map queries of the new model into the old space.

The three transforms of the paper are those of the package isotrieve.
"""

import warnings
from typing import Any, Literal

import numpy as np

from nobackfill.errors import ConfigurationError
from nobackfill.research.rivals.rival import Floats, TrainingVectors

Kind = Literal["procrustes", "low_rank", "residual"]
# Rank of the affine map and width of the network, as in the paper.
_RANK, _INNER = 64, 256


class DriftAdapterRival:
    """A transform of the package isotrieve, fitted from new to old vectors.

    Args of the constructor:
        kind: procrustes; low_rank, an affine map of rank 64; or residual, a network of width 256.
    """

    mapped_vectors: Literal["items", "queries"] = "queries"

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._map: Any = None
        self._parameters = 0

    def fit(self, train: TrainingVectors, seed: int) -> None:
        """Fit the transform on the CPU; a seed gives the same transform again.

        A second call replaces the transform.

        Args:
            train: the pairs; labels and side-information are not used.
            seed: sets all random numbers.

        Raises:
            ConfigurationError: isotrieve is not installed, or refuses these vectors.
        """
        try:
            from isotrieve import mapping
            from isotrieve.mapping.mlp import ResidualMLPMapping
        except ImportError as error:
            raise ConfigurationError(
                "drift_adapter needs the package isotrieve, which is not installed; run: "
                "pip install 'isotrieve>=0.4,<0.5'"
            ) from error
        old_dim, new_dim = train.old.shape[1], train.new.shape[1]
        smaller = min(old_dim, new_dim)
        if self._kind == "procrustes":
            fitted: Any = mapping.OrthogonalProcrustesMapping(seed=seed)
            self._parameters = old_dim * new_dim
        elif self._kind == "low_rank":
            rank = min(_RANK, smaller)
            fitted = mapping.LowRankAffineMapping(rank=rank, seed=seed)
            self._parameters = rank * (old_dim + new_dim) + old_dim
        else:
            inner = min(_INNER, new_dim)
            fitted = ResidualMLPMapping(hidden_dim=inner, seed=seed, device="cpu")
            self._parameters = inner * (old_dim + new_dim + 1) + old_dim
        with warnings.catch_warnings():
            # It warns of few pairs; the comparison reports what they are worth.
            warnings.simplefilter("ignore", UserWarning)
            try:
                fitted.fit(train.new, train.old)
            except ValueError as error:
                raise ConfigurationError(
                    "method drift_adapter cannot be fitted: the package isotrieve refuses these "
                    f"vectors ({error}); leave drift_adapter out of --methods"
                ) from error
        self._map = fitted

    def transform(self, vectors: Floats, side: Floats | None) -> Floats:
        """Map queries [m, b] of the new model to unit vectors float32 [m, a].

        Call `fit` before. `side` is not used.

        Raises:
            AttributeError: `fit` was not called.
        """
        return np.asarray(self._map.transform(vectors), np.float32)

    @property
    def parameters(self) -> int:
        """The number of fitted values. It is 0 before `fit`."""
        return self._parameters
