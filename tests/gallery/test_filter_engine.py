"""What the filter engine holds, who waits for what it reads, and what is read again."""

import sqlite3
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nobackfill.errors import BusyError
from nobackfill.gallery import filter_engine
from nobackfill.gallery import filter_engine as engine
from nobackfill.gallery.filter_engine import FilterEngine, KeyColumn, StoredSegment
from nobackfill.gallery.filters import All, Exists, OneOf, Range, TimeRange
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from tests.gallery.making import filled, ids, spec, vectors

WAIT_S = 60


class Gate:
    """Reads columns as the engine does, and stops before a key until it is let go on."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.read: list[str] = []
        self.read_column = filter_engine.read_column

    def __call__(self, connection: sqlite3.Connection, key: str, labels: Labels) -> KeyColumn:
        self.read.append(key)
        if key == self.key:
            self.reached.set()
            assert self.go_on.wait(WAIT_S)
        return self.read_column(connection, key, labels)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteGallery]:
    """50 items with their number under `a`, `b` and `n`."""
    with filled(tmp_path / "g.sqlite", 50) as made:
        put(made, 0, 50)
        yield made


def put(store: SqliteGallery, first: int, count: int) -> None:
    numbers = range(first, first + count)
    store.put(
        ids(count, first),
        [NewVectors(spec().space, vectors(count, 1))],
        metadata=[{"a": n, "b": n, "n": n} for n in numbers],
    )


def gated(monkeypatch: pytest.MonkeyPatch, key: str) -> Gate:
    gate = Gate(key)
    monkeypatch.setattr(filter_engine, "read_column", gate)
    return gate


def test_who_asks_for_another_key_does_not_wait(
    store: SqliteGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gated(monkeypatch, "a")
    filtering = FilterEngine(store)
    with ThreadPoolExecutor(3) as pool:
        slow = [pool.submit(filtering.find_matches, Range("a", at_least=40)) for _ in range(2)]
        assert gate.reached.wait(WAIT_S)
        assert len(filtering.find_matches(Range("b", at_least=45))) == 5
        put(store, 50, 3)
        assert len(filtering.find_matches(Exists("b"))) == 53
        assert not any(one.done() for one in slow)
        gate.go_on.set()
        # As it was when they asked: the second thread may have started after the change.
        first, second = sorted(len(one.result(WAIT_S)) for one in slow)
        assert first == 10
        assert second in (10, 13)
    assert gate.read.count("a") == 1
    assert len(filtering.find_matches(Range("a", at_least=40))) == 13
    filtering.close()


def test_a_reading_that_fails_is_told_and_tried_again(
    store: SqliteGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    filtering = FilterEngine(store)
    assert len(filtering.find_matches(Exists("a"))) == 50

    def busy(*_: object) -> KeyColumn:
        raise BusyError("try again")

    with monkeypatch.context() as patch:
        patch.setattr(filter_engine, "read_column", busy)
        with pytest.raises(BusyError):
            filtering.find_matches(Exists("b"))
        assert len(filtering.find_matches(Range("a", at_least=49))) == 1
    assert len(filtering.find_matches(Exists("b"))) == 50
    filtering.close()


def test_many_changes_are_read_anew_while_others_are_answered(
    store: SqliteGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change costs a filter what changed; many changes one reading of everything, for which
    nobody waits, and which misses nothing that came meanwhile."""
    monkeypatch.setattr(engine, "LEAST_CHANGED_ITEMS", 10)
    gate = gated(monkeypatch, "n")
    gate.go_on.set()
    filtering = FilterEngine(store)
    assert len(filtering.find_matches(Exists("n"))) == 50
    put(store, 50, 5)
    assert len(filtering.find_matches(Range("n", at_least=40))) == 15
    assert gate.read == ["n"]
    gate.reached.clear()
    gate.go_on.clear()
    put(store, 60, 25)
    assert len(filtering.find_matches(Exists("n"))) == 80
    assert gate.reached.wait(WAIT_S)
    put(store, 100, 100)
    store.delete(ids(10))
    assert len(filtering.find_matches(Exists("n"))) == 170
    assert len(filtering.find_matches(Range("n", less_than=60))) == 45
    store.delete(ids(10, 100))
    (work,) = (thread for thread in threading.enumerate() if thread.name == "filters")
    gate.go_on.set()
    work.join(WAIT_S)
    assert gate.read == ["n", "n"]
    for _ in range(2):
        assert len(filtering.find_matches(Exists("n"))) == 160
        assert len(filtering.find_matches(Range("n", less_than=60))) == 45
    filtering.close()


