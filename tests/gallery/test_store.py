"""Putting, reading and deleting items."""

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nobackfill.errors import (
    AlreadyExistsError,
    CannotWriteError,
    DamagedError,
    IncompatibleSpaceError,
    InvalidInputError,
    NotFoundError,
)
from nobackfill.gallery import staging
from nobackfill.gallery.spec import Origin, SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import Change, NewVectors
from tests.gallery.making import DIM, SIDE_DIM, Linear, filled, ids, put, rows, spec, vectors
from tests.support import graphs, releases

SPACE = spec().space


def test_what_was_put_is_there_bit_for_bit_after_opening_again(tmp_path: Path) -> None:
    embedding, side = vectors(50, 3), vectors(50, 4, SIDE_DIM)
    with SqliteGallery.create(tmp_path / "g.sqlite", spec()) as store:
        result = store.put(
            ids(50),
            [NewVectors(SPACE, embedding, side)],
            digests=[f"d{n}" for n in range(50)],
            metadata=[
                {"n": float(n), "even": n % 2 == 0, "name": f"bild ü {n}"} for n in range(50)
            ],
        )
        assert result.labels.tolist() == list(range(1, 51)) and result.changed_mask.all()
    with SqliteGallery.open(tmp_path / "g.sqlite") as store:
        labels, loaded = store.load_vectors(SPACE)
        np.testing.assert_array_equal(labels, result.labels)
        np.testing.assert_array_equal(loaded, embedding)
        item = store.get("item-7")
        assert item is not None and item.label == 8 and item.digest == "d7"
        assert item.metadata == {"n": 7.0, "even": False, "name": "bild ü 7"}
        assert rows(store, SPACE)[8] == (embedding[7].tobytes(), side[7].tobytes(), "native")
        vector = store.vector(8, SPACE)
        assert vector is not None
        np.testing.assert_array_equal(vector, embedding[7:8])
        assert store.vector(99, SPACE) is None
        assert store.get("nobody") is None
        assert store.count() == store.count(SPACE) == 50


def test_the_spec_of_a_release_is_kept(tmp_path: Path) -> None:
    manifest = releases.draft(tmp_path / "drafts", 1).manifest
    wanted = SpaceSpec.of(manifest)
    assert (wanted.dim, wanted.side_dim, wanted.unit_norm) == (graphs.DIM, graphs.SIDE_DIM, True)
    with SqliteGallery.create(tmp_path / "g.sqlite", wanted) as store:
        info = store.active()
    assert (info.spec, info.state) == (wanted, "active")


def test_the_same_content_changes_nothing_and_other_content_gets_a_new_label(
    tmp_path: Path,
) -> None:
    heard: list[Change] = []
    with SqliteGallery.create(tmp_path / "g.sqlite", spec()) as store:
        first = store.put(["a", "b"], [NewVectors(SPACE, vectors(2, 1))], digests=["x", "y"])
        store.subscribe(heard.append)
        again = store.put(["a", "b"], [NewVectors(SPACE, vectors(2, 2))], digests=["x", "y"])
        assert again.labels.tolist() == first.labels.tolist() and not again.changed_mask.any()
        assert store.load_vectors(SPACE)[1].tolist() == vectors(2, 1).tolist()
        third = store.put(["b", "a"], [NewVectors(SPACE, vectors(2, 2))], digests=["y", "z"])
        assert third.changed_mask.tolist() == [False, True] and third.labels.tolist() == [2, 3]
        assert store.items([1, 3])[0] is None
        # Without a digest nobody knows that it is the same.
        for _ in range(2):
            assert store.put(["b"], [NewVectors(SPACE, vectors(1, 2))]).changed_mask.all()
    assert [change.deleted_labels.tolist() for change in heard] == [[], [1], [2], [4]]


def test_labels_are_never_used_twice(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 5) as store:
        assert store.delete(ids(5)) == 5
        assert put(store, ["new"], seed=1).tolist() == [6]


def test_metadata_of_a_kept_item_can_change(tmp_path: Path) -> None:
    new = NewVectors(SPACE, vectors(1, 1))
    with SqliteGallery.create(tmp_path / "g.sqlite", spec()) as store:
        store.put(["a"], [new], digests=["x"], metadata=[{"v": 1.0}])
        store.put(["a"], [new], digests=["x"])
        kept = store.get("a")
        assert kept is not None and kept.metadata == {"v": 1.0}
        store.put(["a"], [new], digests=["x"], metadata=[{"v": 2.0}])
        described = store.get("a")
        assert described is not None and described.metadata == {"v": 2.0} and described.label == 1


def test_no_metadata_is_not_empty_metadata(tmp_path: Path) -> None:
    new = NewVectors(SPACE, vectors(3, 1))
    with SqliteGallery.create(tmp_path / "g.sqlite", spec()) as store:
        store.put(["a", "b", "c"], [new], digests=["x"] * 3, metadata=[{"v": 1.0}] * 3)
        store.put(["a", "b", "c"], [new], digests=["x"] * 3, metadata=[None, {}, {"v": 2.0}])
        found = [item.metadata for item in store.items([1, 2, 3]) if item is not None]
        assert found == [{"v": 1.0}, {}, {"v": 2.0}]
        store.put(["d", "e"], [new_rows(2)], metadata=[None, {"w": True}])
        found = [item.metadata for item in store.items([4, 5]) if item is not None]
        assert found == [{}, {"w": True}]


