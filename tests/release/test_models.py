"""Running ONNX files: right answers, and refusal of what is not as it was published."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nobackfill.errors import InvalidInputError, VerificationError
from nobackfill.release.manifest import Manifest, embedder_path
from nobackfill.release.models import (
    open_embedder,
    open_side_encoder,
    open_upgrade,
    read_verified_file,
)
from nobackfill.release.publishing.draft import Draft
from tests.support import graphs
from tests.support.releases import draft, images, published


@pytest.fixture
def life(tmp_path: Path) -> tuple[Draft, Draft]:
    first = draft(tmp_path, 1)
    return first, draft(tmp_path, 2, [first.manifest], int8=True)


def expected_embedding(release: int, count: int) -> graphs.Matrix:
    """numpy's own answer."""
    wide = flat(count) @ graphs.into_block(graphs.projection(graphs.BLOCK, 1), release)
    return np.asarray(wide / np.linalg.norm(wide, axis=1, keepdims=True), np.float32)


def expected_side(release: int, count: int) -> graphs.Matrix:
    wide = flat(count) @ graphs.into_block(graphs.projection(graphs.SIDE_BLOCK, 2), release)
    return wide.astype(np.float32)


def flat(count: int) -> graphs.Matrix:
    return (images(count).reshape(count, graphs.SIZE**2 * 3) / 255 - 0.4987).astype(np.float32)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_embedder_and_side_encoder_give_what_numpy_gives(
    count: int, life: tuple[Draft, Draft]
) -> None:
    for number, one in enumerate(life, 1):
        got = open_embedder(one.local_files, one.manifest).run(images(count))
        assert got.shape == (count, graphs.DIM)
        np.testing.assert_allclose(got, expected_embedding(number, count), atol=1e-5)
        side = open_side_encoder(one.local_files, one.manifest).run(images(count))
        np.testing.assert_allclose(side, expected_side(number, count), atol=1e-5)


@pytest.mark.parametrize("int8", [False, True])
def test_an_upgrade_leads_into_the_new_space(int8: bool, life: tuple[Draft, Draft]) -> None:
    _, second = life
    model = open_upgrade(
        second.local_files, second.manifest, second.manifest.upgrades[0], int8=int8
    )
    side = expected_side(1, 6)
    got = model.run(expected_embedding(1, 6), side)
    tolerance = 0.05 if int8 else 1e-5
    np.testing.assert_allclose(got.embedding, expected_embedding(2, 6), atol=tolerance)
    assert got.side_information is not None
    np.testing.assert_allclose(got.side_information, expected_side(2, 6), atol=tolerance)
    assert got.uncertainty is not None
    np.testing.assert_allclose(got.uncertainty, np.abs(side).sum(axis=1), rtol=1e-5)


def test_carried_side_information_comes_back_untouched(tmp_path: Path) -> None:
    first = draft(tmp_path, 1)
    second = draft(tmp_path, 2, [first.manifest], side="carries")
    upgrade = second.manifest.upgrades[0]
    side = expected_side(1, 3)
    got = open_upgrade(second.local_files, second.manifest, upgrade).run(
        expected_embedding(1, 3), side
    )
    assert got.side_information is side


def test_an_upgrade_without_side_information_drops_it(tmp_path: Path) -> None:
    first = draft(tmp_path, 1, side="none")
    second = draft(tmp_path, 2, [first.manifest], side="none")
    model = open_upgrade(second.local_files, second.manifest, second.manifest.upgrades[0])
    got = model.run(expected_embedding(1, 3), None)
    assert got.side_information is None
    assert got.uncertainty is None
    with pytest.raises(InvalidInputError, match="no encoder of side-information"):
        open_side_encoder(first.local_files, first.manifest)
    with pytest.raises(InvalidInputError, match="without int8"):
        open_upgrade(second.local_files, second.manifest, second.manifest.upgrades[0], int8=True)


