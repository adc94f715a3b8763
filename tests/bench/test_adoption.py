"""`bench.adoption` on made models: what its tables say is what a slow look finds."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.adoption import scanning
from bench.adoption.covering import coverage_rows
from bench.adoption.curves import (
    class_curves,
    class_ranking_figures,
    curve_rows,
    same_class_relevance,
)
from bench.adoption.texts import EmbeddedDocuments
from bench.adoption.trial import Trial
from bench.adoption.valley import class_valley_rows
from nobackfill.adopt.judgement import query_item_distances
from nobackfill.metrics.ranking import relevance_by_label
from nobackfill.metrics.retrieval import search_and_score
from tests.adopt.made import kinds

PAIRS, REST = 120, 140


@pytest.fixture(scope="module")
def trial() -> Trial:
    made = kinds(PAIRS + REST, PAIRS + REST)
    order = np.argsort(made.answers)
    old = EmbeddedDocuments(made.old, made.queries_old[order])
    new = EmbeddedDocuments(made.new, made.queries_new[order])
    labels = np.array([f"class {row % 6}" for row in range(PAIRS + REST)])
    return Trial("made", old, new, PAIRS, 60, labels)


def test_the_truth_is_that_of_items_that_chose_nothing(trial: Trial) -> None:
    rows = trial.verdict_rows()
    assert [str(row["way"]).split(" (")[0] for row in rows] == [
        "stay", "query adapter", "map", "both", "lazily", "re-embed",
    ]  # fmt: skip
    assert sum(row["verdict"] == "named" for row in rows) == 1
    assert sum(row["truth"] == "best" for row in rows) == 1
    for way, side in ((0, trial.old), (-1, trial.new)):
        near = side.titles[PAIRS : PAIRS + 60] @ side.bodies[PAIRS:].T
        found = (near.argmax(1) == np.arange(60)).mean()
        assert rows[way]["R@1"] == pytest.approx(100 * found)
        assert trial.labels is not None
        labels, own = trial.labels[PAIRS:], np.arange(REST)
        asked = side.bodies[PAIRS:]
        slow = search_and_score(
            asked, asked, relevance_by_label(labels, labels, own, own), "cosine"
        )
        assert rows[way]["class mAP"] == pytest.approx(100 * slow["map"].mean(), abs=1e-3)
        assert rows[way]["class CMC-1"] == pytest.approx(100 * slow["cmc1"].mean(), abs=1e-3)


def test_curves_end_where_the_ways_are(trial: Trial) -> None:
    truth = trial.true_figures
    for row in trial.reembedding_rows():
        if row["ranked by"] == "distance":
            figure = str(row["figure"])
            assert row["0 %"] == pytest.approx(100 * truth["map"][figure].mean())
            assert row["100 %"] == pytest.approx(100 * truth["re-embed"][figure].mean())
    found = class_valley_rows(trial)
    ranked = {row["ranked by"] for row in found}
    assert ranked == {"distance", "scale", "nobackfill.serve"}
    # A line keeps the order within an origin.
    for share in ("0 %", "100 %"):
        by_distance, by_scale = (
            [row[share] for row in found if row["ranked by"] == one]
            for one in ("distance", "scale")
        )
        assert by_distance == pytest.approx(by_scale, abs=0.5)


def test_a_valley_is_told_from_the_lower_end_with_its_interval() -> None:
    rng = np.random.default_rng(0)
    items = rng.normal(size=(80, 8)).astype(np.float32)
    labels = np.array([f"class {row % 4}" for row in range(80)])
    block = query_item_distances(items, items)
    same = class_curves(block, block, labels)
    alone = class_ranking_figures(block, same_class_relevance(labels))
    assert np.allclose(same["class mAP"], alone["class mAP"])
    (flat, *_) = curve_rows("pair", "distance", same, labels)
    assert flat["valley"] == 0
    # Of nothing that compares: in the middle it is worse than at either end.
    values = np.ones((11, 200))
    values[5, :50] = 0
    (row,) = curve_rows("pair", "distance", {"R@1": values}, None)
    assert row["valley"] == pytest.approx(25)
    low, high = map(float, str(row["95 %"]).split(" to "))
    assert 15 < low < 25 < high < 35


def test_a_sample_is_set_beside_chance(trial: Trial) -> None:
    rows = coverage_rows(trial, 60)
    assert [row["figure"] for row in rows] == ["R@1", "R@10", "agreement@10"]
    for row in rows:
        random, spread, gain = (float(str(row[name])) for name in ("random", "sample", "gain"))
        assert 0 < random < 100
        assert gain == pytest.approx(spread - random)


@pytest.mark.long
def test_the_memory_of_a_verdict_is_measured_on_a_gallery(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scanning.main(rows=3000, dim=8, pairs=60, queries=30, folder=tmp_path)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["command"] for row in rows] == ["inspect", "sample", "fit"]
    assert all(row["rows"] == 3000 and row["MiB"] > 20 and row["seconds"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())
