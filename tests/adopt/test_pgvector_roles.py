"""Roles see no more of new vectors than of the rows that they are of, and no row is passed over."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.sources.opening import open_source
from nobackfill.errors import NotPermittedError
from tests.adopt.table_beside import MAP, TARGET, Connection, carried
from tests.support.postgres import Server


@pytest.fixture
def role(postgres: Server) -> Iterator[str]:
    """A role that may connect."""
    name = f"app_{id(object())}"
    postgres.sql(f"CREATE ROLE {name} LOGIN")
    yield name
    postgres.sql(f"DROP ROLE {name}")


@contextmanager
def acting(connection: Connection, role: str) -> Iterator[None]:
    connection.execute(f"SET ROLE {role}".encode())
    try:
        yield
    finally:
        connection.execute("RESET ROLE")


def read(connection: Connection, role: str, column: str = "count(v)") -> object:
    with acting(connection, role):
        return connection.execute(f"SELECT {column} FROM beside".encode()).fetchall()


def test_a_table_beside_is_its_owners_until_the_flip_gives_it(
    table: tuple[str, Connection], role: str
) -> None:
    address, connection = table
    connection.execute(
        f"ALTER TABLE t ADD tenant text DEFAULT 'a'; UPDATE t SET tenant = 'b' WHERE id < 100;"
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY own ON t USING (tenant = current_setting('app.tenant', true));"
        f"GRANT SELECT, UPDATE ON t TO {role};"
        f"ALTER DEFAULT PRIVILEGES GRANT SELECT, UPDATE ON TABLES TO {role}, PUBLIC".encode()
    )
    done = carry(open_source(f"{address}#t"), TARGET, MAP)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        read(connection, role)
    (sentence,) = [step for step in done.next_steps if step.startswith('"public"."beside" has')]
    assert "the policies own of t" in sentence
    connection.execute(done.next_steps[-1].encode())
    # No column tells whose row it is: the old table's rows do.
    assert read(connection, role) == [(0,)]
    connection.execute("SET app.tenant = 'b'")
    assert read(connection, role) == [(100,)]
    with acting(connection, role):
        assert connection.execute("UPDATE beside SET v = v").rowcount == 0
    connection.execute(
        f"DROP OWNED BY {role};ALTER DEFAULT PRIVILEGES REVOKE ALL ON TABLES FROM PUBLIC".encode()
    )


def test_policies_of_the_key_and_grants_of_columns_go_along(
    table: tuple[str, Connection], role: str
) -> None:
    address, connection = table
    connection.execute(
        "CREATE TABLE shares (item int, who text, note text DEFAULT 'two\nlines');"
        f"INSERT INTO shares VALUES (1, '{role}'), (2, '{role}');"
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY;"
        f"CREATE POLICY shared ON t TO {role} USING (id IN (SELECT item FROM shares WHERE "
        "who = current_user AND note = 'two\nlines'));"
        f"CREATE POLICY few ON t AS RESTRICTIVE FOR UPDATE TO {role} USING (id < 2);"
        f"GRANT SELECT ON shares TO {role};"
        f"GRANT SELECT (id, v), UPDATE (v) ON t TO {role} WITH GRANT OPTION".encode()
    )
    done = carry(open_source(f"{address}#t"), TARGET, MAP)
    assert [step for step in done.next_steps if "policies" in step] == []
    assert "\n" not in done.next_steps[-1]
    connection.execute(done.next_steps[-1].encode())
    assert read(connection, role, "id") == [(1,), (2,)]
    with acting(connection, role):
        assert connection.execute("UPDATE beside SET v = v").rowcount == 1
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("UPDATE beside SET id = id")
        connection.execute("GRANT SELECT (id) ON beside TO PUBLIC")
    connection.execute(f"DROP OWNED BY {role} CASCADE".encode())


@pytest.mark.parametrize("to", ["n", "table:beside"])
def test_hidden_rows_are_not_passed_over(table: tuple[str, Connection], role: str, to: str) -> None:
    address, connection = table
    connection.execute(
        f"ALTER TABLE t OWNER TO {role}; GRANT CREATE ON SCHEMA public TO {role};"
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY; ALTER TABLE t FORCE ROW LEVEL SECURITY;"
        "CREATE POLICY half ON t USING (id < 150)".encode()
    )
    own = address.replace("postgres@", f"{role}@")
    source = open_source(f"{own}#t")
    target = TARGET if to == TARGET.name else type(TARGET)(to, TARGET.dim, TARGET.computer_digest)
    with pytest.raises(NotPermittedError, match=rf"hide rows from the role '{role}'"):
        carry(source, target, MAP)
    with pytest.raises(NotPermittedError):
        next(source.windows(10))
    source.close()  # type: ignore[attr-defined]
    made = "SELECT count(*) FROM pg_class WHERE relname = 'beside'"
    assert connection.execute(made).fetchone() == (0,)
    # One whom no policy binds carries all of them, and is not bound by its own trigger.
    assert carry(open_source(f"{address}#t"), target, MAP).new_vector_count == 300
    with acting(connection, role):
        connection.execute("UPDATE t SET v = '[" + ",".join(["1"] * 24) + "]' WHERE id = 7")
    assert carry(open_source(f"{address}#t"), target, MAP).write_count == 1
    connection.execute(f"DROP OWNED BY {role} CASCADE".encode())


def test_the_tables_owner_owns_the_table_beside(table: tuple[str, Connection], role: str) -> None:
    address, connection = table
    connection.execute(f"ALTER TABLE t OWNER TO {role}".encode())
    carried(address)
    assert read(connection, role) == [(300,)]
    connection.execute(f"DROP OWNED BY {role} CASCADE".encode())
