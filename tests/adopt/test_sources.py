"""One suite of behaviour for all sources, and for those that others write to meanwhile."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.embedding.native_vectors import open_originals
from nobackfill.adopt.maps import Map, fit_maps
from nobackfill.adopt.pairs import read_all
from nobackfill.adopt.sources.arrays import ArraySource
from nobackfill.adopt.sources.source import Rows, Target, TargetVectors
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    CannotWriteError,
    InvalidInputError,
    NotFoundError,
    VerificationError,
)
from nobackfill.vectors import Vectors, normalise
from tests.adopt.racing import Racing
from tests.adopt.stores import MADE, Pgvector, Store, Written, opened
from tests.support.disks import fill, small_disk
from tests.support.waiting import wait_until

MAPS = fit_maps(MADE.old, MADE.new)
MAP = MAPS["affine"]
WINDOW = 50


def target(mapping: Map = MAP, name: str = "vector_new") -> Target:
    return Target(name, mapping.dims[1], mapping.digest)


FILES = ("parquet", "arrays")
# Stores that applications write to meanwhile, and the number of seeds of their race.
WRITTEN = {
    "pgvector": 3, "pgvector-table": 3, "qdrant": 1, "lancedb": 2, "sqlite-vec": 2,
    "chroma": 1, "milvus-lite": 1, "milvus": 1,
}  # fmt: skip
# Stores whose engine only `make test-scale` installs.
SCALE = ("chroma", "milvus-lite", "milvus")


def marked(name: str, *values: object) -> Any:
    return pytest.param(name, *values, marks=[pytest.mark.scale] if name in SCALE else [])


STORES = [marked(name) for name in (*FILES, *WRITTEN)]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with opened(request.param, request, tmp_path / "store") as found:
        yield found


every = pytest.mark.parametrize("store", STORES, indirect=True)
writable = pytest.mark.parametrize("store", [marked(name) for name in WRITTEN], indirect=True)
on_pgvector = pytest.mark.parametrize("store", ["pgvector"], indirect=True)


def by_id(rows: Rows) -> dict[str, Vectors]:
    return dict(zip(rows.ids, rows.vectors, strict=True))


def new_vectors(store: Store, name: str = "vector_new") -> dict[str, Vectors]:
    """What is beside, as the store's own readers find it under its name."""
    found = store.open().open_target(target(name=name))
    window_rows = [found.read(window) for window in store.open().windows(WINDOW)]
    return {name: vector for rows in window_rows for name, vector in by_id(rows).items()}


def expected(old: dict[str, Vectors]) -> dict[str, Vectors]:
    return {name: MAP(vector[None])[0] for name, vector in old.items()}


def check(store: Store) -> None:
    """Each item has the map of the vector that it has now, and nothing else is there."""
    wanted, got = expected(by_id(read_all(store.open()))), new_vectors(store)
    assert set(got) == set(wanted)
    for name, vector in wanted.items():
        np.testing.assert_allclose(got[name], vector, atol=1e-5)


@every
def test_a_source_tells_what_it_holds(store: Store) -> None:
    source = store.open()
    assert source.count() == 230
    assert source.facts().dim in (24, None)
    rows = read_all(source)
    assert sorted(rows.ids) == sorted(MADE.ids)
    old = dict(zip(MADE.ids, MADE.old, strict=True))
    assert all(np.allclose(vector, old[name], atol=1e-6) for name, vector in by_id(rows).items())
    texts = [source.read_column(window, "text") for window in source.windows(WINDOW)]
    found = {n: v for one in texts for n, v in zip(one.ids, one.values, strict=True)}
    assert found == {name: f"on {name}" for name in MADE.ids}


@every
def test_a_wrong_name_is_refused_before_vectors_are_read(store: Store) -> None:
    there = r"(found|there are|[Tt]ables|collections are).*(vector|docs|Documents)"
    with pytest.raises((InvalidInputError, NotFoundError), match=there):
        store.open("nope").facts()
    source = store.open()
    window = next(iter(source.windows(WINDOW)))
    rows = source.read(window)
    texts = open_originals(source, "text", None).read_rows(rows, window)
    assert texts == {name: f"on {name}" for name in rows.ids}
    # Qdrant lists no fields of its points.
    if source.facts().columns:
        with pytest.raises(InvalidInputError, match=r"name a column of texts, got 'txet'; .*text"):
            open_originals(source, "txet", None)


