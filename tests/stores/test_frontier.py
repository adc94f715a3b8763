"""Up to where a space is whole: what a flip needs not look at again. The oracle joins all."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from nobackfill.errors import PreconditionError
from nobackfill.gallery.staging import run_upgrade
from nobackfill.gallery.store import NewVectors
from nobackfill.server.stores.postgresql import schema
from nobackfill.server.stores.postgresql.database import Database, execute
from nobackfill.server.stores.postgresql.gallery import PostgresqlGalleries, PostgresqlGallery
from nobackfill.server.stores.postgresql.writes import lock_gallery_exclusive, read_frontier
from tests.gallery.making import Linear, ids, spec, vectors
from tests.support.postgres import Server
from tests.support.waiting import wait_until

ONE, TWO = spec(1).space, spec(2).space


@pytest.fixture(scope="module")
def database(postgres: Server) -> Iterator[Database]:
    with postgres.database() as url:
        made = Database(url, most_connections=6)
        made.open(schema.prepare)
        yield made
        made.close()


def staged(database: Database, name: str, count: int = 10) -> PostgresqlGallery:
    """Carried into a second space."""
    store = PostgresqlGalleries(database).create(name, [spec()], {})
    if count:
        store.put(ids(count), [NewVectors(ONE, vectors(count, 1))], digests=["first"] * count)
    run_upgrade(store, Linear(reads_side=False), spec(2))
    return store


def put(store: PostgresqlGallery, name: str, *spaces: str, digest: str | None = None) -> None:
    new = [NewVectors(space, vectors(1, len(name))) for space in spaces]
    store.put([name], new, digests=[digest])


def put_and_delete(store: PostgresqlGallery) -> None:
    put(store, "new", ONE)
    store.delete(["new"])


def reached(store: PostgresqlGallery, space: str = TWO) -> int:
    number = store.space(space).table_number
    return store.database.read(lambda connection: read_frontier(connection, store.schema, number))


def truly_lacking(store: PostgresqlGallery, space: str = TWO) -> list[int]:
    """Labels without a vector, by a join of all."""
    table = schema.table_name(store.schema, store.space(space).table_number)
    query = (
        f"SELECT i.label FROM {store.schema}.items i LEFT JOIN {table} v ON v.label = i.label"
        " WHERE v.label IS NULL ORDER BY i.label"
    )
    return store.database.read(lambda c: [label for (label,) in execute(c, query)])


class Raced(PostgresqlGallery):
    """Between the look and the gate, others write."""

    between: Callable[[], object]

    def advance_frontier(self, space: str) -> None:
        super().advance_frontier(space)
        self.between()


RACES: list[tuple[str, Callable[[PostgresqlGallery], object], int]] = [
    ("nothing", lambda store: None, 0),
    ("a put in both", lambda store: put(store, "new", ONE, TWO), 0),
    ("a put in the old space", lambda store: put(store, "new", ONE), 1),
    ("a deletion", lambda store: store.delete(ids(3)), 0),
    ("a re-put in the old space", lambda store: put(store, "item-3", ONE, digest="other"), 1),
    ("a re-put in both", lambda store: put(store, "item-3", ONE, TWO, digest="other"), 0),
    ("the same put again", lambda store: put(store, "item-3", ONE, digest="first"), 0),
    ("put and deleted", lambda store: put_and_delete(store), 0),
]


@pytest.mark.parametrize(("what", "race", "lacking"), RACES, ids=[race[0] for race in RACES])
def test_what_comes_between_look_and_gate_is_seen(
    database: Database, what: str, race: Callable[[PostgresqlGallery], object], lacking: int
) -> None:
    store = staged(database, what)
    raced = Raced(database, store.number)
    raced.between = lambda: race(store)
    if lacking:
        with pytest.raises(PreconditionError, match=f"{lacking} items"):
            raced.flip(TWO)
        assert store.active().spec.space == ONE
    else:
        raced.flip(TWO)
        assert store.active().spec.space == TWO and not truly_lacking(store)
    assert reached(store) == 10


def test_any_history_is_counted_as_the_join_counts(database: Database) -> None:
    """Puts, re-puts, deletions, carrying, looks, a space that goes and comes again."""
    store, rng = staged(database, "history"), np.random.default_rng(3)
    seen = set()
    for turn in range(150):
        name = f"item-{rng.integers(0, 15)}"
        match int(rng.integers(0, 12)):
            case 0 | 1 | 2 | 3:
                put(store, name, *(ONE, TWO)[: rng.integers(1, 3)], digest=f"{rng.integers(0, 2)}")
            case 4 | 5:
                store.delete([name])
            case 6 | 7:
                store.advance_frontier((ONE, TWO)[rng.integers(0, 2)])
            case 8 | 9:
                run_upgrade(store, Linear(reads_side=False), spec(2), items_per_chunk=3)
            case 10:
                put(store, name, TWO, digest=f"only in the new one {turn}")
            case _:
                store.drop_space(TWO)
                store.add_staging_space(spec(2))
                assert reached(store) == 0, "numbers are never used again"
        for space in (ONE, TWO):
            lacking = truly_lacking(store, space)
            assert store.count_items_without_vector(space) == len(lacking), turn
            listed = [item.label for item in store.items_without_vector(space)]
            assert listed == lacking and reached(store, space) < min([*lacking, 10**9]), turn
            seen.add((bool(lacking), reached(store, space) > 0))
    assert len(seen) == 4, "whole and not, looked at and not"


def test_a_label_that_was_drawn_and_not_yet_committed_is_waited_for(database: Database) -> None:
    """It is lower than the last that is seen: a look that did not wait would pass it over."""
    store = staged(database, "late")
    with database.connect() as other:
        with other.transaction():
            execute(other, f"LOCK TABLE {store.schema}.gate IN ROW SHARE MODE")
            execute(other, f"INSERT INTO {store.schema}.items (id) VALUES ('late')")
            put(store, "later", ONE, TWO)
            looking = threading.Thread(target=store.advance_frontier, args=(TWO,))
            looking.start()
            wait_until(lambda: waits(database, store), "the look waits")
        looking.join()
    assert truly_lacking(store) == [11] and reached(store) == 10
    with pytest.raises(PreconditionError, match="1 items"):
        store.flip(TWO)


def waits(database: Database, store: PostgresqlGallery) -> bool:
    """Whether somebody waits for the gate."""
    gate = f"relation = '{store.schema}.gate'::regclass"
    query = f"SELECT count(*) FROM pg_locks WHERE {gate} AND NOT granted"
    return bool(database.read(lambda connection: execute(connection, query).fetchone()[0]))


def test_what_is_carried_and_taken_back_leaves_no_frontier(database: Database) -> None:
    store = staged(database, "back")
    put(store, "new", ONE)

    def carrying() -> None:
        store.add_staging_space(spec(2))
        run_upgrade(store, Linear(reads_side=False), spec(2))
        store.advance_frontier(TWO)
        assert store.count_items_without_vector(TWO) == 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        database.transact(carrying)
    assert store.count_items_without_vector(TWO) == 1 and reached(store) <= 10


@pytest.mark.parametrize("count", [0, 1])
def test_galleries_of_hardly_anything_flip_and_return(database: Database, count: int) -> None:
    store = staged(database, f"few {count}", count)
    store.flip(TWO)
    assert store.rollback() == ONE
    store.delete(ids(count))
    store.flip(TWO)
    assert store.active().spec.space == TWO and reached(store) == count


def test_two_who_flip_at_once_look_once_each_and_agree(database: Database) -> None:
    first = staged(database, "both")
    stores = [first, PostgresqlGallery(database, first.number)]
    with database.connect() as other, other.transaction():
        lock_gallery_exclusive(other, stores[0].schema)
        threads = [threading.Thread(target=store.flip, args=(TWO,)) for store in stores]
        for thread in threads:
            thread.start()
        wait_until(lambda: waits(database, stores[0]), "they wait")
    for thread in threads:
        thread.join()
    assert {store.active().spec.space for store in stores} == {TWO} and reached(stores[0]) == 10
