import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from demo.data import MIN_IMAGES, PARTS, check_image, choose_image_size, prepare_images, split_files
from demo.recipes import Recipes
from nobackfill.class_folders import list_images
from nobackfill.errors import InvalidInputError
from nobackfill.quality.listing import split_halves


def make_images(folder: Path, classes: int, each: int) -> Path:
    for number in range(classes):
        (folder / f"class{number}").mkdir(parents=True)
        for image in range(each):
            shade = (number * 40) % 256, image, 7
            Image.new("RGB", (5, 4), shade).save(folder / f"class{number}" / f"{image}.png")
    return folder


@pytest.mark.slow
def test_digits_are_cut_into_parts_that_never_overlap(tmp_path: Path) -> None:
    names = prepare_images(tmp_path, None, seed=1, limit=None)
    assert (names.old, names.new) == (list("01234"), list("0123456789"))
    assert names.image_size == 16
    count: Counter[str] = Counter()
    for part in PARTS:
        files = list((tmp_path / part).glob("*/*.png"))
        count.update(f"{path.parent.name}/{path.name}" for path in files)
        assert {path.parent.name for path in files} == set("0123456789")
        assert len(files) == pytest.approx(1797 * PARTS[part], abs=10)
    assert len(count) == 1797
    assert set(count.values()) == {1}


def test_the_seed_alone_decides_the_cut(tmp_path: Path) -> None:
    files = [Path(f"{n}.png") for n in range(100)]
    assert dict(split_files(files, 3)) == dict(split_files(files, 3))
    assert dict(split_files(files, 3)) != dict(split_files(files, 4))


@pytest.mark.parametrize("count", [MIN_IMAGES, 14, 29, 1000])
def test_every_part_gets_an_image_and_every_image_a_part(count: int) -> None:
    files = [Path(f"{n}.png") for n in range(count)]
    parts = dict(split_files(files, 0))
    assert list(parts) == list(PARTS)
    assert all(parts.values())
    assert sorted(p for part in parts.values() for p in part) == sorted(files)


def test_own_images_are_copied_and_only_read(tmp_path: Path) -> None:
    images = make_images(tmp_path / "mine", 5, 20)
    before = {path: path.read_bytes() for path in images.glob("*/*")}
    names = prepare_images(tmp_path / "data", images, seed=0, limit=15)
    assert names.old == ["class0", "class1"]
    assert len(list((tmp_path / "data").glob("*/*/*.png"))) == 5 * 15
    assert {path: path.read_bytes() for path in images.glob("*/*")} == before


@pytest.mark.parametrize(
    ("classes", "each", "message"),
    [
        (3, 20, "at least 4 class folders, found 3"),
        (4, 12, "4 of 4 class folders hold fewer than 13"),
        (8, 2, r"\(class0: 2, class1: 2, class2: 2 and 5 more\)"),
        (60, 1, "and 57 more"),
    ],
)
def test_too_little_is_refused(tmp_path: Path, classes: int, each: int, message: str) -> None:
    images = make_images(tmp_path / "mine", classes, each)
    with pytest.raises(InvalidInputError, match=message) as refusal:
        prepare_images(tmp_path / "data", images, seed=0, limit=None)
    assert refusal.value.exit_code == 65
    assert len(str(refusal.value)) < 500


def test_one_large_class_among_tiny_ones_is_refused_at_once(tmp_path: Path) -> None:
    images = make_images(tmp_path / "mine", 1, 250)
    for number in range(200):
        shutil.copytree(images / "class0", images / f"tiny{number}", ignore=but_three)
    with pytest.raises(InvalidInputError, match="200 of 201 class folders") as refusal:
        prepare_images(tmp_path / "data", images, seed=0, limit=None)
    assert len(str(refusal.value)) < 500
    assert not (tmp_path / "data").exists()


def but_three(_: str, names: list[str]) -> set[str]:
    return set(names[3:])


@pytest.mark.parametrize(
    ("classes", "each"), [(4, 13), (4, 14), (5, 15), (6, 16), (30, 20), (4, 30), (7, 13)]
)
def test_whatever_is_cut_can_be_measured(tmp_path: Path, classes: int, each: int) -> None:
    """Calibration and gate each get pairs of two classes at least; the galleries their items."""
    made = prepare_images(
        tmp_path / "data", make_images(tmp_path / "mine", classes, each), seed=0, limit=None
    )
    assert len(made.new) == classes
    evaluation = list_images(tmp_path / "data" / "eval")
    for half in split_halves(evaluation, 0):
        counts = np.bincount(evaluation.labels[half])
        assert (counts >= 2).sum() >= classes // 2
    for release, known, images in ((1, made.old, made.old_images), (2, made.new, made.new_images)):
        recipes = Recipes(
            tmp_path / "data" / "train", tmp_path, made.image_size, None, None, 0, False
        )
        for recipe in [*recipes.networks(release, len(known), images), recipes.upgrade(images)]:
            assert 2 <= int(recipe.settings["batch_size"]) <= images // 2


@pytest.mark.parametrize(
    ("side", "size"), [(5, 16), (16, 16), (28, 24), (32, 32), (100, 64), (3000, 64)]
)
def test_the_models_see_pictures_in_about_their_own_size(side: int, size: int) -> None:
    assert choose_image_size([side] * 9 + [1, 4000]) == size


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="folder of class folders"):
        prepare_images(tmp_path / "data", tmp_path / "nowhere", seed=0, limit=None)


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    path = tmp_path / "note.png"
    path.write_text("not a picture")
    with pytest.raises(InvalidInputError, match=r"note\.png is no image"):
        check_image(path)
    whole = make_images(tmp_path / "mine", 1, 1) / "class0" / "0.png"
    path.write_bytes(whole.read_bytes()[:50])
    with pytest.raises(InvalidInputError, match=r"note\.png is no image"):
        check_image(path)
