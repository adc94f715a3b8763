"""Maps that others have published, small and in numpy alone, beside ours: rows of the bench.

Each gives carried vectors [n, b] from pairs of vectors, or says by what else it searches.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.crossfit import correct_converter
from nobackfill.adopt.judgement import Queries, figures_from_vectors
from nobackfill.adopt.maps import Map, fit_maps
from nobackfill.adopt.pairs import Pairs, cluster_vectors
from nobackfill.ridge import Doubles
from nobackfill.vectors import Vectors, normalise

# Old vectors [n, a] -> carried vectors [n, b].
Carrier = Callable[[Vectors], Vectors]
# A carrier by its strength, from pairs that are given.
Fit = Callable[[float], Carrier]
# Of lambda-orthogonality: weights of the distance from orthogonal, per mean input variance.
_WEIGHTS = (0.03, 0.1, 0.3, 1.0, 3.0)
_STEPS = 100
# Of local adapters: clusters, and the temperature of the softmax over cosines to their centres.
_CLUSTERS = (4, 8)
_TEMPERATURE = 0.05


def fit_lambda_orthogonal(pairs: Pairs, seed: int = 0) -> Carrier:
    """lambda-orthogonality (Ricci et al., NeurIPS 2025): an affine map whose squared error is
    weighed against |W'W - 1|², the weight chosen on a fifth of the pairs.

    `affine` is turned towards the one rotation that Procrustes finds, which has a closed form; this
    towards any, as the penalty says nothing of directions, only of singular values.
    """

    def prepared(some: Pairs) -> Fit:
        start = fit_maps(some.old, some.new, kinds=["procrustes"])["procrustes"]
        means = some.old.mean(0, np.float64), some.new.mean(0, np.float64)
        x, y = some.old - means[0], some.new - means[1]
        values, turn = np.linalg.eigh(x.T @ x / len(x))
        begun, cross = turn.T @ start.weight.T, turn.T @ (x.T @ y / len(x))

        def fitted(weight: float) -> Carrier:
            found = turn @ _descend(values, cross, begun, weight)
            bias = (means[1] - means[0] @ found).astype(np.float32)
            return Map("lambda_orthogonal", found.T.astype(np.float32), bias, start.unit_norm)

        return fitted

    return _chosen(pairs, _WEIGHTS, prepared, seed)


def _descend(
    values: Doubles, cross: Doubles, start: NDArray[np.floating], weight: float
) -> Vectors:
    """Least tr(W'GW) - 2 tr(W'C) + weight v |W'W - 1|² / 2 from `start` [a, b], by accelerated
    gradient descent; v is the mean of G's diagonal. In the directions of G's eigenvectors, where G
    is its eigenvalues `values` [a] and the penalty the same."""
    scale = weight * float(values.mean())
    wide = start.shape[0] > start.shape[1]
    eye = np.eye(min(start.shape), dtype=np.float32)
    # A bound of the curvature near an orthogonal W.
    step = 0.5 / (float(values[-1]) + 4 * scale)
    gram, wanted = values[:, None].astype(np.float32), cross.astype(np.float32)
    now = before = start.astype(np.float32)
    for count in range(_STEPS):
        ahead = now + count / (count + 3) * (now - before)
        excess = ahead.T @ ahead - eye if wide else ahead @ ahead.T - eye
        pull = ahead @ excess if wide else excess @ ahead
        slope = gram * ahead - wanted + scale * pull
        before, now = now, np.asarray(ahead - step * 2 * slope, np.float32)
    return now


def fit_local_adapters(pairs: Pairs, seed: int = 0) -> Carrier:
    """Local adapters by cluster (Local Drift-Adapters): an affine map for each of k clusters of the
    old vectors, blended by nearness to their centres, k chosen on a fifth of the pairs. Each is
    ridge towards the map of all, without which a cluster's few pairs say too little."""

    def prepared(some: Pairs) -> Fit:
        whole = fit_maps(some.old, some.new, kinds=["affine"])["affine"]

        def fitted(count: float) -> Carrier:
            cluster = cluster_vectors(some.old, int(count), np.random.default_rng(seed))
            parts = [np.flatnonzero(cluster == one) for one in range(cluster.max() + 1)]
            parts = [part for part in parts if len(part) > 10]
            centres = normalise(np.stack([some.old[part].mean(0) for part in parts]))
            more = [correct_converter(whole, _part(some, part)) for part in parts]

            def carry(vectors: Vectors) -> Vectors:
                near = np.exp((normalise(vectors) @ centres.T - 1) / _TEMPERATURE)
                near /= near.sum(1, keepdims=True)
                blend = sum(
                    near[:, [one]] * (vectors @ own.weight.T + own.bias)
                    for one, own in enumerate(more)
                )
                carried = np.asarray(blend, np.float32)
                return normalise(carried) if whole.unit_norm else carried

            return carry

        return fitted

    return _chosen(pairs, _CLUSTERS, prepared, seed)


def _chosen(
    pairs: Pairs, options: tuple[float, ...], prepared: Callable[[Pairs], Fit], seed: int
) -> Carrier:
    """By neighbours kept among a fifth of the pairs; then from all of them."""
    order = np.random.default_rng(seed).permutation(len(pairs))
    held, rest = (_part(pairs, part) for part in np.split(order, [len(pairs) // 5]))
    rows = np.arange(len(held), dtype=np.int64)
    asked = Queries(held.old, held.new, rows, are_gallery_items=True)
    fitted = prepared(rest)

    def kept(option: float) -> float:
        vectors = fitted(option)(held.old)
        return float(figures_from_vectors(vectors, held, asked)["agreement@10"].mean())

    return prepared(pairs)(max(options, key=kept))


def _part(pairs: Pairs, rows: NDArray[np.int64]) -> Pairs:
    return Pairs([pairs.ids[row] for row in rows.tolist()], pairs.old[rows], pairs.new[rows])
