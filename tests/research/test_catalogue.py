"""The catalogue: which rows there are, what they train and in which order, what they claim."""

from dataclasses import replace
from pathlib import Path

import pytest

from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.research.catalogue import GROUPS, list_rows
from nobackfill.research.claims import CLAIMS
from nobackfill.research.compare import compare
from nobackfill.research.presets import (
    CIFAR100,
    CIFAR100_CPU,
    DIGITS,
    PRESETS,
    folder_preset,
    preset_named,
)
from nobackfill.research.rows import ComparisonPlace, RowName, TrainingRun, upper_bound_key
from nobackfill.research.tasks import FeatureViews, list_tasks, make_features, run_training
from nobackfill.training.config import parse_config
from nobackfill.training.loop.run import CHECKPOINT


def place(tmp_path: Path, split: int = 0) -> ComparisonPlace:
    return ComparisonPlace(DIGITS, DIGITS.splits[split], 0, tmp_path / "data", tmp_path / "runs")


def test_every_row_is_a_configuration_that_training_accepts(tmp_path: Path) -> None:
    for preset in PRESETS.values():
        for split in preset.splits:
            here = ComparisonPlace(preset, split, 0, tmp_path / "data", tmp_path / "runs")
            wanted = preset.row_groups if preset is not DIGITS else tuple(GROUPS)
            folders: dict[Path, object] = {}
            for row in list_rows(here, wanted):
                for run in row.runs:
                    parse_config(dict(run.config_values), str(run.folder))
                    # One folder, one configuration.
                    assert folders.setdefault(run.folder, run.config_values) == run.config_values


def test_a_run_comes_after_all_that_it_reads(tmp_path: Path) -> None:
    here = place(tmp_path)
    seen: set[object] = set()
    for task in list_tasks([(here, list_rows(here, tuple(GROUPS)))]):
        assert task.prerequisites <= seen
        assert not task.outputs & seen
        seen |= task.outputs
    assert len(seen) > 60


def test_features_that_upgrades_share_are_made_once(tmp_path: Path) -> None:
    """In one task where they look at the same pictures: of several views, or of mixed ones."""
    here = place(tmp_path)
    names = ("affine", "fct_simclr", "residual_none", "residual_simclr", "dmu_residual")
    planned = list_tasks([(here, list_rows(here, names))])
    upgrades = {
        task.arguments[0].folder.name.removeprefix("upgrade-"): task.prerequisites
        for task in planned
        if task.work is run_training and isinstance(task.arguments[0], TrainingRun)
        if task.arguments[0].config_values["kind"] == "upgrade"
    }
    assert set(upgrades) == set(names)
    read = {name: _features(prerequisites) for name, prerequisites in upgrades.items()}
    assert all(len(views) == 1 for views in read.values())
    assert read["affine"] == read["fct_simclr"] != read["residual_none"]
    assert read["residual_none"] == read["residual_simclr"] == read["dmu_residual"]
    making = [task for task in planned if task.work is make_features]
    assert [_features(task.outputs) for task in making] == [read["affine"], read["residual_none"]]
    # Of a model that only one of them reads, too.
    assert (
        here.runs_folder / "dmu" in making[1].prerequisites
        and here.runs_folder / "side-simclr" in making[0].prerequisites
    )


def test_features_of_another_place_are_others(tmp_path: Path) -> None:
    """Two seeds look at the same pictures by different models."""
    here = place(tmp_path)
    other = replace(here, runs_folder=tmp_path / "others")
    planned = list_tasks([(p, list_rows(p, ("affine",))) for p in (here, other)])
    assert len([task for task in planned if task.work is make_features]) == 2


def test_what_is_trained_reads_no_features(tmp_path: Path) -> None:
    here = place(tmp_path)
    rows = list_rows(here, ("affine", "residual_simclr"))
    for row in rows:
        for run in row.runs:
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / CHECKPOINT).touch()
    assert all(
        not _features(task.prerequisites | task.outputs) for task in list_tasks([(here, rows)])
    )


def _features(names: frozenset[Path | FeatureViews]) -> set[FeatureViews]:
    return {one for one in names if isinstance(one, FeatureViews)}


def test_rivals_start_from_the_same_seed_and_seeds_differ(tmp_path: Path) -> None:
    rows = {row.name: row for row in list_rows(place(tmp_path), tuple(GROUPS))}
    assert (
        rows["bct"].new_run.config_values["seed"]
        == rows["independent"].new_run.config_values["seed"]
    )
    assert rows["bct"].old_run == rows["dmu"].old_run == rows["fct_simclr"].old_run
    other = replace(place(tmp_path), seed=1)
    seeds = {row.new_run.config_values["seed"] for row in list_rows(other, ("bct_family",))}
    assert seeds.isdisjoint({row.new_run.config_values["seed"] for row in rows.values()})


