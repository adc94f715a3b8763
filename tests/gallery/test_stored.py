"""Vectors read where they are asked for, against rows that sqlite3 gives one by one."""

import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from nobackfill.errors import DamagedError
from nobackfill.gallery.sqlite_file import VectorsOnDisk, find_space
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from nobackfill.vectors import Vectors
from tests.gallery.making import filled, ids, spec

ONE = spec(1).space


def rows_of(path: Path) -> dict[int, Vectors]:
    """What lies in the file."""
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT label, embedding FROM vectors_1").fetchall()
    connection.close()
    return {label: np.frombuffer(blob, "<f4") for label, blob in found}


@pytest.mark.parametrize("gone", [range(0), range(7, 60, 3), range(5, 55)])
def test_any_rows_in_any_order(
    gone: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nobackfill.gallery.sqlite_file.FETCH_ROWS", 7)
    monkeypatch.setattr("nobackfill.gallery.sqlite_file._LABELS_AT_ONCE", 10)
    path = tmp_path / "g.sqlite"
    with filled(path, 60) as store:
        # Mostly zeros, which end a text.
        sparse = np.eye(3, spec(1).dim, dtype=np.float32)
        store.put(ids(3, start=100), [NewVectors(ONE, sparse)])
        store.delete([f"item-{number}" for number in gone])
        true = rows_of(path)
        with store.read_snapshot() as connection:
            stored = VectorsOnDisk(connection, find_space(connection, ONE))
            assert stored.labels.tolist() == sorted(true)
            expected = np.stack([true[label] for label in sorted(true)])
            np.testing.assert_array_equal(np.asarray(stored), expected)
            count = len(stored)
            mixed = np.random.default_rng(1).integers(0, count, 50)
            asked = (
                slice(2, 9), slice(count - 3, count + 9), slice(0, 0), mixed, np.sort(mixed),
                np.unique(mixed), np.array([0]), np.arange(count)[::-1], np.empty(0, np.intp),
            )  # fmt: skip
            for rows in asked:
                np.testing.assert_array_equal(stored[rows], expected[rows])


@pytest.mark.parametrize("damage", ["zeroblob(3)", "CAST(embedding AS TEXT)", "17"])
def test_a_vector_that_is_none_is_told(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    with filled(path, 20) as store, store.read_snapshot() as connection:
        stored = VectorsOnDisk(connection, find_space(connection, ONE))
        assert len(stored[:]) == 20
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"UPDATE vectors_1 SET embedding = {damage} WHERE label = 9")
    connection.close()
    with (
        SqliteGallery.open(path) as store,
        pytest.raises(DamagedError, match=f"^{re.escape(str(path))} is damaged .*; restore"),
        store.read_snapshot() as connection,
    ):
        stored = VectorsOnDisk(connection, find_space(connection, ONE))
        assert len(stored[:8]) == 8
        stored[:]


def test_lengths_that_make_up_for_one_another_are_told(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    filled(path, 20).close()
    connection = sqlite3.connect(path, isolation_level=None)
    size = 4 * spec(1).dim
    connection.execute(f"UPDATE vectors_1 SET embedding = zeroblob({size - 4}) WHERE label = 9")
    connection.execute(f"UPDATE vectors_1 SET embedding = zeroblob({size + 4}) WHERE label = 10")
    connection.close()
    with SqliteGallery.open(path) as store, store.read_snapshot() as connection:
        stored = VectorsOnDisk(connection, find_space(connection, ONE))
        with pytest.raises(DamagedError):
            stored[:]