@every
def test_all_is_carried_once_and_twice_is_nothing(store: Store) -> None:
    before = by_id(read_all(store.open()))
    done = carry(store.open(), target(), MAP, rows_per_window=WINDOW)
    assert (done.write_count, done.new_vector_count) == (230, 230)
    assert done.next_steps
    check(store)
    again = carry(store.open(), target(), MAP, rows_per_window=WINDOW)
    assert (again.write_count, again.new_vector_count) == (0, 230)
    after = by_id(read_all(store.open()))
    assert all(np.array_equal(after[name], vector) for name, vector in before.items())


@every
def test_a_run_that_ends_half_way_is_gone_on_with(store: Store) -> None:
    class KilledError(Exception):
        pass

    def kill(written: int) -> None:
        if written >= 100:
            raise KilledError

    with pytest.raises(KilledError):
        carry(store.open(), target(), MAP, rows_per_window=WINDOW, progress=kill)
    rest = carry(store.open(), target(), MAP, rows_per_window=WINDOW)
    assert 0 < rest.write_count < 180
    assert rest.new_vector_count == 230
    check(store)


@every
def test_vectors_of_another_map_are_never_mixed_in(store: Store) -> None:
    carry(store.open(), target(), MAP, rows_per_window=WINDOW)
    other = MAPS["procrustes"]
    with pytest.raises(AlreadyExistsError, match="not made by this map"):
        carry(store.open(), target(other), other, rows_per_window=WINDOW)
    check(store)
    carry(store.open(), target(other, "another"), other, rows_per_window=WINDOW)


@every
def test_rollback_removes_what_was_carried_and_nothing_else(store: Store) -> None:
    source = store.open()
    assert not source.drop_new_vectors("vector_new")
    assert not source.drop_new_vectors("text")
    carry(source, target(), MAP, rows_per_window=WINDOW)
    assert store.open().drop_new_vectors("vector_new")
    assert not store.open().drop_new_vectors("vector_new")
    assert len(read_all(store.open())) == 230
    # The name is free for another map.
    other = MAPS["procrustes"]
    assert carry(store.open(), target(other), other, rows_per_window=WINDOW).write_count == 230


# Parquet's new vectors are files of their own, which no --vector opens.
@pytest.mark.parametrize("store", [marked(name) for name in ("arrays", *WRITTEN)], indirect=True)
def test_carried_vectors_name_their_model(store: Store) -> None:
    named = Target("vector_new", MAP.dims[1], MAP.digest, model="the new model")
    carry(store.open(), named, MAP, rows_per_window=300)
    assert store.open().facts().model is None
    assert store.open("vector_new").facts().model == "the new model"


@pytest.mark.parametrize("store", ["qdrant"], indirect=True)
def test_a_store_that_keeps_directions_only_takes_a_map_to_any_norm(store: Store) -> None:
    longer = fit_maps(MADE.old, 3 * MADE.new)["affine"]
    assert not longer.unit_norm
    assert carry(store.open(), target(longer), longer, rows_per_window=300).new_vector_count == 230
    found = by_id(read_all(store.open("vector_new")))
    wanted = normalise(longer(MADE.old))
    assert all(
        np.allclose(found[n], vector, atol=1e-4) for n, vector in zip(MADE.ids, wanted, strict=True)
    )


