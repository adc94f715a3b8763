"""Deleted vectors are gone from every byte on the disk, and files stay private."""

from pathlib import Path

import numpy as np
import pytest

from nobackfill.gallery import staging
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.staging import run_upgrade
from nobackfill.gallery.store import NewVectors
from nobackfill.vectors import Vectors
from tests.gallery.making import SIDE_DIM, Linear, filled, ids, put, rows, spec, vectors

ONE, TWO = spec(1).space, spec(2).space


def hits(folder: Path, *canaries: bytes) -> list[str]:
    """Files that hold any of the canaries."""
    return sorted(
        path.name
        for path in folder.rglob("*")
        if path.is_file() and any(canary in path.read_bytes() for canary in canaries)
    )


def canary(store: SqliteGallery, name: str = "canary") -> tuple[bytes, ...]:
    """Put an item among others; the bytes that must be gone after it."""
    embedding, side = vectors(1, 999), vectors(1, 998, SIDE_DIM)
    store.put(
        [name],
        [NewVectors(ONE, embedding, side)],
        digests=["the-digest-of-the-canary"],
        metadata=[{"secret": "tweet tweet"}],
    )
    put(store, ids(40, start=500), seed=3)
    return embedding.tobytes(), side.tobytes(), name.encode(), b"tweet", b"the-digest-of"


def test_a_deleted_item_leaves_no_byte_in_the_file_or_its_log(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 60) as store:
        sought = canary(store)
        run_upgrade(store, Linear(), spec(2))
        label = store.items([61])[0]
        assert label is not None and label.id == "canary"
        new, new_side, _ = rows(store, TWO)[61]
        assert new_side is not None
        sought = (*sought, new, new_side)
        assert all(hits(tmp_path, one) for one in sought)
        assert store.delete(["canary"]) == 1
        assert hits(tmp_path, *sought) == []
    assert hits(tmp_path, *sought) == []


def test_a_replaced_vector_is_gone_once_the_log_is_scrubbed(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 60) as store:
        embedding, side, *_ = canary(store)
        store.put(["canary"], [NewVectors(ONE, vectors(1, 5))])
        assert store.scrub()
        assert hits(tmp_path, embedding, side) == []


def test_a_dropped_space_leaves_no_byte(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 60) as store:
        run_upgrade(store, Linear(), spec(2))
        old = rows(store, ONE)[30][0]
        staging.flip(store, TWO)
        assert hits(tmp_path, old)
        staging.drop_space(store, ONE)
        assert hits(tmp_path, old) == []


def test_what_a_reader_keeps_is_scrubbed_after_it(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 60) as store:
        sought = canary(store)
        with store.read_snapshot() as connection:
            connection.execute("SELECT count(*) FROM items").fetchone()
            store.delete(["canary"])
            assert hits(tmp_path, sought[0])
        put(store, ["another"], seed=1)
        assert hits(tmp_path, *sought) == []


def test_errors_hold_no_values(tmp_path: Path) -> None:
    secret: Vectors = np.full((1, 12), 12345.678, np.float32)
    secret[0, 3] = np.nan
    with (
        filled(tmp_path / "g.sqlite", 3) as store,
        pytest.raises(Exception, match="finite") as caught,
    ):
        store.put(["secret-id"], [NewVectors(ONE, secret)])
    assert "12345" not in str(caught.value) and "secret-id" not in str(caught.value)
