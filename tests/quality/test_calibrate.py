import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nobackfill.metrics.backfill import IDENTITY_LINE, DistanceLine
from nobackfill.metrics.bootstrap import Difference
from nobackfill.metrics.ranking import Ranking, Relevance
from nobackfill.quality.retrieval import CellFigures
from nobackfill.quality.route_evidence import (
    PAIRS_A_QUERY,
    choose_distance_line,
    fit_calibration,
    fit_curve,
    fit_distance_line,
    retrieved_pairs,
)
from nobackfill.release.calibration import Scorer, match_probabilities
from nobackfill.release.manifest import LazyReembeddingEvidence

SPACE = "sp-" + "0" * 64


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.float64, st.integers(1, 300), elements=st.floats(0, 4, width=32)),
    st.integers(0, 2**32 - 1),
)
def test_every_curve_is_strictly_monotone(distances: np.ndarray, seed: int) -> None:
    matches = np.random.default_rng(seed).integers(0, 2, len(distances)).astype(float)
    x, y = fit_curve(distances, matches)
    assert len(x) == len(y) >= 2
    assert (np.diff(x) > 0).all()
    assert (np.diff(y) < 0).all()
    assert 0 <= min(y) < max(y) <= 1


def test_probabilities_are_the_shares_of_matches() -> None:
    """Matches drawn with a known probability of distance: the fit finds it."""
    rng = np.random.default_rng(0)
    distances = rng.uniform(0, 2, 40_000)
    truth = 1 / (1 + np.exp(6 * (distances - 1)))
    x, y = fit_curve(distances, (rng.random(len(distances)) < truth).astype(float))
    grid = np.linspace(0.1, 1.9, 30)
    expected = 1 / (1 + np.exp(6 * (grid - 1)))
    assert np.abs(np.interp(grid, x, y) - expected).max() < 0.04


def test_a_curve_covers_the_distances_that_were_seen() -> None:
    """All pairs match below 1, none does above: two blocks, each as wide as its pairs lie. One
    breakpoint a block, at its mean, left half of the pairs outside of the curve."""
    rng = np.random.default_rng(0)
    distances = np.sort(rng.uniform(0, 2, 6400))
    x, y = fit_curve(distances, (distances < 1).astype(float))
    outside = (distances < x[0]) | (distances > x[-1])
    # Half a bin of 64 at each end.
    assert outside.mean() == pytest.approx(1 / 64, abs=0.002)
    np.testing.assert_allclose(
        np.interp([0.3, 0.9, 1.1, 1.9], x, y), [101 / 102] * 2 + [1 / 102] * 2
    )


