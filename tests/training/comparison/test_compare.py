"""compare.py in small: few digits, few epochs, the whole way from images to the claims."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from metrics.ranking import rank, same_label
from metrics.retrieval import average_precision, mean
from release.errors import ConfigurationError, InvalidInputError
from training.compare import compare
from training.comparison.catalogue import GROUPS, rows_of
from training.comparison.cells import Cells, evaluation, read_cells, write_cells
from training.comparison.claims import CLAIMS, Claim, judge
from training.comparison.data import link, train_and_test, with_label_noise, write_digits
from training.comparison.presets import (
    CIFAR100,
    CIFAR100_CPU,
    DIGITS,
    PRESETS,
    folder_preset,
    preset_named,
)
from training.comparison.recipe import Place
from training.comparison.results import Comparison, as_json, as_markdown, points
from training.comparison.work import do, levels
from training.config_file import parse_config
from training.data import list_images

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


def place(tmp_path: Path, split: int = 0) -> Place:
    return Place(DIGITS, DIGITS.splits[split], 0, tmp_path / "data", tmp_path / "runs")


def test_every_row_is_a_configuration_that_training_accepts(tmp_path: Path) -> None:
    for preset in PRESETS.values():
        for split in preset.splits:
            here = Place(preset, split, 0, tmp_path / "data", tmp_path / "runs")
            wanted = preset.groups if preset is not DIGITS else tuple(GROUPS)
            folders: dict[Path, object] = {}
            for row in rows_of(here, wanted):
                for run in row.runs:
                    parse_config(dict(run.values), str(run.folder))
                    # One folder, one configuration.
                    assert folders.setdefault(run.folder, run.values) == run.values


def test_a_run_comes_after_all_that_it_reads(tmp_path: Path) -> None:
    here = place(tmp_path)
    seen: set[Path] = set()
    for level in levels([(here, rows_of(here, tuple(GROUPS)))]):
        for run in level:
            assert run.folder not in seen
            assert {needed.folder for needed in run.needs} <= seen
        seen |= {run.folder for run in level}
    assert len(seen) > 60


def test_rivals_start_from_the_same_seed_and_seeds_differ(tmp_path: Path) -> None:
    rows = {row.name: row for row in rows_of(place(tmp_path), tuple(GROUPS))}
    assert rows["bct"].new.values["seed"] == rows["independent"].new.values["seed"]
    assert rows["bct"].old == rows["dmu"].old == rows["fct_simclr"].old
    other = replace(place(tmp_path), seed=1)
    seeds = {row.new.values["seed"] for row in rows_of(other, ("bct_family",))}
    assert seeds.isdisjoint({row.new.values["seed"] for row in rows.values()})


def test_new_models_go_on_from_one_shared_warm_up(tmp_path: Path) -> None:
    split = CIFAR100_CPU.splits[0]
    here = Place(CIFAR100_CPU, split, 0, tmp_path / "data", tmp_path / "runs")
    rows = rows_of(here, ("core",))
    new = {row.new.folder: row.new for row in rows}
    assert {folder.name for folder in new} == {"new", "bct", "bct_sys", "unibct", "dmu"}
    assert len({run.values["init"] for run in new.values()}) == 1
    assert {run.values["epochs"] for run in new.values()} == {6}
    # The old model has nothing to share.
    assert "init" not in rows[0].old.values and rows[0].old.values["epochs"] == 10
    assert "init" not in rows_of(place(tmp_path), ("bct",))[0].new.values


def test_claims_name_rows_that_exist(tmp_path: Path) -> None:
    names = {row.name for row in rows_of(place(tmp_path), tuple(GROUPS))}
    for claim in CLAIMS:
        assert {claim.better[0], claim.worse[0]} <= names, claim.text
    assert len({claim.text for claim in CLAIMS}) == len(CLAIMS)


def test_a_claim_is_judged_over_paired_seeds() -> None:
    rng = np.random.default_rng(0)
    base = [rng.random(200) for _ in range(3)]

    def row(gain: float) -> list[Cells]:
        return [Cells({"new/old": {"map": values + gain}}, {}) for values in base]

    rows = {"a": row(0.01), "b": row(0.0)}
    claims = [
        Claim("a > b", ("a", "new/old"), ("b", "new/old")),
        Claim("b > a", ("b", "new/old"), ("a", "new/old")),
        Claim("a > c", ("a", "new/old"), ("c", "new/old")),
        Claim("a's other cell", ("a", "new/new"), ("b", "new/old")),
    ]
    judged = judge(claims, rows)
    assert set(judged) == {"a > b", "b > a"}
    assert judged["a > b"][1].verdict == "holds" and judged["b > a"][1].verdict == "fails"


def test_presets_are_the_protocols_they_say(tmp_path: Path) -> None:
    assert CIFAR100.embedder["backbone"] == "resnet50" and CIFAR100.embedder["embedding_dim"] == 128
    assert (CIFAR100.upgrade["epochs"], CIFAR100.upgrade["inner_dim"]) == (80, 2048)
    assert {split.name: (split.old, split.new) for split in CIFAR100_CPU.splits} == {
        "main": (50, 100),
        "unseen": (40, 80),
    }
    unseen = DIGITS.splits[1]
    assert (unseen.old, unseen.new, unseen.tested_first, unseen.tested_end) == (3, 7, 7, 10)
    photos = folder_preset(20)
    assert photos.splits[0].old == 10 and photos.splits[1].tested_first == 16


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown method 'bcd'; groups: core"):
        rows_of(place(tmp_path), ("bcd",))
    with pytest.raises(ConfigurationError, match="unknown data 'mnist'; known: digits"):
        preset_named("mnist")
    with pytest.raises(ConfigurationError, match="needs --images"):
        compare(CIFAR100_CPU, None, tmp_path, [0], ("core",), 1)
    with pytest.raises(ConfigurationError, match="no image folder"):
        compare(CIFAR100_CPU, tmp_path / "none", tmp_path, [0], ("core",), 1)
    with pytest.raises(InvalidInputError, match="at least 10 class folders"):
        folder_preset(9)


def test_methods_that_train_on_made_folders_make_them(tmp_path: Path, digits: Path) -> None:
    train_and_test(digits, tmp_path / "data", 0.4, 0)
    short = {kind: dict(values) for kind, values in SHORT.items()}
    here = replace(place(tmp_path), changes=short)
    do([(here, rows_of(here, ("noisy_unibct", "open-class:vanilla")))], 1)
    old = list_images(tmp_path / "data" / "open-class" / "old")
    new = list_images(tmp_path / "data" / "open-class" / "new")
    assert not set(old.class_names) & set(new.class_names)
    cells = read_cells(here.runs / "cells" / "open-class-vanilla.npz")
    assert cells is not None and set(cells.by_query) >= {"old/old", "new/old", "new/new"}
