from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nobackfill.class_folders import Images, decode_listing, list_images
from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.release.trust.trust import read_publication
from nobackfill.training.config import Augmentation, StoredVectorFiles
from nobackfill.training.data.folders import read_stored_vectors
from nobackfill.training.data.pictures import ImageSource, ListedImages, ReadingOptions
from nobackfill.training.loop.run import read_checkpoint, write_checkpoint
from nobackfill.training.networks.frozen import (
    AugmentedView,
    FrozenEncoder,
    augmented_views,
    cached_features,
    cached_training_features,
    encoder_of_run,
    encoders_of_manifest,
    load_encoder,
)
from tests.training.life import SIZE, Life


@pytest.fixture(scope="module")
def images(digits: Path) -> Images:
    return decode_listing(list_images(digits / "queries"), SIZE)


@pytest.fixture
def listed(digits: Path) -> ListedImages:
    return ListedImages(list_images(digits / "queries"), SIZE, ReadingOptions())


def test_features_are_computed_once(listed: ListedImages, tmp_path: Path) -> None:
    calls = []

    def run(batch: Images) -> np.ndarray:
        calls.append(len(batch))
        return batch.reshape(len(batch), -1)[:, :3].astype(np.float32)

    encoder = FrozenEncoder("test", run, 3, SIZE, False, "digest")
    first = cached_features(encoder, listed, tmp_path)
    again = cached_features(encoder, listed, tmp_path)
    assert np.array_equal(first, again)
    assert calls == [len(listed)]
    # Another picture, or another model, is another file.
    fewer = listed.listing.select(np.arange(1, len(listed)))
    cached_features(encoder, replace(listed, listing=fewer), tmp_path)
    cached_features(FrozenEncoder("test", run, 3, SIZE, False, "other"), listed, tmp_path)
    assert len(calls) == 3
    assert len(list(tmp_path.glob("*.npy"))) == 3