def new_rows(count: int, seed: int = 1) -> NewVectors:
    return NewVectors(SPACE, vectors(count, seed))


@pytest.mark.parametrize("carried", ["upgraded", "direct"])
def test_a_native_vector_takes_the_place_of_a_carried_one(tmp_path: Path, carried: Origin) -> None:
    """Whoever put an image again after an upgrade kept the carried vector for ever."""
    two = spec(2).space
    with SqliteGallery.create(tmp_path / "g.sqlite", spec()) as store:
        old = NewVectors(SPACE, vectors(3, 1))
        labels = store.put(["a", "b", "c"], [old], digests=["x"] * 3).labels
        staging.add_staging_space(store, spec(2))
        staging.write_vectors(
            store, two, labels, vectors(3, 2), origin=carried, uncertainty=[1.0, 2, 3]
        )
        staging.write_vectors(
            store, two, labels[2:], vectors(1, 3), origin="re-embedded", replace=True
        )
        told: list[Change] = []
        store.subscribe(told.append)
        native = vectors(3, 4)
        store.put(["a", "c"], [NewVectors(two, native[[0, 2]])], digests=["x"] * 2)
        # One that was carried once more is no better than what is there.
        again = NewVectors(two, vectors(3, 5), origin="upgraded")
        store.put(["a", "b", "c"], [again], digests=["x"] * 3)
        items = store.items(labels, two)
        assert [item and item.origin for item in items] == ["native", carried, "re-embedded"]
        assert [item and item.uncertainty for item in items] == [None, 2.0, None]
        expected = np.stack([native[0], vectors(3, 2)[1], vectors(1, 3)[0]])
        np.testing.assert_array_equal(store.load_vectors(two)[1], expected)
        assert [
            change.added_vectors[two][0].tolist() for change in told if change.added_vectors
        ] == [[1]]


def test_a_kept_item_takes_vectors_of_spaces_it_lacks(tmp_path: Path) -> None:
    two = spec(2).space
    with SqliteGallery.create(tmp_path / "g.sqlite", spec()) as store:
        old = NewVectors(SPACE, vectors(1, 1))
        store.put(["a"], [old], digests=["x"])
        staging.add_staging_space(store, spec(2))
        store.put(["a"], [old, NewVectors(two, vectors(1, 2))], digests=["x"])
        assert list(rows(store, two)) == [1] == list(rows(store, SPACE))


def test_deleting_takes_an_item_from_every_space(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 4) as store:
        staging.add_staging_space(store, spec(2))
        staging.write_vectors(store, spec(2).space, np.arange(1, 5), vectors(4, 2))
        assert store.delete(["item-1", "item-2", "nobody"]) == 2
        assert list(rows(store, SPACE)) == list(rows(store, spec(2).space)) == [1, 4]
        assert store.delete([]) == 0


@pytest.mark.parametrize(
    "bad",
    [
        np.array([[np.nan] * DIM]),
        np.array([[np.inf] * DIM]),
        np.array([[1e20] * DIM]),
        vectors(1, 1, DIM + 1),
        np.ones((1, DIM), np.int64),
        np.ones((2, DIM), np.float32),
        np.ones(DIM, np.float32),
        np.array([["x"] * DIM]),
    ],
    ids=["nan", "infinite", "huge", "dimension", "dtype", "rows", "flat", "text"],
)
def test_bad_vectors_are_refused(tmp_path: Path, bad: NDArray[Any]) -> None:
    with filled(tmp_path / "g.sqlite", 2) as store:
        before = rows(store, SPACE)
        with pytest.raises(InvalidInputError):
            store.put(["bad"], [NewVectors(SPACE, bad)])
        assert rows(store, SPACE) == before and store.count() == 2


@pytest.mark.parametrize("name", ["", "x" * 257, "a\0b", "\ud800", "good"])
def test_one_bad_id_refuses_the_batch(tmp_path: Path, name: str) -> None:
    with filled(tmp_path / "g.sqlite", 2) as store:
        with pytest.raises(InvalidInputError, match="id"):
            store.put(["good", name], [NewVectors(SPACE, vectors(2, 1))])
        assert store.count() == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, [1], "\udc00", "a\0"])
def test_bad_metadata_is_refused(tmp_path: Path, value: Any) -> None:
    with filled(tmp_path / "g.sqlite", 2) as store:
        for metadata in ({"key": value}, {"key\0": 1.0}):
            with pytest.raises(InvalidInputError, match="key"):
                store.put(["a"], [NewVectors(SPACE, vectors(1, 1))], metadata=[metadata])
        assert store.count() == 2


