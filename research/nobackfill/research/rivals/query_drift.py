"""Query Drift Compensation (2025): move queries of the new model by the mean drift."""

from typing import Literal

import numpy as np

from nobackfill.errors import ConfigurationError
from nobackfill.research.rivals.rival import Floats, TrainingVectors
from nobackfill.vectors import normalise


class QueryDrift:
    """Subtract the mean difference between new and old vectors from each query."""

    mapped_vectors: Literal["items", "queries"] = "queries"

    def fit(self, train: TrainingVectors, seed: int) -> None:
        """Compute the mean drift; `seed` is not used.

        A second call replaces the drift. Without rows it is NaN.

        Raises:
            ConfigurationError: the two spaces differ in dimension.
        """
        if train.old.shape[1] != train.new.shape[1]:
            raise ConfigurationError(
                "query_drift subtracts vectors of both models, so it needs one dimension; the old "
                f"model has {train.old.shape[1]} dimensions, the new one {train.new.shape[1]}; "
                "leave query_drift out of --methods"
            )
        self._drift = (train.new.mean(axis=0) - train.old.mean(axis=0)).astype(np.float32)
        self._unit = train.unit_norm

    def transform(self, vectors: Floats, side: Floats | None) -> Floats:
        """Map queries [m, d] of the new model to [m, d]; unit vectors if the new ones are.

        Call `fit` before. `side` is not used.

        Raises:
            AttributeError: `fit` was not called.
        """
        moved = vectors - self._drift
        return normalise(moved) if self._unit else moved

    @property
    def parameters(self) -> int:
        """The number of fitted values.

        Raises:
            AttributeError: `fit` was not called.
        """
        return len(self._drift)