@pytest.mark.parametrize("kind", ["alternate", "mixup"])
def test_an_alternate_old_model_is_the_old_one_but_for_its_seed(tmp_path: Path, kind: str) -> None:
    here = place(tmp_path)
    old = dict(here.embedder("old", classes=5, role="old").config_values)
    alternate = dict(here.side_encoder("side", classes=5, kind=kind).config_values)
    assert alternate.pop("side_info_dim") == old.pop("embedding_dim")
    different = {key for key in old | alternate if old.get(key) != alternate.get(key)}
    assert different == {"kind", "run_dir", "seed", "side_info"}


def test_multi_crop_is_a_row_where_the_presets_own_simclr_has_none(tmp_path: Path) -> None:
    crops = list_rows(place(tmp_path), ["fct_multicrop"])[0].side_run
    plain = list_rows(place(tmp_path), ["fct_simclr"])[0].side_run
    assert crops is not None and plain is not None
    changed = {
        key
        for key in crops.config_values
        if crops.config_values[key] != plain.config_values.get(key)
    }
    assert changed == {"run_dir", "small_crops"}
    with pytest.raises(ConfigurationError, match="fct_multicrop"):
        list_rows(replace(place(tmp_path), preset=PRESETS["cifar100"]), ["fct_multicrop"])


def test_new_models_go_on_from_one_shared_warm_up(tmp_path: Path) -> None:
    split = CIFAR100_CPU.splits[0]
    here = ComparisonPlace(CIFAR100_CPU, split, 0, tmp_path / "data", tmp_path / "runs")
    rows = list_rows(here, ("core",))
    new = {row.new_run.folder: row.new_run for row in rows}
    assert {folder.name for folder in new} == {"new", "bct", "bct_sys", "unibct", "dmu"}
    assert len({run.config_values["init"] for run in new.values()}) == 1
    assert {run.config_values["epochs"] for run in new.values()} == {5}
    # The old model has nothing to share.
    assert (
        "init" not in rows[0].old_run.config_values
        and rows[0].old_run.config_values["epochs"] == 13
    )
    assert "init" not in list_rows(place(tmp_path), ("bct",))[0].new_run.config_values


def test_claims_name_rows_that_exist(tmp_path: Path) -> None:
    names = {row.name for row in list_rows(place(tmp_path), tuple(GROUPS))}
    for claim in CLAIMS:
        for side, _ in (claim.better, claim.worse):
            assert {side} if isinstance(side, str) else set(side) <= names, claim.text
    assert len({claim.text for claim in CLAIMS}) == len(CLAIMS)
    # No name outlives its row.
    assert set(RowName) <= names | {part for name in names for part in name.split(":")}


def test_rows_that_learned_the_same_share_one_bound(tmp_path: Path) -> None:
    rows = {row.name: upper_bound_key(row) for row in list_rows(place(tmp_path), tuple(GROUPS))}
    alike = {name for name, what in rows.items() if what == rows["independent"]}
    assert {"bct", "dmu_chain", "bct_wide", "fct_simclr", "dmu_residual"} <= alike
    assert rows["open-class:vanilla"] == rows["open-class:independent"] != rows["independent"]
    # Wrong labels, other images of the same name, other tests.
    assert {"noisy_unibct", "blurred:independent", "disjoint:independent"}.isdisjoint(alike)


def test_presets_are_the_protocols_they_say(tmp_path: Path) -> None:
    assert CIFAR100.embedder["backbone"] == "resnet50" and CIFAR100.embedder["embedding_dim"] == 128
    assert (CIFAR100.upgrade["epochs"], CIFAR100.upgrade["inner_dim"]) == (80, 2048)
    assert {
        split.name: (split.old_class_count, split.new_class_count) for split in CIFAR100_CPU.splits
    } == {
        "main": (50, 100),
        "unseen": (40, 80),
    }
    unseen = DIGITS.splits[1]
    assert (
        unseen.old_class_count,
        unseen.new_class_count,
        unseen.first_tested_class,
        unseen.tested_class_end,
    ) == (3, 7, 7, 10)
    photos = folder_preset(20)
    assert photos.splits[0].old_class_count == 10 and photos.splits[1].first_tested_class == 16


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown method 'bcd'; expected a group .core"):
        list_rows(place(tmp_path), ("bcd",))
    with pytest.raises(ConfigurationError, match="unknown data 'mnist'; expected digits"):
        preset_named("mnist")
    with pytest.raises(ConfigurationError, match="needs --images"):
        compare(CIFAR100_CPU, None, tmp_path, [0], ("core",), 1)
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        compare(CIFAR100_CPU, tmp_path / "none", tmp_path, [0], ("core",), 1)
    with pytest.raises(InvalidInputError, match="at least 10 class folders"):
        folder_preset(9)
