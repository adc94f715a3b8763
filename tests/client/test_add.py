"""Adding: by content, wherever the file lies; what is no image is named and the rest goes on."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nobackfill import images
from nobackfill.client.device import Device
from nobackfill.client.gallery_file import beside
from nobackfill.client.photos import files
from nobackfill.client.photos.adding import Added, add
from nobackfill.client.photos.files import find_images
from nobackfill.client.photos.search import Search
from nobackfill.client.photos.thumbnails import Thumbnails
from nobackfill.errors import InvalidInputError
from tests.support import blocks, edge, pictures, releases
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


def test_only_regular_files_are_read(setting: Setting, tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe.png", tmp_path / "odd"
    os.mkfifo(pipe)
    good = blocks.write_pngs(folder, 1, seed=5)
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "pipe.png").symlink_to(pipe)
    (folder / "again").symlink_to(folder)
    done = put(setting.gallery, pipe, Path("/dev/zero"), folder, folder / "zero.png")
    assert done.added == [str(good[0])]
    assert done.refused == {
        str(path): "expected a regular file"
        for path in (pipe, Path("/dev/zero"), folder / "zero.png")
    }


def test_a_file_that_grows_while_it_is_read_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (image,) = blocks.write_pngs(tmp_path, 1)
    size = image.stat().st_size
    monkeypatch.setattr(images, "LARGEST_BYTES", size)
    assert len(images.read_file(image)) == size
    monkeypatch.setattr(images, "LARGEST_BYTES", size - 1)
    with pytest.raises(InvalidInputError, match=f"at most {size - 1} bytes, got {size}"):
        images.read_file(image)


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
    assert set(done.added) >= {str(path) for path in cut}
    assert 5 < len(done.refused) < 60


def test_a_picture_without_a_vector_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    repo, folder = tmp_path / "pub" / "repo", tmp_path / "photos"
    blocks.publish_block_release(repo, 1, middle=0.0)
    gallery = edge.make_device(repo, tmp_path / "g.sqlite")
    good = blocks.write_pngs(folder, 40)
    blank = [folder / "0-0017-black.png", folder / "0-0035-black.png"]
    for size, path in enumerate(blank, 8):
        Image.new("RGB", (size, size)).save(path)
    done = put(gallery, folder)
    assert sorted(done.added) == sorted(map(str, good))
    assert list(done.refused) == [str(path) for path in blank]
    assert all("no vector" in why for why in done.refused.values())
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
    named = [path.relative_to(tmp_path).as_posix() for path in find_images([tmp_path])]
    assert named == [f"{folder}/{number}.png" for folder in "ab" for number in range(5)]
    monkeypatch.setattr(files, "MOST_FILES", 9)
    with pytest.raises(InvalidInputError, match="at most 9 images at a time"):
        find_images([tmp_path])
    assert len(find_images([tmp_path / "a", tmp_path / "a"])) == 5
    with pytest.raises(InvalidInputError, match="cannot be read"):
        find_images([tmp_path / ("x" * 300)])


def test_a_gallerys_own_small_copies_are_no_photos(setting: Setting, tmp_path: Path) -> None:
    with Device(setting.gallery) as device:
        assert Thumbnails(setting.gallery).of(device.store.listing(0, 1)[0])
    copies = beside(setting.gallery, "thumbs")
    assert any(copies.iterdir())
    assert find_images([setting.gallery.parent]) == sorted(
        path for path in find_images([setting.gallery.parent]) if copies not in path.parents
    )
    # A folder of that kind of name without a gallery is anybody's.
    shutil.copytree(copies, tmp_path / "my.thumbs")
    assert find_images([tmp_path / "my.thumbs"])


def test_a_place_that_nobody_may_look_at_is_none(setting: Setting, tmp_path: Path) -> None:
    # A name that is too long cannot be looked for, whoever asks: root may look into any folder.
    (image,) = blocks.write_pngs(tmp_path / "here", 1, seed=5)
    put(setting.gallery, image)
    with Device(setting.gallery) as device:
        item = device.store.listing(0, 100)[-1]
        gone = {**item.metadata, "path": f"/{'x' * 300}/a.png"}
        device.store.put([item.id], [], digests=[item.digest], metadata=[gone])
    assert put(setting.gallery, image).added == [str(image)]