@every
def test_a_wrong_vector_is_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a store makes of what it was given, it is read back."""
    source = store.open()
    beside = type(source.open_target(target()))
    source.drop_new_vectors("vector_new")
    write = beside.write

    def spoilt(self: TargetVectors, rows: Rows, vectors: Vectors) -> None:
        write(self, rows, normalise(vectors + np.float32(0.1)))

    monkeypatch.setattr(beside, "write", spoilt)
    with pytest.raises(VerificationError, match="--rollback"):
        carry(source, target(), MAP, rows_per_window=WINDOW)


@every
def test_searches_find_what_a_slow_loop_finds(store: Store) -> None:
    with closing(store.search()) as source:
        for query in MADE.queries_old[:5]:
            order = np.argsort(-(MADE.old @ query), kind="stable")[:60]
            assert source.nearest(query, 60) == [MADE.ids[row] for row in order]
        rows = source.lookup([MADE.ids[3], "nowhere", MADE.ids[9], MADE.ids[3]])
        old = dict(zip(MADE.ids, MADE.old, strict=True))
        assert set(rows.ids) == {MADE.ids[3], MADE.ids[9]}
        assert len(rows) == 2
        assert all(
            np.allclose(vector, old[name], atol=1e-6) for name, vector in by_id(rows).items()
        )
        assert source.texts([MADE.ids[4], "nowhere"], "text") == {MADE.ids[4]: f"on {MADE.ids[4]}"}
        assert len(source.lookup([])) == 0


@on_pgvector
def test_threads_that_have_ended_keep_no_connection(store: Pgvector) -> None:
    """A server with a thread a request would have all of PostgreSQL's connections otherwise."""
    with closing(store.search()) as source:
        for query in MADE.queries_old[:10]:
            one = Thread(target=source.nearest, args=(query, 1))
            one.start()
            one.join()
        ours = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        # This one, and the last that searched; what is closed ends on the server a moment later.
        wait_until(lambda: store.run(ours) == [(3,)], seconds=30, what="three connections are left")


@pytest.mark.long
@pytest.mark.parametrize(
    ("store", "seed"),
    [marked(name, seed) for name, seeds in WRITTEN.items() for seed in range(seeds)],
    indirect=["store"],
)
def test_who_writes_meanwhile_loses_nothing(store: Written, seed: int) -> None:
    """Puts, changes and deletions at every moment: nothing lost, doubled, stale, or back again."""
    rng = np.random.default_rng(seed)

    calls = itertools.count(1)

    def others() -> None:
        call = next(calls)
        if call > 12:
            return
        names = store.names()
        for name in rng.choice(names, 3, replace=False).tolist():
            store.delete(name)
        for name in rng.choice(names, 3, replace=False).tolist():
            store.put(name, normalise(rng.normal(size=(1, 24)).astype(np.float32))[0])
        for number in range(2):
            name = f"{'ffffffff' if number else '00000000'}-1111-4000-8000-{call:012d}"
            store.put(name, normalise(rng.normal(size=(1, 24)).astype(np.float32))[0])
        store.touch(store.names()[0])

    done = carry(Racing(store.open(), others, others), target(), MAP, rows_per_window=WINDOW)  # type: ignore[arg-type]
    assert done.new_vector_count == store.open().count()
    check(store)
    # Written after all was carried: the trigger empties what is stale, the next run fills it.
    store.put(MADE.ids[1], MADE.old[2])
    assert carry(store.open(), target(), MAP, rows_per_window=WINDOW).write_count == 1
    check(store)


@pytest.mark.long
@writable
def test_writers_that_never_rest_are_not_followed_for_ever(store: Written) -> None:
    calls = itertools.count(1)

    def others() -> None:
        store.put(MADE.ids[7], MADE.old[next(calls) % 200])

    with pytest.raises(BusyError, match="quieter hour"):
        carry(Racing(store.open(), others, others), target(), MAP, rows_per_window=300)  # type: ignore[arg-type]


def test_a_full_disk_leaves_a_folder_of_arrays_that_continues(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        np.save(disk / "ids.npy", np.array(MADE.ids))
        np.save(disk / "v.npy", MADE.old)
        source = ArraySource(disk)
        place = source.open_target(Target("new", MAP.dims[1], MAP.digest))
        for window in source.windows(50):
            rows = place.pending(window)
            place.write(rows, MAP(rows.vectors))
        fill(disk, but=0)
        with pytest.raises(CannotWriteError):
            place.finish()
        (disk / "filler").unlink()
        place.finish()
        np.testing.assert_array_equal(np.load(disk / "new.npy"), MAP(MADE.old))


@on_pgvector
def test_a_search_of_new_vectors_that_do_not_exist_is_refused(store: Pgvector) -> None:
    with closing(store.search()) as source:
        for name in ("absent", "table:absent"):
            with pytest.raises(NotFoundError):
                source.nearest(MADE.queries_new[0], 5, name)
