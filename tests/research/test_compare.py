"""compare.py in small: few digits, few epochs, the whole way from images to the claims."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nobackfill.class_folders import list_images
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.metrics.ranking import rank, relevance_by_label
from nobackfill.metrics.retrieval import average_precision, mean_of_answerable
from nobackfill.research.catalogue import list_rows
from nobackfill.research.cells import Cells, Evaluation, read_cells, write_cells
from nobackfill.research.compare import compare
from nobackfill.research.images import (
    link_images,
    link_train_and_test,
    link_with_label_noise,
    write_digits,
)
from nobackfill.research.pages import results_page
from nobackfill.research.presets import DIGITS
from nobackfill.research.results import Results, cost_points, read_results, write_results
from nobackfill.research.rows import ComparisonPlace
from nobackfill.research.tasks import (
    list_tasks,
    make_features,
    measure_row,
    run_tasks,
    run_training,
)
from nobackfill.training.loop.loop import DivergedError

SHORT: Mapping[str, Mapping[str, object]] = {
    "embedder": {"epochs": 2, "batch_size": 16},
    "side_encoder": {"epochs": 3, "batch_size": 16},
    "upgrade": {"epochs": 3, "batch_size": 32, "views": 2},
}
WANTED = ("independent", "bct", "dmu", "affine", "residual_simclr")


FEW = replace(DIGITS, name="few")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 40 images of each digit."""
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder / "all")
    full_page = list_images(folder / "all")
    rows = np.concatenate([np.flatnonzero(full_page.labels == c)[:40] for c in range(10)])
    chosen = full_page.select(rows)
    link_images(chosen, folder / "few")
    return folder / "few"


def compared(out: Path, digits: Path) -> Results:
    return compare(FEW, digits, out, [0], WANTED, 1, SHORT)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> tuple[Path, Results]:
    """A comparison of one seed with a part of the digits."""
    out = tmp_path_factory.mktemp("compare")
    return out, compared(out, digits)


def untimed(results: Results) -> dict[str, object]:
    """The results without what a clock measured."""
    return results.model_dump(exclude={"costs"})


