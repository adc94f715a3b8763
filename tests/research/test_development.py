"""The development split: nothing that chooses is anything that a table reports."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nobackfill.class_folders import hash_files, list_images
from nobackfill.research.catalogue import list_rows
from nobackfill.research.images import (
    TABLE_SEEDS,
    comparison_seeds,
    development_preset,
    link_development_images,
    prepare_seed_images,
    remove_name_places,
)
from nobackfill.research.presets import CIFAR100_CPU, DIGITS, Preset, folder_preset
from nobackfill.research.rows import ComparisonPlace

SEEDS = range(4)


def write_images(folder: Path, classes: int, first: int) -> None:
    """Ten pictures a class, no two of one content; `first` keeps two folders apart."""
    for label in range(classes):
        for number in range(10):
            colours = (label, number, first)
            path = folder / f"class-{label:03d}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), colours).save(path)


@pytest.fixture(params=["digits", "cifar100-cpu", "folder"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Preset, Path]:
    """A preset and images of its form: with a test folder of its own, or without."""
    presets = {p.name: p for p in (DIGITS, CIFAR100_CPU, folder_preset(12))}
    preset = presets[request.param]
    classes = preset.splits[0].new_class_count
    if preset.test_share is None:
        write_images(tmp_path / "images" / "train", classes, 0)
        write_images(tmp_path / "images" / "test", classes, 1)
    else:
        write_images(tmp_path / "images", classes, 0)
    return preset, tmp_path / "images"


def contents(folder: Path) -> set[str]:
    return set(hash_files(list_images(folder)))


def class_of(name: str) -> str:
    """The class's own name, without its place in a seed's order."""
    return name.split("-", 1)[1] if name[:4].isdigit() else name


def test_no_image_that_chooses_is_tested_by_a_table(
    data: tuple[Preset, Path], tmp_path: Path
) -> None:
    preset, images = data
    table = prepare_seed_images(preset, images, tmp_path / "table", TABLE_SEEDS)
    tested = contents(table / "test")
    # Every seed of a table tests the same images.
    assert prepare_seed_images(preset, images, tmp_path / "table", TABLE_SEEDS + 1) == table
    development = development_preset(preset)
    divided = []
    for seed in SEEDS:
        own = prepare_seed_images(development, images, tmp_path / "development", seed)
        train, test = contents(own / "train"), contents(own / "test")
        assert train and test and not train & test
        assert not (train | test) & tested
        divided.append(frozenset(test))
    assert len(set(divided)) > 1


def test_no_class_that_a_table_calls_unseen_chooses(
    data: tuple[Preset, Path], tmp_path: Path
) -> None:
    preset, images = data
    (unseen,) = (split for split in preset.splits if split.name == "unseen")
    table = prepare_seed_images(preset, images, tmp_path / "table", TABLE_SEEDS)
    names = list_images(table / "train").class_names
    hidden = set(names[unseen.first_tested_class : unseen.tested_class_end])
    development = development_preset(preset)
    orders = set()
    for seed in SEEDS:
        own = prepare_seed_images(development, images, tmp_path / "development", seed)
        chosen = list_images(own / "train").class_names
        assert len(chosen) == unseen.new_class_count
        assert hidden.isdisjoint(map(class_of, chosen))
        orders.add(tuple(map(class_of, chosen)))
    # Each seed has other old, new and unseen classes.
    assert len(orders) == len(SEEDS)


def test_its_splits_have_the_form_of_the_tables(data: tuple[Preset, Path], tmp_path: Path) -> None:
    preset, _ = data
    development = development_preset(preset)
    assert development.title == f"{preset.name}-development" != preset.title
    assert development.upgrade == preset.upgrade and development.embedder == preset.embedder
    for own, told in zip(development.splits, preset.splits, strict=True):
        assert own.name == told.name
        assert (
            2 <= own.old_class_count < own.new_class_count
            and own.tested_class_end - own.first_tested_class >= 2
        )
        assert (own.first_tested_class >= own.new_class_count) == (
            told.first_tested_class >= told.new_class_count
        )
        groups = preset.row_groups if own.name == "main" else preset.row_groups_for_unseen_classes
        rows = [
            {
                row.name
                for row in list_rows(ComparisonPlace(p, split, 0, tmp_path, tmp_path), groups)
            }
            for p, split in ((development, own), (preset, told))
        ]
        assert rows[0] == rows[1]


def test_its_classes_have_one_name_in_all_seeds(tmp_path: Path) -> None:
    for name in ("a-b", "c", "d"):
        for number in range(4):
            (tmp_path / "train" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "train" / name / f"{number}.png").touch()
    orders = set()
    for seed in range(4):
        link_development_images(tmp_path / "train", tmp_path / str(seed), 3, seed)
        names = list_images(tmp_path / str(seed) / "test").class_names
        orders.add(names)
        assert sorted(remove_name_places(np.array(names)).tolist()) == ["a-b", "c", "d"]
    assert len(orders) > 1


def test_seeds_that_choose_fill_no_table() -> None:
    chosen, told = comparison_seeds(development_preset(DIGITS), 500), comparison_seeds(DIGITS, 500)
    assert len(chosen) == len(told) == 500 and not set(chosen) & set(told)
    # Results of these were seen before there was a development split.
    assert not set(range(10)) & set(told)


def test_a_seed_of_a_table_trains_on_all_of_its_training_images(tmp_path: Path) -> None:
    write_images(tmp_path / "images", 10, 0)
    few = replace(DIGITS, name="few")
    folder = prepare_seed_images(few, tmp_path / "images", tmp_path / "out", TABLE_SEEDS)
    counts = [np.bincount(list_images(folder / part).labels) for part in ("train", "test")]
    assert counts[0].tolist() == [6] * 10 and counts[1].tolist() == [4] * 10
