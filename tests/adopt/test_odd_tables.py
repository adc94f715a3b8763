"""Tables and text files as people have them: each is carried, or refused in a sentence that is
true."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.pairs import inspect, read_ids
from nobackfill.adopt.sources.opening import open_searchable, open_source
from nobackfill.adopt.sources.source import Target
from nobackfill.errors import InvalidInputError
from nobackfill.text import read_text_lines
from tests.adopt.made import world
from tests.support.pgbouncer import pooled
from tests.support.postgres import Server

MADE = world(120)
MAP = fit_maps(MADE.old, MADE.new)["procrustes"]
Connection = psycopg.Connection[tuple[Any, ...]]
BOTH = pytest.mark.parametrize("to", ["n", "table:beside"])


def target(to: str) -> Target:
    return Target(to, MAP.dims[1], MAP.digest)


@pytest.fixture
def database(postgres: Server) -> Iterator[tuple[str, Connection]]:
    with postgres.connected() as (address, connection):
        yield address, connection


def fill(connection: Connection, made: str, table: str = "docs") -> None:
    connection.execute(f"CREATE TABLE {table} {made}".encode())
    rows = [(n, str(v.tolist())) for n, v in enumerate(MADE.old)]
    connection.cursor().executemany(f"INSERT INTO {table} (id, v) VALUES (%s, %s)".encode(), rows)


def wrong(connection: Connection, to: str, after_flip: bool = False) -> int:
    """Rows whose new vector is not that of their old one."""
    old, new = ("v_before", "v") if after_flip else ("v", "n")
    query = f"SELECT {old}::real[], {new}::real[] FROM docs"
    if to != "n":
        query = "SELECT d.v::real[], b.v::real[] FROM docs d LEFT JOIN beside b USING (id)"
    found = connection.execute(query.encode()).fetchall()
    assert len(found) == 120
    return sum(
        after is None or not np.allclose(MAP(np.array([before], np.float32))[0], after, atol=1e-5)
        for before, after in found
    )


@BOTH
@pytest.mark.parametrize("flip", [False, True])
def test_pgvector_off_the_search_path(
    database: tuple[str, Connection], to: str, flip: bool
) -> None:
    address, connection = database
    connection.execute("CREATE SCHEMA extensions; CREATE EXTENSION vector SCHEMA extensions")
    fill(connection, "(id int PRIMARY KEY, v extensions.halfvec(24), body text)")
    connection.execute("CREATE INDEX ON docs USING hnsw (v extensions.halfvec_ip_ops)")
    with closing(open_searchable(f"{address}#docs")) as source:
        assert source.facts().metric == "inner_product" and source.facts().dim == 24
        done = carry(source, target(to), MAP)
        assert len(source.lookup(["3"])) == 1
        assert len(source.nearest(MADE.old[3], 5)) == 5
        assert len(source.nearest(MADE.new[3], 5, to)) == 5
    assert done.new_vector_count == 120
    # An application that knows nothing of the schema either.
    connection.execute("UPDATE docs SET body = 'x' WHERE id = 3")
    connection.execute("UPDATE docs SET v = (SELECT v FROM docs WHERE id = 5) WHERE id = 4")
    connection.execute("UPDATE docs SET v = NULL WHERE id = 6")
    again = carry(open_source(f"{address}#docs"), target(to), MAP, flip=flip)
    assert (again.write_count, again.new_vector_count) == (1, 119)
    connection.execute("DELETE FROM docs WHERE id = 6")
    connection.execute("INSERT INTO docs SELECT 6, NULL")
    if not flip:
        for step in done.next_steps:
            if step.startswith(("CREATE", "BEGIN")):
                connection.execute(step.encode())


@BOTH
def test_behind_a_pooler_of_transactions(postgres: Server, to: str) -> None:
    with postgres.connected() as (address, connection), pooled(postgres) as pool:
        connection.execute("CREATE EXTENSION vector")
        fill(connection, "(id int PRIMARY KEY, v vector(24))")
        connection.execute("CREATE INDEX ON docs USING hnsw (v vector_cosine_ops)")
        through = f"{pool}{urlsplit(address).path}#docs"
        with closing(open_searchable(through)) as source:
            assert carry(source, target(to), MAP, rows_per_window=20).new_vector_count == 120
            for row in range(20):
                assert source.nearest(MADE.old[row], 1) == [str(row)]
                assert source.nearest(MAP(MADE.old)[row], 1, to) == [str(row)]
            assert wrong(connection, to) == 0
            connection.execute("UPDATE docs SET v = NULL WHERE id < 7")
            assert (
                carry(source, target(to), MAP, rows_per_window=20, flip=True).new_vector_count
                == 113
            )


@BOTH
def test_partitions_are_carried_and_their_steps_run(
    database: tuple[str, Connection], to: str
) -> None:
    address, connection = database
    connection.execute("CREATE EXTENSION vector")
    connection.execute(
        "CREATE TABLE docs (id int PRIMARY KEY, v vector(24)) PARTITION BY HASH (id)"
    )
    for part in range(2):
        connection.execute(
            f"CREATE TABLE docs_{part} PARTITION OF docs "
            f"FOR VALUES WITH (MODULUS 2, REMAINDER {part})".encode()
        )
    connection.execute("CREATE INDEX ON docs_0 USING hnsw (v vector_l2_ops)")
    rows = [(n, str(v.tolist())) for n, v in enumerate(MADE.old)]
    connection.cursor().executemany("INSERT INTO docs VALUES (%s, %s)", rows)
    source = open_source(f"{address}#docs")
    assert source.facts().metric == "squared_l2"
    done = carry(source, target(to), MAP, rows_per_window=50)
    assert done.new_vector_count == 120 and wrong(connection, to) == 0
    for step in done.next_steps:
        if step.startswith(("CREATE", "BEGIN")):
            connection.execute(step.encode())
    if to == "n":
        assert wrong(connection, to, after_flip=True) == 0


def refusal(address: str) -> str:
    with pytest.raises(InvalidInputError) as refused:
        open_source(address)
    return str(refused.value)


def test_what_is_no_table_with_a_key_of_its_own_is_refused(
    database: tuple[str, Connection],
) -> None:
    address, connection = database
    connection.execute("CREATE EXTENSION vector")
    fill(connection, "(id int PRIMARY KEY, v vector(24))")
    connection.execute("CREATE VIEW seen AS SELECT id, v FROM docs")
    said = refusal(f"{address}#seen")
    assert "found a view (of docs)" in said and "ALTER TABLE" not in said
    connection.execute("CREATE MATERIALIZED VIEW kept AS SELECT id, v FROM docs")
    connection.execute("CREATE UNIQUE INDEX ON kept (id)")
    assert "found a materialized view (of docs)" in refusal(f"{address}#kept")
    connection.execute(
        "CREATE TABLE months (id int, month int, v vector(24), PRIMARY KEY (id, month)) "
        "PARTITION BY RANGE (month)"
    )
    connection.execute("CREATE TABLE m1 PARTITION OF months FOR VALUES FROM (1) TO (2)")
    said = refusal(f"{address}#months")
    assert "partitioned by RANGE (month)" in said and "ALTER TABLE" not in said
    connection.execute("CREATE TABLE more (PRIMARY KEY (id)) INHERITS (docs)")
    connection.execute("INSERT INTO more SELECT id, v FROM ONLY docs WHERE id < 10")
    assert "other tables inherit from this table (more)" in refusal(f"{address}#docs")
    # One of them alone is carried.
    assert carry(open_source(f"{address}#more"), target("n2"), MAP).new_vector_count == 10


def test_a_trigger_that_drops_updates_is_named_as_the_cause(
    database: tuple[str, Connection],
) -> None:
    address, connection = database
    connection.execute("CREATE EXTENSION vector")
    fill(connection, "(id int PRIMARY KEY, v vector(24))")
    connection.execute(
        "CREATE FUNCTION frozen() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
    )
    connection.execute(
        "CREATE TRIGGER frozen BEFORE UPDATE ON docs FOR EACH ROW EXECUTE FUNCTION frozen()"
    )
    with pytest.raises(InvalidInputError, match="a trigger or a rule drops each"):
        carry(open_source(f"{address}#docs"), target("n"), MAP)
    assert (
        carry(open_source(f"{address}#docs"), target("table:beside"), MAP).new_vector_count == 120
    )


def test_two_models_in_one_column_are_counted(database: tuple[str, Connection]) -> None:
    """As LangChain keeps the collections of all models."""
    address, connection = database
    connection.execute("CREATE EXTENSION vector")
    fill(connection, "(id int PRIMARY KEY, v vector)")
    connection.execute("INSERT INTO docs SELECT n + 1000, '[1,2,3]' FROM generate_series(1, 50) n")
    found = inspect(open_source(f"{address}#docs"))
    assert found.count == 170
    assert "24 in 120 rows, 3 in 50 rows" in found.sentences[-1]
    condition = found.sentences[-1].split("--where '")[1].rstrip("'").replace("COLUMN", "v")
    assert inspect(open_source(f"{address}#docs", where=condition)).dim == 24
    connection.execute("CREATE TABLE one AS SELECT * FROM docs WHERE vector_dims(v) = 24")
    connection.execute("ALTER TABLE one ADD PRIMARY KEY (id)")
    assert inspect(open_source(f"{address}#one")).dim == 24


def test_byte_order_marks_are_no_part_of_a_text(tmp_path: Path) -> None:
    lines = tmp_path / "texts.jsonl"
    lines.write_text('{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n', "utf-8-sig")
    assert [one.id for one in read_text_lines(lines)] == ["a", "b"]
    (tmp_path / "ids.txt").write_text("a\nb\n", "utf-8-sig")
    assert read_ids(tmp_path / "ids.txt") == {"a", "b"}