def test_vectors_of_an_unknown_space_or_with_bad_side_information_are_refused(
    tmp_path: Path,
) -> None:
    with filled(tmp_path / "g.sqlite", 2) as store:
        with pytest.raises(IncompatibleSpaceError, match="release 1"):
            store.put(["a"], [NewVectors(spec(9).space, vectors(1, 1))])
        with pytest.raises(InvalidInputError, match="side"):
            store.put(["a"], [NewVectors(SPACE, vectors(1, 1), vectors(1, 1, SIDE_DIM + 1))])
        with pytest.raises(InvalidInputError, match="1 vectors, one for each item"):
            store.put(["a"], [NewVectors(SPACE, vectors(1, 1), vectors(2, 1, SIDE_DIM))])
        assert store.count() == 2


def test_vectors_off_the_unit_sphere_are_refused_where_the_space_says_unit(tmp_path: Path) -> None:
    with (
        SqliteGallery.create(tmp_path / "g.sqlite", spec(unit=True)) as store,
        pytest.raises(InvalidInputError, match="norm 1"),
    ):
        store.put(["a"], [NewVectors(SPACE, 3 * vectors(1, 1))])


def test_a_strided_array_is_stored_as_its_values(tmp_path: Path) -> None:
    wide = vectors(6, 1, 2 * DIM)
    with SqliteGallery.create(tmp_path / "g.sqlite", spec()) as store:
        store.put(ids(3), [NewVectors(SPACE, wide[::2, ::2])])
        np.testing.assert_array_equal(store.load_vectors(SPACE)[1], wide[::2, ::2])


def test_items_are_listed_in_pages(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 10) as store:
        first = store.list_items(limit=4)
        assert [item.id for item in first] == ids(4)
        assert [item.id for item in store.list_items(start_after=first[-1].label)] == ids(6, 4)
        found = store.items([3, 99, 1], SPACE)
        assert [item and (item.id, item.origin) for item in found] == [
            ("item-2", "native"), None, ("item-0", "native"),
        ]  # fmt: skip


def test_state_is_kept_and_removed(tmp_path: Path) -> None:
    with SqliteGallery.create(tmp_path / "g.sqlite", spec()) as store:
        store.update_state({"floor": {"root": 3}, "other": "ü"})
        assert (
            store.read_state_value("floor") == {"root": 3}
            and store.read_state_value("other") == "ü"
        )
        store.update_state({"floor": None})
        assert store.read_state_value("floor") is None


@pytest.mark.parametrize("bad", ["[NaN]", "[1e400]", '["\\ud800"]', "[", "[-Infinity]"])
def test_a_state_that_cannot_be_stored_is_damage(tmp_path: Path, bad: str) -> None:
    with filled(tmp_path / "g.sqlite", 1) as store:
        for key, text in (("pair", '"\\ud83d\\ude00"'), ("large", "[1e300, 7]"), ("bad", bad)):
            with store.transaction() as connection:
                connection.execute("INSERT INTO state VALUES (?, ?)", (key, text))
        assert store.read_state_value("pair") == "\U0001f600"
        assert store.read_state_value("large") == [1e300, 7]
        for read in (lambda: store.read_state_value("bad"), store.state):
            with pytest.raises(DamagedError, match="an unusable value of 'bad'"):
                read()


def test_files_are_private_and_create_refuses_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "g.sqlite"
    old = os.umask(0)
    try:
        with filled(path, 3):
            for file in path.parent.iterdir():
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    finally:
        os.umask(old)
    with pytest.raises(AlreadyExistsError):
        SqliteGallery.create(path, spec())
    with pytest.raises(NotFoundError, match="no gallery"):
        SqliteGallery.open(tmp_path / "nowhere.sqlite")
    assert sorted(p.name for p in path.parent.iterdir()) == ["g.sqlite", "g.sqlite.lock"]


@pytest.mark.parametrize("end", ["-wal", "-journal"])
def test_the_log_of_a_gallery_that_is_gone_is_not_written_into_a_new_one(
    end: str, tmp_path: Path
) -> None:
    path, log = tmp_path / "g.sqlite", tmp_path / f"g.sqlite{end}"
    log.write_bytes(b"changes of another")
    with pytest.raises(AlreadyExistsError, match=f"g.sqlite{end}: holds the last changes"):
        SqliteGallery.create(path, spec())
    assert not path.exists() and log.read_bytes() == b"changes of another"
    # SQLite leaves an empty one of a gallery that was closed.
    log.write_bytes(b"")
    SqliteGallery.create(path, spec()).close()


def test_create_says_where_it_cannot_write() -> None:
    with pytest.raises(CannotWriteError):
        SqliteGallery.create(Path("/proc/nowhere/g.sqlite"), spec())


@pytest.mark.parametrize("other", ["item-1\0", "item-1\0zzz", "item-1\ud800"])
def test_an_id_that_no_item_can_have_finds_no_other(tmp_path: Path, other: str) -> None:
    with filled(tmp_path / "g.sqlite", 3) as store:
        staging.run_upgrade(store, Linear(), spec(2))
        assert store.get("item-1") is not None and store.get(other) is None
        assert [
            item.id for item in staging.find_migrated(store, spec(2).space, [other, "item-2"])
        ] == ["item-2"]
        assert store.delete([other]) == 0 and store.count() == 3