def test_a_view_is_made_once_for_all_models_that_have_no_features_of_it(
    listed: ListedImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sums(batch: Images) -> np.ndarray:
        colours: np.ndarray = batch.reshape(len(batch), -1, 3).sum(1)
        return colours.astype(np.float32)

    def model(name: str, times: int) -> FrozenEncoder:
        return FrozenEncoder(
            name, lambda batch: sums(batch) * np.float32(times), 3, SIZE, False, name
        )

    view = AugmentedView(listed, SIZE, Augmentation(translate=0.2), 1, is_mixed=True)
    passes = []
    make = AugmentedView.chunks

    def counted(self: AugmentedView) -> Iterator[torch.Tensor]:
        passes.append(self.seed)
        return make(self)

    monkeypatch.setattr(AugmentedView, "chunks", counted)
    old, side, new, later = (model(name, n) for n, name in enumerate(("a", "b", "c", "d"), 1))
    of_old = cached_features(old, view, tmp_path)
    assert np.array_equal(of_old, sums(torch.cat(list(make(view))).numpy()))
    # One of them is known, and one asked twice.
    found = cached_training_features([new, old, side, side], view, tmp_path)
    assert len(passes) == 2
    for vectors, times in zip(found, (3, 1, 2, 2), strict=True):
        np.testing.assert_allclose(vectors, of_old * times, rtol=1e-6)
    again = cached_training_features([old, side, new], view, tmp_path)
    assert len(passes) == 2
    assert all(map(np.array_equal, again, (found[1], found[2], found[0])))
    # Another model's share of the pass is its own.
    np.testing.assert_allclose(cached_features(later, view, tmp_path), of_old * 4, rtol=1e-6)
    assert len(list(tmp_path.glob("*.npy"))) == 4


def test_what_is_trained_on_is_read_in_fewer_digits_and_kept_apart(
    images: Images, listed: ListedImages, tmp_path: Path
) -> None:
    """What is stored of a gallery's own pictures has all digits."""

    def first(batch: Images) -> np.ndarray:
        colours: np.ndarray = batch.reshape(len(batch), -1, 3).sum(1)
        return colours.astype(np.float32)

    def rounded(batch: Images) -> np.ndarray:
        return np.round(first(batch) / 100) * 100

    encoder = FrozenEncoder("test", first, 3, SIZE, False, "digest", encode_in_bf16=rounded)
    plain = FrozenEncoder("test", first, 3, SIZE, False, "digest")
    for shown in (listed, AugmentedView(listed, SIZE, Augmentation(), seed=1)):
        near, whole = cached_training_features([encoder, plain], shown, tmp_path)
        assert (near % 100 == 0).all()
        assert not np.array_equal(near, whole)
        # All digits were kept by a model that has none fewer: it is the same one.
        assert np.array_equal(cached_features(encoder, shown, tmp_path), whole)
    assert np.array_equal(cached_features(encoder, listed, tmp_path), first(images))


@pytest.mark.parametrize(("precision", "quick"), [("auto", True), ("32-true", False)])
def test_models_that_bf16_trained_read_in_it(
    precision: str,
    quick: bool,
    runs: Path,
    images: Images,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    checkpoint = read_checkpoint(runs / "embedder-1")
    config = checkpoint.config.model_copy(update={"precision": precision, "run_dir": tmp_path})
    write_checkpoint(tmp_path, replace(checkpoint, config=config))
    encoder = encoder_of_run(tmp_path, "embedder")
    assert (encoder.encode_in_bf16 is not None) is quick
    if encoder.encode_in_bf16 is not None:
        exact, near = encoder.encode(images[:20]), encoder.encode_in_bf16(images[:20])
        assert near.dtype == np.float32
        assert not np.array_equal(exact, near)
        assert (exact * near).sum(1).min() > 0.999


def test_frozen_models_neither_learn_nor_drift(runs: Path, images: Images) -> None:
    encoder, _ = load_encoder(runs / "embedder-1")
    assert not encoder.training
    assert not any(p.requires_grad for p in encoder.parameters())
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    frozen = encoder_of_run(runs / "embedder-1", "embedder")
    # In pieces as in whole: BatchNorm does not look at the batch.
    whole = frozen.encode(images)
    assert np.allclose(whole[:3], frozen.encode(images[:3]), atol=1e-6)
    assert all(torch.equal(t, before[name]) for name, t in encoder.state_dict().items())


def test_a_run_and_its_release_are_the_same_model(life: Life, images: Images) -> None:
    manifest = read_publication(life.repo).manifests[1]
    embedder, side = encoders_of_manifest(life.repo, manifest)
    assert side is not None
    for published, run, kind in (
        (embedder, "embedder-1", "embedder"),
        (side, "side-1", "side_encoder"),
    ):
        expected = encoder_of_run(life.runs / run, kind).encode(images)
        np.testing.assert_allclose(published.encode(images), expected, atol=1e-4)


def whole(view: Mapping[int, ImageSource]) -> dict[int, Images]:
    """A view's images by size."""
    return {size: torch.cat(list(images.chunks())).numpy() for size, images in view.items()}


def test_views_begin_with_the_images_and_repeat_by_seed(digits: Path) -> None:
    listing = list_images(digits / "queries", 2)
    moving = Augmentation(rotate_degrees=20, translate=0.1)

    def views(seed: int) -> list[dict[int, Images]]:
        return [
            whole(view)
            for view in augmented_views(listing, (8, 16), 3, moving, seed, ReadingOptions())
        ]

    first, again, other = views(1), views(1), views(2)
    assert np.array_equal(first[0][8], decode_listing(listing, 8))
    assert np.array_equal(first[0][16], decode_listing(listing, 16))
    assert np.array_equal(first[2][16], again[2][16])
    assert not np.array_equal(first[2][16], other[2][16])
    assert not np.array_equal(first[1][16], first[2][16])


def test_models_of_different_sizes_see_the_same_view(digits: Path) -> None:
    listing = list_images(digits / "queries", 2)
    moving = Augmentation(rotate_degrees=40, translate=0.2)
    view = whole(list(augmented_views(listing, (8, 16), 2, moving, 0, ReadingOptions()))[1])
    # Averaged over 2 x 2 pixels the large view is nearly the small one, and far from the others.
    halved = view[16].reshape(len(listing), 8, 2, 8, 2, 3).mean((2, 4))
    gap = np.abs(halved - view[8]).mean((1, 2, 3))
    stranger = np.abs(np.roll(halved, 1, 0) - view[8]).mean((1, 2, 3))
    assert gap.max() < stranger.mean() / 2


def test_mixed_views_come_last_and_show_two_images_to_every_size(digits: Path) -> None:
    listing = list_images(digits / "queries", 2)

    def views() -> list[dict[int, Images]]:
        made = augmented_views(listing, (8, 16), 2, Augmentation(), 0, ReadingOptions(), 2)
        return [whole(view) for view in made]

    first, again = views(), views()
    assert len(first) == 4
    for before, after in zip(first, again, strict=True):
        assert all(np.array_equal(before[size], after[size]) for size in (8, 16))
    plain, mixture = first[0][16].astype(int), first[2][16].astype(int)
    assert np.array_equal(first[1][16], first[0][16])
    assert not np.array_equal(first[2][8], first[3][8])
    # Most mixtures are no image of the folder, turned or not.
    symmetries = [
        np.rot90(side, k, (1, 2)) for k in range(4) for side in (plain, plain[:, :, ::-1])
    ]
    gaps = [np.abs(s[None] - mixture[:, None]).mean((2, 3, 4)).min(1) for s in symmetries]
    assert (np.min(gaps, 0) > 5).mean() > 0.6
    halved = first[2][16].reshape(len(listing), 8, 2, 8, 2, 3).mean((2, 4))
    gap = np.abs(halved - first[2][8]).mean((1, 2, 3))
    stranger = np.abs(np.roll(halved, 1, 0) - first[2][8]).mean((1, 2, 3))
    assert gap.max() < stranger.mean() / 2


@pytest.fixture
def stored(digits: Path, tmp_path: Path) -> StoredVectorFiles:
    """A vector a query image, in reverse order."""
    listing = list_images(digits / "queries")
    source = StoredVectorFiles(vectors=tmp_path / "v.npy", paths=tmp_path / "p.txt", release=1)
    rows = np.arange(len(listing), dtype=np.float32)[::-1]
    np.save(source.vectors, np.stack([rows, rows + 0.5], 1))
    source.paths.write_text("\n".join(reversed(listing.paths)) + "\n", encoding="utf-8")
    return source


def test_stored_vectors_are_matched_by_path(digits: Path, stored: StoredVectorFiles) -> None:
    listing = list_images(digits / "queries")
    vectors = read_stored_vectors(stored, listing)
    assert np.array_equal(vectors[:, 0], np.arange(len(listing)))
    assert vectors.dtype == np.float32


def test_an_image_without_a_vector_is_named(digits: Path, stored: StoredVectorFiles) -> None:
    with pytest.raises(InvalidInputError, match=r"no vector for 800 of 800 images"):
        read_stored_vectors(stored, list_images(digits / "eval"))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(80, np.float32), r"shape \[n, dim\]"),
        (np.zeros((80, 2), np.int32), "float32"),
        (np.full((80, 2), np.nan, np.float32), "finite"),
        (np.zeros((81, 2), np.float32), "81 lines"),
        (np.zeros((80, 2), np.float32), "80 vectors are zero"),
        (np.zeros((80, 0), np.float32), r"shape \[n, dim\]"),
    ],
)
def test_unusable_vectors_are_refused(
    array: np.ndarray, message: str, digits: Path, stored: StoredVectorFiles
) -> None:
    np.save(stored.vectors, array)
    with pytest.raises(InvalidInputError, match=message):
        read_stored_vectors(stored, list_images(digits / "queries"))


