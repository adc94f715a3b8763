"""A flip that PostgreSQL would refuse is refused by name before the first row is written."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.carrying import CarryResult, carry
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Target
from nobackfill.errors import InvalidInputError
from tests.adopt.table_beside import MADE, MAP, TARGET, Connection, put
from tests.support.postgres import Server

COLUMN = replace(TARGET, name="n")


@pytest.fixture
def roles(postgres: Server) -> Iterator[tuple[str, str]]:
    """Two roles that may connect; what they own in the test's database goes with it."""
    names = f"one_{id(object())}", f"two_{id(object())}"
    for name in names:
        postgres.sql(f"CREATE ROLE {name} LOGIN")
    yield names
    for name in names:
        postgres.sql(f"DROP ROLE {name}")


def carried(address: str, table: str = "t", vector: str = "v", *, flip: bool = True) -> CarryResult:
    with closing(open_source(f"{address}#{table}", vector=vector)) as source:  # type: ignore[type-var]
        return carry(source, COLUMN, MAP, flip=flip)


def columns(connection: Connection, table: str) -> list[str]:
    query = "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
    return [name for (name,) in connection.execute(query, [table]).fetchall()]


def refusal(address: str, connection: Connection, table: str = "t", vector: str = "v") -> str:
    """The sentence by which a flip is refused; nothing has been made or written."""
    before = columns(connection, table)
    with pytest.raises(InvalidInputError) as refused:
        carried(address, table, vector)
    assert columns(connection, table) == before
    triggers = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'nobackfill%'"
    assert connection.execute(triggers).fetchone() == (0,)
    return str(refused.value)


DOMAIN = (
    "ALTER TABLE t DROP COLUMN v; CREATE DOMAIN emb AS vector(24) {}; DELETE FROM t; "
    "ALTER TABLE t ADD v emb"
)
ROWS = (
    "ALTER TABLE t ADD norm real GENERATED ALWAYS AS (vector_norm(v)) STORED;"
    "CREATE TYPE pair AS (one t[]); CREATE DOMAIN pairs AS pair; CREATE TABLE log (r pairs)"
)


@pytest.mark.parametrize(
    ("setup", "sentence"),
    [
        (DOMAIN.format("NOT NULL"), "domain emb, .*NOT NULL.*TYPE vector"),
        (DOMAIN.format("CONSTRAINT unit CHECK (vector_norm(VALUE) < 2)"), "domain emb, .*unit"),
        (DOMAIN.format(f"DEFAULT '{[1] * 24}'"), "domain emb, .*DEFAULT"),
        ("ALTER TABLE t ADD v_before vector(24)", "renames the old vectors to 'v_before'"),
        (ROWS, "column r of table public.log"),
        ("CREATE VIEW w AS SELECT v FROM t; CREATE TABLE log (r w[])", "table public.log"),
        (
            "CREATE VIEW w AS SELECT id, v FROM t; CREATE TABLE o (id int);"
            "CREATE POLICY p ON o USING (id IN (SELECT id FROM w))",
            "policy p on table public.o",
        ),
        (
            "CREATE FUNCTION f(t) RETURNS real IMMUTABLE RETURN vector_norm(($1).v)::real;"
            "CREATE INDEX rows ON t (f(t.*))",
            "read whole rows, .*rows",
        ),
        ("CREATE PUBLICATION ours FOR TABLE t (id, v)", "publication of table"),
    ],
    ids=[
        "domain's NOT NULL", "domain's CHECK", "domain's DEFAULT", "v_before", "type of rows",
        "type of a view's rows", "policy of a view", "index of rows", "publication",
    ],
)  # fmt: skip
def test_what_keeps_a_flip_is_named_before_anything_is_written(
    table: tuple[str, Connection], setup: str, sentence: str
) -> None:
    address, connection = table
    connection.execute(setup.encode())
    put(connection, range(300), MADE.old)
    with pytest.raises(InvalidInputError, match=sentence):
        raise InvalidInputError(refusal(address, connection))
    # Without --flip the vectors are carried: another column may be what is searched.
    done = carried(address, flip=False)
    assert done.new_vector_count == 300 and not any(
        step.startswith("BEGIN") for step in done.next_steps
    )
    with pytest.raises(InvalidInputError, match=sentence):
        raise InvalidInputError(done.next_steps[-1])


@pytest.mark.parametrize("whole", ["", " PARTITION BY HASH (id)"], ids=["parent", "partitions"])
def test_an_inherited_column_is_not_flipped(postgres: Server, whole: str) -> None:
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute(f"CREATE TABLE t (id int PRIMARY KEY, v vector(24)){whole}".encode())
        part = "CREATE TABLE c PARTITION OF t FOR VALUES WITH (MODULUS 1, REMAINDER 0)"
        heir = "CREATE TABLE c (PRIMARY KEY (id)) INHERITS (t)"
        connection.execute((part if whole else heir).encode())
        connection.execute("INSERT INTO c SELECT n, NULL FROM generate_series(1, 9) n")
        said = refusal(address, connection, "c")
        assert "'v' is inherited from t" in said
        assert ("with all its partitions" if whole else 'TABLE "c" NO INHERIT t') in said
        if not whole:
            connection.execute("ALTER TABLE c NO INHERIT t")
            assert carried(address, "c").new_vector_count == 0
            assert "v_before" in columns(connection, "c")


