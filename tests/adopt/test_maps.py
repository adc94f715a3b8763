"""Closed-form maps against scipy and scikit-learn, and the file that holds one."""

from pathlib import Path

import numpy as np
import pytest
from scipy.linalg import orthogonal_procrustes

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
    assert maps["affine"].unit


def test_low_rank_has_its_rank_and_lies_below_the_affine_map() -> None:
    old, noise = random(300, 8, 3), random(300, 6, 4)
    new = old @ random(8, 6, 5) + 0.1 * noise
    maps = fit_maps(old, new)
    assert np.linalg.matrix_rank(maps["low_rank"].weight, tol=1e-4) == 3

    def error(kind: str) -> float:
        return float(np.square(maps[kind](old) - new).sum())

    assert error("affine") < error("low_rank") < float(np.square(new - new.mean(0)).sum())


def test_near_procrustes_is_ridge_towards_it() -> None:
    """The least of |Y - XW'|² + lambda |W - W0|²: with few pairs nearly W0, with many no longer."""
    rotation = np.linalg.qr(random(12, 12, 1))[0].astype(np.float32)
    bent = rotation + 0.1 * random(12, 12, 2)
    distances = []
    for count in (16, 3000):
        old = random(count, 12, 3)
        new = 2 * old @ bent + random(count, 12, 4)
        maps = fit_maps(old, new)
        start, found = maps["procrustes"].weight, maps["near_procrustes"]
        a, b = (one.astype(float) - one.mean(0) for one in (old, new))
        penalty = float(found.facts["penalty"]) * np.square(a).sum() / 12
        slope = (a @ found.weight.T - b).T @ a + penalty * (found.weight - start)
        assert np.abs(slope).max() < 0.02 * np.abs(b.T @ a).max()
        distances.append(np.linalg.norm(found.weight - start))
        affine = np.linalg.norm(maps["affine"].weight - 2 * bent.T)
        assert np.linalg.norm(found.weight - 2 * bent.T) < 1.01 * affine
    assert distances[0] < distances[1]


def test_a_map_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = world(100)
    found = fit_maps(made.old, made.new)["affine"]
    save_map(tmp_path / "map.npz", found)
    again = load_map(tmp_path / "map.npz")
    assert (again.kind, again.unit, again.facts) == (found.kind, found.unit, found.facts)
    np.testing.assert_array_equal(again(made.old), found(made.old))
    assert again.digest == found.digest != fit_maps(made.old, -made.new)["affine"].digest


def test_what_is_no_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nobackfill fit"):
        load_map(tmp_path / "none.npz")
    for number, content in enumerate((b"", b"PK\x03\x04 broken", b"{}")):
        path = tmp_path / f"{number}.npz"
        path.write_bytes(content)
        with pytest.raises(InvalidInputError, match="expected a map"):
            load_map(path)
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, header=np.array([{"a": 1}], object), weight=np.ones((2, 2)), bias=np.ones(2))
    with pytest.raises(InvalidInputError, match="expected a map"):
        load_map(pickled)


def test_vectors_of_another_model_are_refused() -> None:
    made = world(100)
    found = fit_maps(made.old, made.new)["affine"]
    with pytest.raises(InvalidInputError, match=r"shape \[n, 24\]"):
        found(made.new)
    with pytest.raises(InvalidInputError, match="at least 2 pairs"):
        fit_maps(made.old[:1], made.new[:1])
