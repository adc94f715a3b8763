import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nobackfill.class_folders import decode_listing, list_images
from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.quality.listing import split_halves
from nobackfill.training.data.folders import drop_unreadable_images, hold_out, require_classes


def test_listing_is_ordered_by_class_then_name(digits: Path) -> None:
    listing = list_images(digits / "queries")
    assert listing.class_names == tuple("0123456789")
    assert list(listing.paths) == sorted(listing.paths)
    for path, label in zip(listing.paths, listing.labels, strict=True):
        assert path.split("/")[0] == listing.class_names[label]


def test_the_first_classes_only(digits: Path) -> None:
    few, all_ = list_images(digits / "queries", 3), list_images(digits / "queries")
    assert few.paths == all_.paths[: len(few)]
    assert few.class_names == ("0", "1", "2")


def test_models_of_few_and_of_many_classes_hold_out_the_same_images(digits: Path) -> None:
    def held(classes: int) -> set[str]:
        listing = list_images(digits / "train", classes)
        return {listing.paths[row] for row in hold_out(listing, 0.1, 7)[1]}

    few, many = held(4), held(10)
    assert few == {path for path in many if path[0] in "0123"}
    assert len(few) == 4 * 4


def test_held_out_images_change_with_the_seed_only(digits: Path) -> None:
    listing = list_images(digits / "train")
    one, again, other = (set(hold_out(listing, 0.2, seed)[1].tolist()) for seed in (1, 1, 2))
    assert one == again != other


def test_a_split_covers_every_row_once_and_every_class_alike(digits: Path) -> None:
    listing = list_images(digits / "train")
    for left, right in (hold_out(listing, 0.1, 0), split_halves(listing, 3)):
        assert sorted([*left, *right]) == list(range(len(listing)))
        counts = np.bincount(listing.labels[right], minlength=10)
        assert (counts == counts[0]).all()


def test_a_class_of_one_image_is_trained_on(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "1.png")
    train, held = hold_out(list_images(tmp_path), 0.3, 0)
    assert (len(train), len(held)) == (2, 0)


def test_decoding_gives_the_pictures_in_order(digits: Path) -> None:
    listing = list_images(digits / "queries", 2)
    images = decode_listing(listing, 8)
    for row in (0, len(listing) - 1):
        with Image.open(listing.root / listing.paths[row]) as picture:
            assert np.array_equal(images[row], np.asarray(picture.convert("RGB")))


def test_files_of_other_kinds_are_named_and_a_folder_is_no_image(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("0.jpg/a.png", "0.jpg/1.jpg/b.png", "0.jpg/@eaDir/c.png", "0.jpg/._a.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("d.heic", "e.HEIC", "f.bmp"):
        (tmp_path / "0.jpg" / name).touch()
    (tmp_path / "0.jpg" / "link").symlink_to(tmp_path)
    listing = list_images(tmp_path)
    assert listing.paths == ("0.jpg/1.jpg/b.png", "0.jpg/a.png")
    said = caplog.text
    assert "4 files are no images (2 .heic, 1 .bmp, 1 no suffix)" in said and "d.heic" in said


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        list_images(Path("nowhere"))


def test_a_folder_without_class_folders(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "loose.png")
    with pytest.raises(InvalidInputError, match="expected class folders") as caught:
        list_images(tmp_path)
    assert caught.value.exit_code == 65


def test_an_empty_class_is_named(digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits / "queries", tmp_path / "q")
    (tmp_path / "q" / "empty").mkdir()
    with pytest.raises(InvalidInputError, match=r"empty: expected images"):
        list_images(tmp_path / "q")


def test_fewer_classes_than_asked_for(digits: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"at least 11 class folders, .* got 10"):
        list_images(digits / "queries", 11)


def test_one_class_cannot_be_told_from_nothing(digits: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"at least 2 class folders .* got 1"):
        require_classes(list_images(digits / "queries", 1))


def test_a_corrupt_image_is_named_and_skipped_only_if_asked(digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits / "queries", tmp_path / "q")
    broken = tmp_path / "q" / "3" / "0000.png"
    broken.write_bytes(b"\x89PNG but no more")
    listing = list_images(tmp_path / "q")
    with pytest.raises(InvalidInputError, match=r"remove 3/0000\.png.*skip_corrupt"):
        decode_listing(listing, 8)
    left, skipped = drop_unreadable_images(listing, tmp_path / "notes")
    assert skipped == ["3/0000.png"]
    assert len(left) == len(listing) - 1
    decode_listing(left, 8)


def test_a_class_left_without_readable_images_is_refused(tmp_path: Path) -> None:
    for name, data in (("a", None), ("b", b"no image")):
        (tmp_path / name).mkdir()
        if data is None:
            Image.new("RGB", (8, 8)).save(tmp_path / name / "1.png")
        else:
            (tmp_path / name / "1.png").write_bytes(data)
    with pytest.raises(InvalidInputError, match="class b"):
        drop_unreadable_images(list_images(tmp_path), tmp_path / "notes")


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (["/b/y 0", "/a/x 1", ""], ("b/y", "a/x")),
        (["a tench, Tinca tinca", "b goldfish"], ("a", "b")),
    ],
)
def test_a_class_list_names_folders_in_its_order(
    tmp_path: Path, lines: list[str], names: tuple[str, ...]
) -> None:
    for folder in ("a/x", "b/y"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "1.png")
    (tmp_path / "list.txt").write_text("\n".join(lines), "utf-8")
    listing = list_images(tmp_path, None, tmp_path / "list.txt")
    assert listing.class_names == names
    assert [(tmp_path / path).is_file() for path in listing.paths] == [True, True]
    assert list_images(tmp_path, 1, tmp_path / "list.txt").class_names == names[:1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nnowhere\n", "1 of 2 classes are no folders .*nowhere"),
        ("a\n../a\n", r"\.\./a"),
        ("a\na\n", "1 of 2 classes are listed twice"),
        ("a\n./a\n", "1 of 2 classes are listed twice"),
        ("a\na/b\n", "1 of 2 classes lie inside another listed class .*a/b"),
        (".\na\n", "1 of 2 classes are no folders"),
        ("", "expected class folders"),
    ],
)
def test_a_wrong_class_list_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "images" / "a" / "b").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "a" / "1.png")
    (tmp_path / "list.txt").write_text(text, "utf-8")
    with pytest.raises(InvalidInputError, match=message):
        list_images(tmp_path / "images", None, tmp_path / "list.txt")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        list_images(tmp_path / "images", None, tmp_path / "nothing.txt")


def test_many_classes_of_one_image(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:03d}").mkdir()
        Image.new("RGB", (8, 8), (number % 256, 0, 0)).save(tmp_path / f"{number:03d}" / "1.png")
    listing = list_images(tmp_path)
    train, held = hold_out(listing, 0.5, 0)
    assert (len(train), len(held)) == (300, 0)