@pytest.mark.parametrize(
    "wrong",
    [images(2).astype(np.float32), images(2)[0], images(2)[:, :4], images(2)[..., :1]],
    ids=["dtype", "one", "size", "channels"],
)
def test_other_images_are_refused(wrong: Any, life: tuple[Draft, Draft]) -> None:
    first, _ = life
    with pytest.raises(InvalidInputError, match="uint8"):
        open_embedder(first.local_files, first.manifest).run(wrong)


def test_an_upgrade_refuses_what_it_cannot_read(life: tuple[Draft, Draft]) -> None:
    _, second = life
    model = open_upgrade(second.local_files, second.manifest, second.manifest.upgrades[0])
    good, side = expected_embedding(1, 3), expected_side(1, 3)
    with pytest.raises(InvalidInputError, match="side-information"):
        model.run(good, None)
    with pytest.raises(InvalidInputError, match="side-information"):
        model.run(good, side[:2])
    with pytest.raises(InvalidInputError, match="side-information"):
        model.run(good, side[:, :-1])
    with pytest.raises(InvalidInputError, match="embedding"):
        model.run(good[:, :-1], side)
    with pytest.raises(InvalidInputError, match="embedding"):
        model.run(good * np.nan, side)


@pytest.mark.parametrize("damage", ["bit", "truncated", "longer", "missing", "swapped"])
def test_a_file_that_is_not_the_published_one_is_refused(
    damage: str, life: tuple[Draft, Draft]
) -> None:
    first, second = life
    path = first.local_files[embedder_path(1)]
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[len(data) // 2] ^= 1
    elif damage == "truncated":
        del data[-1]
    elif damage == "longer":
        data += b"\0"
    elif damage == "swapped":
        data = bytearray(second.local_files[embedder_path(2)].read_bytes())
    path.write_bytes(data)
    if damage == "missing":
        path.unlink()
    with pytest.raises(VerificationError, match="embedder_1"):
        open_embedder(first.local_files, first.manifest)


def test_a_draft_that_lacks_a_file_names_it(life: tuple[Draft, Draft]) -> None:
    first, _ = life
    with pytest.raises(VerificationError, match="no file was given"):
        read_verified_file({}, first.manifest.probes.file)


def with_embedder(first: Draft, folder: Path, weights: graphs.Matrix, unit: bool) -> Manifest:
    """The manifest of `first` with another embedder, digest and all."""
    path = embedder_path(1)
    graphs.save(graphs.encoder("embedding", weights, unit=unit), folder / path)
    spec = first.manifest.embedder.model_copy(update={"file": published(folder, path)})
    return first.manifest.model_copy(update={"embedder": spec})


@pytest.mark.parametrize(
    ("weights", "message"),
    [(np.full((192, graphs.DIM), np.nan, np.float32), "finite"),
     (np.full((192, graphs.DIM), 2, np.float32), "norm 1"),
     (np.ones((192, graphs.DIM + 1), np.float32), "shape"),
     (np.zeros((192, graphs.DIM), np.float32), "norm 1")],
    ids=["nan", "no unit", "dimension", "zero"],
)  # fmt: skip
def test_outputs_that_are_no_vectors_of_the_space_are_refused(
    weights: graphs.Matrix, message: str, tmp_path: Path
) -> None:
    first = draft(tmp_path, 1)
    manifest = with_embedder(first, tmp_path, weights, unit=False)
    embedder = open_embedder(tmp_path, manifest)
    with pytest.raises(VerificationError, match=message):
        embedder.run(images(2))


def test_signed_nonsense_is_refused_by_the_runtime_not_crashed_on(tmp_path: Path) -> None:
    first = draft(tmp_path, 1)
    path = tmp_path / embedder_path(1)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no model at all")
    spec = first.manifest.embedder.model_copy(
        update={"file": published(tmp_path, embedder_path(1))}
    )
    manifest = first.manifest.model_copy(update={"embedder": spec})
    with pytest.raises(VerificationError, match="onnxruntime cannot load"):
        open_embedder(tmp_path, manifest)
