"""The flip of a column moves what hangs on it, or refuses."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.carrying import CarryResult, carry
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.sources.opening import open_source
from nobackfill.errors import InvalidInputError
from tests.adopt.table_beside import MADE, MAP, TARGET, Connection
from tests.support.postgres import Server

COLUMN = replace(TARGET, name="n")


@pytest.fixture
def role(postgres: Server) -> Iterator[str]:
    name = f"app_{id(object())}"
    postgres.sql(f"CREATE ROLE {name}")
    yield name
    postgres.sql(f"DROP ROLE {name}")


def carried(address: str, *, flip: bool = False) -> CarryResult:
    return carry(open_source(f"{address}#t", vector="v"), COLUMN, MAP, flip=flip)


def flipped(address: str, connection: Connection, how: str) -> None:
    """By what is printed, or by the tool."""
    steps = carried(address, flip=how == "tool").next_steps
    if how == "printed":
        for statement in steps:
            if statement.startswith(("CREATE INDEX", "BEGIN")):
                connection.execute(statement.encode())


def one(connection: Connection, query: str) -> object:
    row = connection.execute(query.encode()).fetchone()
    return None if row is None else row[0] if len(row) == 1 else row


ways = pytest.mark.parametrize("how", ["printed", "tool"])


@ways
def test_views_and_views_of_views_find_the_new_vectors(
    table: tuple[str, Connection], role: str, how: str
) -> None:
    address, connection = table
    connection.execute(
        f"""CREATE VIEW "Search able" WITH (security_barrier) AS
            SELECT id, v, 'two
