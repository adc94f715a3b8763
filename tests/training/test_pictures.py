"""Images that are read as they are needed: the pixels, and the training, of those in memory."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nobackfill.class_folders import ImageListing, decode_listing, list_images
from nobackfill.errors import InvalidInputError, NobackfillError
from nobackfill.training.config import EmbedderConfig
from nobackfill.training.data.pictures import (
    ListedImages,
    Pictures,
    ReadingOptions,
    chunks,
    in_batches,
    open_pictures,
)
from nobackfill.training.networks.frozen import FrozenEncoder, cached_features
from tests.support.odd_pictures import ODD
from tests.training.life import config_of, train_quietly

SIZE = 8
STREAMED = ReadingOptions(in_memory_mib=0, workers=0)


@pytest.fixture
def listing(digits: Path) -> ImageListing:
    return list_images(digits / "queries")


def opened(listing: ImageListing, reading: ReadingOptions = STREAMED, size: int = SIZE) -> Pictures:
    pictures = open_pictures(listing, size, reading)
    assert isinstance(pictures, Pictures)
    return pictures


def whole(pictures: Pictures | torch.Tensor) -> np.ndarray:
    return torch.cat(list(chunks(pictures))).numpy()


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_the_pixels_are_those_held_in_memory(listing: ImageListing, workers: int) -> None:
    held = open_pictures(listing, SIZE, ReadingOptions())
    assert isinstance(held, torch.Tensor)
    pictures = opened(listing, ReadingOptions(in_memory_mib=0, workers=workers))
    shuffled = torch.randperm(len(listing), generator=torch.Generator().manual_seed(3))
    order = torch.split(shuffled, 7)
    # A second pass by the same processes, in another order.
    for batches in (order, order[::-1]):
        for ours, memory in zip(
            in_batches(pictures, batches), in_batches(held, batches), strict=True
        ):
            assert torch.equal(ours, memory)
    assert np.array_equal(whole(pictures), decode_listing(listing, SIZE))


def test_a_choice_of_rows_reads_nothing_else(listing: ImageListing) -> None:
    pictures = opened(listing)
    mask = torch.arange(len(listing)) % 3 == 1
    assert np.array_equal(whole(pictures[mask]), decode_listing(listing, SIZE)[mask.numpy()])


@pytest.mark.parametrize("method", ["independent", "unibct", "bct_sys"])
def test_a_training_is_the_same_bit_by_bit(
    method: str, digits: Path, runs: Path, tmp_path: Path
) -> None:
    def trained(name: str, **reading: object) -> dict[str, torch.Tensor]:
        old = {} if method == "independent" else {"old": str(runs / "embedder-1")}
        return train_quietly(
            config_of(
                "embedder",
                tmp_path / name / "run",
                digits / "queries",
                epochs=2,
                method=method,
                **old,
                **reading,
            )
        ).tensors

    streamed = trained(
        "a", in_memory_mib=0, workers=0 if method != "independent" else 1, pixel_cache=tmp_path
    )
    memory = trained("b")
    assert streamed.keys() == memory.keys()
    assert all(torch.equal(tensor, memory[name]) for name, tensor in streamed.items())


def test_a_resumed_training_may_read_in_another_way(digits: Path, tmp_path: Path) -> None:
    keys: dict[str, object] = {"epochs": 2}
    first = config_of("embedder", tmp_path / "run", digits / "queries", **keys)
    done = train_quietly(first)
    again = config_of(
        "embedder", tmp_path / "run", digits / "queries", in_memory_mib=0, workers=0, **keys
    )
    assert train_quietly(again).step == done.step


@pytest.mark.parametrize("reading", [ReadingOptions(), STREAMED], ids=["held", "streamed"])
def test_features_are_found_without_reading_a_picture(
    reading: ReadingOptions, listing: ImageListing, tmp_path: Path
) -> None:
    def run(batch: np.ndarray) -> np.ndarray:
        return batch.reshape(len(batch), -1)[:, :3].astype(np.float32)

    encoder = FrozenEncoder("test", run, 3, SIZE, False, "digest")
    first = cached_features(encoder, ListedImages(listing, SIZE, reading), tmp_path)
    assert np.array_equal(first, run(decode_listing(listing, SIZE)))
    unread = ListedImages(listing, SIZE, reading)
    assert np.array_equal(cached_features(encoder, unread, tmp_path), first)
    assert "images" not in unread.__dict__
    assert len(list(tmp_path.iterdir())) == 1


def test_a_changed_file_a_size_and_other_files_are_another_digest(tmp_path: Path) -> None:
    listing = pictures_of(tmp_path, {"a/1.png": 10, "b/1.png": 20})

    def digest(size: int = SIZE, of: ImageListing = listing) -> str:
        return ListedImages(of, size, ReadingOptions()).digest

    before = digest()
    assert digest() == before
    assert len({before, digest(16), digest(of=listing.select(np.array([1])))}) == 3
    os.utime(tmp_path / "a" / "1.png", ns=(1, 1))
    assert digest() != before


def test_a_file_that_is_gone_is_named_before_features_are_looked_for(tmp_path: Path) -> None:
    listing = pictures_of(tmp_path, {"a/1.png": 10, "b/1.png": 20})
    (tmp_path / "b" / "1.png").unlink()
    with pytest.raises(InvalidInputError, match=r"b/1\.png cannot be read"):
        ListedImages(listing, SIZE, ReadingOptions()).digest  # noqa: B018 - asked for its error


def pictures_of(root: Path, greys: dict[str, int]) -> ImageListing:
    for path, grey in greys.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (grey, grey, grey)).save(root / path)
    return list_images(root)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_file_is_named_in_one_sentence(tmp_path: Path, workers: int) -> None:
    listing = pictures_of(tmp_path, {"a/1.png": 1, "b/1.png": 2, "b/2.png": 3})
    (tmp_path / "b" / "1.png").write_bytes(b"no image")
    pictures = opened(listing, ReadingOptions(0, workers))
    with pytest.raises(InvalidInputError, match=r"b/1\.png: image: expected a JPEG") as caught:
        whole(pictures)
    assert "Traceback" not in str(caught.value)


@pytest.mark.long
def test_all_broken_files_are_named_before_a_training(digits: Path, tmp_path: Path) -> None:
    greys = {f"{name}/{n}.png": 40 * n for name in "ab" for n in range(6)}
    listing = pictures_of(tmp_path / "images", greys)
    for path, data in (("a/1.png", b"text"), ("b/2.png", b""), ("b/3.png", ODD["png, cut"])):
        (listing.root / path).write_bytes(data)
    keys: dict[str, object] = {"batch_size": 2, "in_memory_mib": 0, "workers": 0, "epochs": 2}
    run = tmp_path / "runs" / "run"
    with pytest.raises(InvalidInputError, match=r"3 of the 12 files .*a/1\.png, b/2\.png, b/3"):
        train_quietly(config_of("embedder", run, listing.root, classes=2, **keys))
    assert not run.exists()
    skipping = config_of("embedder", run, listing.root, classes=2, skip_corrupt=True, **keys)
    assert train_quietly(skipping).is_finished


@pytest.mark.parametrize("kind", sorted(ODD))
def test_odd_pictures_are_read_or_refused_as_everywhere(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(ODD[kind])
    listing = list_images(tmp_path)
    reading = ReadingOptions(0, 0, tmp_path / "cache")
    try:
        expected = decode_listing(listing, SIZE)
    except InvalidInputError:
        with pytest.raises(InvalidInputError, match=r"1\.jpg"):
            whole(opened(listing, reading))
        return
    for _ in range(2):
        assert np.array_equal(whole(opened(listing, reading)), expected)


def test_a_reading_process_that_is_killed_is_reported(listing: ImageListing) -> None:
    pictures = opened(listing, ReadingOptions(in_memory_mib=0, workers=1))
    batches = pictures.in_batches(torch.split(torch.arange(len(listing)), 2))
    next(batches)
    (reader,) = multiprocessing.active_children()
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGKILL)
    with pytest.raises(NobackfillError, match="a process that reads training images was killed"):
        for _ in batches:
            time.sleep(0.1)


def test_the_keys_are_described(digits: Path, tmp_path: Path) -> None:
    config = config_of("embedder", tmp_path, digits, workers=3, pixel_cache=str(tmp_path))
    assert isinstance(config, EmbedderConfig)
    assert (config.in_memory_mib, config.workers, config.pixel_cache) == (2048, 3, tmp_path)
