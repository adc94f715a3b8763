"""Files that only save time: one that is damaged counts as not there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nobackfill.class_folders import Images, list_images
from nobackfill.research.cells import Cells, read_cells, write_cells
from nobackfill.training.data.pictures import ListedImages, ReadingOptions
from nobackfill.training.networks.frozen import FrozenEncoder, cached_features
from tests.training.life import SIZE


def _first(batch: Images) -> np.ndarray:
    return batch.reshape(len(batch), -1)[:, :3].astype(np.float32)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _head(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:9])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _fewer(file: Path) -> None:
    np.save(file, np.load(file)[1:])


def _doubles(file: Path) -> None:
    np.save(file, np.load(file).astype(np.float64))


@pytest.mark.parametrize("damage", [_truncate, _head, _empty, _fewer, _doubles])
def test_damaged_features_are_computed_anew(
    damage: Callable[[Path], None], digits: Path, tmp_path: Path
) -> None:
    listed = ListedImages(list_images(digits / "queries"), SIZE, ReadingOptions())
    encoder = FrozenEncoder("test", _first, 3, SIZE, False, "digest")
    whole = cached_features(encoder, listed, tmp_path)
    (file,) = tmp_path.glob("*.npy")
    kept = file.read_bytes()
    damage(file)
    again = cached_features(encoder, listed, tmp_path)
    assert again.dtype == np.float32
    assert np.array_equal(again, whole)
    assert file.read_bytes() == kept


@pytest.mark.parametrize("damage", [_truncate, _head, _empty])
@pytest.mark.parametrize("suffix", [".npz", ".json"])
def test_damaged_cells_are_not_there(
    suffix: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "row.npz"
    values = np.linspace(0, 1, 500)
    classes = np.repeat(["a", "b"], 250)
    extras = {f"extra {number}": 0.5 for number in range(20)}
    write_cells(path, Cells({"new/old": {"map": values}}, extras, classes), "digest")
    assert read_cells(path, "digest") is not None
    damage(path.with_suffix(suffix))
    assert read_cells(path, "digest") is None
    write_cells(path, Cells({"new/old": {"map": values}}, extras, classes), "digest")
    kept = read_cells(path, "digest")
    assert kept is not None
    np.testing.assert_array_equal(kept.figures_by_query["new/old"]["map"], values)
    np.testing.assert_array_equal(kept.query_classes, classes)