lines' AS "no;te" FROM t WHERE body IS DISTINCT FROM 'back\\slash
';
        COMMENT ON VIEW "Search able" IS 'it''s ours';
        COMMENT ON COLUMN "Search able".v IS 'the vector';
        CREATE VIEW few AS SELECT id, v FROM "Search able" WHERE id < 10;
        CREATE MATERIALIZED VIEW kept AS SELECT f.id, f.v, s.v AS again
            FROM few f JOIN "Search able" s USING (id);
        CREATE UNIQUE INDEX kept_id ON kept (id);
        CREATE RULE quiet AS ON DELETE TO few DO INSTEAD NOTHING;
        CREATE FUNCTION put() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
            UPDATE t SET v = NEW.v WHERE id = NEW.id; RETURN NEW; END$$;
        CREATE TRIGGER put INSTEAD OF UPDATE ON "Search able" FOR EACH ROW EXECUTE FUNCTION put();
        GRANT SELECT ON few TO {role}; GRANT SELECT (id), UPDATE (v) ON "Search able" TO {role};
        GRANT SELECT ON kept TO PUBLIC; ALTER VIEW few OWNER TO {role};
        GRANT SELECT ON "Search able" TO {role}""".encode()
    )
    flipped(address, connection, how)
    new = MAP(MADE.old[3:4])[0]
    for view in ('"Search able"', "few", "kept"):
        found = one(connection, f"SELECT v::real[] FROM {view} WHERE id = 3")
        np.testing.assert_allclose(np.array(found, np.float32), new, atol=1e-5)
    assert one(connection, 'SELECT "no;te" FROM "Search able" LIMIT 1') == "two\nlines"
    assert one(connection, "SELECT obj_description('\"Search able\"'::regclass)") == "it's ours"
    said = "SELECT col_description('\"Search able\"'::regclass, 2)"
    assert one(connection, said) == "the vector"
    options = "SELECT reloptions FROM pg_class WHERE relname = 'Search able'"
    assert one(connection, options) == ["security_barrier=true"]
    assert one(
        connection, "SELECT relowner::regrole::text FROM pg_class WHERE relname = 'few'"
    ) == (role)
    held = f"SELECT has_column_privilege('{role}', '\"Search able\"', 'v', 'UPDATE')"
    assert one(connection, held) is True
    assert one(connection, f"SELECT has_table_privilege('{role}', 'kept', 'SELECT')") is True
    assert one(connection, "SELECT count(*) FROM pg_indexes WHERE indexname = 'kept_id'") == 1
    # Rules and triggers of views, too.
    connection.execute("DELETE FROM few WHERE id = 3")
    connection.execute('UPDATE "Search able" SET v = v WHERE id = 3')
    connection.execute(f"DROP OWNED BY {role} CASCADE".encode())


@ways
def test_parts_of_the_table_are_of_the_new_vectors(
    table: tuple[str, Connection], role: str, how: str
) -> None:
    address, connection = table
    connection.execute(
        f"""ALTER TABLE t ADD CONSTRAINT unit CHECK (abs(vector_norm(v) - 1) < 0.01),
            ADD short bit(24) GENERATED ALWAYS AS (binary_quantize(v)::bit(24)) STORED,
            ADD norm real GENERATED ALWAYS AS (vector_norm(v)) STORED;
        CREATE INDEX by_short ON t USING hnsw (short bit_hamming_ops);
        CREATE VIEW shorts AS SELECT id, short FROM t;
        CREATE FUNCTION best(q vector) RETURNS SETOF int
            BEGIN ATOMIC SELECT id FROM t ORDER BY v <=> q LIMIT 2; END;
        ALTER TABLE t ENABLE ROW LEVEL SECURITY;
        CREATE POLICY long ON t USING (vector_dims(v) < 100) WITH CHECK (v IS NOT NULL);
        CREATE TABLE seen (id int);
        CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
            $$BEGIN INSERT INTO seen VALUES (NEW.id); RETURN NULL; END$$;
        CREATE TRIGGER see AFTER UPDATE OF v ON t FOR EACH ROW EXECUTE FUNCTION see();
        ALTER TABLE t ENABLE ALWAYS TRIGGER see;
        CREATE STATISTICS norms ON id, (vector_norm(v)) FROM t;
        CREATE RULE never AS ON UPDATE TO t WHERE NEW.v IS NULL DO INSTEAD NOTHING;
        GRANT SELECT (id, v) ON t TO {role}""".encode()
    )
    flipped(address, connection, how)
    new = MAP(MADE.old[3:4])[0]
    bits = "".join("1" if value > 0 else "0" for value in new)
    assert one(connection, "SELECT short FROM t WHERE id = 3") == bits
    assert one(connection, "SELECT short FROM shorts WHERE id = 3") == bits
    assert "v_before" not in str(one(connection, "SELECT pg_get_functiondef('best'::regproc)"))
    assert one(connection, f"SELECT best('{new.tolist()}')") == 3
    with pytest.raises(psycopg.errors.CheckViolation):
        connection.execute(f"INSERT INTO t (id, v) VALUES (1000, '{(5 * new).tolist()}')".encode())
    connection.execute(f"INSERT INTO t (id, v) VALUES (1000, '{new.tolist()}')".encode())
    policy = "SELECT qual || with_check FROM pg_policies WHERE policyname = 'long'"
    assert "v_before" not in str(one(connection, policy))
    connection.execute("TRUNCATE seen; UPDATE t SET v = v WHERE id = 1000")
    assert one(connection, "SELECT id FROM seen") == 1000
    enabled = "SELECT tgenabled::text FROM pg_trigger WHERE tgname = 'see'"
    assert one(connection, enabled) == "A"
    assert "v_before" not in str(one(connection, "SELECT definition FROM pg_rules"))
    statistics = "SELECT pg_get_statisticsobjdef(oid) FROM pg_statistic_ext"
    assert "v_before" not in str(one(connection, statistics))
    assert one(connection, f"SELECT has_column_privilege('{role}', 't', 'v', 'SELECT')") is True
    connection.execute(f"DROP OWNED BY {role}".encode())


@ways
def test_indexes_are_as_the_old_ones(table: tuple[str, Connection], how: str) -> None:
    address, connection = table
    connection.execute(
        "DROP INDEX t_v_idx;"
        "CREATE INDEX ON t USING hnsw (v vector_cosine_ops) WITH (m = 8, ef_construction = 40) "
        "WHERE body IS NULL;"
        "CREATE INDEX ON t USING hnsw ((v::halfvec(24)) halfvec_cosine_ops);"
        "CREATE INDEX ON t (vector_norm(v))"
    )
    before = [row[0] for row in connection.execute("SELECT indexdef FROM pg_indexes ORDER BY 1")]
    flipped(address, connection, how)
    after = [row[0] for row in connection.execute("SELECT indexdef FROM pg_indexes ORDER BY 1")]

    def forms(definitions: list[str]) -> list[str]:
        return sorted(re.sub(r"halfvec\(\d+\)", "halfvec(N)", one.partition(" USING ")[2])
                      for one in definitions)  # fmt: skip

    ours = forms([one for one in after if "pg_catalog" not in one and "v_before" not in one
                  and " ON public.t " in one])  # fmt: skip
    assert ours == forms([one for one in before if " ON public.t " in one])
    assert any("halfvec(32)" in one for one in after)


@ways
def test_equal_dimensions_hide_nothing(postgres: Server, how: str) -> None:
    """Nothing would fail: the view would search the old vectors by new queries."""
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.normal(size=(24, 24)))[0].astype(np.float32)
    mapping = fit_maps(MADE.old, MADE.old @ turn)["procrustes"]
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v vector(24))")
        rows = [(n, str(v.tolist())) for n, v in enumerate(MADE.old)]
        connection.cursor().executemany("INSERT INTO t VALUES (%s, %s)", rows)
        connection.execute("CREATE VIEW searchable AS SELECT * FROM t")
        target = replace(COLUMN, dim=24, computer_digest=mapping.digest)
        done = carry(open_source(f"{address}#t", vector="v"), target, mapping, flip=how == "tool")
        if how == "printed":
            connection.execute(done.next_steps[-1].encode())
        for number, vector in list(enumerate(MADE.old @ turn))[:100:10]:
            near = f"SELECT id FROM searchable ORDER BY v <=> '{vector.tolist()}' LIMIT 1"
            assert one(connection, near) == number


def test_parts_of_a_partitioned_table_are_moved_once(postgres: Server) -> None:
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute(
            """CREATE TABLE t (id int PRIMARY KEY, v vector(24) CONSTRAINT unit CHECK
                (vector_norm(v) < 2), short bit(24) GENERATED ALWAYS AS
                (binary_quantize(v)::bit(24)) STORED) PARTITION BY HASH (id);
            CREATE TABLE t0 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 0);
            CREATE TABLE t1 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 1);
            ALTER TABLE t1 ADD CONSTRAINT own CHECK (vector_norm(v) > 0.1);
            CREATE VIEW odd AS SELECT id, v FROM t1;
            CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$;
            CREATE TRIGGER see AFTER UPDATE OF v ON t FOR EACH ROW EXECUTE FUNCTION see()"""
        )
        rows = [(n, str(v.tolist())) for n, v in enumerate(MADE.old)]
        connection.cursor().executemany("INSERT INTO t (id, v) VALUES (%s, %s)", rows)
        connection.execute(carried(address).next_steps[-1].encode())
        dims = "SELECT DISTINCT vector_dims(v), length(short) FROM t"
        assert connection.execute(dims.encode()).fetchall() == [(32, 32)]
        assert one(connection, "SELECT count(*) FROM odd WHERE vector_dims(v) = 32") == one(
            connection, "SELECT count(*) FROM t1"
        )
        checks = (
            "SELECT conrelid::regclass::text, conname FROM pg_constraint "
            "WHERE contype = 'c' AND conrelid <> 0"
        )
        assert set(connection.execute(checks.encode()).fetchall()) == {
            ("t", "unit"), ("t0", "unit"), ("t1", "unit"), ("t1", "own"),
        }  # fmt: skip


@pytest.mark.parametrize(
    ("hanging", "named"),
    [
        ("CREATE PUBLICATION ours FOR TABLE t (id, v)", "publication of table"),
        (
            "CREATE FUNCTION emb(int) RETURNS vector IMMUTABLE LANGUAGE sql "
            "AS 'SELECT array_fill($1 + 1, ARRAY[24])::vector'; ALTER TABLE t DROP COLUMN v, "
            "ADD COLUMN v vector(24) GENERATED ALWAYS AS (emb(id)) STORED",
            "generated column v of table public.t",
        ),
        (
            "CREATE VIEW w AS SELECT id, v FROM t; CREATE FUNCTION f() RETURNS SETOF w "
            "LANGUAGE sql AS 'SELECT * FROM w'",
            "function",
        ),
    ],
)
def test_what_cannot_be_moved_is_named_and_nothing_flips(
    table: tuple[str, Connection], hanging: str, named: str
) -> None:
    address, connection = table
    connection.execute(hanging.encode())
    steps = carried(address).next_steps
    assert [step for step in steps if step.startswith("BEGIN")] == []
    assert named in steps[-1] and "would still read the old vectors of v" in steps[-1]
    with pytest.raises(InvalidInputError, match=named):
        carried(address, flip=True)
    assert one(connection, "SELECT count(*) FROM t WHERE n IS NOT NULL") == 300


def test_what_came_since_the_flip_was_printed_is_not_left_behind(
    table: tuple[str, Connection],
) -> None:
    address, connection = table
    *_, flip = carried(address).next_steps
    connection.execute("CREATE VIEW late AS SELECT id, v FROM t")
    with pytest.raises(psycopg.errors.RaiseException, match="carry again"):
        connection.execute(flip.encode())
    connection.rollback()
    connection.execute(carried(address).next_steps[-1].encode())
    assert one(connection, "SELECT vector_dims(v) FROM late LIMIT 1") == 32


def test_a_table_beside_names_who_reads_the_old_vectors_still(
    table: tuple[str, Connection],
) -> None:
    address, connection = table
    connection.execute("CREATE VIEW searchable AS SELECT id, v FROM t")
    steps = carry(open_source(f"{address}#t"), TARGET, MAP).next_steps
    assert "the old vectors are still read by view public.searchable" in steps


def test_what_is_carried_elsewhere_stays_with_the_old_vectors(
    table: tuple[str, Connection],
) -> None:
    address, connection = table
    carry(open_source(f"{address}#t"), TARGET, MAP)
    connection.execute(carried(address).next_steps[-1].encode())
    connection.execute("UPDATE t SET v_before = v_before::real[] WHERE id < 10")
    connection.execute("DELETE FROM t WHERE id = 20")
    emptied = "SELECT id FROM beside WHERE v IS NULL"
    assert connection.execute(emptied.encode()).fetchall() == [(20,)]


@ways
def test_a_materialized_view_is_filled_with_the_rights_of_its_owner(
    table: tuple[str, Connection], role: str, how: str
) -> None:
    """Not with those of the role that carries: the view may call what its owner wrote."""
    address, connection = table
    connection.execute(
        f"""GRANT SELECT ON t TO {role};
        CREATE SCHEMA theirs AUTHORIZATION {role};
        SET ROLE {role};
        CREATE FUNCTION theirs.rise(i text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
            IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
                EXECUTE 'ALTER ROLE {role} SUPERUSER';
            END IF;
            RETURN current_user;
        END $$;
        CREATE MATERIALIZED VIEW theirs.mine AS SELECT theirs.rise(id::text) AS i, v FROM t;
        CREATE MATERIALIZED VIEW theirs.empty AS SELECT v FROM t WITH NO DATA;
        RESET ROLE;
        ALTER TABLE t ENABLE ROW LEVEL SECURITY;
        CREATE POLICY few ON t FOR SELECT TO {role} USING (false)""".encode()
    )
    flipped(address, connection, how)
    assert one(connection, f"SELECT rolsuper FROM pg_roles WHERE rolname = '{role}'") is False
    # Row-level security holds for the owner, as in each REFRESH.
    assert one(connection, "SELECT count(*) FROM theirs.mine") == 0
    populated = "SELECT relispopulated FROM pg_class WHERE oid = 'theirs.{}'::regclass"
    assert one(connection, populated.format("mine")) is True
    assert one(connection, populated.format("empty")) is False
    connection.execute(b"DROP SCHEMA theirs CASCADE; REVOKE ALL ON t FROM " + role.encode())
    connection.execute(b"DROP POLICY few ON t")


@ways
def test_default_privileges_give_nobody_a_view_that_is_made_again(
    table: tuple[str, Connection], role: str, how: str
) -> None:
    address, connection = table
    connection.execute(
        f"""ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO {role};
        ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO PUBLIC;
        CREATE VIEW secret AS SELECT id, v FROM t; REVOKE ALL ON secret FROM {role}, PUBLIC;
        CREATE MATERIALIZED VIEW hidden AS SELECT id, v FROM t;
        REVOKE ALL ON hidden FROM {role}, PUBLIC;
        CREATE VIEW shown AS SELECT id, v FROM t;
        REVOKE ALL ON t FROM {role}, PUBLIC""".encode()
    )
    flipped(address, connection, how)
    for view, readable in (("secret", False), ("hidden", False), ("shown", True)):
        query = f"SELECT has_table_privilege('{role}', '{view}', 'SELECT')"
        assert one(connection, query) is readable, view
    connection.execute(
        f"""DROP VIEW secret, shown; DROP MATERIALIZED VIEW hidden;
        ALTER DEFAULT PRIVILEGES REVOKE SELECT ON TABLES FROM {role}, PUBLIC;
        DROP OWNED BY {role}""".encode()
    )


@ways
@pytest.mark.parametrize("state", ["DISABLE", "ENABLE REPLICA", "ENABLE ALWAYS"])
def test_a_rule_keeps_its_state(table: tuple[str, Connection], how: str, state: str) -> None:
    address, connection = table
    connection.execute(
        f"""CREATE RULE r AS ON UPDATE TO t WHERE NEW.v IS NULL AND OLD.v IS NOT NULL
        DO INSTEAD NOTHING; ALTER TABLE t {state} RULE r""".encode()
    )
    query = "SELECT ev_enabled FROM pg_rewrite WHERE rulename = 'r'"
    before = one(connection, query)
    flipped(address, connection, how)
    assert one(connection, query) == before


@ways
@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW twin AS SELECT v::halfvec({dim}), w::halfvec({dim}) FROM t",
        "CREATE VIEW one AS SELECT v, w FROM t;"
        " CREATE VIEW twin AS SELECT v::halfvec({dim}), w::halfvec({dim}) FROM one",
        "CREATE POLICY twin ON t USING (v::halfvec({dim}) <-> w::halfvec({dim}) < 9)",
        "ALTER TABLE t ALTER v SET DEFAULT array_fill(0.1, ARRAY[{dim}])::vector({dim})",
    ],
    ids=["view", "view of a view", "policy", "default"],
)
def test_a_length_that_may_be_of_another_vector_is_not_changed(
    table: tuple[str, Connection], how: str, statement: str
) -> None:
    """It would read vectors of the old length by the new one, and fail at each use."""
    address, connection = table
    dim = MAP.dims[0]
    connection.execute(f"ALTER TABLE t ADD COLUMN w vector({dim})".encode())
    connection.execute(statement.format(dim=dim).encode())
    if how == "tool":
        with pytest.raises(InvalidInputError, match=r"twin|default"):
            carried(address, flip=True)
    else:
        assert not any(step.startswith("BEGIN") for step in carried(address).next_steps)
    assert connection.execute(b"SELECT count(*) FROM t WHERE v IS NOT NULL").fetchone() != (0,)
    connection.execute(b"DROP VIEW IF EXISTS twin")


@pytest.mark.parametrize(
    "rename",
    [
        "ALTER TABLE t RENAME TO t_old; ALTER TABLE t_old RENAME TO docs",
        "ALTER TABLE t RENAME v TO emb",
    ],
    ids=["table", "column"],
)
@pytest.mark.parametrize("end", ["flip", "rollback"])
def test_a_renamed_table_keeps_no_trigger_of_the_old_name(
    table: tuple[str, Connection], rename: str, end: str
) -> None:
    """After the flip it made every UPDATE fail; a rollback could not drop the column."""
    address, connection = table
    carried(address)
    connection.execute(rename.encode())
    name, column = ("docs", "v") if "docs" in rename else ("t", "emb")
    source = open_source(f"{address}#{name}", vector=column)
    if end == "flip":
        carry(source, COLUMN, MAP, flip=True)
    else:
        assert source.drop_new_vectors("n")
        query = f"SELECT count(*) FROM pg_attribute WHERE attrelid = '{name}'::regclass"
        assert one(connection, f"{query} AND attname = 'n'") == 0
    assert one(connection, "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'nobackfill%'") == 0
    connection.execute(f"UPDATE {name} SET {column} = {column}".encode())
    if name != "t":
        connection.execute(b"ALTER TABLE docs RENAME TO t")
