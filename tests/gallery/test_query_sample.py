"""Queries that were asked: a few are kept; a graph is as wide as they need, or a search says."""

import numpy as np
import pytest

from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search import view as asked_queries
from nobackfill.gallery.search.index import EXACT_EF
from nobackfill.gallery.search.view import QuerySample
from nobackfill.vectors import Vectors
from tests.gallery.making import spec


@pytest.fixture(autouse=True)
def always_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hnsw, "_GRAPH_QUERY", 0)
    monkeypatch.setattr(hnsw, "_GRAPH_CANDIDATE", 0)


@pytest.fixture(scope="module")
def foreign() -> tuple[hnsw.HnswIndex, Vectors]:
    """A graph of tight clusters, and queries of quite another distribution."""
    rng = np.random.default_rng(5)
    centres = rng.standard_normal((50, 128))
    content = centres[rng.integers(0, 50, 8000)] + 0.05 * rng.standard_normal((8000, 128))
    index = hnsw.build_index(spec(dim=128), np.arange(8000), content.astype(np.float32))
    return index, rng.standard_normal((200, 128)).astype(np.float32)


def recall(index: hnsw.HnswIndex, queries: Vectors, ef: int = 0) -> float:
    true = index.search_exactly(queries, 10).labels
    found = np.concatenate([index.search(query[None], 10, ef=ef).labels for query in queries])
    return float((found[:, :, None] == true[:, None, :]).any(axis=1).mean())


@pytest.mark.slow
def test_an_index_is_tuned_on_what_was_asked(foreign: tuple[hnsw.HnswIndex, Vectors]) -> None:
    index, queries = foreign
    before = index.ef
    assert recall(index, queries[100:]) < 0.8
    found = hnsw.tune_index(index, queries[:64])
    assert recall(found, queries[100:]) >= 0.95
    # Who searches the index as it was is not disturbed, and near queries take it back.
    assert index.ef == before < found.ef
    assert hnsw.tune_index(found, index.vectors[:64]).ef == before


def test_a_graph_without_rows_is_not_tuned() -> None:
    """As after all items of a gallery were deleted, while queries go on."""
    queries = np.ones((3, 8), np.float32)
    index = hnsw.build_index(spec(dim=8), np.arange(0), queries[:0])
    tuned = hnsw.tune_index(index, queries)
    assert tuned.ef == index.ef and (tuned.search(queries, 2).labels == -1).all()


@pytest.mark.slow
def test_a_search_looks_at_as_many_candidates_as_it_asks_for(
    foreign: tuple[hnsw.HnswIndex, Vectors],
) -> None:
    index, queries = foreign
    shares = [recall(index, queries[:50], ef) for ef in (0, 300, 2000)]
    assert shares == sorted(shares) and shares[0] < shares[1] and shares[2] >= 0.99
    half = np.arange(len(index.labels)) % 2 == 0
    exact = index.search_exactly(queries[:50], 10, half)
    for ef in (EXACT_EF, len(index.labels)):
        np.testing.assert_array_equal(
            index.search(queries[:50], 10, half, ef=ef).labels, exact.labels
        )
        assert recall(index, queries[:50], ef) == 1.0
    wide = index.search(queries[:50], 10, half, ef=2000).labels
    assert (wide == exact.labels).mean() >= 0.99


def test_queries_are_kept_at_random_and_late_ones_too() -> None:
    asked = QuerySample(3)
    assert asked.sample().shape == (0, 3)
    for number in range(4000):
        asked.observe(np.full((1, 3), number, np.float32))
    kept = asked.sample()
    assert kept.shape == (asked_queries.SAMPLE_QUERIES, 3) and asked.count == 4000
    assert len(np.unique(kept)) == asked_queries.SAMPLE_QUERIES
    assert kept.max() > 2000 and np.median(kept) < 3900
