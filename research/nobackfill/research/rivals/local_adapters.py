"""Local adapters (Local Drift-Adapters, 2026): one affine map of queries per cluster.

Queries far from every cluster use the same maps; each cluster's map is shrunk towards the map of
all pairs, so that a small cluster has a map, too.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nobackfill.research.rivals.rival import Floats, TrainingVectors
from nobackfill.vectors import normalise

_CLUSTERS = 16
# Least pairs of a cluster on average, and the weight of the map of all pairs, in pairs.
_LEAST, _SHRINKAGE = 100, 500


class LocalAdapters:
    """Map a query by the affine map of its nearest cluster of new vectors."""

    mapped_vectors: Literal["items", "queries"] = "queries"

    def fit(self, train: TrainingVectors, seed: int) -> None:
        """Cluster the new vectors by k-means, and fit one affine map per cluster.

        There are up to 16 clusters of on average at least 100 pairs; fewer than 200 pairs give one.
        Labels and side-information are not used. A second call replaces the maps.

        Args:
            train: at least one pair, old float32 [n, a] and new [n, b]. Old vectors are not
                checked: NaN spoils every map.
            seed: draws the clusters, 0 to 2^32 - 1.

        Raises:
            ValueError: there are no pairs, a new vector is not finite, or the seed is out of range.
        """
        # Imported here: it takes a second, and the command's help does not need it.
        from sklearn.cluster import KMeans

        count = max(1, min(_CLUSTERS, len(train.new) // _LEAST))
        means = KMeans(count, n_init=2, random_state=seed).fit(train.new)
        self._centres = np.asarray(means.cluster_centers_, np.float64)
        self._unit = train.unit_norm
        x, y = _with_one(train.new), train.old.astype(np.float64)
        penalty = 1e-3 * float(np.trace(x.T @ x)) / x.shape[1]
        ridge = penalty * np.eye(x.shape[1])
        self._all = np.linalg.solve(x.T @ x + ridge, x.T @ y)
        self._maps = []
        for number in range(count):
            own = means.labels_ == number
            left = x[own].T @ x[own] + _SHRINKAGE * (x.T @ x) / len(x) + ridge / count
            right = x[own].T @ (y[own] - x[own] @ self._all)
            self._maps.append(self._all + np.linalg.solve(left, right))

    def transform(self, vectors: Floats, side: Floats | None) -> Floats:
        """Map queries [m, b] of the new model to [m, a]; unit vectors if the new ones are.

        Call `fit` before. m may be 0. `side` is not used; give None.

        Raises:
            AttributeError: `fit` was not called.
        """
        squared = (self._centres**2).sum(axis=1) - 2 * vectors @ self._centres.T
        nearest = squared.argmin(axis=1)
        x = _with_one(vectors)
        mapped = np.empty((len(vectors), self._all.shape[1]), np.float32)
        for number, weights in enumerate(self._maps):
            own = nearest == number
            mapped[own] = x[own] @ weights
        return normalise(mapped) if self._unit else mapped

    @property
    def parameters(self) -> int:
        """The number of fitted values.

        Raises:
            AttributeError: `fit` was not called.
        """
        return int(self._all.size * len(self._maps) + self._centres.size)


def _with_one(vectors: Floats) -> NDArray[np.float64]:
    """Append a column of ones: [n, d] -> [n, d + 1]."""
    return np.concatenate((vectors, np.ones((len(vectors), 1))), axis=1, dtype=np.float64)
