"""The folder of resized images: whatever happens to it, the pixels are those of the files."""

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nobackfill.class_folders import ImageListing, decode_listing, list_images
from nobackfill.errors import CannotWriteError
from nobackfill.training.data import image_files
from nobackfill.training.data.image_files import PixelCache, reader_context
from nobackfill.training.data.pictures import ReadingOptions, chunks, open_pictures
from tests.support.disks import fill, small_disk

SIZE = 16


@pytest.fixture
def listing(tmp_path: Path) -> ImageListing:
    """Sixty JPEGs of noise in three classes."""
    rng = np.random.default_rng(0)
    for number in range(60):
        path = tmp_path / "images" / "abc"[number % 3] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 30, 3), dtype=np.uint8)).save(path)
    return list_images(tmp_path / "images")


def read(listing: ImageListing, cache: Path) -> np.ndarray:
    images = open_pictures(listing, SIZE, ReadingOptions(0, 0, cache))
    return torch.cat(list(chunks(images))).numpy()


def kept(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_a_folder_that_was_removed_keeps_nothing_and_ends_nothing(
    listing: ImageListing, tmp_path: Path
) -> None:
    cache = PixelCache(tmp_path / "cache")
    (pixels,) = decode_listing(listing.select(np.array([0])), SIZE)
    cache.open()
    shutil.rmtree(tmp_path / "cache")
    image = listing.root / listing.paths[0]
    cache.write(image, pixels)
    assert cache.read(image, SIZE) is None


def test_a_picture_is_decoded_once(listing: ImageListing, tmp_path: Path) -> None:
    cache, expected = tmp_path / "cache", decode_listing(listing, SIZE)
    assert np.array_equal(read(listing, cache), expected)
    assert len(kept(cache)) == len(listing)
    assert {path.stat().st_size for path in kept(cache)} == {SIZE * SIZE * 3 + 4}
    # Other content behind the same name, length and time is not seen: it is not read again.
    for path in listing.paths:
        file = listing.root / path
        status = file.stat()
        file.write_bytes(b"x" * status.st_size)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert np.array_equal(read(listing, cache), expected)


def test_a_replaced_picture_is_decoded_anew(listing: ImageListing, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = read(listing, cache)
    Image.new("RGB", (9, 9), "red").save(listing.root / listing.paths[5])
    after = read(listing, cache)
    assert np.array_equal(after, decode_listing(listing, SIZE))
    assert not np.array_equal(after[5], before[5])


@pytest.mark.parametrize("damage", ["empty", "cut", "cut by a byte", "zeros", "a bit", "longer"])
def test_damage_is_decoded_anew_and_mended(
    listing: ImageListing, tmp_path: Path, damage: str
) -> None:
    cache = tmp_path / "cache"
    expected = read(listing, cache)
    for path in kept(cache):
        data = path.read_bytes()
        spoiled = {
            "empty": b"",
            "cut": data[: len(data) // 2],
            "cut by a byte": data[:-1],
            "zeros": bytes(len(data)),
            "a bit": bytes([data[0] ^ 1]) + data[1:],
            "longer": data + b"x",
        }[damage]
        path.write_bytes(spoiled)
    assert np.array_equal(read(listing, cache), expected)
    found = PixelCache(cache).read(listing.root / listing.paths[0], SIZE)
    assert found is not None
    assert np.array_equal(found, expected[0])


def test_a_size_has_its_own_files(listing: ImageListing, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    read(listing, cache)
    images = open_pictures(listing, 8, ReadingOptions(0, 0, cache))
    assert np.array_equal(torch.cat(list(chunks(images))).numpy(), decode_listing(listing, 8))
    assert len(kept(cache)) == 2 * len(listing)


def test_a_link_shares_what_its_picture_has(listing: ImageListing, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    read(listing, cache)
    linked = tmp_path / "linked" / "all"
    linked.mkdir(parents=True)
    for path in listing.paths:
        (linked / path.replace("/", "-")).symlink_to(listing.root / path)
    read(list_images(linked.parent), cache)
    assert len(kept(cache)) == len(listing)


def test_a_full_disk_costs_time_only(
    listing: ImageListing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        fill(disk, but=80_000)
        assert np.array_equal(read(listing, disk / "cache"), decode_listing(listing, SIZE))
        # A twentieth is left to others.
        assert 0 < len(kept(disk / "cache")) < len(listing)
        told = os.statvfs(disk)
        assert told.f_bavail >= 0.9 * image_files.RESERVE * told.f_blocks
    assert "the other images are decoded in every epoch" in capsys.readouterr().err


def test_a_disk_that_is_full_to_the_brim(
    listing: ImageListing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_files, "RESERVE", -1.0)
    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        fill(disk, but=30_000)
        for _ in range(2):
            assert np.array_equal(read(listing, disk / "cache"), decode_listing(listing, SIZE))


def test_a_folder_that_cannot_be_made_is_refused(listing: ImageListing, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CannotWriteError, match="file"):
        open_pictures(listing, SIZE, ReadingOptions(0, 0, tmp_path / "file" / "cache"))


def _reads_for_ever(listing: ImageListing, cache: Path) -> None:
    while True:
        for path in kept(cache):
            path.unlink(missing_ok=True)
        read(listing, cache)


@pytest.mark.long
def test_two_share_a_cache_and_one_is_killed_while_it_writes(
    listing: ImageListing, tmp_path: Path
) -> None:
    cache, expected = tmp_path / "cache", decode_listing(listing, SIZE)
    for _ in range(2):
        other = reader_context().Process(target=_reads_for_ever, args=(listing, cache))
        other.start()
        try:
            deadline = time.monotonic() + 60
            while not cache.is_dir() or not kept(cache):
                assert time.monotonic() < deadline
            for _ in range(10):
                assert np.array_equal(read(listing, cache), expected)
        finally:
            assert other.pid is not None
            os.kill(other.pid, signal.SIGKILL)
            other.join()
        assert np.array_equal(read(listing, cache), expected)
