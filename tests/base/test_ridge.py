"""The ridge map and its penalty, against fits that really leave rows out."""

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.linear_model import Ridge as SklearnRidge

from nobackfill.ridge import PENALTIES, Floats, Moments, fit_ridge, solve_ridge, split_into_blocks

Doubles = NDArray[np.float64]


def paired(n: int, a: int, b: int, seed: int, noise: float = 0.5) -> tuple[Doubles, Doubles]:
    """x [n, a] with unequal variances and a shift, y [n, b] linear in it plus noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, a)) * np.linspace(0.2, 2, a) + 3
    return x, x @ rng.normal(size=(a, b)) + noise * rng.normal(size=(n, b)) - 7


def slow_error(x: Doubles, y: Doubles, penalty: float, together: int) -> float:
    """By as many fits of scikit-learn as there are groups; lambda stays what it is for all rows."""
    centred = x - x.mean(0)
    alpha = penalty * float(np.square(centred).sum()) / x.shape[1]
    groups = np.arange(len(x)) // together
    total = 0.0
    for group in range(groups[-1] + 1):
        out = groups == group
        model = SklearnRidge(alpha=alpha).fit(x[~out], y[~out])
        total += float(np.square(model.predict(x[out]).reshape(y[out].shape) - y[out]).sum())
    return total / len(x)


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(8, 30), a=st.integers(1, 12), b=st.integers(2, 4), together=st.integers(1, 3),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_the_chosen_error_is_that_of_really_leaving_out(
    n: int, a: int, b: int, together: int, seed: int
) -> None:
    x, y = paired(n * together, a, b, seed)
    found = fit_ridge(split_into_blocks(x, y, rows_per_block=4 * together), rows_per_group=together)
    assert found.loo_error == pytest.approx(slow_error(x, y, found.penalty, together), rel=1e-5)
    assert found.output_variance == pytest.approx(y.var(0).sum(), rel=1e-9)
    # No penalty of the coarse grid is better by really leaving out.
    others = [slow_error(x, y, penalty, together) for penalty in PENALTIES]
    assert found.loo_error <= min(others) * (1 + 1e-6)


@pytest.mark.parametrize("penalty", [1e-5, 0.1, 3.0])
def test_the_map_is_scikit_learns(penalty: float) -> None:
    x, y = paired(50, 6, 3, 0)
    found = solve_ridge(Moments.from_blocks(split_into_blocks(x, y, 7)()), penalty)
    alpha = penalty * float(np.square(x - x.mean(0)).sum()) / 6
    model = SklearnRidge(alpha=alpha).fit(x, y)
    np.testing.assert_allclose(found.weight, model.coef_, rtol=1e-8)
    np.testing.assert_allclose(found.bias, model.intercept_, rtol=1e-8)


def test_a_linear_truth_is_found_and_noise_is_answered_by_the_mean() -> None:
    x, y = paired(400, 5, 3, 1, noise=0)
    exact = fit_ridge(split_into_blocks(x, y))
    assert exact.penalty < 1e-5
    np.testing.assert_allclose(x @ exact.weight.T + exact.bias, y, atol=1e-3)
    rng = np.random.default_rng(2)
    noise = rng.normal(size=(100, 3))
    inputs = rng.normal(size=(100, 60))
    unrelated = fit_ridge(split_into_blocks(inputs, noise))
    mean_alone = float(np.square((noise - noise.mean(0)) * 100 / 99).sum(1).mean())
    assert unrelated.loo_error <= mean_alone * 1.001
    # Least squares answers with what it learnt by heart.
    assert slow_error(inputs, noise, 1e-6, 1) > 2 * mean_alone


def test_the_fewer_the_pairs_the_larger_the_penalty() -> None:
    x, y = paired(5000, 40, 10, 3, noise=8)
    penalties = [fit_ridge(split_into_blocks(x[:n], y[:n])).penalty for n in (60, 400, 5000)]
    assert penalties[0] > penalties[1] > penalties[2]


def test_blocks_and_a_far_origin_change_nothing() -> None:
    """Raw sums of products of float32 far from 0 would leave no digit of the variance."""
    x, y = paired(600, 8, 4, 4)
    whole = fit_ridge(split_into_blocks(x, y))
    far = fit_ridge(split_into_blocks(x + 1e6, y - 1e6, rows_per_block=37))
    np.testing.assert_allclose(far.weight, whole.weight, rtol=1e-5)
    assert far.loo_error == pytest.approx(whole.loo_error, rel=1e-5)


def test_moments_of_the_rest_are_those_of_all_without_a_part() -> None:
    x, y = paired(90, 5, 3, 8)
    whole = Moments.from_blocks(split_into_blocks(x, y)())
    part = Moments(whole)
    part.add(x[20:50], y[20:50])
    left = np.r_[:20, 50:90]
    rest, expected = (
        whole.subtract(part),
        Moments.from_blocks(split_into_blocks(x[left], y[left])()),
    )
    assert rest.row_count == 60
    np.testing.assert_allclose(rest.gram, expected.gram, atol=1e-9)
    np.testing.assert_allclose(rest.cross, expected.cross, atol=1e-9)
    for found, mean in zip(rest.mean, expected.mean, strict=True):
        np.testing.assert_allclose(found, mean, atol=1e-12)


def test_of_many_rows_some_are_left_out() -> None:
    x, y = paired(4000, 10, 3, 5)
    all_rows = fit_ridge(split_into_blocks(x, y))
    some = fit_ridge(split_into_blocks(x, y, rows_per_block=300), most_sampled_rows=1000)
    assert some.loo_error == pytest.approx(all_rows.loo_error, rel=0.1)
    assert some.loo_error != all_rows.loo_error
    np.testing.assert_allclose(some.weight, all_rows.weight, atol=0.02)


@pytest.mark.long
@pytest.mark.slow
def test_a_million_pairs_take_the_memory_of_a_few_windows() -> None:
    truth = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)

    def peak(windows: int) -> tuple[int, float]:
        def blocks() -> Iterator[tuple[Floats, Floats]]:
            for number in range(windows):
                rng = np.random.default_rng(number)
                x = rng.standard_normal((8192, 64), np.float32)
                yield x, x @ truth + rng.standard_normal((8192, 64), np.float32)

        tracemalloc.start()
        try:
            found = fit_ridge(blocks)
            return tracemalloc.get_traced_memory()[1], float(np.abs(found.weight.T - truth).max())
        finally:
            tracemalloc.stop()

    few, many = peak(4), peak(123)
    assert 123 * 8192 > 1_000_000
    assert many[0] < 1.1 * few[0]
    # The deviation of a weight is 1 over the root of the rows.
    assert many[1] < 6 / np.sqrt(123 * 8192) < few[1]


def test_inputs_that_never_vary_weigh_nothing() -> None:
    y = np.arange(12.0).reshape(6, 2)
    found = fit_ridge(split_into_blocks(np.full((6, 3), 2.0), y))
    assert not found.weight.any()
    np.testing.assert_allclose(found.bias, y.mean(0))


def test_what_is_no_pair_is_refused() -> None:
    good = np.ones((4, 2))
    with pytest.raises(ValueError, match="at least 2 pairs, got 0"):
        Moments.from_blocks([])
    with pytest.raises(ValueError, match="expected paired rows"):
        Moments.from_blocks([(good, good[:3])])
    with pytest.raises(ValueError, match="NaN or infinity"):
        Moments.from_blocks([(good, good), (good * np.nan, good)])
    with pytest.raises(ValueError, match="expected the dimensions"):
        Moments.from_blocks([(good, good), (np.ones((4, 3)), good)])
    with pytest.raises(ValueError, match="2 whole groups of 4 pairs"):
        fit_ridge(split_into_blocks(good, good), rows_per_group=4)
