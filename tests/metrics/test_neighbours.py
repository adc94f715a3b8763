"""Exact neighbours against scikit-learn, hubness and CKA against their definitions."""

import numpy as np
import pytest
from scipy.stats import skew
from sklearn.neighbors import NearestNeighbors

from nobackfill.metrics.cka import linear_cka
from nobackfill.metrics.hubness import hubness
from nobackfill.metrics.neighbours import exact_neighbours


def test_nearest_is_scikit_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    queries, gallery = rng.normal(size=(37, 5)), rng.normal(size=(60, 5))
    expected = NearestNeighbors(algorithm="brute").fit(gallery)
    monkeypatch.setattr("nobackfill.metrics.distances.BLOCK_DISTANCES", 10 * 60)
    for k in (1, 7, 60):
        distances, positions = expected.kneighbors(queries, n_neighbors=k)
        ours, values = exact_neighbours(queries, gallery, k)
        np.testing.assert_array_equal(ours, positions)
        np.testing.assert_allclose(values, distances**2, atol=1e-12)
    cosine = NearestNeighbors(algorithm="brute", metric="cosine").fit(gallery)
    np.testing.assert_array_equal(
        exact_neighbours(queries, gallery, 4, "cosine")[0], cosine.kneighbors(queries, 4)[1]
    )


def test_equal_distances_come_by_position() -> None:
    gallery = np.array([[2.0], [1.0], [1.0], [0.0], [1.0]])
    assert exact_neighbours(np.array([[1.0]]), gallery, 2)[0].tolist() == [[1, 2]]
    assert exact_neighbours(np.array([[1.0]]), gallery, 5)[0].tolist() == [[1, 2, 4, 0, 3]]
    with pytest.raises(ValueError, match="k, the number of neighbours, must be 1 to 5"):
        exact_neighbours(np.array([[1.0]]), gallery, 6)


def test_hubness_skewness_is_scipys() -> None:
    rng = np.random.default_rng(1)
    neighbours = np.minimum(rng.geometric(0.1, size=(200, 5)) - 1, 39)
    counts = [sum(int(n == item) for n in neighbours.ravel()) for item in range(40)]
    assert hubness(neighbours, 40) == pytest.approx(skew(counts))
    assert hubness(np.array([[0], [1]]), 2) == 0
    with pytest.raises(ValueError, match="expected positions below 3"):
        hubness(np.array([[3]]), 3)


def test_linear_cka_is_the_normalised_hsic_of_the_gram_matrices() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(3, 1, size=(50, 4)), rng.normal(size=(50, 7))
    y[:, :4] += x

    def hsic(a: np.ndarray, b: np.ndarray) -> float:
        centring = np.eye(50) - np.full((50, 50), 1 / 50)
        return float(np.trace(a @ a.T @ centring @ b @ b.T @ centring))

    assert linear_cka(x, y) == pytest.approx(hsic(x, y) / np.sqrt(hsic(x, x) * hsic(y, y)))
    rotation = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    assert linear_cka(x, 3 * x @ rotation + 5) == pytest.approx(1)
    assert linear_cka(x, np.zeros((50, 3))) == 0
    with pytest.raises(ValueError, match="same images"):
        linear_cka(x, y[:10])
