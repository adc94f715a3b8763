"""Searches of a space among what another lacks, as those of a mixed gallery are. The oracle
subtracts in Python and compares all."""

from typing import Any

import numpy as np
import pytest

from nobackfill.gallery.filters import Filter, Range
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Neighbours
from nobackfill.gallery.staging import run_upgrade
from nobackfill.gallery.store import NewVectors
from nobackfill.server.stores.postgresql import schema, writes
from nobackfill.server.stores.postgresql.conditions import sql_condition
from nobackfill.server.stores.postgresql.database import Connection, execute
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.search import SpaceTable, search
from tests.gallery.making import Linear, ids, spec, vectors

ONE, TWO = spec(1).space, spec(2).space
QUERIES = vectors(3, 9)
# Rows that a connection has read, by any way, and not yet told.
READ = (
    "SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables"
    " WHERE relid = %s::regclass"
)


@pytest.fixture
def store(empty: PostgresqlGallery) -> PostgresqlGallery:
    """A gallery of nothing, with a second space."""
    empty.add_staging_space(spec(2))
    return empty


def put(store: PostgresqlGallery, names: list[str], *spaces: str) -> None:
    new = [NewVectors(space, vectors(len(names), len(names[0]))) for space in spaces]
    store.put(names, new, metadata=[{"n": int(name.split("-")[1])} for name in names])


def carry(store: PostgresqlGallery, **given: Any) -> None:
    run_upgrade(store, Linear(reads_side=False), spec(2), **given)


def answers(store: PostgresqlGallery, k: int, filtered: Filter | None = None) -> list[Neighbours]:
    """Of the new space, and of the old one for the rest."""
    one, two = store.space(ONE), store.space(TWO)
    tables = [SpaceTable(store.schema, two), SpaceTable(store.schema, one, two)]
    asked = [(table, QUERIES) for table in tables]
    return search(store.database, asked, k, sql_condition(filtered))


def check(store: PostgresqlGallery, k: int, filtered: Range | None = None) -> int:
    """Against all vectors; how many are left."""
    labels, content = store.load_vectors(ONE)
    left = ~np.isin(labels, store.load_vectors(TWO)[0])
    passing = left.copy()
    if filtered is not None:
        assert filtered.less_than is not None
        items = store.items(labels)
        numbers = [item.metadata["n"] for item in items if item is not None]
        passing &= np.array(numbers, np.int64) < filtered.less_than
    found = answers(store, k, filtered)[1]
    true = ExactIndex(spec(), labels, content).search(QUERIES, k, passing)
    assert found.labels.tolist() == true.labels.tolist()
    np.testing.assert_array_equal(found.distances, true.distances)
    return int(left.sum())


@pytest.mark.parametrize(("few", "beyond"), [(2_000, 10_000), (3, 10_000), (2_000, 4)])
def test_the_rest_is_found_whatever_happened(
    store: PostgresqlGallery, monkeypatch: pytest.MonkeyPatch, few: int, beyond: int
) -> None:
    """Puts in one space and in both, deletions, carrying, looks; a graph asked from some on."""
    monkeypatch.setattr(writes, "_FEW", few)
    monkeypatch.setattr(writes, "_BEYOND", beyond)
    rng, seen = np.random.default_rng(5), set()
    put(store, ids(20), ONE)
    for turn in range(40):
        some = ids(int(rng.integers(1, 6)), int(rng.integers(0, 40)))
        match turn % 5:
            case 0 | 1:
                put(store, some, *(ONE, TWO)[: rng.integers(1, 3)])
            case 2:
                store.delete(some)
            case 3:
                carry(store, items_per_chunk=7)
            case _:
                store.advance_frontier(TWO)
        left = check(store, int(rng.integers(1, 12)))
        assert check(store, 4, Range("n", less_than=int(rng.integers(0, 40)))) == left
        seen.add(min(left, 4))
    assert {0, 4} <= seen, "nothing was left, and some"


def test_a_little_that_is_left_is_not_sought_among_all(
    store: PostgresqlGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph nearly all of which another answers for was walked for as long as it may be, and
    then every row was read: in each search, from the last window to the switch."""
    monkeypatch.setattr(writes, "_BEYOND", 1_000)
    put(store, ids(3_000), ONE)
    carry(store)
    put(store, ids(5, 3_000), ONE)
    put(store, ids(9, 3_005), ONE, TWO)
    old, new = (
        schema.table_name(store.schema, store.space(space).table_number) for space in (ONE, TWO)
    )
    store.database.write(lambda connection: execute(connection, f"ANALYZE {old}, {new}"))
    assert rows_read(store, old) > 3_000, "as many as there are, where nobody has looked"
    store.advance_frontier(TWO)
    assert rows_read(store, old) < 100
    assert check(store, 10) == 5


def rows_read(store: PostgresqlGallery, table: str) -> int:
    """Of a table, by one search of three queries."""

    def read(connection: Connection) -> int:
        return int(execute(connection, READ, [table]).fetchone()[0])

    def asked() -> int:
        before = store.database.read(read)
        answers(store, 10)
        return store.database.read(read) - before

    return store.database.transact(asked)
