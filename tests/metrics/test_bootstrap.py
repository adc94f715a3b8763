"""The paired bootstrap: its interval covers the truth as often as it says, and pairing matters."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import bootstrap as scipy_bootstrap
from scipy.stats import norm
from scipy.stats import t as student

from nobackfill.metrics.bootstrap import FEWEST_DECIDING_CLASSES, Difference, paired_bootstrap

Runs = list[NDArray[np.float64]]


@pytest.mark.slow
def test_one_run_agrees_with_scipys_percentile_bootstrap() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random(300), rng.random(300)
    ours = paired_bootstrap([a], [b], resample_count=20_000)
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
        result = paired_bootstrap(
            [values], [np.zeros(100)], resample_count=400, seed=trial, confidence_level=0.9
        )
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


def test_no_difference_decides_nothing() -> None:
    same = np.ones(10)
    assert paired_bootstrap([same], [same]) == Difference(0, 0, 0)
    assert paired_bootstrap([same], [same]).verdict == "undecided"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.2, -0.1, "fails"),
        (-0.2, 0.0, "undecided"),
        (-0.2, -0.0, "undecided"),
        (0.0, 0.0, "undecided"),
        (0.0, 0.2, "undecided"),
        (0.1, 0.2, "holds"),
    ],
)
def test_an_interval_that_reaches_zero_decides_nothing(
    low: float, high: float, verdict: str
) -> None:
    assert Difference((low + high) / 2, low, high).verdict == verdict


def test_what_rounding_leaves_of_zero_is_on_no_side_of_it() -> None:
    """Ten runs whose differences cancel but for the last bit."""
    whole = [np.full(30, 0.1 + 0.2)] * 10
    ours = paired_bootstrap(whole, [np.full(30, 0.3)] * 10)
    assert ours.mean != 0
    assert (ours.low, ours.high, ours.verdict) == (0, 0, "undecided")


def runs_of_one_test(rng: np.random.Generator, runs: int, queries: int) -> Runs:
    """Differences without a gain: what a query has in every run, what a run has, and the rest."""
    common = rng.normal(0, 0.3, queries)
    return [common + rng.normal(0, 0.005) + rng.normal(0, 0.15, queries) for _ in range(runs)]


@pytest.mark.slow
def test_runs_of_one_test_are_decided_wrongly_about_as_seldom_as_it_says() -> None:
    """Were queries drawn for each run apart, about half of these would be decided."""
    rng, zero = np.random.default_rng(3), np.zeros(200)
    wrong = 0
    for trial in range(150):
        values = runs_of_one_test(rng, 10, 200)
        found = paired_bootstrap(values, [zero] * 10, resample_count=400, seed=trial)
        wrong += found.verdict != "undecided"
    assert wrong <= 0.12 * 150


def test_runs_and_queries_are_drawn_crosswise_as_a_slow_loop_draws_them() -> None:
    rng = np.random.default_rng(4)
    values = np.stack(runs_of_one_test(rng, 4, 60)) + np.array([0.1, 0.0, 0.0, -0.1])[:, None]
    means = []
    for _ in range(8000):
        runs, queries = rng.integers(4, size=4), rng.integers(60, size=60)
        means.append(values[np.ix_(runs, queries)].mean())
    ours = paired_bootstrap(list(values), [np.zeros(60)] * 4, resample_count=8000)
    assert ours.mean == pytest.approx(values.mean())
    assert (ours.low, ours.high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=4e-3)
    again = paired_bootstrap(list(values), [np.zeros(60)] * 4, resample_count=8000)
    assert again == ours


def test_runs_of_other_tests_draw_queries_of_their_own() -> None:
    """Seen by their number or by which are answerable."""
    queries = 400
    common = np.random.default_rng(5).normal(0, 0.3, queries)
    values = [common] * 8

    def width(runs: Runs) -> float:
        found = paired_bootstrap(runs, [0 * run for run in runs])
        return found.high - found.low

    together = width(values)
    apart = together / np.sqrt(8)
    shorter = [common[: queries - run] for run in range(8)]
    assert width(shorter) == pytest.approx(apart, rel=0.2)
    unanswered = [np.where(np.arange(queries) == run, np.nan, common) for run in range(8)]
    assert width(unanswered) == pytest.approx(apart, rel=0.2)
    unanswered = [np.where(np.arange(queries) < 8, np.nan, common)] * 8
    assert width(unanswered) == pytest.approx(together, rel=0.1)


def test_unanswerable_queries_are_left_out_and_must_pair() -> None:
    a, b = np.array([1.0, np.nan, 1.0]), np.array([0.0, np.nan, 0.0])
    assert paired_bootstrap([a], [b]).mean == 1
    with pytest.raises(ValueError, match="that only one of them answers"):
        paired_bootstrap([a], [np.zeros(3)])
    with pytest.raises(ValueError, match="one value for each query"):
        paired_bootstrap([np.zeros(3)], [np.zeros(4)])
    with pytest.raises(ValueError, match="as many runs"):
        paired_bootstrap([np.zeros(3)], [])
    with pytest.raises(ValueError, match="confidence_level between 0 and 1"):
        paired_bootstrap([a], [b], confidence_level=1)


@pytest.mark.slow
def test_classes_are_drawn_whole_as_a_slow_loop_draws_them() -> None:
    """Two runs of 12 classes of unequal size, one query without an answer; percentiles widened as
    Student's t is."""
    rng, count = np.random.default_rng(6), 12
    labels = np.repeat([f"class {number}" for number in range(count)], np.arange(3, 3 + count))
    gains = np.repeat(rng.normal(0.1, 0.3, count), np.arange(3, 3 + count))
    values = [gains + rng.normal(0, 0.1, len(gains)) for _ in range(2)]
    for run in values:
        run[5] = np.nan
    by_class = [
        [run[(labels == name) & ~np.isnan(run)] for name in np.unique(labels)] for run in values
    ]
    means = []
    for _ in range(20_000):
        runs, drawn = rng.integers(2, size=2), rng.integers(count, size=count)
        means.append(
            np.mean([np.concatenate([by_class[r][c] for c in drawn]).mean() for r in runs])
        )
    tail = norm.cdf(student.ppf(0.025, count - 1) * np.sqrt(count / (count - 1)))
    zero = [0 * run for run in values]
    ours = paired_bootstrap(values, zero, classes=[labels] * 2, resample_count=20_000)
    assert (ours.low, ours.high) == pytest.approx(np.quantile(means, [tail, 1 - tail]), abs=0.02)
    assert ours.mean == pytest.approx(np.mean([np.nanmean(run) for run in values]))
    assert ours.class_count == count


