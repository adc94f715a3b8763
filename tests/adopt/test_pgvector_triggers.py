"""A new vector is emptied whenever its old one changes, by whichever way it changes."""

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.carrying import CarryResult, carry
from nobackfill.adopt.cli import main
from nobackfill.adopt.maps import save_map
from nobackfill.adopt.sources.opening import open_source
from tests.adopt.table_beside import MAP, TARGET, Connection, drawn, put
from tests.support.postgres import Server

COLUMN = replace(TARGET, name="n")
# By which query the new vectors of either form are read.
READ = {
    "n": "SELECT id, v::real[], n::real[] FROM t ORDER BY id",
    "table:beside": "SELECT t.id, t.v::real[], b.v::real[] FROM t LEFT JOIN beside b USING (id)",
}
both = pytest.mark.parametrize("target", [COLUMN, TARGET], ids=["column", "table"])
# An embedding that a database computes of a text.
EMBED = """CREATE FUNCTION embed(text) RETURNS vector IMMUTABLE LANGUAGE sql AS $$
SELECT ('[' || string_agg((ascii(substr(md5($1 || i), 1, 1)) - 70)::text, ',') || ']')::vector
FROM generate_series(1, 24) i $$"""


def carried(address: str, target: Any) -> CarryResult:
    return carry(open_source(f"{address}#t", vector="v"), target, MAP)


def stale(connection: Connection, target: Any) -> list[int]:
    """Keys whose new vector is not of their old one."""
    rows = connection.execute(READ[target.name].encode()).fetchall()
    old = MAP(np.array([row[1] for row in rows], np.float32))
    return [
        key
        for (key, _, new), wanted in zip(rows, old, strict=True)
        if new is not None and np.abs(np.array(new, np.float32) - wanted).max() > 1e-4
    ]


@both
@pytest.mark.parametrize("when", ["BEFORE", "AFTER"])
def test_the_owners_trigger_that_makes_the_vector_may_fire_last(
    table: tuple[str, Connection], target: Any, when: str
) -> None:
    address, connection = table
    connection.execute(EMBED)
    change = {
        "BEFORE": "NEW.v := embed(NEW.body); RETURN NEW",
        "AFTER": "UPDATE t SET v = embed(NEW.body) WHERE id = NEW.id; RETURN NULL",
    }[when]
    connection.execute(
        f"CREATE FUNCTION zz() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {change}; END$$;"
        f"CREATE TRIGGER zz {when} UPDATE OF body ON t FOR EACH ROW "
        "WHEN (OLD.body IS DISTINCT FROM NEW.body) EXECUTE FUNCTION zz()".encode()
    )
    carried(address, target)
    connection.execute("UPDATE t SET body = 'changed ' || id WHERE id < 50")
    assert stale(connection, target) == []
    assert carried(address, target).write_count == 50
    assert stale(connection, target) == []


@both
def test_replication_empties_as_an_application_does(
    table: tuple[str, Connection], target: Any
) -> None:
    address, connection = table
    carried(address, target)
    connection.execute("SET session_replication_role = replica")
    put(connection, range(20), drawn(1, 20))
    connection.execute("RESET session_replication_role")
    assert stale(connection, target) == []
    assert carried(address, target).write_count == 20


@both
def test_a_generated_vector_is_carried_and_followed(postgres: Server, target: Any) -> None:
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute(EMBED)
        connection.execute(
            "CREATE TABLE t (id int PRIMARY KEY, body text, "
            "v vector(24) GENERATED ALWAYS AS (embed(body)) STORED)"
        )
        connection.execute("INSERT INTO t SELECT n, 'on ' || n FROM generate_series(1, 60) n")
        assert carried(address, target).new_vector_count == 60
        connection.execute("UPDATE t SET body = 'changed' WHERE id < 11")
        assert stale(connection, target) == []
        assert carried(address, target).write_count == 10
        assert stale(connection, target) == []


