"""Ranks while a gallery is replaced, against ranking each mixed gallery by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobackfill.metrics.ranking import Relevance, rank_block
from nobackfill.metrics.replaced import ReplacementSteps, rank_replacement_steps


@pytest.mark.slow
@given(st.data())
def test_each_step_is_the_ranking_of_its_mixture(data: st.DataObject) -> None:
    """In two orders, with ties of every kind, ignored items, and relevant ones that are ignored."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    queries, items = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    # Of few values, most distances are tied.
    values = data.draw(st.sampled_from([2, 5, 10_000]))
    before, after = (rng.integers(0, values, (queries, items)).astype(np.float32) for _ in range(2))
    counts = st.lists(st.integers(0, items), min_size=1, max_size=5).map(sorted).map(np.array)
    ways = [ReplacementSteps(rng.permutation(items), data.draw(counts)) for _ in range(2)]

    def some() -> np.ndarray:
        return rng.choice(items, rng.integers(0, items + 1), replace=False)

    relevance = Relevance([some() for _ in range(queries)], [some() for _ in range(queries)])
    found = rank_replacement_steps(before, after, 0, ways, relevance)
    for way, steps in zip(ways, found, strict=True):
        for count, step in zip(way.replaced_counts, steps, strict=True):
            mixture = before.copy()
            mixture[:, way.item_order[:count]] = after[:, way.item_order[:count]]
            expected = rank_block(mixture, 0, relevance)
            assert [ranks.tolist() for ranks in step] == [ranks.tolist() for ranks in expected]
