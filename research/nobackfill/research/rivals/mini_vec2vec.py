"""mini-vec2vec (Dar, 2025, arXiv 2510.02348): map old vectors into the new space without pairs.

The package mini-vec2vec needs Python 3.12, so this is a version of our own. It matches clusters
half as often as the author's, from a third of the starts.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import ConfigurationError
from nobackfill.research.rivals.rival import Floats, TrainingVectors
from nobackfill.vectors import normalise

Doubles = NDArray[np.float64]
_CLUSTERS, _NEIGHBOURS = 20, 50
# Draws of clusters, starts of a matching, and rounds that refine the rotation.
_DRAWS, _STARTS, _ROUNDS = 15, 10, 30
# The share of the vectors that a run sees, and the weight of a refined rotation.
_SUBSAMPLE, _ALPHA = 0.33, 0.5
# Fewer vectors than this leave a run fewer vectors than clusters, or than neighbours.
_LEAST = round(max(_CLUSTERS, _NEIGHBOURS) / _SUBSAMPLE) + 1


class MiniVec2Vec:
    """Rotate centred old vectors so that their clusters and neighbourhoods fit the new ones.

    It reads no pair: the new vectors are shuffled before anything else is done.
    """

    mapped_vectors: Literal["items", "queries"] = "items"

    def fit(self, train: TrainingVectors, seed: int) -> None:
        """Match clusters of both spaces by their similarities, then refine the rotation.

        Labels and side-information are not used. A second call replaces the rotation.

        Args:
            train: old float32 [n, a] and new [n, b], finite, n at least 153.
            seed: draws samples and clusters, 0 to 2^32 - 1.

        Raises:
            ConfigurationError: there are too few vectors.
            ValueError: a vector is not finite, or the seed is negative.
        """
        if len(train.old) < _LEAST:
            raise ConfigurationError(
                f"mini_vec2vec clusters samples of the vectors, so it needs at least {_LEAST}; got "
                f"{len(train.old)}; give more --pairs, or leave mini_vec2vec out of --methods"
            )
        rng = np.random.default_rng(seed)
        self._old_mean, self._new_mean = train.old.mean(axis=0), train.new.mean(axis=0)
        self._scale = float(np.linalg.norm(train.new - self._new_mean, axis=1).mean())
        self._unit = train.unit_norm
        old = _directions(train.old - self._old_mean)
        new = _directions(train.new - self._new_mean)[rng.permutation(len(train.new))]
        dim = max(old.shape[1], new.shape[1])
        old, new = (np.pad(part, ((0, 0), (0, dim - part.shape[1]))) for part in (old, new))
        rotation = _first_rotation(old, new, rng)
        for _ in range(_ROUNDS):
            sample = old[rng.choice(len(old), int(_SUBSAMPLE * len(old)), replace=False)]
            targets = _mean_of_nearest(sample @ rotation, new, new)
            rotation += _ALPHA * (_rotation(sample, targets) - rotation)
        centres = _centres(old, rng)
        rotation += _ALPHA * (_rotation(centres, _centres(new, rng, centres @ rotation)) - rotation)
        self._map = rotation[: train.old.shape[1], : train.new.shape[1]].astype(np.float32)

    def transform(self, vectors: Floats, side: Floats | None) -> Floats:
        """Map old vectors [m, a] to [m, b]; unit vectors if the new ones are.

        Directions from the new vectors' mean are rotated; their length is the new vectors' mean
        one. Call `fit` before. `side` is not used.

        Raises:
            AttributeError: `fit` was not called.
        """
        turned = _directions(vectors - self._old_mean) @ self._map
        mapped = (self._new_mean + self._scale * turned).astype(np.float32)
        return normalise(mapped) if self._unit else mapped

    @property
    def parameters(self) -> int:
        """The number of fitted values.

        Raises:
            AttributeError: `fit` was not called.
        """
        return int(self._map.size + self._old_mean.size + self._new_mean.size)


def _first_rotation(old: Doubles, new: Doubles, rng: np.random.Generator) -> Doubles:
    """Rotate by pseudo-pairs: vectors with like similarities to matched centres of clusters."""
    # Imported here: it takes a second, and the command's help does not need it.
    from scipy.optimize import quadratic_assignment

    anchors: tuple[list[Doubles], list[Doubles]] = ([], [])
    for _ in range(_DRAWS):
        samples = (
            part[rng.choice(len(part), int(_SUBSAMPLE * len(part)), replace=False)]
            for part in (old, new)
        )
        centres = [_centres(sample, rng) for sample in samples]
        alike = [directions @ directions.T for directions in map(_directions, centres)]
        # A single try of 2-opt often ends in a poor match.
        tries = [
            quadratic_assignment(*alike, method="2opt", options={"maximize": True, "rng": rng})
            for _ in range(_STARTS)
        ]
        best = max(tries, key=lambda result: float(result.fun))
        anchors[0].append(centres[0])
        anchors[1].append(centres[1][best.col_ind])
    old_like, new_like = (
        _directions(part @ np.concatenate(own).T)
        for part, own in zip((old, new), anchors, strict=True)
    )
    return _rotation(old, _mean_of_nearest(old_like, new_like, new))


def _centres(vectors: Doubles, rng: np.random.Generator, first: Doubles | None = None) -> Doubles:
    from sklearn.cluster import KMeans

    start = "k-means++" if first is None else first
    means = KMeans(_CLUSTERS, init=start, n_init=1, random_state=int(rng.integers(1_000_000)))
    return np.asarray(means.fit(vectors).cluster_centers_, np.float64)


def _mean_of_nearest(queries: Doubles, keys: Doubles, values: Doubles) -> Doubles:
    """Return for each query [m, d] the mean value of the keys [n, d] nearest by cosine: [m, e]."""
    means = np.empty((len(queries), values.shape[1]))
    # In parts, because all similarities of 10,000 vectors take 0.8 GB.
    for start in range(0, len(queries), 1000):
        alike = _directions(queries[start : start + 1000]) @ _directions(keys).T
        nearest = np.argpartition(-alike, _NEIGHBOURS - 1, axis=1)[:, :_NEIGHBOURS]
        means[start : start + 1000] = values[nearest].mean(axis=1)
    return means


def _rotation(vectors: Doubles, targets: Doubles) -> Doubles:
    """Return the orthogonal matrix that takes vectors [n, d] nearest to targets [n, d]."""
    from scipy.linalg import orthogonal_procrustes

    return np.asarray(orthogonal_procrustes(vectors, targets)[0], np.float64)


def _directions(vectors: NDArray[np.floating]) -> Doubles:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, 1e-12), np.float64)
