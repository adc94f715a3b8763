"""Adding: by content, wherever the file lies; what is no image is named and the rest goes on."""

import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from nobackfill import images
from nobackfill.client import photos
from nobackfill.client.device import Device
from nobackfill.client.gallery_file import sidecar_path
from nobackfill.client.maintenance import change_metadata
from nobackfill.client.photos import AddReport, add, find_images
from nobackfill.client.pictures import Thumbnails
from nobackfill.client.search import Search
from nobackfill.errors import InvalidInputError
from tests.client.test_cli import ask, run
from tests.support import blocks, edge, pictures, releases
from tests.support.edge import Setting


def put(gallery: Path, *paths: Path) -> AddReport:
    with Device(gallery) as device:
        return add(device, paths, {}, lambda done, total: None)


def test_the_same_picture_is_one_item(setting: Setting, tmp_path: Path) -> None:
    twin = tmp_path / "twin.png"
    shutil.copy(setting.images[0], twin)
    done = put(setting.gallery, twin, setting.images[1])
    assert (done.added_names, done.duplicate_count, done.refusals) == ([], 2, {})
    two = blocks.write_pngs(tmp_path / "two", 1, seed=5)[0]
    shutil.copy(two, tmp_path / "two" / "again.png")
    done = put(setting.gallery, tmp_path / "two")
    assert (len(done.added_names), done.duplicate_count) == (1, 1)
    assert len(edge.contents(setting.gallery)) == 13


def test_a_file_that_moved_is_followed(setting: Setting, tmp_path: Path) -> None:
    (image,) = blocks.write_pngs(tmp_path / "here", 1, seed=5)
    put(setting.gallery, image)
    before = edge.contents(setting.gallery)[str(image)]
    with Device(setting.gallery) as device:
        change_metadata(device, [str(image)], {"stars": 5})
    moved = image.rename(tmp_path / "moved.png")
    assert put(setting.gallery, moved).added_names == [str(moved)]
    after = edge.contents(setting.gallery)
    assert str(image) not in after
    assert (after[str(moved)][1] == before[1]).all()
    assert len(after) == 13
    with Device(setting.gallery) as device:
        (item,) = device.list(where={"name": "moved.png"})
    assert item.metadata["stars"] == 5 and item.metadata["folder"] == tmp_path.name


def test_an_identical_image_keeps_its_metadata_unless_it_gets_another(setting: Setting) -> None:
    image = setting.images[0]
    with Device(setting.gallery) as device:
        device.put({"cat": image}, {"cat": {"stars": 5, "trip": "alps"}})
        device.put({"cat": image})
        assert device.get("cat").metadata["stars"] == 5
        device.put({"cat": image}, {"cat": {"stars": 4}})
        item = device.get("cat")
    assert item.metadata["stars"] == 4 and "trip" not in item.metadata
    assert item.metadata["path"] == str(image)


def test_an_empty_id_is_refused(setting: Setting) -> None:
    with Device(setting.gallery) as device:
        count = device.count()
        with pytest.raises(InvalidInputError, match="expected 1 to 256 characters"):
            device.put({"": setting.images[0]})
        assert device.count() == count


