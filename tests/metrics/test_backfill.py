"""The backfill curve against building each mixed gallery by hand; the four orders."""

from itertools import pairwise

import numpy as np
import pytest

from nobackfill.metrics.backfill import (
    GAIN_NEIGHBOURS,
    DistanceLine,
    backfill_curve,
    class_order,
    class_shares,
    gain_order,
    oracle_order,
    random_order,
    uncertainty_order,
)
from nobackfill.metrics.distances import Metric, to_unit_norm
from nobackfill.metrics.ranking import relevance_by_label
from nobackfill.metrics.retrieval import mean_of_answerable, search_and_score


def mixed() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries [30, 4], served [50, 4] (backfilled plus noise of its own scale an item), backfilled,
    and both labels."""
    rng = np.random.default_rng(0)
    labels, query_labels = rng.integers(0, 5, 50), rng.integers(0, 5, 30)
    centres = rng.normal(size=(5, 4))
    backfilled = centres[labels] + 0.3 * rng.normal(size=(50, 4))
    served = backfilled + rng.exponential(1, (50, 1)) * rng.normal(size=(50, 4))
    queries = centres[query_labels] + 0.3 * rng.normal(size=(30, 4))
    return queries, served, backfilled, query_labels, labels


def test_each_point_is_the_mixed_gallery(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, served, backfilled, query_labels, labels = mixed()
    relevance = relevance_by_label(query_labels, labels)
    order = random_order(50, seed=3)
    monkeypatch.setattr("nobackfill.metrics.distances.BLOCK_DISTANCES", 7 * 50)
    curve = backfill_curve(
        queries, served, backfilled, order, relevance, shares=[0, 0.5, 1], metric="cosine"
    )
    for point, done in enumerate([0, 25, 50]):
        gallery = served.copy()
        gallery[order[:done]] = backfilled[order[:done]]
        expected = search_and_score(queries, gallery, relevance, "cosine")
        assert curve.map[point] == pytest.approx(mean_of_answerable(expected["map"]))
        assert curve.cmc1[point] == pytest.approx(mean_of_answerable(expected["cmc1"]))


def test_the_oracle_beats_random_and_the_mean_is_the_area() -> None:
    queries, served, backfilled, query_labels, labels = mixed()
    relevance = relevance_by_label(query_labels, labels)
    means = {}
    for name, order in {
        "random": random_order(50, 0),
        "oracle": oracle_order(served, backfilled),
        "reversed": oracle_order(served, backfilled)[::-1],
    }.items():
        curve = backfill_curve(queries, served, backfilled, order, relevance)
        means[name] = curve.area_under(curve.map)
        by_hand = sum((curve.map[i] + curve.map[i + 1]) / 2 * 0.1 for i in range(10))
        assert means[name] == pytest.approx(by_hand)
        assert mean_of_answerable(curve.map_areas) == pytest.approx(by_hand)
        assert mean_of_answerable(curve.cmc1_areas) == pytest.approx(curve.area_under(curve.cmc1))
    assert means["oracle"] > means["random"] > means["reversed"]


def test_served_items_may_have_fewer_dimensions() -> None:
    queries, served, backfilled, query_labels, labels = mixed()
    relevance = relevance_by_label(query_labels, labels)
    curve = backfill_curve(
        queries,
        served[:, :2],
        backfilled,
        random_order(50, 0),
        relevance,
        served_queries=queries[:, :2],
    )
    assert curve.map[0] == pytest.approx(
        mean_of_answerable(search_and_score(queries[:, :2], served[:, :2], relevance)["map"])
    )
    assert curve.map[-1] == pytest.approx(
        mean_of_answerable(search_and_score(queries, backfilled, relevance)["map"])
    )


def test_orders() -> None:
    labels = np.array([2, 0, 2, 1, 0, 7])
    order = class_order(labels, seed=1)
    ordered = labels[order].tolist()
    assert sorted(order.tolist()) == list(range(6))
    assert sum(a != b for a, b in pairwise(ordered)) == 3
    assert any(class_order(labels, s).tolist() != order.tolist() for s in range(9))
    assert uncertainty_order(np.array([0.1, 3, 0.1, 2])).tolist() == [1, 3, 0, 2]
    assert random_order(9, 1).tolist() == random_order(9, 1).tolist() != random_order(9, 2).tolist()


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_gain_counts_searches_and_damps_the_variance(metric: Metric) -> None:
    rng = np.random.default_rng(3)
    served = to_unit_norm(rng.normal(size=(40, 3)))
    variance = rng.exponential(1, 40)
    met = np.zeros(40)
    for query in range(40):
        others = [i for i in range(40) if i != query]
        others.sort(key=lambda i: float(np.sum((served[i] - served[query]) ** 2)))
        met[others[:GAIN_NEIGHBOURS]] += 1
    expected = np.argsort(-(met + 0.1) * variance**0.25, kind="stable")
    assert gain_order(served, variance, metric).tolist() == expected.tolist()
    # Fewer items than neighbours: all meet all.
    few = gain_order(served[:3], variance[:3], metric)
    assert few.tolist() == uncertainty_order(variance[:3]).tolist()


def test_uncertain_outliers_that_no_search_meets_wait() -> None:
    """By variance alone they come first, and every search goes on without a re-embedded item."""
    rng = np.random.default_rng(0)
    dense, far = rng.normal(size=(60, 8)) * 0.1 + 1, rng.normal(size=(20, 8)) * 40
    variance = np.append(np.full(60, 0.1), np.full(20, 0.4))
    served = np.concatenate([dense, far])
    assert set(uncertainty_order(variance)[:20]) == set(range(60, 80))
    first = gain_order(served, variance)[:20]
    assert np.sum(first < 60) >= 15


def test_a_line_undoes_what_carrying_did_to_distances() -> None:
    """A gallery that was carried without error, but to half of its size, around the query."""
    rng = np.random.default_rng(3)
    new, labels = rng.normal(size=(30, 6)), np.arange(30) % 3
    query = np.zeros((1, 6))
    relevance = relevance_by_label(np.array([0]), labels)
    order = random_order(30, 0)
    plain = backfill_curve(query, new, new, order, relevance)
    # Squared distances of l2 are a quarter.
    undone = backfill_curve(query, new / 2, new, order, relevance, distance_line=DistanceLine(4.0))
    np.testing.assert_allclose(undone.map, plain.map)
    assert not np.allclose(backfill_curve(query, new / 2, new, order, relevance).map, plain.map)
    far = backfill_curve(query, new, new, order, relevance, distance_line=DistanceLine(1.0, 100.0))
    assert far.map[0] == far.map[-1] == pytest.approx(plain.map[0])


def test_class_shares_stop_where_classes_end() -> None:
    labels = np.repeat(np.arange(100), np.arange(1, 101))
    order = class_order(labels, seed=0)
    shares = class_shares(labels, order, class_share_step=0.02)
    assert len(shares) == 51 and shares[0] == 0 and shares[-1] == 1
    for share in shares[1:-1]:
        done = round(share * len(order))
        assert labels[order][done] != labels[order][done - 1]
    assert len(np.unique(labels[order][: round(shares[1] * len(order))])) == 2


def test_an_order_must_name_every_item() -> None:
    queries, served, backfilled, query_labels, labels = mixed()
    with pytest.raises(ValueError, match="each item from 0 to 49 once"):
        backfill_curve(
            queries, served, backfilled, np.zeros(50, int), relevance_by_label(query_labels, labels)
        )
