"""Closed-form maps against scipy and scikit-learn, and the file that holds one."""

from pathlib import Path

import numpy as np
import pytest
from scipy.linalg import orthogonal_procrustes
from sklearn.linear_model import Ridge

from nobackfill.adopt.maps import fit_maps, load_map, save_map
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.vectors import Vectors
from tests.adopt.made import world


def random(n: int, dim: int, seed: int) -> Vectors:
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


def test_procrustes_is_scipys_between_centred_vectors() -> None:
    old = random(80, 6, 0) + 2
    new = old @ random(6, 6, 1) - 3
    found = fit_maps(old, new)["procrustes"]
    a, b = old - old.mean(0), new - new.mean(0)
    rotation, total = orthogonal_procrustes(a, b)
    factor = total / np.square(a).sum()
    np.testing.assert_allclose(found.weight, factor * rotation.T, atol=1e-4)
    np.testing.assert_allclose(found(old).mean(0), new.mean(0), atol=1e-3)


def test_a_decomposition_that_does_not_converge_is_made_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As LAPACK's did with 240 pairs of 384 dims; which matrices these are differs by machine."""
    old, new = random(80, 6, 0), random(80, 4, 1)
    wanted, svd, given = fit_maps(old, new)["procrustes"], np.linalg.svd, []

    def fails_once(matrix: Vectors, full_matrices: bool) -> object:
        given.append(matrix.shape)
        if len(given) == 1:
            raise np.linalg.LinAlgError("SVD did not converge")
        return svd(matrix, full_matrices=full_matrices)

    monkeypatch.setattr(np.linalg, "svd", fails_once)
    found = fit_maps(old, new)["procrustes"]
    assert given == [(6, 4), (4, 6)]
    np.testing.assert_allclose(found.weight, wanted.weight, atol=1e-5)


@pytest.mark.parametrize(("a", "b"), [(6, 6), (4, 7), (7, 4)])
def test_a_rotation_between_unit_vectors_is_found_again(a: int, b: int) -> None:
    small = min(a, b)
    truth = random(60, small, 2)
    truth /= np.linalg.norm(truth, axis=1, keepdims=True)
    into = [np.linalg.qr(random(dim, dim, dim))[0][:small] for dim in (a, b)]
    maps = fit_maps(truth @ into[0], truth @ into[1])
    for kind in ("procrustes", "affine"):
        np.testing.assert_allclose(maps[kind](truth @ into[0]), truth @ into[1], atol=2e-3)
    assert maps["affine"].unit_norm


def test_low_rank_has_its_rank_and_lies_below_the_affine_map() -> None:
    old, noise = random(300, 8, 3), random(300, 6, 4)
    new = old @ random(8, 6, 5) + 0.1 * noise
    maps = fit_maps(old, new)
    assert np.linalg.matrix_rank(maps["low_rank"].weight, tol=1e-4) == 3

    def error(kind: str) -> float:
        return float(np.square(maps[kind](old) - new).sum())

    assert error("affine") < error("low_rank") < float(np.square(new - new.mean(0)).sum())


def test_affine_is_ridge_and_a_rotation_in_the_mean() -> None:
    """Against scikit-learn's ridge and numpy's decomposition: how much is turned is what ridge
    leaves unexplained, .6 at most."""
    turned = []
    for noise in (0.1, 4.0):
        old = random(300, 8, 3)
        new = old @ random(8, 6, 5) + noise * random(300, 6, 4)
        found = fit_maps(old, new)["affine"]
        a, b = (one.astype(float) - one.mean(0) for one in (old, new))
        penalty, share = (float(found.facts[name]) for name in ("penalty", "turned"))
        straight = Ridge(alpha=penalty * np.square(a).sum() / 8).fit(a, b)
        u, singular, vt = np.linalg.svd(a.T @ b, full_matrices=False)
        rotation = u * (singular / np.sqrt(singular**2 + (0.3 * singular.mean()) ** 2)) @ vt
        carried = a @ rotation
        rotation *= (carried * b).sum() / np.square(carried).sum()
        expected = (1 - share) * straight.coef_ + share * rotation.T
        np.testing.assert_allclose(found.weight, expected, rtol=0.01, atol=2e-3)
        turned.append(share)
    assert turned[0] < 0.01
    assert turned[1] == 0.6


def test_what_is_linear_is_found_exactly() -> None:
    old = random(100, 8, 3)
    new = old @ random(8, 6, 5) + 2
    np.testing.assert_allclose(fit_maps(old, new)["affine"](old), new, atol=1e-3)


@pytest.mark.parametrize("pairs", [2, 3, 10])
def test_few_pairs_and_what_never_varies_give_finite_maps(pairs: int) -> None:
    old, new = random(pairs, 24, 0), random(pairs, 1, 1)
    old[:, :5] = 1
    for one in fit_maps(old, new).values():
        assert np.isfinite(one(old)).all()
    for one in fit_maps(old, np.ones((pairs, 4), np.float32)).values():
        np.testing.assert_allclose(one(old), one(old)[:1].repeat(pairs, 0), atol=1e-5)
    for one in fit_maps(old[:1].repeat(pairs, 0), random(pairs, 4, 2)).values():
        assert np.isfinite(one(old)).all()


def test_a_map_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = world(100)
    found = fit_maps(made.old, made.new)["affine"]
    save_map(tmp_path / "map.npz", found)
    again = load_map(tmp_path / "map.npz")
    assert (again.kind, again.unit_norm, again.facts) == (found.kind, found.unit_norm, found.facts)
    np.testing.assert_array_equal(again(made.old), found(made.old))
    assert again.digest == found.digest != fit_maps(made.old, -made.new)["affine"].digest


def test_what_is_no_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nobackfill fit"):
        load_map(tmp_path / "none.npz")
    for number, content in enumerate((b"", b"PK\x03\x04 broken", b"{}")):
        path = tmp_path / f"{number}.npz"
        path.write_bytes(content)
        with pytest.raises(InvalidInputError, match="expected a file that"):
            load_map(path)
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, header=np.array([{"a": 1}], object), weight=np.ones((2, 2)), bias=np.ones(2))
    with pytest.raises(InvalidInputError, match="expected a file that"):
        load_map(pickled)


def test_vectors_of_another_model_are_refused() -> None:
    made = world(100)
    found = fit_maps(made.old, made.new)["affine"]
    with pytest.raises(InvalidInputError, match=r"shape \[n, 24\]"):
        found(made.new)
    with pytest.raises(InvalidInputError, match="at least 2 items"):
        fit_maps(made.old[:1], made.new[:1])


def test_a_kind_that_does_not_exist_is_refused() -> None:
    made = world(30)
    with pytest.raises(
        InvalidInputError, match="kinds of maps to fit: expected only names of affine"
    ):
        fit_maps(made.old, made.new, kinds=["linear"])