@pytest.mark.long
def test_a_comparison_needs_no_index() -> None:
    """Neither the compiled one nor the package hnswlib is there, as on a borrowed GPU."""
    program = """
import sys
for name in ("hnswlib", "nobackfill.gallery.search._native"):
    sys.modules[name] = None
import nobackfill.research.compare
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.long
def test_two_processes_find_what_one_does(
    small: tuple[Path, Results], digits: Path, tmp_path: Path
) -> None:
    names = ("bct", "residual_simclr")
    shared = compare(FEW, digits, tmp_path, [0], names, 2, SHORT)
    alone = small[1].main.rows
    assert set(shared.main.rows) == set(names)
    for name in names:
        assert shared.main.rows[name].cells["new/served"] == alone[name].cells["new/served"]


def test_an_upgrade_whose_features_are_made_computes_none(digits: Path, tmp_path: Path) -> None:
    """Neither of its training images nor of those held out."""
    link_train_and_test(digits, tmp_path / "data", 0.4, 0)
    place = ComparisonPlace(FEW, FEW.splits[0], 0, tmp_path / "data", tmp_path / "runs", SHORT)
    planned = list_tasks([(place, list_rows(place, ("residual_simclr",)))])
    cache = tmp_path / "runs" / "features"
    for task in planned:
        before = set(cache.glob("*"))
        if task.work is not measure_row:
            task.work(*task.arguments)
        new = set(cache.glob("*")) - before
        assert bool(new) == (task.work is make_features), task
    assert {task.work for task in planned} == {run_training, make_features, measure_row}


@pytest.mark.long
def test_a_training_that_fails_in_a_process_ends_the_comparison(
    digits: Path, tmp_path: Path
) -> None:
    changes = {**SHORT, "embedder": {**SHORT["embedder"], "lr": 1e30}}
    with pytest.raises(DivergedError):
        compare(FEW, digits, tmp_path, [0], ("independent",), 2, changes)
    assert not list(tmp_path.rglob("cells/*"))


def test_every_wanted_row_has_its_cells_on_both_splits(small: tuple[Path, Results]) -> None:
    _, results = small
    assert results.data == "few" and results.seeds == (0,)
    rows = results.main.rows
    for split in results.splits.values():
        assert set(split.rows) == set(WANTED)
        for name, row in split.rows.items():
            for cell in ("old/old", "new/old", "new/new", "new/served"):
                for figure in ("cmc1", "cmc5", "map"):
                    value, deviation = row.cells[cell][figure]
                    # One seed has no deviation.
                    assert 0 < value <= 1 and deviation is None, (name, cell, figure)
    # One old model for all rows, one new model for all but the compatible ones.
    assert len({row.mean("old/old", "map") for row in rows.values()}) == 1
    assert rows["affine"].cells["new/new"] == rows["independent"].cells["new/new"]
    assert rows["bct"].cells["new/new"] != rows["independent"].cells["new/new"]
    assert rows["bct"].cells["new/served"] == rows["bct"].cells["new/old"]
    assert rows["dmu"].cells["new/served"] != rows["dmu"].cells["new/old"]
    assert rows["dmu"].extras["weight_spread"] < 1.01
    assert "variance_ratio" in rows["residual_simclr"].extras
    # 32 numbers of the old embedding, 32 of side-information.
    assert results.costs["residual_simclr"].stored_bytes == 256
    for name, cost in results.costs.items():
        assert (cost.microseconds > 0) == (name in ("dmu", "affine", "residual_simclr")), name


def test_the_results_are_read_as_they_were_written(
    small: tuple[Path, Results], tmp_path: Path
) -> None:
    write_results(tmp_path / "r.json", small[1])
    assert read_results(tmp_path / "r.json") == small[1]
    (tmp_path / "r.json").write_text('{"data": "digits"}')
    with pytest.raises(InvalidInputError, match="expected results of compare"):
        read_results(tmp_path / "r.json")
    with pytest.raises(NotFoundError, match="does not exist"):
        read_results(tmp_path / "none.json")


def test_figures_by_class_range_are_those_of_the_whole(small: tuple[Path, Results]) -> None:
    """Digits 0-4 trained the old model, 5-9 did not: half of the queries each."""
    _, results = small
    for row in results.main.rows.values():
        for cell in ("new/new", "new/served"):
            parts = [row.cells[f"{cell}, {name} classes"]["map"][0] for name in ("known", "new")]
            assert sum(parts) / 2 == pytest.approx(row.cells[cell]["map"][0])
    for row in results.splits["unseen"].rows.values():
        assert not any("classes" in cell for cell in row.cells)


def test_what_is_kept_is_held_to_the_best_new_model_of_the_table(
    small: tuple[Path, Results],
) -> None:
    """Whichever row it is: a weak independent model makes no transform look whole."""
    _, results = small
    for split in results.splits.values():
        for figure in ("cmc1", "map"):
            reached = {name: row.cells["new/new"][figure][0] for name, row in split.rows.items()}
            best = max(reached.values())
            for row in split.rows.values():
                assert row.held_to[figure].value == best
                assert reached[row.held_to[figure].row] == best
                served = row.cells["new/served"][figure][0]
                assert row.extras[f"kept_{figure}"] == pytest.approx(served / best)
        for row in split.rows.values():
            old, served, new = (
                row.cells[c]["map"][0] for c in ("old/old", "new/served", "new/new")
            )
            best = row.held_to["map"].value
            assert row.extras["gap_closed"] == pytest.approx((served - old) / (best - old))
            assert row.extras["degradation"] == pytest.approx(1 - new / best)


def test_the_curve_and_the_table_tell_one_share_kept(small: tuple[Path, Results]) -> None:
    _, results = small
    shown = {point.name: point.kept_map for point in cost_points(results)}
    assert set(shown) == set(WANTED)
    lines = [line.split(" | ") for line in results_page(results).splitlines()]
    told = {line[0].removeprefix("| "): line[5] for line in lines if len(line) == 11}
    for name, row in results.main.rows.items():
        assert shown[name] == row.extras["kept_map"]
        kept = [f"{100 * row.extras[f'kept_{figure}']:.1f}" for figure in ("cmc1", "map")]
        assert told[name] == " / ".join(kept)


def test_one_seed_decides_no_claim(small: tuple[Path, Results]) -> None:
    _, results = small
    claims = results.main.claims
    incompatible = claims["independent models are incompatible"]
    for figure in ("cmc1", "map"):
        bounds = incompatible[figure].bounds
        assert bounds is not None and bounds[0] > 0
        assert incompatible[figure].verdict == "undecided"
    assert "BCT loses new/new" in results.splits["unseen"].claims
    assert "FCT with SimCLR > the strongest BCT" not in claims
    text = results_page(results)
    assert "±" not in text and "One seed (0)" in text
    for name in WANTED:
        assert f"| {name} |" in text
    assert "independent models are incompatible | undecided |" in text


def test_rows_of_one_seed_stand_beside_those_of_two(
    small: tuple[Path, Results], digits: Path
) -> None:
    results = compare(
        FEW, digits, small[0], [0, 1], ("independent",), 1, SHORT, first_seed_names=("bct",)
    )
    rows = results.main.rows
    assert {name: row.seeds for name, row in rows.items()} == {"independent": 2, "bct": 1}
    # Of the first seed, as bct's own figures are.
    assert rows["bct"].held_to["map"].value != rows["independent"].held_to["map"].value
    text = results_page(results)
    assert "| bct (1 seed) |" in text and "| independent |" in text
    assert results.main.claims["BCT loses new/new"]["map"].seeds == 1


def test_what_is_done_is_not_done_again(small: tuple[Path, Results], digits: Path) -> None:
    out, results = small
    run = out / "few" / "seed-0" / "main" / "bct" / "checkpoint.safetensors"
    kept = out / "few" / "seed-0" / "main" / "cells" / "bct.npz"
    before = run.stat().st_mtime_ns, kept.stat().st_mtime_ns
    again = compared(out, digits)
    assert (run.stat().st_mtime_ns, kept.stat().st_mtime_ns) == before
    assert untimed(again) == untimed(results)


def test_a_lost_checkpoint_is_trained_again_to_the_same_cells(
    small: tuple[Path, Results], digits: Path
) -> None:
    out, results = small
    shutil.rmtree(out / "few" / "seed-0" / "main" / "bct")
    again = compared(out, digits)
    assert untimed(again) == untimed(results)


def test_cells_are_measured_again_when_a_model_changed(tmp_path: Path) -> None:
    values = np.array([1.0, np.nan, 0.25])
    cells = Cells({"new/old": {"map": values}}, {"cka": 0.5}, np.array(["a", "b", "b"]))
    write_cells(tmp_path / "row.npz", cells, "digest a")
    kept = read_cells(tmp_path / "row.npz", "digest a")
    assert kept is not None and kept.row_figures == {"cka": 0.5}
    np.testing.assert_array_equal(kept.figures_by_query["new/old"]["map"], values)
    assert read_cells(tmp_path / "row.npz", "digest b") is None
    assert read_cells(tmp_path / "other.npz") is None
    # Versions that kept no classes cannot be judged: the row is measured again.
    with np.load(tmp_path / "row.npz") as arrays:
        old: dict[str, Any] = {name: arrays[name] for name in arrays.files if name != "classes"}
    np.savez(tmp_path / "row.npz", **old)
    assert read_cells(tmp_path / "row.npz", "digest a") is None


def test_queries_do_not_find_themselves(tmp_path: Path, digits: Path) -> None:
    link_train_and_test(digits, tmp_path / "data", 0.4, 0)
    listing = list_images(tmp_path / "data" / "test")
    test = Evaluation(listing, "cosine", tmp_path)
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(len(listing), 4))
    ours = mean_of_answerable(average_precision(rank(vectors, vectors, test.relevance)))
    with_self = relevance_by_label(listing.labels, listing.labels)
    assert ours < mean_of_answerable(average_precision(rank(vectors, vectors, with_self)))


def test_train_and_test_images_are_apart_and_change_with_the_seed(
    tmp_path: Path, digits: Path
) -> None:
    parts = []
    for seed in (0, 1):
        link_train_and_test(digits, tmp_path / f"data-{seed}", 0.4, seed)
        train, test = (
            {Path(path).name for path in list_images(tmp_path / f"data-{seed}" / part).paths}
            for part in ("train", "test")
        )
        assert not train & test and len(train | test) == 400
        assert len(test) == 160
        parts.append(test)
    assert parts[0] != parts[1]


def test_label_noise_moves_a_fifth_of_the_images_to_wrong_classes(
    tmp_path: Path, digits: Path
) -> None:
    link_with_label_noise(digits, tmp_path / "noisy", 0.2, 0)
    noisy = list_images(tmp_path / "noisy")
    assert len(noisy) == 400 and len(noisy.class_names) == 10
    wrong = sum(
        Path(path).name.split("__")[0] != noisy.class_names[label]
        for path, label in zip(noisy.paths, noisy.labels, strict=True)
    )
    assert wrong == round(0.2 * 400)


@pytest.mark.long
def test_methods_that_train_on_made_folders_make_them(tmp_path: Path, digits: Path) -> None:
    link_train_and_test(digits, tmp_path / "data", 0.4, 0)
    short = {kind: dict(values) for kind, values in SHORT.items()}
    here = ComparisonPlace(DIGITS, DIGITS.splits[0], 0, tmp_path / "data", tmp_path / "runs", short)
    run_tasks([(here, list_rows(here, ("noisy_unibct", "open-class:vanilla")))], 1)
    old = list_images(tmp_path / "data" / "open-class" / "old")
    new = list_images(tmp_path / "data" / "open-class" / "new")
    assert not set(old.class_names) & set(new.class_names)
    cells = read_cells(here.runs_folder / "cells" / "open-class-vanilla.npz")
    assert cells is not None and set(cells.figures_by_query) >= {"old/old", "new/old", "new/new"}
