"""Closed-form maps against scipy, numpy and alternating least squares."""

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes

from nobackfill.training.networks.maps import (
    fit_affine,
    fit_low_rank,
    fit_procrustes,
    fit_whitening_map,
)


def paired(a: int = 6, b: int = 6, n: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, a] with unequal variances and a shift, y [n, b] linear in it plus noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, a, generator=generator, dtype=torch.float64) * torch.arange(1, a + 1) + 3
    mix = torch.randn(a, b, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, b, generator=generator, dtype=torch.float64)
    return x, x @ mix + 0.5 * noise - 7


def error(predicted: torch.Tensor, y: torch.Tensor) -> float:
    return float((predicted - y).square().sum())


@pytest.mark.parametrize(("a", "b"), [(6, 6), (4, 7), (7, 4)])
def test_procrustes_is_scipys(a: int, b: int) -> None:
    x, y = paired(a, b)
    found = fit_procrustes(x, y, scaled=False)
    xc, yc = (x - x.mean(0)).numpy(), (y - y.mean(0)).numpy()
    wide = max(a, b)
    # scipy's takes equal dimensions only: zeros fill the smaller side.
    padded_x = np.pad(xc, ((0, 0), (0, wide - a)))
    padded_y = np.pad(yc, ((0, 0), (0, wide - b)))
    rotation, _ = orthogonal_procrustes(padded_x, padded_y)
    expected = (padded_x @ rotation)[:, :b] + y.mean(0).numpy()
    small = found.weight @ found.weight.t() if b <= a else found.weight.t() @ found.weight
    torch.testing.assert_close(small, torch.eye(min(a, b), dtype=torch.float64))
    if a == b:
        torch.testing.assert_close(found(x), torch.from_numpy(expected))
    else:
        product = float((xc @ found.weight.t().numpy() * yc).sum())
        assert product == pytest.approx(np.linalg.svd(xc.T @ yc)[1].sum())


def test_procrustes_finds_a_rotation_and_a_factor_again() -> None:
    x, _ = paired()
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(random)[0]
    y = 2.5 * x @ rotation + 4
    torch.testing.assert_close(fit_procrustes(x, y, scaled=True)(x), y)
    assert error(fit_procrustes(x, y, scaled=False)(x), y) > 1
    # The factor is the best one: any other is worse.
    noisy = paired()[1]
    best = fit_procrustes(x, noisy, scaled=True)
    for factor in (0.9, 1.1):
        shifted = (best(x) - noisy.mean(0)) * factor + noisy.mean(0)
        assert error(shifted, noisy) > error(best(x), noisy)


def test_affine_is_numpys_least_squares() -> None:
    x, y = paired(5, 3)
    ones = np.c_[x.numpy(), np.ones(len(x))]
    solution, *_ = np.linalg.lstsq(ones, y.numpy(), rcond=None)
    found = fit_affine(x, y, ridge=0)
    torch.testing.assert_close(found.weight, torch.from_numpy(solution[:-1].T.copy()))
    torch.testing.assert_close(found.bias, torch.from_numpy(solution[-1].copy()))


def test_affine_stays_finite_for_dependent_inputs() -> None:
    x, y = paired(5, 3)
    twice = torch.cat((x, x, torch.ones(len(x), 1)), 1)
    found = fit_affine(twice, y)
    assert torch.isfinite(found.weight).all()
    assert error(found(twice), y) < 1.05 * error(fit_affine(x, y)(x), y)


def test_the_ridge_is_chosen_by_leaving_images_out_with_all_their_views() -> None:
    """Views of one image answer for each other: left out alone, they would choose no penalty."""
    generator = torch.Generator().manual_seed(3)
    x, y = paired(30, 4, n=440)
    noisy = y[:40] + 40 * torch.randn(40, 4, generator=generator, dtype=torch.float64)
    jitter = 1e-3 * torch.randn(40, 3, 30, generator=generator, dtype=torch.float64)
    views, targets = (x[:40, None] + jitter).flatten(0, 1), noisy.repeat_interleave(3, 0)
    together = error(fit_affine(views, targets, group_size=3)(x[40:]), y[40:])
    assert together < 0.8 * error(fit_affine(views, targets)(x[40:]), y[40:])
    assert together < 0.8 * error(fit_affine(views, targets, ridge=1e-5)(x[40:]), y[40:])


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_low_rank_is_the_best_of_its_rank(rank: int) -> None:
    x, y = paired(6, 4)
    down, up = fit_low_rank(x, y, rank, ridge=0)
    assert down.weight.shape == (rank, 6) and up.weight.shape == (4, rank)
    found = error(up(down(x)), y)
    # Alternating least squares from a random start, as an independent solver.
    xc, yc = (x - x.mean(0)).numpy(), (y - y.mean(0)).numpy()
    right = np.random.default_rng(0).normal(size=(rank, 4))
    for _ in range(500):
        left = np.linalg.lstsq(xc, yc @ np.linalg.pinv(right), rcond=None)[0]
        right = np.linalg.lstsq(xc @ left, yc, rcond=None)[0]
    assert found == pytest.approx(float(((xc @ left @ right - yc) ** 2).sum()), rel=1e-6)


def test_the_full_rank_is_the_affine_map() -> None:
    x, y = paired(6, 4)
    down, up = fit_low_rank(x, y, 4)
    torch.testing.assert_close(up(down(x)), fit_affine(x, y)(x))
    with pytest.raises(ValueError, match=r"rank of 1 to 4, .* got 5"):
        fit_low_rank(x, y, 5)


def test_whitened_inputs_are_uncorrelated_with_unit_variance() -> None:
    x, _ = paired()
    white = fit_whitening_map(x, ridge=0)(x)
    torch.testing.assert_close(torch.cov(white.t()), torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(white.mean(0), torch.zeros(6, dtype=torch.float64))
    flat = torch.cat((x, torch.ones(len(x), 1)), 1)
    assert fit_whitening_map(flat)(flat).abs().max() < 100


def test_unpaired_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="expected paired vectors"):
        fit_affine(torch.zeros(3, 2), torch.zeros(4, 2))
