"""compare.py in small: few digits, few epochs, the whole way from images to the claims."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nobackfill.class_folders import list_images
from nobackfill.metrics.ranking import rank, same_label
from nobackfill.metrics.retrieval import average_precision, mean
from nobackfill.training.cli.compare import compare
from nobackfill.training.comparison.catalogue import rows_of
from nobackfill.training.comparison.cells import Cells, evaluation, read_cells, write_cells
from nobackfill.training.comparison.data import link, train_and_test, with_label_noise, write_digits
from nobackfill.training.comparison.presets import DIGITS
from nobackfill.training.comparison.recipe import Place
from nobackfill.training.comparison.results import Comparison, as_json, as_markdown, points
from nobackfill.training.comparison.scheduler import do
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
    whole = list_images(folder / "all")
    rows = np.concatenate([np.flatnonzero(whole.labels == c)[:40] for c in range(10)])
    chosen = whole.select(rows)
    link(chosen, [path.split("/")[0] for path in chosen.paths], folder / "few")
    return folder / "few"


def compared(out: Path, digits: Path) -> Comparison:
    return compare(FEW, digits, out, [0], WANTED, 1, SHORT)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> tuple[Path, Comparison]:
    """A comparison of one seed with a part of the digits."""
    out = tmp_path_factory.mktemp("compare")
    return out, compared(out, digits)


def untimed(comparison: Comparison) -> dict[str, object]:
    """The comparison as JSON, without what a clock measured."""
    costs = {name: replace(cost, microseconds=0.0) for name, cost in comparison.costs.items()}
    return as_json(replace(comparison, costs=costs))


def test_two_processes_find_what_one_does(
    small: tuple[Path, Comparison], digits: Path, tmp_path: Path
) -> None:
    shared = compare(FEW, digits, tmp_path, [0], ("bct", "residual_simclr"), 2, SHORT)
    alone, cells = as_json(small[1])["cells"], as_json(shared)["cells"]
    assert isinstance(alone, dict) and isinstance(cells, dict)
    assert {name: row["new/served"] for name, row in cells.items()} == {
        name: alone[name]["new/served"] for name in ("bct", "residual_simclr")
    }


def test_a_training_that_fails_in_a_process_ends_the_comparison(
    digits: Path, tmp_path: Path
) -> None:
    changes = {**SHORT, "embedder": {**SHORT["embedder"], "lr": 1e30}}
    with pytest.raises(DivergedError):
        compare(FEW, digits, tmp_path, [0], ("independent",), 2, changes)
    assert not list(tmp_path.rglob("cells/*"))


def test_every_wanted_row_has_its_cells_on_both_splits(small: tuple[Path, Comparison]) -> None:
    _, comparison = small
    told = as_json(comparison)
    assert json.loads(json.dumps(told)) == told
    assert told["data"] == "few" and told["seeds"] == 1
    cells = told["cells"]
    assert isinstance(cells, dict) and set(cells) == set(WANTED)
    for name, row in cells.items():
        for part in (row, row["unseen"]):
            for cell in ("old/old", "new/old", "new/new", "new/served"):
                for figure in ("cmc1", "cmc5", "map"):
                    value, std = part[cell][figure]
                    assert 0 < value <= 1 and std == 0, (name, cell, figure)
    # One old model for all rows, one new model for all but the compatible ones.
    assert len({row["old/old"]["map"][0] for row in cells.values()}) == 1
    assert cells["affine"]["new/new"] == cells["independent"]["new/new"]
    assert cells["bct"]["new/new"] != cells["independent"]["new/new"]
    assert cells["bct"]["new/served"] == cells["bct"]["new/old"]
    assert cells["dmu"]["new/served"] != cells["dmu"]["new/old"]
    assert cells["dmu"]["extras"]["weight_spread"] < 1.01
    assert "variance_ratio" in cells["residual_simclr"]["extras"]
    # 32 numbers of the old embedding, 32 of side-information.
    assert cells["residual_simclr"]["cost"]["stored"] == 256
    for name, row in cells.items():
        transformed = name in ("dmu", "affine", "residual_simclr")
        assert (row["cost"]["microseconds"] > 0) == transformed, name


def test_figures_by_class_range_are_those_of_the_whole(small: tuple[Path, Comparison]) -> None:
    """Digits 0-4 trained the old model, 5-9 did not: half of the queries each."""
    _, comparison = small
    for runs in comparison.rows["main"].values():
        by_query = runs[0].by_query
        for cell in ("new/new", "new/served"):
            parts = [by_query[f"{cell}, {name} classes"]["map"] for name in ("known", "new")]
            assert [np.isfinite(part).sum() for part in parts] == [80, 80]
            assert sum(mean(part) for part in parts) / 2 == pytest.approx(
                mean(by_query[cell]["map"])
            )
    for runs in comparison.rows["unseen"].values():
        assert not any("classes" in cell for cell in runs[0].by_query)


def test_the_curve_shows_every_row_of_the_shared_old_model(small: tuple[Path, Comparison]) -> None:
    _, comparison = small
    shown = {point.name: point for point in points(comparison)}
    assert set(shown) == set(WANTED)
    served = mean(comparison.rows["main"]["affine"][0].by_query["new/served"]["map"])
    whole = mean(comparison.rows["main"]["independent"][0].by_query["new/new"]["map"])
    assert shown["affine"].kept == pytest.approx(served / whole)


def test_one_share_kept_is_told_everywhere(small: tuple[Path, Comparison]) -> None:
    """Compatible models are held to the independent new/new, never to their own."""
    _, comparison = small
    rows = comparison.rows["main"]

    def of(name: str, cell: str) -> float:
        return mean(rows[name][0].by_query[cell]["map"])

    whole = of("independent", "new/new")
    cells = as_json(comparison)["cells"]
    assert isinstance(cells, dict)
    lines = [line.split(" | ") for line in as_markdown(comparison).splitlines()]
    kept = {line[0].removeprefix("| "): line[5] for line in lines if len(line) == 10}
    for name in WANTED:
        old, served, extras = of(name, "old/old"), of(name, "new/served"), cells[name]["extras"]
        assert extras["share_kept"] == pytest.approx(served / whole)
        assert extras["gap_closed"] == pytest.approx((served - old) / (whole - old))
        assert extras["degradation"] == pytest.approx(1 - of(name, "new/new") / whole)
        assert kept[name] == f"{100 * served / whole:.1f}"
    assert cells["bct"]["extras"]["degradation"] != 0 == cells["affine"]["extras"]["degradation"]


def test_the_claims_are_judged_where_their_rows_are(small: tuple[Path, Comparison]) -> None:
    _, comparison = small
    claims = as_json(comparison)["claims"]
    assert isinstance(claims, dict)
    incompatible = claims["independent models are incompatible"]
    assert incompatible["holds"] is True and incompatible["difference"][1] > 0
    assert "BCT loses new/new (unseen classes)" in claims
    assert "FCT with SimCLR > BCT" not in claims
    text = as_markdown(comparison)
    for name in WANTED:
        assert f"| {name} |" in text
    assert "independent models are incompatible | holds |" in text


def test_what_is_done_is_not_done_again(small: tuple[Path, Comparison], digits: Path) -> None:
    out, comparison = small
    run = out / "few" / "seed-0" / "main" / "bct" / "checkpoint.safetensors"
    kept = out / "few" / "seed-0" / "main" / "cells" / "bct.npz"
    before = run.stat().st_mtime_ns, kept.stat().st_mtime_ns
    again = compared(out, digits)
    assert (run.stat().st_mtime_ns, kept.stat().st_mtime_ns) == before
    assert untimed(again) == untimed(comparison)


def test_a_lost_checkpoint_is_trained_again_to_the_same_cells(
    small: tuple[Path, Comparison], digits: Path
) -> None:
    out, comparison = small
    shutil.rmtree(out / "few" / "seed-0" / "main" / "bct")
    again = compared(out, digits)
    assert untimed(again) == untimed(comparison)


def test_cells_are_measured_again_when_a_model_changed(tmp_path: Path) -> None:
    values = np.array([1.0, np.nan, 0.25])
    cells = Cells({"new/old": {"map": values}}, {"cka": 0.5})
    write_cells(tmp_path / "row.npz", cells, "digest a")
    kept = read_cells(tmp_path / "row.npz", "digest a")
    assert kept is not None and kept.extras == {"cka": 0.5}
    np.testing.assert_array_equal(kept.by_query["new/old"]["map"], values)
    assert read_cells(tmp_path / "row.npz", "digest b") is None
    assert read_cells(tmp_path / "other.npz") is None


def test_queries_do_not_find_themselves(tmp_path: Path, digits: Path) -> None:
    train_and_test(digits, tmp_path / "data", 0.4, 0)
    listing = list_images(tmp_path / "data" / "test")
    test = evaluation(listing, "cosine", tmp_path)
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(len(listing), 4))
    ours = mean(average_precision(rank(vectors, vectors, test.relevance)))
    with_self = same_label(listing.labels, listing.labels)
    assert ours < mean(average_precision(rank(vectors, vectors, with_self)))


def test_train_and_test_images_are_apart_and_change_with_the_seed(
    tmp_path: Path, digits: Path
) -> None:
    parts = []
    for seed in (0, 1):
        train_and_test(digits, tmp_path / f"data-{seed}", 0.4, seed)
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
    with_label_noise(digits, tmp_path / "noisy", 0.2, 0)
    noisy = list_images(tmp_path / "noisy")
    assert len(noisy) == 400 and len(noisy.class_names) == 10
    wrong = sum(
        Path(path).name.split("__")[0] != noisy.class_names[label]
        for path, label in zip(noisy.paths, noisy.labels, strict=True)
    )
    assert wrong == round(0.2 * 400)


def test_methods_that_train_on_made_folders_make_them(tmp_path: Path, digits: Path) -> None:
    train_and_test(digits, tmp_path / "data", 0.4, 0)
    short = {kind: dict(values) for kind, values in SHORT.items()}
    here = Place(DIGITS, DIGITS.splits[0], 0, tmp_path / "data", tmp_path / "runs", short)
    do([(here, rows_of(here, ("noisy_unibct", "open-class:vanilla")))], 1)
    old = list_images(tmp_path / "data" / "open-class" / "old")
    new = list_images(tmp_path / "data" / "open-class" / "new")
    assert not set(old.class_names) & set(new.class_names)
    cells = read_cells(here.runs / "cells" / "open-class-vanilla.npz")
    assert cells is not None and set(cells.by_query) >= {"old/old", "new/old", "new/new"}
