"""Maps of others in `bench.adoption`: each does what its paper says, told by a slow oracle."""

import numpy as np
import pytest

from bench.adoption import backfilling, unpaired
from bench.adoption.rivals import fit_lambda_orthogonal, fit_local_adapters
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.pairs import Pairs
from nobackfill.vectors import Vectors, normalise


def random(n: int, dim: int, seed: int) -> Vectors:
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


def pairs(old: Vectors, new: Vectors) -> Pairs:
    return Pairs([str(row) for row in range(len(old))], old, new)


def test_nearly_orthogonal_lies_between_affine_and_a_rotation() -> None:
    rotation = np.linalg.qr(random(8, 8, 0))[0]
    old = random(400, 8, 1)
    new = old @ (rotation + 0.15 * random(8, 8, 2)) + 0.3 * random(400, 8, 3)
    carry = fit_lambda_orthogonal(pairs(old, new))
    # The carrier is affine: its rows are what it makes of the axes.
    found = (carry(np.eye(8, dtype=np.float32)) - carry(np.zeros((1, 8), np.float32))).T
    affine = fit_maps(old, new)["affine"].weight

    def bent(weight: Vectors) -> float:
        return float(np.linalg.norm(weight.T @ weight - np.eye(8)))

    assert 1e-3 < bent(found) < bent(affine)
    error = np.square(carry(old) - new).sum()
    assert error < np.square(old @ rotation - new).sum()


def test_local_adapters_follow_what_differs_between_clusters() -> None:
    away = np.zeros((600, 6), np.float32)
    away[300:, 0] = 8
    old = random(600, 6, 4) + away
    new = np.concatenate([old[:300] @ random(6, 6, 5), old[300:] @ random(6, 6, 6)])
    some = np.random.default_rng(0).permutation(600)
    carry = fit_local_adapters(pairs(old[some[:400]], new[some[:400]]))
    whole = fit_maps(old[some[:400]], new[some[:400]])["affine"]
    left = [np.square(one(old[some[400:]]) - new[some[400:]]).sum() for one in (carry, whole)]
    assert left[0] < 0.4 * left[1]


def test_the_slope_of_metric_compatible_learning_is_that_of_its_loss() -> None:
    old, new = (normalise(random(9, dim, dim)).astype(np.float64) for dim in (4, 5))
    weight = random(4, 6, 7).astype(np.float64)

    def loss(at: Vectors) -> float:
        turned = np.concatenate([new, np.ones((9, 1))], 1) @ at.T
        turned /= np.linalg.norm(turned, axis=1, keepdims=True)
        total = 0.0
        for one in range(9):
            crossed = [np.exp((turned[one] @ other - 1) / 0.05) for other in old]
            native = sum(np.exp((new[one] @ new[k] - 1) / 0.05) for k in range(9) if k != one)
            total -= np.log(crossed[one] / (sum(crossed) + native))
            total += np.log(1 + native + sum(crossed) - crossed[one])
        return total / 9

    slope = backfilling._slope(weight, old, new)  # type: ignore[arg-type]
    for place in np.ndindex(4, 6):
        step = np.zeros((4, 6))
        step[place] = 1e-6
        there = (loss(weight + step) - loss(weight - step)) / 2e-6  # type: ignore[arg-type]
        assert slope[place] == pytest.approx(there, abs=1e-6)


def test_a_turned_query_finds_its_item_among_old_vectors() -> None:
    old = normalise(random(300, 10, 8))
    new = normalise(old @ random(10, 12, 9))
    turn = backfilling.train_reverse_transform(pairs(old[:200], new[:200]))
    assert ((turn(new[200:]) @ old.T).argmax(1) == np.arange(200, 300)).mean() > 0.95


def test_what_an_exchange_gains_is_what_the_sum_gains() -> None:
    one, two = (made + made.T for made in (random(7, 7, seed).astype(float) for seed in (10, 11)))
    gain = unpaired._gain(one, two)
    for r, s in np.ndindex(7, 7):
        order = np.arange(7)
        order[[r, s]] = s, r
        there = (one * two[np.ix_(order, order)]).sum() - (one * two).sum()
        assert gain[r, s] == pytest.approx(there, abs=1e-9)


@pytest.mark.slow
def test_a_rotation_is_found_without_pairs_where_shapes_agree() -> None:
    rng = np.random.default_rng(12)
    centres = 3 * random(12, 10, 13) * np.linspace(1, 0.2, 10, dtype=np.float32)
    some = centres[rng.choice(12, 500, p=rng.dirichlet(np.ones(12)))]
    old = normalise(some + 0.3 * random(500, 10, 14))
    rotation = np.linalg.qr(random(10, 10, 15))[0]
    shuffled = rng.permutation(500)
    found = unpaired.fit_without_pairs(old, old[shuffled] @ rotation)
    assert (found(old) * (old @ rotation)).sum(1).mean() > 0.95
