"""Files that every older format wrote must open: one of each is kept in zoo/."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from nobackfill.gallery import staging
from nobackfill.gallery.filter_engine import passing_labels
from nobackfill.gallery.filters import OneOf
from nobackfill.gallery.sqlite_file import GALLERY_FORMAT
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from tests.gallery.making import Linear, put, rows, spec, vectors

ZOO = sorted((Path(__file__).parent / "zoo").glob("format-*.gz"))


def test_there_is_one_of_every_format() -> None:
    assert [path.stem for path in ZOO] == [
        f"format-{number}" for number in range(1, GALLERY_FORMAT + 1)
    ]


@pytest.mark.parametrize("file", ZOO, ids=lambda path: path.stem)
def test_an_old_file_is_read_written_and_rolled_back(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    path.write_bytes(gzip.decompress(file.read_bytes()))
    with SqliteGallery.open(path) as store:
        assert [info.spec for info in store.spaces()] == [spec(1), spec(2)]
        assert store.active().spec == spec(2)
        labels, content = store.load_vectors(spec(1).space)
        assert labels.tolist() == [1, 2, 4]
        np.testing.assert_array_equal(content, vectors(4, 1)[[0, 1, 3]])
        upgraded = vectors(4, 1)[[0, 1, 3]] @ Linear().embedding
        np.testing.assert_allclose(
            store.load_vectors(spec(2).space)[1], upgraded, rtol=1e-5, atol=1e-5
        )
        assert rows(store, spec(2).space)[1][2] == "upgraded"
        item = store.get("item-3")
        assert item is not None and item.metadata == {"n": 3, "flag": True, "text": "ü"}
        assert passing_labels(store, OneOf("n", (1.0, 3.0))).tolist() == [2, 4]
        assert store.read_state_value("floor") == {"root": 1}
        assert put(store, ["new"], release=2, seed=3).tolist() == [5]
        assert staging.rollback(store, leave_behind=True) == spec(1).space
