"""CMC and mAP against slow loops and scikit-learn; queries in the gallery and not."""

import tracemalloc

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from nobackfill.metrics import ranking as ranking_module
from nobackfill.metrics.distances import BLOCK_DISTANCES, Metric, distances, to_unit_norm
from nobackfill.metrics.ranking import Ranking, Relevance, rank, rank_neighbours, relevance_by_label
from nobackfill.metrics.retrieval import (
    average_precision,
    average_precision_at,
    cmc,
    mean_of_answerable,
    search_and_score,
)
from tests.metrics import slow

METRICS: list[Metric] = ["l2", "cosine"]


def data(seed: int, tied: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries [40, 6], their labels, gallery [90, 6], its labels; class 9 is in the queries alone.

    `tied`: small integers, so that equal distances are exactly equal and frequent.
    """
    rng = np.random.default_rng(seed)
    query_labels, gallery_labels = rng.integers(0, 10, 40), rng.integers(0, 9, 90)
    if tied:
        queries, gallery = rng.integers(0, 2, (40, 6)), rng.integers(0, 2, (90, 6))
        return queries.astype(float), query_labels, gallery.astype(float), gallery_labels
    centres = rng.normal(size=(10, 6))
    near = centres[query_labels] + rng.normal(size=(40, 6))
    return near, query_labels, centres[gallery_labels] + rng.normal(size=(90, 6)), gallery_labels


def compare_with_loops(
    queries: np.ndarray, gallery: np.ndarray, relevance: Relevance, metric: Metric
) -> None:
    ranked = slow.all_ranked(queries, gallery, relevance, metric)
    ours = rank(queries, gallery, relevance, metric)
    for k in (1, 5, 90):
        np.testing.assert_allclose(cmc(ours, k), [slow.cmc(r, k) for r in ranked])
        np.testing.assert_allclose(
            average_precision_at(ours, k), [slow.average_precision(r, k) for r in ranked]
        )
    np.testing.assert_allclose(average_precision(ours), [slow.average_precision(r) for r in ranked])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("seed", range(3))
def test_queries_and_gallery_differ(seed: int, metric: Metric) -> None:
    queries, query_labels, gallery, gallery_labels = data(seed)
    relevance = relevance_by_label(query_labels, gallery_labels)
    assert any(label == 9 for label in query_labels)
    compare_with_loops(queries, gallery, relevance, metric)


@pytest.mark.parametrize("seed", range(3))
def test_ties_put_irrelevant_items_first(seed: int) -> None:
    queries, query_labels, gallery, gallery_labels = data(seed, tied=True)
    compare_with_loops(queries, gallery, relevance_by_label(query_labels, gallery_labels), "l2")


@pytest.mark.parametrize("metric", METRICS)
def test_self_match_is_removed_by_image_not_by_label(metric: Metric) -> None:
    _, _, gallery, labels = data(4)
    images = [f"{i}.png" for i in range(90)]
    order = np.random.default_rng(0).permutation(90)[:50]
    relevance = relevance_by_label(labels[order], labels, [images[i] for i in order], images)
    assert [ignored.tolist() for ignored in relevance.ignored] == [[i] for i in order]
    compare_with_loops(gallery[order], gallery, relevance, metric)
    # Left in, every query would find itself.
    assert (
        mean_of_answerable(
            cmc(rank(gallery, gallery, relevance_by_label(labels, labels), metric), 1)
        )
        == 1
    )
    assert mean_of_answerable(cmc(rank(gallery[order], gallery, relevance, metric), 1)) < 1


def test_average_precision_is_scikit_learns_without_ties() -> None:
    queries, query_labels, gallery, gallery_labels = data(1)
    d = distances(queries, gallery, "l2")
    ours = average_precision(
        rank(queries, gallery, relevance_by_label(query_labels, gallery_labels))
    )
    for q, label in enumerate(query_labels):
        if label != 9:
            expected = average_precision_score(gallery_labels == label, -d[q])
            assert ours[q] == pytest.approx(expected, abs=1e-12)


def test_a_collapsed_embedding_scores_the_worst_not_the_best() -> None:
    relevance = relevance_by_label([0], [0, 1, 1, 0])
    ours = rank(np.zeros((1, 3)), np.zeros((4, 3)), relevance)
    assert ours.ranks[0].tolist() == [3, 4]
    assert cmc(ours, 1).tolist() == [0]
    assert average_precision(ours)[0] == pytest.approx((1 / 3 + 2 / 4) / 2)


def test_ranks_by_hand() -> None:
    gallery = np.array([[0.0], [1.0], [2.0], [3.0]])
    ours = rank(np.array([[0.1]]), gallery, relevance_by_label([7], [5, 7, 5, 7]))
    assert ours.ranks[0].tolist() == [2, 4]
    assert cmc(ours, 1).tolist() == [0] and cmc(ours, 2).tolist() == [1]
    assert average_precision(ours)[0] == pytest.approx((1 / 2 + 2 / 4) / 2)
    # Two relevant items, one within the first three.
    assert average_precision_at(ours, 3)[0] == pytest.approx((1 / 2) / 2)
    assert average_precision_at(ours, 1)[0] == 0


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, query_labels, gallery, gallery_labels = data(2)
    relevance = relevance_by_label(query_labels, gallery_labels)
    whole = rank(queries, gallery, relevance)
    monkeypatch.setattr("nobackfill.metrics.distances.BLOCK_DISTANCES", 7 * len(gallery))
    pieces = rank(queries, gallery, relevance)
    for a, b in zip(whole.ranks, pieces.ranks, strict=True):
        np.testing.assert_array_equal(a, b)


def test_neighbour_lists_agree_with_the_full_ranking_and_count_what_they_missed() -> None:
    queries, query_labels, gallery, gallery_labels = data(3)
    images = [f"{i}" for i in range(90)]
    relevance = relevance_by_label(query_labels, gallery_labels, images[:40], images)
    d = distances(queries, gallery)
    full = rank(queries, gallery, relevance)
    listed = rank_neighbours(np.argsort(d, axis=1)[:, :21], relevance)
    np.testing.assert_allclose(cmc(listed, 20), cmc(full, 20))
    np.testing.assert_allclose(average_precision_at(listed, 20), average_precision_at(full, 20))
    assert (
        average_precision(listed)[query_labels != 9] <= average_precision(full)[query_labels != 9]
    ).all()
    assert listed.relevant_counts.tolist() == full.relevant_counts.tolist()
    padded = rank_neighbours(np.array([[2, -1, -1]]), relevance_by_label([0], [1, 0, 0]))
    assert padded.ranks[0].tolist() == [1] and padded.relevant_counts.tolist() == [2]


def test_unanswerable_queries_are_left_out_of_the_mean() -> None:
    ours = Ranking([np.array([1]), np.array([], int)], np.array([1, 0]))
    assert (
        mean_of_answerable(cmc(ours, 1)) == 1 and mean_of_answerable(average_precision(ours)) == 1
    )
    with pytest.raises(ValueError, match="no query has a relevant item"):
        mean_of_answerable(cmc(Ranking([np.array([], int)], np.array([0])), 1))


def test_an_empty_gallery_has_nothing_relevant() -> None:
    relevance = relevance_by_label([0, 1], np.empty(0, np.int64))
    assert [len(one) for one in relevance.relevant] == [0, 0]
    ranked = rank(np.eye(2), np.empty((0, 2)), relevance)
    assert np.isnan(average_precision(ranked)).all()


def test_score_gives_the_three_figures() -> None:
    queries, query_labels, gallery, gallery_labels = data(0)
    relevance = relevance_by_label(query_labels, gallery_labels)
    figures = search_and_score(queries, gallery, relevance, "cosine")
    ours = rank(to_unit_norm(queries), to_unit_norm(gallery), relevance, "l2")
    np.testing.assert_allclose(figures["cmc1"], cmc(ours, 1))
    np.testing.assert_allclose(figures["cmc5"], cmc(ours, 5))
    np.testing.assert_allclose(figures["map"], average_precision(ours))


def test_bad_input_is_refused() -> None:
    good = np.eye(3)
    with pytest.raises(ValueError, match=r"queries \[q, dim\]"):
        distances(good, np.eye(4))
    with pytest.raises(ValueError, match="NaN or infinity"):
        distances(good, good * np.nan)
    with pytest.raises(ValueError, match="row 1 is a zero vector"):
        distances(good, good * np.array([[1], [0], [1]]), "cosine")
    with pytest.raises(ValueError, match="one of l2, cosine, inner_product"):
        distances(good, good, "dot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="each of 3 queries, got 2"):
        rank(good, good, relevance_by_label([0, 1], [0, 1, 2]))
    with pytest.raises(ValueError, match="both or neither"):
        relevance_by_label([0], [0], query_images=["a"])
    with pytest.raises(ValueError, match="one image identity for each label"):
        relevance_by_label([0], [0, 1], ["a"], ["a"])
    with pytest.raises(ValueError, match="k, the number of hits, must be at least 1"):
        cmc(rank(good, good, relevance_by_label([0, 1, 2], [0, 1, 2])), 0)
    with pytest.raises(ValueError, match=r"positions of the shape \[1, k\]"):
        ranking_module.rank_neighbours(np.zeros((2, 3), int), relevance_by_label([0], [0]))


@pytest.mark.slow
def test_memory_is_a_few_blocks_whatever_the_number_of_queries() -> None:
    rng = np.random.default_rng(0)
    gallery = rng.random((50_000, 8), dtype=np.float32)
    queries = rng.random((1_400, 8), dtype=np.float32)
    relevance = relevance_by_label(np.arange(1_400) % 100, np.arange(50_000) % 100)
    tracemalloc.start()
    rank(queries, gallery, relevance)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert BLOCK_DISTANCES // 50_000 < 1_400
    # Distances, their sorted copy and one more on the way, of 2^25 float32 each.
    assert peak < 3.5 * 4 * BLOCK_DISTANCES
