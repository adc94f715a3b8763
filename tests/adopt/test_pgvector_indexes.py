"""A flip builds each index of the new vectors once, and leaves no half-built one."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import psycopg
import pytest

from nobackfill.adopt.carrying import CarryResult, carry
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Target
from nobackfill.errors import BusyError, NobackfillError
from tests.adopt.table_beside import MAP, TARGET, Connection
from tests.support.waiting import wait_until

COLUMN = replace(TARGET, name="n")
both = pytest.mark.parametrize("target", [COLUMN, TARGET], ids=["column", "table"])
# The relation and the column that hold the new vectors before the flip.
PLACES = {"n": ("t", "n"), "table:beside": ("beside", "v")}
INVALID = "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid ORDER BY 1"
BUILDERS = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX CONC%'"


def carried(address: str, target: Target, *, flip: bool = False) -> CarryResult:
    return carry(open_source(f"{address}#t", vector="v"), target, MAP, flip=flip)


def names(connection: Connection, query: str) -> list[str]:
    return [name for (name,) in connection.execute(query.encode()).fetchall()]


def vector_indexes(connection: Connection) -> list[str]:
    query = "SELECT tablename FROM pg_indexes WHERE indexdef LIKE '% USING hnsw %' ORDER BY 1"
    return names(connection, query)


@contextmanager
def writer_in(address: str, relation: str) -> Iterator[None]:
    """A transaction that has written to a relation: nothing builds an index to its end."""
    with psycopg.connect(address) as other:
        other.execute(f"LOCK TABLE {relation} IN ROW EXCLUSIVE MODE".encode())
        yield
        other.rollback()


def kill_build(address: str, connection: Connection, relation: str, statement: str) -> None:
    """Leave an INVALID index, as CREATE INDEX CONCURRENTLY does when it is killed."""
    before = names(connection, INVALID)

    def build() -> None:
        with (
            psycopg.connect(address, autocommit=True) as builder,
            pytest.raises(psycopg.OperationalError),
        ):
            builder.execute(statement.encode())

    with writer_in(address, relation):
        thread = threading.Thread(target=build)
        thread.start()
        wait_until(lambda: names(connection, INVALID) != before, "the index is being built")
        connection.execute("SELECT pg_terminate_backend(pid) FROM (" + BUILDERS + ") builders")
        thread.join()
    assert len(names(connection, INVALID)) == len(before) + 1


@both
@pytest.mark.parametrize("flip", [False, True], ids=["carry", "flip"])
def test_a_killed_build_is_made_again(
    table: tuple[str, Connection], target: Target, flip: bool
) -> None:
    address, connection = table
    relation, column = PLACES[target.name]
    statement = carried(address, target).next_steps[0]
    assert "CONCURRENTLY" in statement
    kill_build(address, connection, relation, statement)
    kill_build(address, connection, relation, statement)
    # One of another definition is its owner's.
    other = f"CREATE INDEX CONCURRENTLY mine ON {relation} USING hnsw ({column} vector_l2_ops)"
    kill_build(address, connection, relation, other)
    done = carried(address, target, flip=flip)
    assert names(connection, INVALID) == ["mine"]
    connection.execute("DROP INDEX mine")
    if not flip:
        assert done.next_steps[0] == statement
        connection.execute(statement.encode())
        # It is not printed, nor built, a second time.
        assert not any("CREATE INDEX" in step for step in carried(address, target).next_steps)
        carried(address, target, flip=True)
    assert vector_indexes(connection) == sorted(["t", relation])


@both
def test_a_flip_builds_only_the_index_that_is_missing(
    table: tuple[str, Connection], target: Target
) -> None:
    address, connection = table
    relation, _ = PLACES[target.name]
    connection.execute("CREATE INDEX ON t USING hnsw (v vector_cosine_ops) WITH (m = 8)")
    *statements, _, _ = carried(address, target).next_steps
    assert len(statements) == (2 if target is COLUMN else 1)
    connection.execute(statements[-1].encode())
    carried(address, target, flip=True)
    built = vector_indexes(connection)
    assert built.count(relation) == (4 if target is COLUMN else 1)


@pytest.mark.long
@both
def test_of_two_flips_at_once_one_refuses(table: tuple[str, Connection], target: Target) -> None:
    address, connection = table
    relation, _ = PLACES[target.name]
    carried(address, target)
    with ThreadPoolExecutor(2) as pool:
        with writer_in(address, relation):
            first: Future[CarryResult] = pool.submit(carried, address, target, flip=True)
            wait_until(lambda: names(connection, INVALID), "the first flip builds an index")
            second: Future[CarryResult] = pool.submit(carried, address, target, flip=True)
            with pytest.raises(BusyError, match="another --flip of this table"):
                second.result(timeout=60)
        assert first.result(timeout=60).new_vector_count == 300
    assert names(connection, INVALID) == []
    assert vector_indexes(connection) == sorted(["t", relation])
    # The lock ends with the flip.
    assert carried_again(address, target).next_steps == []


def carried_again(address: str, target: Target) -> CarryResult:
    vector, again = ("v_before", replace(target, name="v")) if target is COLUMN else ("v", target)
    return carry(open_source(f"{address}#t", vector=vector), again, MAP)


@both
def test_a_flip_whose_build_fails_leaves_no_index(
    table: tuple[str, Connection], target: Target
) -> None:
    address, connection = table
    relation, _ = PLACES[target.name]
    carried(address, target)
    with ThreadPoolExecutor(1) as pool:
        with writer_in(address, relation):
            flip = pool.submit(carried, address, target, flip=True)
            wait_until(lambda: names(connection, INVALID), "the flip builds an index")
            connection.execute("SELECT pg_cancel_backend(pid) FROM (" + BUILDERS + ") builders")
        with pytest.raises(NobackfillError, match="cancel"):
            flip.result(timeout=60)
    assert names(connection, INVALID) == []
    assert carried(address, target, flip=True).new_vector_count == 300


@pytest.mark.long
@both
def test_an_index_that_somebody_builds_is_left_alone(
    table: tuple[str, Connection], target: Target
) -> None:
    """It is INVALID until it is done."""
    address, connection = table
    relation, _ = PLACES[target.name]
    statement = carried(address, target).next_steps[0]

    def build() -> None:
        with psycopg.connect(address, autocommit=True) as builder:
            builder.execute(statement.encode())

    with ThreadPoolExecutor(1) as pool:
        with writer_in(address, relation):
            building = pool.submit(build)
            wait_until(lambda: names(connection, INVALID), "the owner builds an index")
            assert carried(address, target).new_vector_count == 300
            with pytest.raises(BusyError):
                carried(address, target, flip=True)
        building.result(timeout=60)
    assert names(connection, INVALID) == []
    assert vector_indexes(connection) == sorted(["t", relation])
