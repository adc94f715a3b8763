"""The life of spaces: staged, written, flipped, rolled back, dropped."""

from pathlib import Path

import numpy as np
import pytest

from nobackfill.errors import (
    IncompatibleSpaceError,
    InvalidInputError,
    NotFoundError,
    PreconditionError,
)
from nobackfill.gallery import staging
from nobackfill.gallery.spec import State
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import Change, NewVectors
from tests.gallery.making import SIDE_DIM, filled, ids, put, rows, spec, vectors

ONE, TWO, THREE = (spec(n).space for n in (1, 2, 3))


def states(store: SqliteGallery) -> dict[int, State]:
    return {info.spec.release: info.state for info in store.spaces()}


def write_all(store: SqliteGallery, release: int, *, seed: int = 9) -> None:
    labels = np.array([item.label for item in store.list_items()], np.int64)
    staging.write_vectors(store, spec(release).space, labels, vectors(len(labels), seed))


def test_a_whole_space_is_flipped_with_its_state_in_one_transaction(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 5) as store:
        staging.add_staging_space(store, spec(2))
        staging.add_staging_space(store, spec(2))
        assert states(store) == {1: "active", 2: "staging"}
        write_all(store, 2)
        staging.flip(store, TWO, state={"floor": 2})
        assert states(store) == {1: "previous", 2: "active"}
        assert store.read_state_value("floor") == 2
        staging.flip(store, TWO)
        assert states(store) == {1: "previous", 2: "active"}


def test_a_space_with_gaps_is_not_flipped_unless_asked(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 5) as store:
        staging.add_staging_space(store, spec(2))
        staging.write_vectors(store, TWO, np.array([1, 2, 4]), vectors(3, 1))
        with pytest.raises(PreconditionError, match="2 items have no vector in release 2"):
            staging.flip(store, TWO, state={"floor": 2})
        assert (
            states(store) == {1: "active", 2: "staging"} and store.read_state_value("floor") is None
        )
        assert staging.count_items_without_vector(store, TWO) == 2
        assert [item.id for item in staging.items_without_vector(store, TWO)] == [
            "item-2",
            "item-4",
        ]
        assert [i.id for i in staging.items_without_vector(store, TWO, limit=1)] == ["item-2"]
        staging.flip(store, TWO, leave_behind=True)
        assert states(store)[2] == "active"


def test_rollback_returns_to_what_was_active_before_step_by_step(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 3) as store:
        with pytest.raises(NotFoundError, match="no older release"):
            staging.rollback(store)
        for release in (2, 3):
            staging.add_staging_space(store, spec(release))
            write_all(store, release)
            staging.flip(store, spec(release).space)
        assert states(store) == {1: "previous", 2: "previous", 3: "active"}
        assert staging.rollback(store, state={"why": "worse"}) == TWO
        assert states(store) == {1: "previous", 2: "active", 3: "staging"}
        assert store.read_state_value("why") == "worse"
        assert staging.rollback(store) == ONE
        # What was left can be flipped to again, as it is.
        staging.flip(store, THREE)
        assert states(store) == {1: "previous", 2: "staging", 3: "active"}


def test_rollback_counts_and_lists_what_exists_in_one_space_only(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 3) as store:
        staging.add_staging_space(store, spec(2))
        write_all(store, 2)
        staging.flip(store, TWO)
        put(store, ["bare"], release=2, seed=4)
        assert staging.count_items_without_vector(store, ONE) == 1
        assert [item.id for item in staging.items_without_vector(store, ONE)] == ["bare"]
        with pytest.raises(PreconditionError, match="1 items"):
            staging.rollback(store)
        assert staging.rollback(store, leave_behind=True) == ONE
        item = store.get("bare")
        assert item is not None and store.vector(item.label, TWO) is not None