@pytest.mark.parametrize(
    "other",
    [
        "CREATE VIEW w AS SELECT v FROM t; ALTER VIEW w OWNER TO {two}",
        "CREATE MATERIALIZED VIEW w AS SELECT v FROM t; ALTER TABLE w OWNER TO {two}",
        "CREATE FUNCTION w(q vector) RETURNS SETOF int BEGIN ATOMIC SELECT id FROM t "
        "ORDER BY v <=> q; END; ALTER FUNCTION w OWNER TO {two}",
        "CREATE STATISTICS w ON id, (vector_norm(v)) FROM t; ALTER STATISTICS w OWNER TO {two}",
        "CREATE TABLE w (i int); CREATE RULE r AS ON DELETE TO w DO ALSO UPDATE t SET v = NULL;"
        "ALTER TABLE w OWNER TO {two}",
    ],
    ids=["view", "materialized view", "function", "statistics", "rule"],
)
def test_what_another_role_owns_is_named_before_anything_is_written(
    table: tuple[str, Connection], roles: tuple[str, str], other: str
) -> None:
    address, connection = table
    one, two = roles
    connection.execute(
        f"GRANT CREATE ON SCHEMA public TO {one}, {two}; ALTER TABLE t OWNER TO {one};"
        f"GRANT SELECT ON t TO {two}; {other.format(two=two)}".encode()
    )
    own = address.replace("postgres@", f"{one}@")
    said = refusal(own, connection)
    assert f"connect as its owner {two}, or GRANT {two} TO {one}" in said
    # The same through the schema where it is made again.
    connection.execute(f"GRANT {two} TO {one}; REVOKE CREATE ON SCHEMA public FROM {one}".encode())
    connection.execute(f"REVOKE CREATE ON SCHEMA public FROM {two}".encode())
    if "RULE" not in other:
        assert f"GRANT CREATE ON SCHEMA public TO {one}" in refusal(own, connection)
    connection.execute(f"GRANT CREATE ON SCHEMA public TO {one}, {two}".encode())
    assert carried(own).new_vector_count == 300
    assert "v_before" in columns(connection, "t")
    connection.execute(f"DROP OWNED BY {one}, {two} CASCADE".encode())


@pytest.mark.parametrize("name", ["x" * 60, "x" * 63, "é" * 31, "w"])
def test_the_old_vectors_have_a_name_that_postgresql_keeps_whole(
    table: tuple[str, Connection], name: str
) -> None:
    address, connection = table
    connection.execute(f'ALTER TABLE t RENAME v TO "{name}"'.encode())
    carried(address, vector=name)
    *_, new = columns(connection, "t")
    (old,) = [one for one in columns(connection, "t") if one.endswith("_before")]
    assert new == name and len(old.encode()) <= 63 and name.startswith(old.removesuffix("_before"))
    # Rows that have an old vector alone are filled by the same map.
    connection.execute(f'INSERT INTO t (id, "{old}") VALUES (999, %s)'.encode(), [f"{[1] * 24}"])
    source = open_source(f"{address}#t", vector=old)
    assert carry(source, replace(COLUMN, name=name), MAP).write_count == 1


@pytest.mark.parametrize("valid", ["", " NOT VALID"])
def test_not_null_is_as_it_was(table: tuple[str, Connection], valid: str) -> None:
    address, connection = table
    if valid:
        connection.execute("UPDATE t SET v = NULL WHERE id = 3")
    connection.execute(f"ALTER TABLE t ADD CONSTRAINT must NOT NULL v{valid}".encode())
    assert carried(address).new_vector_count == (299 if valid else 300)
    found = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'must'"
    assert connection.execute(found).fetchone() == (f"NOT NULL v{valid}",)
    connection.execute("INSERT INTO t (id, v) SELECT 999, v FROM t WHERE id = 4")
    with pytest.raises(psycopg.errors.NotNullViolation):
        connection.execute("INSERT INTO t (id) VALUES (1000)")


def test_not_null_of_a_partition_is_as_it_was(postgres: Server) -> None:
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute(
            """CREATE TABLE t (id int PRIMARY KEY, v vector(24)) PARTITION BY HASH (id);
            CREATE TABLE t0 PARTITION OF t FOR VALUES WITH (MODULUS 1, REMAINDER 0);
            ALTER TABLE t0 ADD CONSTRAINT must NOT NULL v"""
        )
        put(connection, range(300), MADE.old)
        assert carried(address).new_vector_count == 300
        connection.execute("INSERT INTO t (id, v) SELECT 999, v FROM t WHERE id = 4")
        with pytest.raises(psycopg.errors.NotNullViolation, match="t0"):
            connection.execute("INSERT INTO t (id) VALUES (1000)")