@both
def test_a_row_that_moves_to_another_partition_takes_no_stale_vector(
    postgres: Server, target: Any
) -> None:
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute(EMBED)
        connection.execute(
            "CREATE TABLE t (id int PRIMARY KEY, body text, "
            "v vector(24) GENERATED ALWAYS AS (embed(body)) STORED) PARTITION BY RANGE (id);"
            "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (0) TO (100);"
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (100) TO (1000)"
        )
        connection.execute("INSERT INTO t SELECT n, 'on ' || n FROM generate_series(1, 60) n")
        carried(address, target)
        connection.execute("UPDATE t SET body = 'changed', id = id + 200 WHERE id < 11")
        assert stale(connection, target) == []
        assert carried(address, target).write_count == 10
        assert stale(connection, target) == []


@pytest.fixture
def role(postgres: Server) -> Iterator[str]:
    """A role without rights."""
    name = f"app_{id(object())}"
    postgres.sql(f"CREATE ROLE {name}")
    yield name
    postgres.sql(f"DROP ROLE {name}")


@both
def test_a_writer_of_one_column_needs_no_right_to_the_new_vector(
    table: tuple[str, Connection], target: Any, role: str
) -> None:
    address, connection = table
    connection.execute(EMBED)
    connection.execute(
        "CREATE FUNCTION zz() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN NEW.v := embed(NEW.body); RETURN NEW; END$$;"
        "CREATE TRIGGER zz BEFORE UPDATE OF body ON t FOR EACH ROW EXECUTE FUNCTION zz()"
    )
    carried(address, target)
    connection.execute(f"GRANT SELECT (id), UPDATE (body) ON t TO {role}; SET ROLE {role}".encode())
    connection.execute("UPDATE t SET body = 'changed' WHERE id < 5")
    connection.execute(f"RESET ROLE; DROP OWNED BY {role}".encode())
    assert stale(connection, target) == []
    assert carried(address, target).write_count == 5


def test_one_change_writes_a_row_once(table: tuple[str, Connection]) -> None:
    """The owner's triggers fire once for it."""
    address, connection = table
    carried(address, COLUMN)
    connection.execute(
        "CREATE TABLE queue (id int); CREATE FUNCTION enqueue() RETURNS trigger LANGUAGE plpgsql "
        "AS $$BEGIN INSERT INTO queue VALUES (NEW.id); RETURN NULL; END$$;"
        "CREATE TRIGGER enqueue AFTER UPDATE ON t FOR EACH ROW EXECUTE FUNCTION enqueue()"
    )
    put(connection, [3], drawn(2, 1))
    assert connection.execute("SELECT id FROM queue").fetchall() == [(3,)]


