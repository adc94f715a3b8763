"""Galleries with vectors of two cells, ranked by their scores as a gateway ranks them."""

import numpy as np
import pytest

from nobackfill.metrics.distances import Metric, distances
from nobackfill.metrics.ranking import Relevance, rank_neighbours
from nobackfill.quality.retrieval import CellFigures, rank_mixture
from nobackfill.release.manifest import Calibration

ITEMS, QUERIES = 60, 25
SPACE, OTHER = f"sp-{'0' * 64}", f"sp-{'1' * 64}"


def cell(found: np.ndarray, relevance: Relevance, count: int) -> CellFigures:
    """Figures of which a mixture reads the neighbours alone, as an index gives them."""
    labels = np.argsort(found, axis=1, kind="stable")[:, :count]
    none = np.full(len(found), np.nan)
    return CellFigures(
        none, none, none, rank_neighbours(labels, relevance),
        labels, np.take_along_axis(found, labels, 1).astype(np.float32),
    )  # fmt: skip


def curve(space: str, farthest: float) -> Calibration:
    """Constant at both ends, where equal scores are ranked by distance."""
    return Calibration(
        query_space=SPACE, gallery_space=space, origin="native", items=ITEMS,
        distances=(0.4 * farthest, 0.6 * farthest, farthest), probabilities=(0.9, 0.5, 0.1),
    )  # fmt: skip


@pytest.mark.parametrize("share", [0, 0.3, 1])
@pytest.mark.parametrize("metrics", [("l2", "cosine"), ("cosine", "cosine")])
def test_a_mixture_is_ranked_by_scores(share: float, metrics: tuple[Metric, Metric]) -> None:
    """Each query sorts every item by (score, distance, position), one by one."""
    rng = np.random.default_rng(5)
    labels = np.arange(ITEMS) % 6
    centres = rng.normal(size=(6, 8))
    found = []
    for metric in metrics:
        items = centres[labels] + rng.normal(size=(ITEMS, 8))
        queries = items[:QUERIES] + rng.normal(size=(QUERIES, 8))
        found.append(distances(queries.astype(np.float32), items.astype(np.float32), metric))
    relevance = Relevance(
        [np.flatnonzero(labels == labels[row]) for row in range(QUERIES)],
        [np.array([row]) for row in range(QUERIES)],
    )
    curves = [
        curve(space, float(one.mean())) for space, one in zip((OTHER, SPACE), found, strict=True)
    ]
    replaced = rng.random(ITEMS) < share
    cells = tuple(cell(one, relevance, ITEMS) for one in found)
    mixed = rank_mixture((cells[0], cells[1]), (curves[0], curves[1]), replaced, relevance)
    for row in range(QUERIES):
        keys = []
        for item in range(ITEMS):
            kind = int(replaced[item])
            distance = np.float32(found[kind][row, item])
            ends = curves[kind]
            score = np.interp(distance, ends.distances, ends.probabilities)
            keys.append((-score, distance, item))
        order = [item for _, _, item in sorted(keys)]
        assert mixed.neighbours[row, :ITEMS].tolist() == order
        assert (mixed.neighbours[row, ITEMS:] == -1).all()
        others = [item for item in order if item != row]
        hits = [rank for rank, item in enumerate(others, 1) if labels[item] == labels[row]]
        expected = np.mean([(n + 1) / rank for n, rank in enumerate(hits)])
        assert mixed.map[row] == pytest.approx(expected)
        assert mixed.cmc1[row] == (hits[0] == 1)


def test_missing_neighbours_are_no_hits() -> None:
    """An index gives fewer than all items; what it leaves out counts as not found."""
    relevance = Relevance([np.array([2])], [np.array([], np.int64)])
    first, second = np.array([[0.1, 0.2, 0.3]]), np.array([[0.3, 0.2, 0.1]])
    cells = cell(first, relevance, 2), cell(second, relevance, 2)
    curves = curve(OTHER, 1.0), curve(SPACE, 1.0)
    mixed = rank_mixture(cells, curves, np.array([False, True, False]), relevance)
    assert mixed.neighbours.tolist() == [[0, 1, -1, -1]]
    assert mixed.map.tolist() == [0.0]