def test_written_vectors_skip_the_deleted_and_the_present(tmp_path: Path) -> None:
    heard: list[Change] = []
    with filled(tmp_path / "g.sqlite", 5) as store:
        staging.add_staging_space(store, spec(2))
        staging.write_vectors(store, TWO, np.array([2]), vectors(1, 1))
        store.delete(["item-3"])
        store.subscribe(heard.append)
        content, doubt = vectors(5, 2), np.arange(5, dtype=np.float32)
        # In any order; label 3 is row 0.
        order = np.array([3, 5, 1, 2, 4])
        written = staging.write_vectors(store, TWO, order, content, uncertainty=doubt)
        assert written.tolist() == [1, 3, 5]
        found = rows(store, TWO)
        assert sorted(found) == [1, 2, 3, 5]
        assert [found[n][0] for n in (3, 5, 1)] == [content[row].tobytes() for row in range(3)]
        assert found[2][0] == vectors(1, 1).tobytes()
        labels, told = heard[0].added_vectors[TWO]
        assert labels.tolist() == [1, 3, 5] and told.tolist() == content[[2, 0, 1]].tolist()
        items = store.items([3, 5, 1], TWO)
        assert [item and item.uncertainty for item in items] == [0, 1, 2]


def test_a_backfill_replaces_what_was_upgraded(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 4) as store:
        staging.add_staging_space(store, spec(2))
        doubt = np.array([1, 9, 3, 5], np.float32)
        staging.write_vectors(store, TWO, np.arange(1, 5), vectors(4, 1), uncertainty=doubt)
        worst = staging.least_certain_items(store, TWO, 2)
        assert [(item.id, item.uncertainty) for item in worst] == [("item-1", 9), ("item-3", 5)]
        better, side = vectors(2, 8), vectors(2, 9, SIDE_DIM)
        labels = np.array([item.label for item in worst])
        staging.write_vectors(
            store, TWO, labels, better, side=side, origin="re-embedded", replace=True
        )
        found = rows(store, TWO)
        assert found[2] == (better[0].tobytes(), side[0].tobytes(), "re-embedded")
        assert found[1][2] == "upgraded" and len(found) == 4
        assert [item.id for item in staging.least_certain_items(store, TWO)] == ["item-2", "item-0"]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 3) as store:
        staging.add_staging_space(store, spec(2))
        labels = np.array([1, 2])
        with pytest.raises(InvalidInputError, match="finite"):
            staging.write_vectors(store, TWO, labels, np.full((2, 12), np.nan))
        with pytest.raises(InvalidInputError, match="uncertainties"):
            doubt = np.array([1, np.nan], np.float32)
            staging.write_vectors(store, TWO, labels, vectors(2, 1), uncertainty=doubt)
        with pytest.raises(InvalidInputError, match="2 vectors, one for each item"):
            staging.write_vectors(store, TWO, labels, vectors(3, 1))
        with pytest.raises(InvalidInputError, match="one for each of 2 upgraded"):
            doubt = np.ones(3, np.float32)
            staging.write_vectors(store, TWO, labels, vectors(2, 1), uncertainty=doubt)
        with pytest.raises(IncompatibleSpaceError):
            staging.write_vectors(store, THREE, labels, vectors(2, 1))
        with pytest.raises(InvalidInputError, match="dim"):
            staging.add_staging_space(store, spec(2, dim=99))
        assert rows(store, TWO) == {}


def test_dropping_needs_a_space_that_is_not_active(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 3) as store:
        with pytest.raises(PreconditionError, match="active"):
            staging.drop_space(store, ONE)
        staging.add_staging_space(store, spec(2))
        staging.drop_space(store, TWO)
        assert states(store) == {1: "active"}
        # A space that comes again has a table of its own.
        staging.add_staging_space(store, spec(2))
        assert rows(store, TWO) == {}


def test_an_item_put_in_two_spaces_is_in_both(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 2) as store:
        staging.add_staging_space(store, spec(2))
        both = [NewVectors(ONE, vectors(3, 1)), NewVectors(TWO, vectors(3, 2))]
        store.put(ids(3, start=2), both)
        assert (
            staging.count_items_without_vector(store, ONE) == 0
            and staging.count_items_without_vector(store, TWO) == 2
        )


def test_listeners_hear_of_spaces_and_only_of_what_is_durable(tmp_path: Path) -> None:
    heard: list[Change] = []
    with filled(tmp_path / "g.sqlite", 2) as store:
        store.subscribe(listener := heard.append)
        staging.add_staging_space(store, spec(2))
        assert [change.spaces_changed for change in heard] == [True]
        with pytest.raises(PreconditionError):
            staging.flip(store, TWO)
        assert len(heard) == 1
        store.unsubscribe(listener)
        staging.drop_space(store, TWO)
        assert len(heard) == 1