@pytest.mark.parametrize("to", [COLUMN, TARGET], ids=["column", "table"])
def test_a_key_is_unique_and_there_in_every_row(
    table: tuple[str, Connection],
    to: Target,
) -> None:
    address, connection = table
    connection.execute("ALTER TABLE t ADD k int; UPDATE t SET k = id / 2")
    connection.execute("ALTER TABLE t ALTER k SET NOT NULL")
    with pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute("CREATE UNIQUE INDEX CONCURRENTLY twice ON t (k)")
    with pytest.raises(InvalidInputError, match="found none in 'k'"):
        open_source(f"{address}#t", key="k")
    connection.execute("DROP INDEX twice; ALTER TABLE t ALTER k DROP NOT NULL")
    connection.execute("UPDATE t SET k = NULLIF(id, 7)")
    connection.execute("CREATE UNIQUE INDEX ON t (k); ALTER TABLE t ADD NOT NULL k NOT VALID")
    with pytest.raises(InvalidInputError, match="found none in 'k'"):
        open_source(f"{address}#t", key="k")
    connection.execute("UPDATE t SET k = 7 WHERE k IS NULL; ALTER TABLE t ALTER k SET NOT NULL")
    assert carry(open_source(f"{address}#t", key="k"), to, MAP, flip=True).new_vector_count == 300


def test_a_table_of_its_own_needs_a_key_that_can_be_referenced(
    table: tuple[str, Connection],
) -> None:
    address, connection = table
    connection.execute("ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ADD PRIMARY KEY (id) "
                       "DEFERRABLE")  # fmt: skip
    with pytest.raises(InvalidInputError, match="deferrable"):
        carry(open_source(f"{address}#t"), TARGET, MAP, flip=True)
    assert connection.execute("SELECT to_regclass('beside')").fetchone() == (None,)
    assert "deferrable" in carry(open_source(f"{address}#t"), TARGET, MAP).next_steps[-1]
    connection.execute("CREATE UNIQUE INDEX ON t (id)")
    assert carry(open_source(f"{address}#t"), TARGET, MAP, flip=True).new_vector_count == 300


def test_the_table_of_an_unlogged_table_is_unlogged(table: tuple[str, Connection]) -> None:
    address, connection = table
    connection.execute("ALTER TABLE t SET UNLOGGED")
    assert carry(open_source(f"{address}#t"), TARGET, MAP, flip=True).new_vector_count == 300
    query = "SELECT relpersistence::text FROM pg_class WHERE relname = 'beside'"
    assert connection.execute(query).fetchone() == ("u",)


@pytest.mark.parametrize("how", ["printed", "tool"])
@pytest.mark.parametrize("to", [COLUMN, TARGET], ids=["column", "table"])
def test_operators_without_a_schema_are_found(
    postgres: Server,
    to: Target,
    how: str,
) -> None:
    """PostgreSQL names no schema for the operator of IS DISTINCT FROM."""
    with postgres.connected() as (address, connection):
        connection.execute(
            """CREATE SCHEMA extensions; CREATE EXTENSION vector SCHEMA extensions;
            CREATE TABLE t (id int PRIMARY KEY, v extensions.vector(24));
            SET search_path = public, extensions;
            ALTER TABLE t ADD CONSTRAINT other CHECK (v IS DISTINCT FROM NULL);
            CREATE VIEW w AS SELECT id, v FROM t WHERE v IS DISTINCT FROM NULL
                AND NULLIF(v, v) IS NULL;
            CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$;
            CREATE TRIGGER see AFTER UPDATE ON t FOR EACH ROW
                WHEN (OLD.v IS DISTINCT FROM NEW.v) EXECUTE FUNCTION see();
            ALTER TABLE t ENABLE ROW LEVEL SECURITY;
            CREATE POLICY p ON t USING (v IS DISTINCT FROM NULL)"""
        )
        put(connection, range(300), MADE.old)
        connection.execute("RESET search_path")
        source = open_source(f"{address}#t", vector="v")
        done = carry(source, to, MAP, flip=how == "tool")
        if how == "printed":
            connection.execute(done.next_steps[-1].encode())
        if to is TARGET:
            assert not any("policies" in step for step in done.next_steps)
            found = connection.execute("SELECT v::real[] FROM beside WHERE id = 3").fetchone()
        else:
            found = connection.execute("SELECT v::real[] FROM w WHERE id = 3").fetchone()
        assert found is not None
        np.testing.assert_allclose(found[0], MAP(MADE.old[3:4])[0], atol=1e-5)
        # The path of the session is as it was.
        assert connection.execute("SHOW search_path").fetchone() == ('"$user", public',)
