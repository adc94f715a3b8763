"""Adding: by content, wherever the file lies; what is no image is named and the rest goes on."""

import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from client.add import Added, add
from client.device import Device
from client.files import find_images
from release.errors import InvalidInputError
from tests.support import blocks, edge
from tests.support.edge import Setting


def put(gallery: Path, *paths: Path) -> Added:
    with Device(gallery) as device:
        return add(device, find_images(paths), {}, lambda done, total: None)


def test_the_same_picture_is_one_item(setting: Setting, tmp_path: Path) -> None:
    twin = tmp_path / "twin.png"
    shutil.copy(setting.images[0], twin)
    done = put(setting.gallery, twin, setting.images[1])
    assert (done.added, done.held, done.refused) == ([], 2, {})
    two = blocks.write_pngs(tmp_path / "two", 1, seed=5)[0]
    shutil.copy(two, tmp_path / "two" / "again.png")
    done = put(setting.gallery, tmp_path / "two")
    assert (len(done.added), done.held) == (1, 1)
    assert len(edge.contents(setting.gallery)) == 13


def test_a_file_that_moved_is_followed(setting: Setting, tmp_path: Path) -> None:
    (image,) = blocks.write_pngs(tmp_path / "here", 1, seed=5)
    put(setting.gallery, image)
    before = edge.contents(setting.gallery)[str(image)]
    moved = image.rename(tmp_path / "moved.png")
    assert put(setting.gallery, moved).added == [str(moved)]
    after = edge.contents(setting.gallery)
    assert str(image) not in after
    assert (after[str(moved)][1] == before[1]).all()
    assert len(after) == 13


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
    assert sorted(done.added) == sorted(map(str, good))
    assert {Path(path).name for path in done.refused} == {
        "empty.png", "text.jpg", "torn.png", "huge.png", "bomb.png",
    }  # fmt: skip
    # Named by itself, a file is tried whatever its suffix.
    assert list(put(setting.gallery, folder / "picture.gif").refused) == [
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
    assert set(done.added) == {str(spaced), str(newline)}
    assert [reason for reason in done.refused.values() if "not valid text" in reason]