def test_the_interval_over_classes_is_the_t_interval_over_their_means() -> None:
    """Of classes of equal size with normal effects."""
    rng = np.random.default_rng(7)
    for count in (10, 30):
        labels = np.repeat(np.arange(count), 5)
        values = rng.normal(size=count)[labels] + 0.01 * rng.normal(size=5 * count)
        ours = paired_bootstrap([values], [0 * values], classes=[labels], resample_count=20_000)
        of_classes = values.reshape(count, 5).mean(1)
        error = of_classes.std(ddof=1) / np.sqrt(count)
        width = 2 * student.ppf(0.975, count - 1) * error
        assert ours.high - ours.low == pytest.approx(width, rel=0.1)


def test_queries_of_a_class_are_not_independent() -> None:
    """Twenty classes gain or lose as wholes: drawn one by one, their queries would decide it."""
    labels = np.repeat(np.arange(20), 50)
    values = np.where(np.arange(20) % 3 == 0, -0.3, 0.25)[labels]
    assert paired_bootstrap([values], [0 * values]).verdict == "holds"
    assert paired_bootstrap([values], [0 * values], classes=[labels]).verdict == "undecided"


def test_fewer_classes_than_are_a_sample_decide_no_claim() -> None:
    labels = np.repeat(np.arange(FEWEST_DECIDING_CLASSES), 30)
    values = np.full(len(labels), 0.1)
    enough = paired_bootstrap([values], [0 * values], classes=[labels])
    assert (enough.verdict, enough.is_limited_to_classes) == ("holds", False)
    some = labels < FEWEST_DECIDING_CLASSES - 1
    for gain in (values[some], -values[some]):
        found = paired_bootstrap([gain], [0 * gain], classes=[labels[some]])
        assert (found.verdict, found.is_limited_to_classes, found.class_count) == (
            "undecided",
            True,
            9,
        )
        # For these classes alone: as queries are drawn.
        assert (found.low, found.high) == (gain[0], gain[0])
    # A class without an answerable query is none.
    values[labels == 0] = np.nan
    assert paired_bootstrap([values], [0 * values], classes=[labels]).class_count == 9


def test_a_class_is_drawn_once_for_all_runs_that_have_it() -> None:
    """Whatever queries ask for it, in whatever order; runs of other classes draw their own."""
    gains = np.random.default_rng(8).normal(0, 0.3, 40)

    def width(names: list[NDArray[np.int64]]) -> float:
        runs = [gains.repeat(2) for _ in names]
        labels = [own.repeat(2) for own in names]
        found = paired_bootstrap(runs, [0 * run for run in runs], classes=labels)
        return found.high - found.low

    same, others = width([np.arange(40)] * 4), width([np.arange(40) + 100 * r for r in range(4)])
    assert others == pytest.approx(same / 2, rel=0.15)


def test_classes_must_match_the_queries() -> None:
    values = np.zeros(3)
    for classes in ([], [np.arange(2)], [np.arange(3)] * 2):
        with pytest.raises(ValueError, match="class for each query"):
            paired_bootstrap([values], [values], classes=classes)
