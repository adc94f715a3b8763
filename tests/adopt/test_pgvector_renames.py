"""New vectors are found again after a table, a column or a schema was renamed."""

from dataclasses import dataclass, replace

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Source
from nobackfill.errors import AlreadyExistsError, InvalidInputError, NotFoundError
from tests.adopt.table_beside import MADE, MAP, TARGET, Connection, carried, drawn, put, stale

NO_TRIGGERS = "SELECT tgname FROM pg_trigger WHERE tgname LIKE 'nobackfill%'"


@dataclass(frozen=True)
class Rename:
    """A statement, and the names that hold after it."""

    statement: str
    table: str = "t"
    key: str = "id"
    vector: str = "v"
    new: str = "beside"

    def open(self, address: str) -> Source:
        return open_source(f"{address}#{self.table}", vector=self.vector)


RENAMES = {
    "table": Rename("ALTER TABLE t RENAME TO docs", table="docs"),
    "column": Rename("ALTER TABLE t RENAME v TO emb", vector="emb"),
    "key": Rename("ALTER TABLE t RENAME id TO doc", key="doc"),
    "all": Rename(
        "ALTER TABLE t RENAME v TO emb; ALTER TABLE t RENAME id TO doc;"
        "ALTER TABLE t RENAME TO docs",
        table="docs",
        key="doc",
        vector="emb",
    ),
    "moved": Rename("CREATE SCHEMA s; ALTER TABLE t SET SCHEMA s", table="s.t"),
    "schema": Rename("ALTER SCHEMA public RENAME TO s; CREATE SCHEMA public", table="s.t"),
    "new table": Rename("ALTER TABLE beside RENAME TO beside2", new="beside2"),
}


@pytest.mark.parametrize("name", RENAMES)
@pytest.mark.parametrize("end", ["printed", "flip", "rollback"])
def test_a_renamed_table_finds_its_new_vectors(
    table: tuple[str, Connection], name: str, end: str
) -> None:
    address, connection = table
    carried(address)
    rename = RENAMES[name]
    connection.execute(rename.statement.encode())
    connection.execute("SET search_path = public, s")
    target = replace(TARGET, name=f"table:{rename.new}")
    source = rename.open(address)
    if end == "rollback":
        assert source.drop_new_vectors(target.name)
        found = connection.execute("SELECT relname FROM pg_class WHERE relname LIKE 'beside%'")
        assert found.fetchall() == []
    else:
        done = carry(source, target, MAP, flip=end == "flip")
        # It carries nothing a second time.
        assert (done.write_count, done.new_vector_count) == (0, 300)
        if end == "printed":
            connection.execute(done.next_steps[-1].encode())
        query = f"""SELECT t.{rename.vector}::real[], b.{rename.vector}::real[]
            FROM {rename.table} t JOIN {rename.new} b USING ({rename.key})"""
        rows = connection.execute(query.encode()).fetchall()
        old, new = (np.array(part, np.float32) for part in zip(*rows, strict=True))
        np.testing.assert_allclose(MAP(old), new, atol=1e-4)
        assert len(rows) == 300
    assert connection.execute(NO_TRIGGERS).fetchall() == []
    change = f"UPDATE {rename.table} SET {rename.vector} = {rename.vector}"
    connection.execute(change.encode())


def test_writes_after_a_rename_are_followed(table: tuple[str, Connection]) -> None:
    address, connection = table
    carried(address)
    rename = RENAMES["table"]
    connection.execute(rename.statement.encode())
    vector = str(drawn(1, 1)[0].tolist())
    connection.execute("UPDATE docs SET v = %s WHERE id = 7", [vector])
    assert carry(rename.open(address), TARGET, MAP).write_count == 1
    connection.execute("UPDATE docs SET v = %s WHERE id IN (8, 9)", [vector])
    assert carry(rename.open(address), TARGET, MAP).write_count == 2
    connection.execute("ALTER TABLE docs RENAME TO t")
    assert stale(connection) == 0


def test_the_old_name_of_the_new_table_says_the_new_one(table: tuple[str, Connection]) -> None:
    address, connection = table
    carried(address)
    connection.execute("ALTER TABLE beside RENAME TO beside2")
    source = open_source(f"{address}#t")
    for use in (
        lambda: source.drop_new_vectors("table:beside"),
        lambda: carry(source, TARGET, MAP),
    ):
        with pytest.raises(NotFoundError, match="renamed to 'beside2'; use --to table:beside2"):
            use()
    assert source.drop_new_vectors("table:beside2")


def test_a_table_that_took_the_name_has_no_part_in_it(table: tuple[str, Connection]) -> None:
    """As when a table is made anew and swapped in."""
    address, connection = table
    carried(address)
    connection.execute(
        "ALTER TABLE t RENAME TO t_old; CREATE TABLE t (id int PRIMARY KEY, v vector(24))"
    )
    put(connection, range(300), drawn(1, 300))
    source = open_source(f"{address}#t")
    with pytest.raises(AlreadyExistsError, match="not made by this map"):
        carry(source, TARGET, MAP)
    assert not source.drop_new_vectors("table:beside")
    # The vectors of the other one are as they were, and followed.
    vector = str(drawn(2, 1)[0].tolist())
    connection.execute("UPDATE t_old SET v = %s WHERE id = 3", [vector])
    done = carry(open_source(f"{address}#t_old"), TARGET, MAP)
    assert (done.write_count, done.new_vector_count) == (1, 300)


def test_the_printed_flip_refuses_a_table_that_took_the_name(
    table: tuple[str, Connection],
) -> None:
    address, connection = table
    steps = carry(open_source(f"{address}#t"), TARGET, MAP).next_steps
    connection.execute(
        "ALTER TABLE t RENAME TO t_old; CREATE TABLE t (id int PRIMARY KEY, v vector(24))"
    )
    put(connection, range(300), drawn(1, 300))
    with pytest.raises(psycopg.errors.RaiseException, match="carry again"):
        connection.execute(steps[-1].encode())
    connection.rollback()


def test_a_rename_after_the_flip_is_followed_or_named(table: tuple[str, Connection]) -> None:
    address, connection = table
    carry(open_source(f"{address}#t"), TARGET, MAP, flip=True)
    connection.execute("ALTER TABLE t RENAME TO docs")
    connection.execute("INSERT INTO docs (id, v) VALUES (900, %s)", [str(MADE.old[0].tolist())])
    source = open_source(f"{address}#docs")
    assert carry(source, TARGET, MAP).write_count == 1
    assert not source.drop_new_vectors("table:beside")
    connection.execute("ALTER TABLE docs RENAME v TO emb")
    source = open_source(f"{address}#docs")
    with pytest.raises(InvalidInputError, match="RENAME COLUMN") as raised:
        carry(source, TARGET, MAP)
    connection.execute(str(raised.value).partition("run ")[2].encode())
    assert carry(source, TARGET, MAP).write_count == 0


@pytest.mark.parametrize("end", ["flip", "rollback"])
def test_a_renamed_new_column_is_watched_again(table: tuple[str, Connection], end: str) -> None:
    address, connection = table
    source = open_source(f"{address}#t", vector="v")
    carry(source, replace(TARGET, name="n"), MAP)
    connection.execute("ALTER TABLE t RENAME n TO n2")
    source = open_source(f"{address}#t", vector="v")
    if end == "flip":
        assert carry(source, replace(TARGET, name="n2"), MAP, flip=True).write_count == 0
    else:
        assert source.drop_new_vectors("n2")
    assert connection.execute(NO_TRIGGERS).fetchall() == []
    connection.execute("UPDATE t SET v = v")
