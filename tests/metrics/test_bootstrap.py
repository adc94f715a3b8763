"""The paired bootstrap: its interval covers the truth as often as it says, and pairing matters."""

import numpy as np
import pytest
from scipy.stats import bootstrap as scipy_bootstrap

from nobackfill.metrics.bootstrap import Difference, paired_bootstrap


def test_one_run_agrees_with_scipys_percentile_bootstrap() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random(300), rng.random(300)
    ours = paired_bootstrap([a], [b], resamples=20_000)
    theirs = scipy_bootstrap((a - b,), np.mean, n_resamples=20_000, method="percentile", rng=1)
    assert ours.mean == pytest.approx(np.mean(a - b))
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=2e-3)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=2e-3)


def test_pairing_narrows_the_interval() -> None:
    rng = np.random.default_rng(1)
    b = rng.random(500)
    a = b + 0.01 + 0.001 * rng.normal(size=500)
    assert paired_bootstrap([a], [b]).verdict == "holds"
    assert paired_bootstrap([b], [a]).verdict == "fails"
    assert paired_bootstrap([a], [rng.permutation(b)]).verdict == "undecided"


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for trial in range(200):
        values = rng.exponential(size=100)
        result = paired_bootstrap([values], [np.zeros(100)], resamples=400, seed=trial, level=0.9)
        covered += result.low <= 1 <= result.high
    assert 160 <= covered <= 196


def test_disagreeing_runs_widen_the_interval() -> None:
    zero = np.zeros(50)
    steady = paired_bootstrap([zero + 0.1] * 3, [zero] * 3)
    assert steady.low == pytest.approx(0.1) and steady.high == pytest.approx(0.1)
    torn = paired_bootstrap([zero + 0.4, zero + 0.1, zero - 0.2], [zero] * 3)
    assert torn.mean == pytest.approx(0.1)
    assert torn.low == pytest.approx(-0.2) and torn.high == pytest.approx(0.4)
    assert torn.verdict == "undecided"


def test_no_difference_is_not_an_improvement() -> None:
    same = np.ones(10)
    assert paired_bootstrap([same], [same]) == Difference(0, 0, 0)
    assert paired_bootstrap([same], [same]).verdict == "fails"


def test_unanswerable_queries_are_left_out_and_must_pair() -> None:
    a, b = np.array([1.0, np.nan, 1.0]), np.array([0.0, np.nan, 0.0])
    assert paired_bootstrap([a], [b]).mean == 1
    with pytest.raises(ValueError, match="do not answer the same queries"):
        paired_bootstrap([a], [np.zeros(3)])
    with pytest.raises(ValueError, match="paired values"):
        paired_bootstrap([np.zeros(3)], [np.zeros(4)])
    with pytest.raises(ValueError, match="same runs"):
        paired_bootstrap([np.zeros(3)], [])
    with pytest.raises(ValueError, match="0 < level < 1"):
        paired_bootstrap([a], [b], level=1)