def test_queries_unlike_those_of_the_calibration_are_recognised() -> None:
    """A model that was trained on some classes places what it does not know all in one spot: ten of
    ten hits have the score of the nearest pairs, and lie beyond the curve."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((20, 16))

    def known(each: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.repeat(np.arange(20), each)
        return centres[labels] + 0.3 * rng.standard_normal((len(labels), 16)), labels

    def nearest(queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
        return np.asarray(((queries[:, None] - gallery) ** 2).sum(2))

    (gallery, theirs), (queries, own) = known(15), known(15)
    apart = nearest(queries, gallery)
    near = np.argsort(apart, axis=1)[:, :PAIRS_A_QUERY]
    relevance = Relevance([np.flatnonzero(theirs == one) for one in own], [np.array([], int)] * 300)
    found = np.take_along_axis(apart, near, 1).astype(np.float32)
    curve = fit_calibration(SPACE, SPACE, "native", near, found, relevance, 300)

    def all_beyond(queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
        tens = np.sort(nearest(queries, gallery), axis=1)[:, :10]
        return np.asarray(Scorer(curve).is_beyond_calibration(tens).all(1))

    other = 3 + 0.03 * rng.standard_normal((100, 16))
    told = match_probabilities(curve, nearest(other[:50], other[50:]))
    assert (told == max(curve.probabilities)).all()
    assert all_beyond(other[:50], other[50:]).all()
    assert not all_beyond(known(15)[0], known(15)[0]).any()


def test_only_retrieved_pairs_count_and_never_the_query_itself() -> None:
    n = PAIRS_A_QUERY + 15
    neighbours = np.arange(n)[None, :].repeat(2, 0)
    distances = (np.arange(n) / 10).astype(np.float32)[None, :].repeat(2, 0)
    neighbours[1, -1], distances[1, -1] = -1, np.inf
    relevance = Relevance([np.array([1, 5]), np.array([0])], [np.array([0]), np.array([], int)])
    found, matches, queries = retrieved_pairs(neighbours, distances, relevance)
    assert queries.tolist() == [0] * PAIRS_A_QUERY + [1] * PAIRS_A_QUERY
    assert len(found) == 2 * PAIRS_A_QUERY
    assert found[0] == pytest.approx(0.1)
    assert found.max() == pytest.approx(PAIRS_A_QUERY / 10)
    assert np.flatnonzero(matches).tolist() == [0, 4, PAIRS_A_QUERY]


def test_a_calibration_is_applied_as_it_was_fitted() -> None:
    rng = np.random.default_rng(1)
    distances = np.sort(rng.uniform(0, 2, (50, 30)).astype(np.float32), axis=1)
    neighbours = np.tile(np.arange(30), (50, 1))
    relevance = Relevance([np.arange(8)] * 50, [np.array([], int)] * 50)
    curve = fit_calibration(SPACE, SPACE, "native", neighbours, distances, relevance, 30)
    assert curve.items == 30
    near, far = match_probabilities(curve, [0.0, 2.0])
    assert near > 0.8 > 0.2 > far


def test_carried_distances_are_brought_to_the_scale_of_embedded_ones() -> None:
    """Pairs whose odds fall with the distance alike, once they are stretched and moved."""
    rng = np.random.default_rng(0)
    own = rng.uniform(0, 1, (400, PAIRS_A_QUERY))
    matching = rng.uniform(size=own.shape) < 1 / (1 + np.exp(12 * own - 5))
    near = np.tile(np.arange(PAIRS_A_QUERY), (400, 1))
    relevance = Relevance([np.flatnonzero(row) for row in matching], [np.array([], int)] * 400)

    def measured(distances: np.ndarray) -> CellFigures:
        none = np.empty(0)
        ranking = Ranking([], np.empty(0, np.int64))
        return CellFigures(none, none, none, ranking, near, distances.astype(np.float32))

    line = fit_distance_line(measured(0.3 + 2 * own), measured(own), relevance)
    assert line.slope == pytest.approx(0.5, rel=0.01)
    assert line.offset == pytest.approx(-0.15, abs=0.01)
    # Where farther is likelier, or all match, there is nothing to go by.
    assert fit_distance_line(measured(-own), measured(own), relevance) == IDENTITY_LINE
    all_match = Relevance([np.arange(PAIRS_A_QUERY)] * 400, relevance.ignored)
    assert fit_distance_line(measured(2 * own), measured(own), all_match) == IDENTITY_LINE


def test_a_line_compares_hits_of_one_query() -> None:
    """Queries differ in how near all is to them, the more so by native distances: fitted across
    queries a line lets a tenth of the items take most first places, and loses 3 to 6 points."""
    rng = np.random.default_rng(0)
    matching = rng.random((400, 200)) < 0.05
    base, seen = rng.normal(0, 1, (400, 1)), rng.random((2, 400, 200))
    native = 0.3 * base + seen[0] - 0.3 * matching + 2
    carried = 0.1 * base + seen[1] - 0.2 * matching + 1.5
    none = np.empty(0)

    def measured(distances: np.ndarray) -> CellFigures:
        near = np.argsort(distances, axis=1)[:, : 3 * PAIRS_A_QUERY]
        apart = np.take_along_axis(distances, near, 1).astype(np.float32)
        return CellFigures(none, none, none, Ranking([], np.empty(0, np.int64)), near, apart)

    found = [np.flatnonzero(row) for row in matching]
    relevance = Relevance(found, [np.array([], int)] * 400)
    line = fit_distance_line(measured(carried), measured(native), relevance)

    def first_right(share: float) -> float:
        shares = []
        for seed in range(5):
            turn = np.random.default_rng(seed).random(200) < share
            first = np.where(turn, native, line.slope * carried + line.offset).argmin(1)
            shares.append(matching[np.arange(400), first].mean())
        return float(np.mean(shares))

    shares = [first_right(share) for share in (0, 0.1, 0.3, 0.5, 1)]
    assert min(shares) == shares[0]


def test_a_line_ranks_where_distances_fall_into_a_valley_that_it_closes() -> None:
    def told(by_distance: float, along: float) -> LazyReembeddingEvidence:
        flat = (0.5, 0.6, 0.7)
        return LazyReembeddingEvidence(
            map=flat, cmc1=(0.5, by_distance, 0.7), scaled_map=flat, scaled_cmc1=(0.5, along, 0.7)
        )

    line = DistanceLine(0.5, 0.1)
    assert told(0.4, 0.49).valley_depth == pytest.approx(0.1)
    assert told(0.4, 0.49).scaled_valley_depth == pytest.approx(0.01)
    sure, chance = Difference(0.02, 0.01, 0.03), Difference(0.02, -0.01, 0.05)
    assert choose_distance_line(told(0.4, 0.49), [chance, sure], line) == line
    # Within a point there is none, and what does not close it is not worth a second search.
    assert choose_distance_line(told(0.495, 0.5), [sure], line) == IDENTITY_LINE
    assert choose_distance_line(told(0.4, 0.39), [sure], line) == IDENTITY_LINE
    # Nor is what a few queries fell by.
    assert choose_distance_line(told(0.4, 0.49), [chance, chance], line) == IDENTITY_LINE
