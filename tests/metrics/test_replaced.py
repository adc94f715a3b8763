"""Ranks while a gallery is replaced, against ranking each mixed gallery by itself."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nobackfill.metrics.ranking import Relevance, rank_block
from nobackfill.metrics.replaced import rank_steps


@given(st.data())
def test_each_step_is_the_ranking_of_its_mixture(data: st.DataObject) -> None:
    """With ties of every kind, ignored items, and relevant ones that are ignored."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    queries, items = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    # Of few values, most distances are tied.
    values = data.draw(st.sampled_from([2, 5, 10_000]))
    before, after = (rng.integers(0, values, (queries, items)).astype(np.float32) for _ in range(2))
    order = rng.permutation(items)
    counts = np.array(sorted(data.draw(st.lists(st.integers(0, items), min_size=1, max_size=5))))

    def some() -> np.ndarray:
        return rng.choice(items, rng.integers(0, items + 1), replace=False)

    relevance = Relevance([some() for _ in range(queries)], [some() for _ in range(queries)])
    steps = rank_steps(before, after, 0, order, counts, relevance)
    assert len(steps) == len(counts)
    for count, found in zip(counts, steps, strict=True):
        mixture = before.copy()
        mixture[:, order[:count]] = after[:, order[:count]]
        expected = rank_block(mixture, 0, relevance)
        assert [ranks.tolist() for ranks in found] == [ranks.tolist() for ranks in expected]
