"""Live views: what a search sees while others write, and while a base is built aside."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from nobackfill.errors import IncompatibleSpaceError, InvalidInputError
from nobackfill.gallery import staging
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Content, Index, Labels
from nobackfill.gallery.search.view import LiveView, new_snapshot
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from nobackfill.vectors import Vectors
from tests.gallery.making import filled, ids, put, spec, vectors

ONE, TWO = spec(1).space, spec(2).space


def agrees(view: LiveView, store: SqliteGallery, space: str = ONE) -> None:
    """The view answers as exact search over what the file holds."""
    labels, content = store.load_vectors(space)
    snapshot = view.snapshot()
    assert len(snapshot) == len(labels)
    np.testing.assert_array_equal(snapshot.labels(), labels)
    found_labels, found = snapshot.live_content()
    np.testing.assert_array_equal(found_labels, labels)
    np.testing.assert_array_equal(found, content)
    queries = vectors(5, 77)
    expected = ExactIndex(store.space(space).spec, labels, content).search(queries, 7)
    got = snapshot.search(queries, 7)
    np.testing.assert_array_equal(got.labels, expected.labels)
    np.testing.assert_array_equal(got.distances, expected.distances)


def test_a_view_follows_every_commit(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 20) as store:
        view = LiveView(store, ONE)
        agrees(view, store)
        for step in range(3):
            put(store, ids(7, start=100 * step), seed=step)
            put(store, ids(3), seed=step + 10)
            store.delete([f"item-{step + 5}", f"item-{100 * step + 1}"])
            agrees(view, store)
            view.compact(ExactIndex)
            agrees(view, store)
            assert len(view.snapshot().delta) == 0
        view.close()
        store.delete(["item-10"])
        assert len(view.snapshot()) == store.count() + 1


def test_a_view_of_a_space_being_staged_and_backfilled(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 30) as store:
        with pytest.raises(IncompatibleSpaceError):
            LiveView(store, TWO)
        staging.add_staging_space(store, spec(2))
        view = LiveView(store, TWO)
        assert len(view.snapshot()) == 0
        assert (view.snapshot().search(vectors(1, 1), 3).labels == -1).all()
        for part in ([5, 20, 9], [1, 2, 30], [4]):
            staging.write_vectors(store, TWO, np.array(part), vectors(3, part[0])[: len(part)])
            agrees(view, store, TWO)
        for compact in (False, True):
            if compact:
                view.compact(ExactIndex)
            again = np.array([2, 30])
            staging.write_vectors(store, TWO, again, vectors(2, 50 + compact), replace=True)
            agrees(view, store, TWO)


def test_a_snapshot_stays_what_it_was(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 20) as store:
        view = LiveView(store, ONE)
        before = view.snapshot()
        answer = before.search(vectors(3, 5), 4)
        put(store, ids(20), seed=8)
        view.compact(ExactIndex)
        again = before.search(vectors(3, 5), 4)
        np.testing.assert_array_equal(again.labels, answer.labels)
        assert set(answer.labels.ravel()) <= set(range(1, 21))


def test_searches_and_writes_go_on_while_a_base_is_built(tmp_path: Path) -> None:
    building, go_on = threading.Event(), threading.Event()

    def slow(spec_: SpaceSpec, labels: Labels, content: Content) -> Index:
        building.set()
        assert go_on.wait(20)
        return ExactIndex(spec_, labels, content)

    with filled(tmp_path / "g.sqlite", 20) as store:
        view = LiveView(store, ONE)
        builder = threading.Thread(target=view.compact, args=(slow,))
        builder.start()
        assert building.wait(20)
        put(store, ids(5, start=50), seed=3)
        put(store, ids(2), seed=4)
        store.delete(["item-7", "item-50"])
        agrees(view, store)
        go_on.set()
        builder.join(20)
        agrees(view, store)
        assert len(view.snapshot().base.index.labels) == 20


def test_a_build_that_fails_changes_nothing(tmp_path: Path) -> None:
    def broken(spec_: SpaceSpec, labels: Labels, content: Content) -> Index:
        raise MemoryError("no room")

    with filled(tmp_path / "g.sqlite", 20) as store:
        view = LiveView(store, ONE)
        with pytest.raises(MemoryError):
            view.compact(broken)
        put(store, ids(5), seed=3)
        agrees(view, store)
        view.compact(ExactIndex)
        agrees(view, store)


@pytest.mark.slow
def test_readers_never_see_half_a_commit(tmp_path: Path) -> None:
    """Pairs are put and deleted together; a search finds both of a pair or neither."""
    failures: list[object] = []
    done = threading.Event()

    def read(view: LiveView) -> None:
        while not done.is_set():
            state = view.snapshot()
            found = state.search(vectors(1, 1), 100)
            labels = found.labels[found.labels >= 0].tolist()
            if len(labels) % 2 or len(labels) != len(set(labels)) or len(labels) != len(state):
                failures.append(labels)

    with SqliteGallery.create(tmp_path / "g.sqlite", spec()) as store:
        view = LiveView(store, ONE)
        readers = [threading.Thread(target=read, args=(view,)) for _ in range(3)]
        for reader in readers:
            reader.start()
        for turn in range(30):
            names = [f"a{turn % 7}", f"b{turn % 7}"]
            store.put(names, [NewVectors(ONE, vectors(2, turn))])
            if turn % 3 == 0:
                store.delete([f"a{(turn + 1) % 7}", f"b{(turn + 1) % 7}"])
            if turn % 5 == 0:
                view.compact(ExactIndex)
        done.set()
        for reader in readers:
            reader.join()
        assert not failures
        agrees(view, store)


def test_a_snapshot_without_what_another_space_answers_for(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 20) as store:
        staging.add_staging_space(store, spec(2))
        old, new = LiveView(store, ONE), LiveView(store, TWO)
        put(store, ["late"], seed=5)
        staging.write_vectors(store, TWO, np.array([2, 4, 21]), vectors(3, 2))
        upgraded = new.snapshot()
        rest = old.snapshot().without_labels(upgraded.labels())
        assert sorted([*rest.labels(), *upgraded.labels()]) == list(range(1, 22))
        found = rest.search(vectors(1, 1), 30).labels
        assert set(found[found >= 0]) == set(range(1, 21)) - {2, 4}


def test_a_filter_applies_to_base_and_delta(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 20) as store:
        view = LiveView(store, ONE)
        put(store, ids(5, start=50), seed=3)
        store.delete(["item-1"])
        allowed = np.array([2, 3, 22, 99])
        found = (
            view.snapshot()
            .search(vectors(1, 1), 10, lambda labels: np.isin(labels, allowed))
            .labels
        )
        assert set(found[found >= 0]) == {3, 22}


@pytest.mark.parametrize(
    "bad", [vectors(1, 1, 11), vectors(1, 1)[0], np.full((1, 12), np.nan, np.float32)]
)
def test_bad_queries_are_refused(tmp_path: Path, bad: Vectors) -> None:
    with filled(tmp_path / "g.sqlite", 3) as store, pytest.raises(InvalidInputError):
        LiveView(store, ONE).snapshot().search(bad, 1)


@pytest.mark.slow
def test_one_deletion_costs_the_searches_that_follow_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Live rows are counted when they die, not at every search: 0.04 -> 0.44 ms it was."""
    monkeypatch.setattr(hnsw, "EF_CONSTRUCTION", 8)
    monkeypatch.setattr(hnsw, "TRIED_EF", (16,))
    count = 200_000
    flat = SpaceSpec("sp-x", 1, 2, "squared_l2", False, None, 0)
    content = np.random.default_rng(1).random((count, 2), np.float32)
    whole = new_snapshot(flat, hnsw.build_index(flat, np.arange(count), content))
    less = whole.without_labels(np.array([7, 7, count + 5])).without_labels(np.array([7, 8]))
    assert (len(whole), len(less), len(less.base)) == (count, count - 2, count - 2)
    took: dict[int, list[float]] = {id(whole): [], id(less): []}
    for row in range(200):
        for snapshot in (whole, less):
            began = time.perf_counter()
            snapshot.search(content[row : row + 1], 10)
            took[id(snapshot)].append(time.perf_counter() - began)
    assert np.median(took[id(less)]) < 3 * np.median(took[id(whole)])
    found = less.search(content[7:9], 10).labels
    assert not np.isin(found, [7, 8]).any() and (found >= 0).all()
