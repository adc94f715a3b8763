"""A rotation without pairs: mini-vec2vec (Dar 2025), from old vectors of some items and new vectors
of others."""

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.maps import Map
from nobackfill.adopt.pairs import cluster_vectors
from nobackfill.vectors import Vectors, normalise

# Draws of anchors, anchors a draw, starts of a matching: half as many and a third of the author's.
_DRAWS, _ANCHORS, _STARTS = 15, 20, 10
# Nearest that stand together for an item of the other side, and rounds that refine the rotation.
_NEAR, _ROUNDS, _ROUND_ROWS = 20, 40, 1000

Ints = NDArray[np.int64]


def fit_without_pairs(old: Vectors, new: Vectors, seed: int = 0) -> Map:
    """Old [m, a] and new [n, b], of the same kind of items, in no order.

    Anchors of both sides are matched by how near they are to one another, items by their cosines to
    the anchors; then the rotation is refined by the nearest items of the other side.
    """
    rng = np.random.default_rng(seed)
    means = old.mean(0), new.mean(0)
    x, y = normalise(old - means[0]), normalise(new - means[1])
    anchors = [_matched(_centres(x, rng), _centres(y, rng), rng) for _ in range(_DRAWS)]
    by_old, by_new = (normalise(np.concatenate(side)) for side in zip(*anchors, strict=True))
    like = normalise(x @ by_old.T) @ normalise(y @ by_new.T).T
    rotation = _rotation(x, _stand_in(like, y))
    for _ in range(_ROUNDS):
        some = x[rng.choice(len(x), min(_ROUND_ROWS, len(x)), replace=False)]
        turned = normalise((some @ rotation).astype(np.float32))
        found = _rotation(some, _stand_in(turned @ y.T, y))
        rotation = (rotation + found) / 2
    weight = rotation.T.astype(np.float32)
    return Map("unpaired", weight, means[1] - weight @ means[0], unit_norm=True)


def _centres(vectors: Vectors, rng: np.random.Generator) -> Vectors:
    found = cluster_vectors(vectors, _ANCHORS, rng)
    return np.stack([vectors[found == one].mean(0) for one in range(found.max() + 1)])


def _matched(old: Vectors, new: Vectors, rng: np.random.Generator) -> tuple[Vectors, Vectors]:
    """Both in one order: the assignment that makes their similarities agree most, by exchanging two
    at a time from several starts (quadratic assignment, 2-opt)."""
    count = min(len(old), len(new))
    one, two = (_centred(normalise(side[:count])) for side in (old, new))
    best, most = np.arange(count), -np.inf
    for _ in range(_STARTS):
        order = rng.permutation(count)
        while True:
            there = two[np.ix_(order, order)]
            gain = _gain(one, there)
            if gain.max() <= 1e-9:
                break
            a, b = np.unravel_index(int(gain.argmax()), gain.shape)
            order[[a, b]] = order[[b, a]]
        if (agree := float((one * two[np.ix_(order, order)]).sum())) > most:
            best, most = order, agree
    return old[:count], new[best]


def _centred(vectors: Vectors) -> NDArray[np.float64]:
    near = (vectors @ vectors.T).astype(np.float64)
    found: NDArray[np.float64] = near - near.mean(0) - near.mean(1, keepdims=True) + near.mean()
    return found


def _gain(one: NDArray[np.float64], two: NDArray[np.float64]) -> NDArray[np.float64]:
    """What the sum of products of two symmetric matrices gains by exchanging r and s in the second:
    2 sum over k but r, s of (one_rk - one_sk) (two_sk - two_rk), and the diagonal's."""
    across = one @ two.T
    own = np.diag(across)
    whole = across + across.T - own[:, None] - own[None]
    d1, d2 = np.diag(one), np.diag(two)
    # The terms of k = r and of k = s, which the sum must not have.
    at_r = (d1[:, None] - one) * (two - d2[:, None])
    at_s = (one - d1[None]) * (d2[None] - two)
    ends = (d1[:, None] - d1[None]) * (d2[None] - d2[:, None])
    gain: NDArray[np.float64] = 2 * (whole - at_r - at_s) + ends
    return gain


def _stand_in(like: Vectors, vectors: Vectors) -> Vectors:
    """For each row of similarities the mean of its nearest vectors."""
    near = np.argpartition(-like, _NEAR, axis=1)[:, :_NEAR]
    found: Vectors = vectors[near].mean(1)
    return found


def _rotation(x: Vectors, y: Vectors) -> NDArray[np.float64]:
    u, _, vt = np.linalg.svd((x.T @ y).astype(np.float64), full_matrices=False)
    found: NDArray[np.float64] = u @ vt
    return found
