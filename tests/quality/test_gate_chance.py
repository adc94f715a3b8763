"""How often the gate lets out a release that is no better: at most in 5 % of draws of classes."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from nobackfill.metrics.bootstrap import FEWEST_DECIDING_CLASSES
from nobackfill.metrics.ranking import Ints, Ranking, relevance_by_label
from nobackfill.metrics.retrieval import PerQuery, search_and_score
from nobackfill.quality.cells import parse_cell
from nobackfill.quality.gate import GainRow, decide_gate, gain_row
from nobackfill.quality.retrieval import CellFigures
from nobackfill.release.trust.trust import Publication
from tests.support.releases import draft

CLASSES, IMAGES, DIM = 300, 12, 12
TRIALS = 150
# Each of mAP and CMC-1 has 2.5 % on this side; both must be above 0.
MOST = 0.05


@dataclass(frozen=True)
class Pool:
    """Figures [classes, images] by old/old and by a release that gains 0 over all classes."""

    before: dict[str, PerQuery]
    served: dict[str, PerQuery]

    def row(self, drawn: Ints, images: list[Ints], *, labelled: bool = True) -> GainRow:
        """The gate's line on some images of the drawn classes."""
        labels = np.repeat(np.arange(len(drawn)), [len(some) for some in images])
        before, served = (
            measured(
                {
                    name: np.concatenate(
                        [values[of, some] for of, some in zip(drawn, images, strict=True)]
                    )
                    for name, values in figures.items()
                }
            )
            for figures in (self.before, self.served)
        )
        return gain_row(
            parse_cell("2/1>2"), parse_cell("1/1"), served, before, None,
            classes=labels if labelled else None, float32_only=False, has_text_queries=False,
        )  # fmt: skip


def measured(figures: dict[str, PerQuery]) -> CellFigures:
    none = np.empty((0, 0))
    return CellFigures(
        figures["cmc1"], figures["cmc5"], figures["map"],
        Ranking([], np.empty(0, np.int64)), none.astype(np.int64), none.astype(np.float32),
    )  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Pool:
    """Two models that are equally good and know different classes well. Searches are real, so the
    images of a class share their positives."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), IMAGES)
    centres = rng.normal(size=(CLASSES, DIM))[labels]
    own = np.arange(len(labels))
    relevance = relevance_by_label(labels, labels, own, own)
    found = []
    for _ in range(2):
        error = rng.lognormal(-0.5, 0.4, CLASSES)[labels, None]
        vectors = (centres + error * rng.normal(size=centres.shape)).astype(np.float32)
        figures = search_and_score(vectors, vectors, relevance)
        found.append({name: figures[name].reshape(CLASSES, IMAGES) for name in figures})
    before, served = found
    assert 0.2 < before["map"].mean() < 0.8
    return Pool(before, {f: served[f] - (served[f] - before[f]).mean() for f in served})


def passes(pool: Pool, classes: int, *, trials: int, labelled: bool = True) -> float:
    """The share of trials in which the gate lets the release out."""
    rng = np.random.default_rng(classes)
    every = np.arange(IMAGES)
    rows = (
        pool.row(rng.integers(CLASSES, size=classes), [every] * classes, labelled=labelled)
        for _ in range(trials)
    )
    return sum(row.passes for row in rows) / trials


@pytest.mark.parametrize("classes", [10, 20, 50, 100])
def test_a_release_that_is_no_better_seldom_passes(pool: Pool, classes: int) -> None:
    assert passes(pool, classes, trials=TRIALS) <= MOST


def test_queries_drawn_as_if_independent_let_it_out(pool: Pool) -> None:
    """The simulation sees the fault that drawing classes mends."""
    assert passes(pool, 20, trials=TRIALS // 3, labelled=False) > 2 * MOST


@pytest.mark.faults
@pytest.mark.parametrize("classes", [10, 20, 50, 100])
def test_nor_does_it_pass_by_classes_of_unequal_size(pool: Pool, classes: int) -> None:
    rng = np.random.default_rng(classes)
    rows = (
        pool.row(
            rng.integers(CLASSES, size=classes),
            [rng.permutation(IMAGES)[: rng.integers(2, IMAGES + 1)] for _ in range(classes)],
        )
        for _ in range(500)
    )
    assert sum(row.passes for row in rows) / 500 <= MOST


def test_few_classes_are_decided_for_themselves_and_the_verdict_says_so(
    pool: Pool, tmp_path: Path
) -> None:
    first = draft(tmp_path, 1).manifest
    second = draft(tmp_path, 2, [first]).manifest
    published = Publication({1: first}, frozenset())
    better = Pool(pool.before, {f: values + 0.2 for f, values in pool.before.items()})
    told = {}
    for count in (FEWEST_DECIDING_CLASSES - 1, FEWEST_DECIDING_CLASSES):
        row = better.row(np.arange(count), [np.arange(IMAGES)] * count)
        assert row.passes and row.map_gain.class_count == count
        told[count] = decide_gate(published, [row], second).detail
    assert told == {
        9: "decided for the 9 evaluated classes alone; evaluate 10 or more to decide for others",
        10: "",
    }
