"""New vectors in a table of their own beside the old ones: what is made, what is refused, and the
flip."""

import time
from contextlib import closing

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.sources.opening import open_searchable, open_source
from nobackfill.errors import AlreadyExistsError
from tests.adopt.table_beside import MADE, MAP, TARGET, Connection, carried, drawn, put, stale


def test_no_row_of_the_old_table_is_written(table: tuple[str, Connection]) -> None:
    address, connection = table
    written = (
        "SELECT sum(xmin::text::bigint), sum(xmax::text::bigint), pg_relation_size('t') FROM t"
    )
    before = connection.execute(written).fetchone()
    assert carried(address) == 300
    assert connection.execute(written).fetchone() == before
    assert stale(connection) == 0


def test_a_changed_key_takes_its_vector_along(table: tuple[str, Connection]) -> None:
    address, connection = table
    carried(address)
    connection.execute("UPDATE t SET id = 1000 WHERE id = 4")
    connection.execute("UPDATE t SET v = NULL WHERE id = 5")
    assert stale(connection) == 0
    assert carried(address) == 299
    found = connection.execute("SELECT id FROM beside WHERE v IS NOT NULL AND id IN (4, 5, 1000)")
    assert found.fetchall() == [(1000,)]


def test_who_may_write_to_the_old_table_alone_still_may(table: tuple[str, Connection]) -> None:
    address, connection = table
    carried(address)
    role = f"app_{time.monotonic_ns()}"
    connection.execute(f"CREATE ROLE {role}".encode())
    connection.execute(f"GRANT INSERT, SELECT, UPDATE, DELETE ON t TO {role}".encode())
    connection.execute(f"SET ROLE {role}".encode())
    put(connection, [3, 2000], drawn(3, 2))
    connection.execute("DELETE FROM t WHERE id = 9")
    connection.execute("RESET ROLE")
    connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())
    assert carried(address) == 300
    assert stale(connection) == 0


def test_somebody_elses_table_is_left_alone(table: tuple[str, Connection]) -> None:
    address, connection = table
    connection.execute("CREATE TABLE beside (id int PRIMARY KEY, v text)")
    connection.execute("INSERT INTO beside VALUES (1, 'mine')")
    with pytest.raises(AlreadyExistsError, match=r"choose another --to\Z"):
        carried(address)
    assert not open_source(f"{address}#t").drop_new_vectors("table:beside")
    assert connection.execute("SELECT v FROM beside").fetchall() == [("mine",)]
    # Nor that of another source, though the map is the same.
    connection.execute("DROP TABLE beside; CREATE TABLE u (id int PRIMARY KEY, v vector(24))")
    assert carry(open_source(f"{address}#u"), TARGET, MAP).new_vector_count == 0
    with pytest.raises(AlreadyExistsError):
        carried(address)
    assert not open_source(f"{address}#t").drop_new_vectors("table:beside")


@pytest.mark.parametrize("gone", ["ALTER TABLE t DISABLE TRIGGER ALL", "DROP TABLE t"])
def test_a_table_that_nothing_watches_is_refused(table: tuple[str, Connection], gone: str) -> None:
    address, connection = table
    carried(address)
    connection.execute(gone.encode())
    if gone.startswith("DROP"):
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v vector(24))")
    put(connection, range(10), drawn(6, 10))
    with pytest.raises(AlreadyExistsError, match="triggers"):
        carried(address)
    assert open_source(f"{address}#t").drop_new_vectors("table:beside")
    carried(address)
    assert stale(connection) == 0


def test_the_flip_leaves_a_table_that_goes_with_the_old_one(table: tuple[str, Connection]) -> None:
    address, connection = table
    steps = carry(open_source(f"{address}#t"), TARGET, MAP).next_steps
    for step in (steps[0], steps[-1]):
        connection.execute(step.encode())
    assert connection.execute("SELECT count(*) FROM beside").fetchone() == (300,)
    connection.execute("DELETE FROM t WHERE id = 2")
    connection.execute("INSERT INTO t (id, v) VALUES (4000, %s)", (str(MADE.old[0].tolist()),))
    assert connection.execute("SELECT count(*) FROM beside").fetchone() == (299,)
    with pytest.raises(psycopg.errors.NotNullViolation):
        connection.execute("INSERT INTO beside VALUES (4000, NULL)")
    found = connection.execute("SELECT tgname FROM pg_trigger WHERE NOT tgisinternal").fetchall()
    assert found == []
    indexed = connection.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'beside'")
    assert sum("hnsw" in text for (text,) in indexed.fetchall()) == 1


def test_searches_meet_the_table_beside(table: tuple[str, Connection]) -> None:
    address, _ = table
    carried(address)
    new = MAP(MADE.old)
    with closing(open_searchable(f"{address}#t")) as source:
        for query in MADE.queries_new[:3]:
            order = np.argsort(-(new @ query), kind="stable")[:20]
            assert source.nearest(query, 20, "table:beside") == [str(row) for row in order]