def test_many_changes_are_read_anew_once_there_is_a_thread(
    store: SqliteGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The filter failed, and nothing was ever read anew."""

    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(engine, "LEAST_CHANGED_ITEMS", 10)
    gate = gated(monkeypatch, "n")
    gate.go_on.set()
    filtering = FilterEngine(store)
    assert len(filtering.find_matches(Exists("n"))) == 50
    put(store, 50, 20)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        assert len(filtering.find_matches(Exists("n"))) == 70
    gate.go_on.clear()
    put(store, 70, 1)
    assert len(filtering.find_matches(Exists("n"))) == 71
    (work,) = (thread for thread in threading.enumerate() if thread.name == "filters")
    gate.go_on.set()
    work.join(WAIT_S)
    assert gate.read == ["n", "n"]
    assert len(filtering.find_matches(Exists("n"))) == 71
    filtering.close()


def test_more_changes_than_are_remembered_are_read_with_the_rest(
    store: SqliteGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "MOST_CHANGED_ITEMS", 30)
    filtering = FilterEngine(store)
    assert len(filtering.find_matches(Exists("n"))) == 50
    put(store, 100, 100)
    assert len(filtering.find_matches(Exists("n"))) == 150
    filtering.close()


def test_an_answer_is_kept_until_something_changes(
    store: SqliteGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    filtering = FilterEngine(store)
    first = filtering.find_matches(OneOf("n", (1,)))
    assert filtering.find_matches(OneOf("n", (1,))) is first
    # Equal to Python, not here.
    assert len(first) == 1
    assert not len(filtering.find_matches(OneOf("n", (True,))))
    put(store, 50, 1)
    assert filtering.find_matches(OneOf("n", (1,))) is not first
    size = 1 + engine.CACHED_INDEXES
    monkeypatch.setattr(engine, "MATCH_CACHE_BYTES", 3 * size * 50)
    for n in range(10):
        assert len(filtering.find_matches(OneOf("n", (n, 1)))) == 1 + (n != 1)
    state = filtering._state
    assert state is not None and len(state.answers) == 3
    filtering.close()


def test_columns_beyond_the_bound_are_forgotten(store: SqliteGallery) -> None:
    numbers = stored_bytes(StoredSegment(store, 1 << 30), ["a"])
    stored = StoredSegment(store, 2 * numbers)
    for _ in range(2):
        for key in ("a", "b", "n"):
            assert stored.passing_mask(Range(key, at_least=40), [key]).sum() == 10
            assert stored_bytes(stored, stored.cached_keys()) <= 2 * numbers
    # The longest unused goes first.
    assert stored.cached_keys() == ["b", "n"]
    every = All((Exists("a"), Exists("b"), Exists("n")))
    assert stored.passing_mask(every, ["a", "b", "n"]).sum() == 50
    assert stored_bytes(stored, stored.cached_keys()) <= 2 * numbers


def stored_bytes(stored: StoredSegment, keys: list[str]) -> int:
    return sum(stored.load_column(key).memory_bytes for key in keys)


@pytest.mark.parametrize("key", ["flag", "whole", "part", "text", "time", "tags"])
def test_a_column_takes_about_the_memory_it_says(tmp_path: Path, key: str) -> None:
    count = 5000
    with SqliteGallery.create(tmp_path / "g.sqlite", spec()) as store:
        store.put(
            ids(count),
            [NewVectors(spec().space, vectors(count, 1))],
            metadata=[
                {
                    "flag": n % 2 == 0,
                    "whole": n,
                    "part": n / 7,
                    "text": f"number {n}",
                    "time": f"{1000 + n}-01-02T03:04:05Z",
                    "tags": ["all", f"t{n % 50}"],
                }
                for n in range(count)
            ],
        )
        stored = StoredSegment(store, 1 << 30)
        tracemalloc.start()
        try:
            column = stored.load_column(key)
            # As it may come to.
            column.passing_rows(TimeRange(key, at_least=0))
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
    assert held <= 1.25 * column.memory_bytes + 10_000
    # It reckons with a time for each text.
    assert column.memory_bytes <= 4 * held + 10_000