def test_a_line_too_many_is_refused(digits: Path, stored: StoredVectorFiles) -> None:
    """A header would give each image its neighbour's vector."""
    listing, lines = list_images(digits / "queries"), stored.paths.read_text("utf-8")
    few = replace(listing, paths=listing.paths[:9], labels=listing.labels[:9])
    read_stored_vectors(stored, few)
    for wrong in ("path\n" + lines, lines + "more\n", "\n" + lines):
        stored.paths.write_text(wrong, "utf-8")
        with pytest.raises(InvalidInputError, match="expected 80 lines"):
            read_stored_vectors(stored, few)


def test_a_path_that_is_there_twice_is_refused(digits: Path, stored: StoredVectorFiles) -> None:
    lines = stored.paths.read_text("utf-8").splitlines()
    stored.paths.write_text("\n".join([lines[1], *lines[1:]]), "utf-8")
    with pytest.raises(InvalidInputError, match=f"1 paths occur more than once: {lines[1]}"):
        read_stored_vectors(stored, list_images(digits / "queries"))


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"\x93NUMPY\1\0\6\0{'de\n"])
def test_what_is_no_array_is_refused(
    content: bytes, digits: Path, stored: StoredVectorFiles
) -> None:
    stored.vectors.write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"\.npy file"):
        read_stored_vectors(stored, list_images(digits / "queries"))


def test_pickles_are_refused(digits: Path, stored: StoredVectorFiles) -> None:
    np.save(stored.vectors, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidInputError, match=r"\.npy file"):
        read_stored_vectors(stored, list_images(digits / "queries"))


def test_missing_files_are_named(digits: Path, stored: StoredVectorFiles) -> None:
    stored.paths.unlink()
    with pytest.raises(ConfigurationError, match=r"p\.txt does not exist; .* stored vectors"):
        read_stored_vectors(stored, list_images(digits / "queries"))