def test_what_is_no_image_is_named_and_the_others_go_on(setting: Setting, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    good = blocks.write_pngs(folder, 2, seed=5)
    (folder / "empty.png").touch()
    (folder / "text.jpg").write_text("hello")
    (folder / "torn.png").write_bytes(good[0].read_bytes()[:-30])
    (folder / "huge.png").write_bytes(b"\x89PNG")
    os.truncate(folder / "huge.png", 33 * 2**20)
    Image.new("L", (30_000, 1_000)).save(folder / "bomb.png")
    Image.new("RGB", (4, 4)).save(folder / "picture.gif")
    (folder / "dangling.png").symlink_to(folder / "nowhere")
    done = put(setting.gallery, folder)
    assert sorted(done.added_names) == sorted(map(str, good))
    assert {Path(path).name for path in done.refusals} == {
        "empty.png", "text.jpg", "torn.png", "huge.png", "bomb.png", "picture.gif",
        "dangling.png",
    }  # fmt: skip
    # Named by itself, a file is tried whatever its suffix.
    assert list(put(setting.gallery, folder / "picture.gif").refusals) == [
        str(folder / "picture.gif")
    ]
    with pytest.raises(InvalidInputError, match="no such file"):
        put(setting.gallery, folder / "dangling.png")


def test_names_of_every_kind(setting: Setting, tmp_path: Path) -> None:
    images = blocks.write_pngs(tmp_path / "names", 3, seed=5)
    spaced = images[0].rename(images[0].with_name('ünï ço\'dé "1".PNG'))
    newline = images[1].rename(images[1].with_name("two\nlines.png"))
    raw = os.fsencode(images[2].parent) + b"/\xff.png"
    os.rename(images[2], raw)  # noqa: PTH104
    done = put(setting.gallery, tmp_path / "names")
    assert set(done.added_names) == {str(spaced), str(newline)}
    assert [reason for reason in done.refusals.values() if "not valid UTF-8" in reason]


def test_only_regular_files_are_read(setting: Setting, tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe.png", tmp_path / "odd"
    os.mkfifo(pipe)
    good = blocks.write_pngs(folder, 1, seed=5)
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "pipe.png").symlink_to(pipe)
    (folder / "again").symlink_to(folder)
    done = put(setting.gallery, pipe, Path("/dev/zero"), folder, folder / "zero.png")
    assert done.added_names == [str(good[0])]
    assert done.refusals == {
        **{
            str(path): ("expected a regular file, got a folder, pipe or device; name an image file")
            for path in (pipe, Path("/dev/zero"), folder / "zero.png", folder / "pipe.png")
        },
        str(folder / "again"): (
            "a link to a folder, which is not followed; name the link itself to add the images "
            "behind it"
        ),
    }


def test_a_file_that_grows_while_it_is_read_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (image,) = blocks.write_pngs(tmp_path, 1)
    size = image.stat().st_size
    monkeypatch.setattr(images, "LARGEST_IMAGE_BYTES", size)
    assert len(images.read_file(image)) == size
    monkeypatch.setattr(images, "LARGEST_IMAGE_BYTES", size - 1)
    with pytest.raises(InvalidInputError, match=f"at most {size - 1} bytes, got {size}"):
        images.read_file(image)


def test_what_else_lies_in_a_folder_is_named_or_passed_over(
    setting: Setting, tmp_path: Path
) -> None:
    good = blocks.write_pngs(tmp_path / "0.jpg", 2, seed=5)
    for name in ("IMG_1.MOV", "IMG_2.mov", "a.bmp", "README"):
        (tmp_path / "0.jpg" / name).write_bytes(b"x")
    hidden = ["@eaDir", ".Trash-1000", "__MACOSX", ".hidden", "._IMG_1.JPG"]
    for name in hidden:
        (tmp_path / name).mkdir()
        shutil.copy(good[0], tmp_path / name / "copy.png")
    done = put(setting.gallery, tmp_path / "0.jpg", *[tmp_path])
    assert done.added_names == [str(path) for path in good]
    kinds = Counter(reason.rpartition(" got ")[2] for reason in done.refusals.values())
    assert kinds.items() >= {".mov": 2, ".bmp": 1, "no suffix": 1}.items()
    assert {Path(path).name for path in done.system_files} >= set(hidden)
    # The gallery itself, and what lies beside it.
    assert str(setting.gallery) in done.system_files
    told = ask(setting.gallery, "add", tmp_path / "0.jpg", code=65)
    assert len(told["refused"]) == 4 and told["held"] == 2


def test_metadata_of_items_that_are_held_is_set(setting: Setting) -> None:
    said = run(setting.gallery, "add", setting.images[0], "--set", "trip=Rome").stderr
    assert "1 images were in the gallery already and keep their metadata" in said
    before = edge.contents(setting.gallery)
    told = ask(setting.gallery, "set", setting.images[0], "--to", "trip=Rome", "--to", "stars=5")
    assert told == {"changed": 1}
    with Device(setting.gallery) as device:
        (item,) = [i for i in device.store.list_items() if "trip" in i.metadata]
        assert item.metadata["path"] == str(setting.images[0])
        assert (item.metadata["trip"], item.metadata["stars"]) == ("Rome", 5)
    after = edge.contents(setting.gallery)
    assert all((after[path][1] == before[path][1]).all() for path in before)
    run(setting.gallery, "set", setting.images[0], "--to", "path=/elsewhere", code=65)
    run(setting.gallery, "set", "nobody", "--to", "a=b", code=66)


def test_telephones_pictures_are_taken(setting: Setting, tmp_path: Path) -> None:
    folder = tmp_path / "telephone"
    folder.mkdir()
    heic, avif, large = folder / "a.HEIC", folder / "b.avif", folder / "c.jpg"
    pixels = np.kron(releases.images(1, 3)[0], np.ones((8, 8, 1), np.uint8))
    pillow_heif.from_pillow(Image.fromarray(pixels)).save(heic, quality=95)
    Image.fromarray(pixels[::-1].copy()).save(avif, quality=95)
    Image.new("RGB", (8160, 6120), "red").save(large)
    done = put(setting.gallery, folder)
    assert done.refusals == {}
    assert done.added_names == [str(heic), str(avif), str(large)]
    got = images.decode_file(heic, 64, 64).astype(int)
    assert np.abs(got - pixels).mean() < 8
    assert images.decode_for_display(heic.read_bytes(), 16).shape == (16, 16, 3)


def test_without_the_extra_a_heic_is_refused_by_name_and_the_others_go_on(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (good,) = blocks.write_pngs(tmp_path / "photos", 1, seed=5)
    heic = good.with_name("a.heic")
    pillow_heif.from_pillow(Image.new("RGB", (64, 64))).save(heic)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    done = put(setting.gallery, good.parent)
    assert done.added_names == [str(good)]
    assert "[heic]" in done.refusals[str(heic)]


def test_damage_of_one_photo_is_its_own(setting: Setting, tmp_path: Path) -> None:
    """A camera's EXIF, cut anywhere, and a folder of damaged files: the whole ones are added."""
    exif = pictures.exif(1).tobytes()
    photo = Image.fromarray(np.kron(releases.images(1, 3)[0], np.ones((8, 8, 1), np.uint8)))
    for length in range(6, len(exif), 4):
        name = f"{length:03d}.jpg"
        data = pictures.encoded(photo, "JPEG", exif=exif[:length], comment=name)
        (tmp_path / name).write_bytes(data)
    cut = sorted(tmp_path.glob("*.jpg"))
    for number, data in enumerate(pictures.damaged(pictures.KINDS["jpeg"], 60, seed=2)):
        (tmp_path / f"torn-{number:02d}.jpg").write_bytes(data)
    done = put(setting.gallery, *cut, tmp_path)
    assert set(done.added_names) >= {str(path) for path in cut}
    torn = [path for path in done.refusals if "torn" in path]
    assert 5 < len(torn) < 60


def test_a_picture_without_a_vector_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    repo, folder = tmp_path / "pub" / "repo", tmp_path / "photos"
    blocks.publish_block_release(repo, 1, middle=0.0)
    gallery = edge.make_device(repo, tmp_path / "g.sqlite")
    good = blocks.write_pngs(folder, 40)
    blank = [folder / "0-0017-black.png", folder / "0-0035-black.png"]
    for size, path in enumerate(blank, 8):
        Image.new("RGB", (size, size)).save(path)
    done = put(gallery, folder)
    assert sorted(done.added_names) == sorted(map(str, good))
    assert list(done.refusals) == [str(path) for path in blank]
    assert all("no usable vector" in why for why in done.refusals.values())
    assert len(edge.contents(gallery)) == 40
    with Device(gallery) as device, pytest.raises(InvalidInputError, match=blank[1].name):
        Search(device, {}).by_images([good[0], blank[1]], 3)


def test_folders_of_too_many_files_and_none_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("b", "a"):
        (tmp_path / folder).mkdir()
        for number in range(5):
            (tmp_path / folder / f"{number}.png").touch()
    named = [path.relative_to(tmp_path).as_posix() for path in find_images([tmp_path]).files]
    assert named == [f"{folder}/{number}.png" for folder in "ab" for number in range(5)]
    monkeypatch.setattr(photos, "MOST_FILES", 9)
    with pytest.raises(InvalidInputError, match="at most 9 images at a time"):
        find_images([tmp_path])
    assert len(find_images([tmp_path / "a", tmp_path / "a"]).files) == 5
    with pytest.raises(InvalidInputError, match="cannot be read"):
        find_images([tmp_path / ("x" * 300)])


def test_a_gallerys_own_small_copies_are_no_photos(setting: Setting, tmp_path: Path) -> None:
    with Device(setting.gallery) as device:
        assert Thumbnails(setting.gallery).thumbnail(device.store.list_items(0, 1)[0])
    copies = sidecar_path(setting.gallery, "thumbs")
    assert any(copies.iterdir())
    found = find_images([setting.gallery.parent])
    assert not [path for path in found.files if copies in path.parents]
    assert str(copies) in found.system_files
    # A folder of that kind of name without a gallery is anybody's.
    shutil.copytree(copies, tmp_path / "my.thumbs")
    assert find_images([tmp_path / "my.thumbs"]).files


def test_a_place_that_nobody_may_look_at_is_none(setting: Setting, tmp_path: Path) -> None:
    # A name that is too long cannot be looked for, whoever asks: root may look into any folder.
    (image,) = blocks.write_pngs(tmp_path / "here", 1, seed=5)
    put(setting.gallery, image)
    with Device(setting.gallery) as device:
        item = device.store.list_items(0, 100)[-1]
        gone = {**item.metadata, "path": f"/{'x' * 300}/a.png"}
        device.store.put([item.id], [], digests=[item.digest], metadata=[gone])
    assert put(setting.gallery, image).added_names == [str(image)]
