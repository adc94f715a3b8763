"""Weights for both models: found where the two know different things, left out where one does."""

from collections.abc import Mapping

import numpy as np
import pytest

from nobackfill.metrics.distances import Metric, distances
from nobackfill.metrics.ranking import Relevance
from nobackfill.quality.cells import CellName
from nobackfill.quality.embedded import EmbeddedListing
from nobackfill.quality.retrieval import search_and_measure
from nobackfill.quality.route_evidence import QuerySet, measure_rank_fusion
from nobackfill.release.calibration import JointDistance
from nobackfill.release.manifest import RankFusionEvidence
from nobackfill.release.models import Upgraded
from nobackfill.vectors import Vectors

CELL = CellName(2, (1, 2))
ITEMS, DIM = 300, 12


class Given(EmbeddedListing):
    """Vectors of two releases, and those that were carried; the metric of either."""

    def __init__(
        self, old: Vectors, new: Vectors, carried: Vectors, metrics: Mapping[int, Metric]
    ) -> None:
        self._vectors, self._carried, self._metrics = {1: old, 2: new}, carried, metrics

    def native_vectors(self, release: int) -> Vectors:
        return self._vectors[release]

    def vectors_along(self, releases: tuple[int, ...], *, int8: bool = False) -> Upgraded:
        found = self._carried if len(releases) > 1 else self._vectors[releases[0]]
        return Upgraded(found, None, None)

    def metric(self, release: int) -> Metric:
        return self._metrics[release]


def asked(seed: int, *, old: float, carried: float, metrics: Mapping[int, Metric]) -> QuerySet:
    """Each query is an item's second view; models see what it is with errors of their own. The old
    space is ten times as large."""
    rng = np.random.default_rng(seed)

    def noisy(vectors: np.ndarray, error: float) -> Vectors:
        noise = rng.standard_normal(vectors.shape)
        return np.asarray(vectors + error * noise, np.float32)

    first, second = (rng.standard_normal((ITEMS, DIM)) for _ in range(2))
    new = np.concatenate([first, second], axis=1)
    queries = Given(10 * noisy(first, old), noisy(new, 0.5), noisy(new, 0.5), metrics)
    items = Given(10 * noisy(first, old), noisy(new, 0.5), noisy(new, carried), metrics)
    relevance = Relevance([np.array([row]) for row in range(ITEMS)], [np.array([], int)] * ITEMS)
    return QuerySet(queries, items, relevance)


def evidence(
    old: float, carried: float, metrics: Mapping[int, Metric]
) -> RankFusionEvidence | None:
    halves = [asked(seed, old=old, carried=carried, metrics=metrics) for seed in (0, 1)]
    return measure_rank_fusion(CELL, halves[0], halves[1], int8=False)


@pytest.mark.parametrize(
    "metrics", [{1: "l2", 2: "l2"}, {1: "cosine", 2: "cosine"}, {1: "cosine", 2: "l2"}]
)
def test_what_is_told_is_what_a_gallery_finds_by_the_weights(
    metrics: Mapping[int, Metric],
) -> None:
    found = evidence(0.7, 1.6, metrics)
    assert found is not None
    judged = asked(1, old=0.7, carried=1.6, metrics=metrics)
    joint = JointDistance(found.new, found.old, found.offset)
    apart = {
        release: distances(
            judged.queries.native_vectors(release),
            judged.items.vectors_along((1, 2) if release == 2 else (1,)).embedding,
            metrics[release],
        )
        for release in (1, 2)
    }
    # By hand: the rank of each query's own item among all.
    both = joint(apart[2], apart[1])
    ranks = (both < np.diagonal(both)[:, None]).sum(1)
    assert found.cmc1 == pytest.approx((ranks == 0).mean(), abs=0.004)
    assert found.map == pytest.approx((1 / (1 + ranks)).mean(), abs=0.004)
    for release in (1, 2):
        alone = search_and_measure(
            judged.queries.native_vectors(release),
            judged.items.vectors_along((1, 2) if release == 2 else (1,)).embedding,
            judged.relevance,
            metrics[release],
        )
        assert found.cmc1 > alone.cmc1.mean()
    assert min(found.map_gain_low, found.cmc1_gain_low) > 0


def test_a_model_that_knows_nothing_more_has_no_say() -> None:
    metrics: Mapping[int, Metric] = {1: "l2", 2: "l2"}
    # What was carried is what the new model makes.
    assert evidence(3.0, 0.5, metrics) is None


def test_to_stay_is_a_weight_of_none_for_the_new_model() -> None:
    metrics: Mapping[int, Metric] = {1: "l2", 2: "l2"}
    found = evidence(0.3, 50.0, metrics)
    assert found is not None
    assert found.new == 0
    assert found.old > 0