def test_the_owner_is_warned_of_triggers_before_they_fire(
    table: tuple[str, Connection],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, connection = table
    connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN RAISE EXCEPTION 'fired'; END$$;"
        "CREATE TRIGGER touch BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION refuse();"
        "CREATE TRIGGER body BEFORE UPDATE OF body ON t FOR EACH ROW EXECUTE FUNCTION refuse();"
        "CREATE TRIGGER put BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    save_map(tmp_path / "map.npz", MAP)
    told = {}
    for to in ("n", "table:beside"):
        command = ["carry", f"{address}#t", "--map", str(tmp_path / "map.npz"), "--to", to]
        monkeypatch.setattr("sys.argv", ["nobackfill", *command])
        with pytest.raises(SystemExit):
            main()
        told[to] = capsys.readouterr().err.splitlines()
    warning, error = told["n"]
    assert "fires the triggers touch; --to table:NAME" in warning
    assert "fired" in error
    assert told["table:beside"] == []


@both
def test_a_restored_dump_has_the_triggers(
    postgres: Server, table: tuple[str, Connection], target: Any
) -> None:
    address, _ = table
    carried(address, target)
    dump = [str(postgres.programs / "pg_dump"), "--dbname", address]
    text = subprocess.run(dump, check=True, capture_output=True).stdout
    with postgres.database() as url:
        restore = [str(postgres.programs / "psql"), "-qX", "-v", "ON_ERROR_STOP=1", "--dbname", url]
        subprocess.run(restore, input=text, check=True, capture_output=True)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("UPDATE t SET v = (SELECT v FROM t WHERE id = 9) WHERE id < 5")
            connection.execute("UPDATE t SET body = 'another' WHERE id = 6")
            assert stale(connection, target) == []
            connection.execute("UPDATE t SET v = NULL WHERE id = 5")
            rows = connection.execute(READ[target.name].encode()).fetchall()
            assert sorted(row[0] for row in rows if row[2] is None) == [0, 1, 2, 3, 4, 5]


BEFORE_ISSUE_N = """
CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql
AS $$BEGIN NEW.n := NULL; RETURN NEW; END$$;
CREATE TRIGGER {function} BEFORE UPDATE ON t FOR EACH ROW WHEN
(NEW.n IS NOT DISTINCT FROM OLD.n AND OLD.v IS DISTINCT FROM NEW.v) EXECUTE FUNCTION {function}()"""


@both
def test_triggers_of_an_earlier_commit_are_made_anew(
    table: tuple[str, Connection], target: Any
) -> None:
    address, connection = table
    carried(address, target)
    ours = "SELECT tgname, tgenabled::text, tgfoid::regproc::text FROM pg_trigger ORDER BY 1"
    now = connection.execute(ours).fetchall()
    function = now[0][2]
    if target is COLUMN:
        connection.execute(f"DROP FUNCTION {function} CASCADE".encode())
        connection.execute(BEFORE_ISSUE_N.format(function=function).encode())
    else:
        connection.execute("ALTER TABLE t ENABLE TRIGGER ALL")
    assert connection.execute(ours).fetchall() != now
    assert carried(address, target).new_vector_count == 300
    assert connection.execute(ours).fetchall() == now
    assert {state for _, state, _ in now} == {"A"}


@both
def test_the_trigger_function_serves_no_other_table(
    table: tuple[str, Connection], target: Any, role: str
) -> None:
    address, connection = table
    default = f"ALTER DEFAULT PRIVILEGES GRANT EXECUTE ON FUNCTIONS TO {role}"
    connection.execute(default.encode())
    carried(address, target)
    attach = (
        "CREATE TABLE mine.t (id int PRIMARY KEY, v vector(24), n vector(32));"
        "INSERT INTO mine.t SELECT n FROM generate_series(0, 299) n;"
        "CREATE TRIGGER mine AFTER DELETE ON mine.t FOR EACH ROW EXECUTE FUNCTION {}()"
    )
    (name, *_) = connection.execute("SELECT tgfoid::regproc::text FROM pg_trigger").fetchall()
    function = f"public.{name[0]}"
    connection.execute(f"CREATE SCHEMA mine AUTHORIZATION {role}; SET ROLE {role}".encode())
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(attach.format(function).encode())
    # Nor where somebody may call it.
    connection.execute("RESET ROLE")
    connection.execute(attach.format(function).encode())
    with pytest.raises(psycopg.errors.RaiseException, match=r"serves .* alone"):
        connection.execute("DELETE FROM mine.t")
    connection.execute(f"DROP SCHEMA mine CASCADE; DROP OWNED BY {role}".encode())
    assert carried(address, target).write_count == 0


@both
def test_a_renamed_table_is_followed(table: tuple[str, Connection], target: Any) -> None:
    address, connection = table
    carried(address, target)
    connection.execute("ALTER TABLE t RENAME TO u")
    connection.execute("UPDATE u SET v = %s WHERE id = 1", [str(drawn(3, 1)[0].tolist())])
    connection.execute("ALTER TABLE u RENAME TO t")
    assert stale(connection, target) == []


@both
def test_a_trigger_has_the_rights_of_the_tables_owner_and_no_more(
    table: tuple[str, Connection], target: Any, role: str
) -> None:
    """Whoever may put a trigger on the table would have those of the role that carries."""
    address, connection = table
    connection.execute(f"ALTER TABLE t OWNER TO {role}".encode())
    carried(address, target)
    owners = connection.execute(
        "SELECT DISTINCT proowner::regrole::text FROM pg_trigger JOIN pg_proc p ON p.oid = tgfoid"
    ).fetchall()
    put(connection, [5], drawn(4, 1))
    assert stale(connection, target) == []
    assert carried(address, target).write_count == 1
    connection.execute(f"DROP OWNED BY {role} CASCADE".encode())
    assert owners == [(role,)]
