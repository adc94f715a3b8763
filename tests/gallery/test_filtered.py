"""Filtered searches through the graph against exact ones."""

import numpy as np
import pytest

from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.hnsw import HnswIndex
from tests.gallery.making import spec


@pytest.fixture(scope="module")
def clusters() -> tuple[HnswIndex, np.ndarray, np.ndarray]:
    """An index of 6,000 items in 40 clusters, the cluster of each item, and 40 queries."""
    rng = np.random.default_rng(3)
    centres = rng.standard_normal((40, 16)).astype(np.float32)
    cluster_ids = rng.integers(0, 40, 6000)
    content = centres[cluster_ids] + 0.2 * rng.standard_normal((6000, 16), dtype=np.float32)
    queries = centres[rng.integers(0, 40, 40)] + 0.2 * rng.standard_normal(
        (40, 16), dtype=np.float32
    )
    return hnsw.build_index(spec(dim=16), np.arange(1, 6001), content), cluster_ids, queries


@pytest.mark.parametrize("share", [0.002, 0.02, 0.05, 0.1, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("far", [False, True])
def test_filtered_searches_find_what_an_exact_one_does(
    clusters: tuple[HnswIndex, np.ndarray, np.ndarray], share: float, far: bool
) -> None:
    """At any selectivity; also where everything near a query is what the filter keeps out, and the
    few that pass at the far end of a wide search are not the nearest of them."""
    index, cluster_ids, queries = clusters
    # Whole clusters, or rows here and there.
    allowed = (
        cluster_ids < max(1, share * 40) if far else np.random.default_rng(4).random(6000) < share
    )
    true = index.search_exactly(queries, 10, allowed)
    for found in (
        index.search(queries, 10, allowed).labels,
        np.concatenate([index.search(query[None], 10, allowed).labels for query in queries]),
    ):
        hits = (found[:, :, None] == true.labels[:, None, :]) & (found[:, :, None] >= 0)
        assert hits.sum() >= 0.98 * (true.labels >= 0).sum()
