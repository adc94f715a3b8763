"""The new vectors have the settings and the comment that the owner gave the old ones."""

from dataclasses import replace

import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Target
from tests.adopt.table_beside import MADE, MAP, TARGET, Connection

COLUMN = replace(TARGET, name="n", model="a" * 64)
BACK = fit_maps(MADE.new, MADE.old)["procrustes"]
ways = pytest.mark.parametrize("how", ["printed", "tool"])
SETTINGS = (
    "SELECT attstorage::text, attcompression::text, attstattarget, attoptions FROM pg_attribute "
    "WHERE attrelid = '{}'::regclass AND attname = 'v'"
)


def flipped(address: str, connection: Connection, how: str, to: Target = COLUMN) -> None:
    steps = carry(open_source(f"{address}#t", vector="v"), to, MAP, flip=how == "tool").next_steps
    if how == "printed":
        for step in steps:
            if step.startswith(("CREATE INDEX", "BEGIN")):
                assert "\n" not in step
                connection.execute(step.encode())


def one(connection: Connection, query: str) -> object:
    row = connection.execute(query.encode()).fetchone()
    return None if row is None else row[0] if len(row) == 1 else row


@ways
@pytest.mark.parametrize("to", [COLUMN, TARGET], ids=["column", "table"])
@pytest.mark.parametrize("storage", ["PLAIN", "MAIN", "EXTENDED", "EXTERNAL"])
def test_a_column_has_the_settings_of_the_old_one(
    table: tuple[str, Connection], to: Target, how: str, storage: str
) -> None:
    address, connection = table
    connection.execute(
        f"""ALTER TABLE t ALTER v SET STORAGE {storage}, ALTER v SET COMPRESSION pglz,
        ALTER v SET STATISTICS 17, ALTER v SET (n_distinct = -1)""".encode()
    )
    before = one(connection, SETTINGS.format("t"))
    assert before == (
        storage.lower()[0 if storage != "EXTENDED" else 1],
        "p",
        17,
        ["n_distinct=-1"],
    )
    flipped(address, connection, how, to)
    assert one(connection, SETTINGS.format("t" if to is COLUMN else "beside")) == before


def test_rows_of_both_vectors_fit_into_a_page(table: tuple[str, Connection]) -> None:
    """A row of PLAIN vectors that is longer than a page could not be written at all."""
    address, connection = table
    connection.execute("DELETE FROM t; DROP INDEX t_v_idx; ALTER TABLE t ALTER v TYPE vector(1100)")
    connection.execute("ALTER TABLE t ALTER v SET STORAGE PLAIN")
    connection.execute("INSERT INTO t SELECT 1, array_fill(1, ARRAY[1100])::vector(1100)")
    open_source(f"{address}#t", vector="v").open_target(replace(COLUMN, dim=1100))
    connection.execute("UPDATE t SET n = v")
    query = "SELECT attstorage::text FROM pg_attribute WHERE attname = 'n'"
    assert one(connection, query) == "m"


@ways
@pytest.mark.parametrize("to", [COLUMN, TARGET], ids=["column", "table"])
@pytest.mark.parametrize("comment", ["it's a \\ vector\nof two lines", '{"of": 3', "[1]\n{}"])
def test_a_column_has_the_comment_of_the_old_one(
    table: tuple[str, Connection], to: Target, how: str, comment: str
) -> None:
    address, connection = table
    connection.execute("SELECT set_config('test.comment', %s, false)", [comment])
    connection.execute("DO $$BEGIN EXECUTE format('COMMENT ON COLUMN t.v IS %L', "
                       "current_setting('test.comment')); END$$")  # fmt: skip
    flipped(address, connection, how, to)
    relation = "t" if to is COLUMN else "beside"
    query = f"SELECT col_description('{relation}'::regclass, attnum) FROM pg_attribute " \
            f"WHERE attrelid = '{relation}'::regclass AND attname = 'v'"  # fmt: skip
    found = one(connection, query)
    assert isinstance(found, str) and found.startswith(comment)
    if to is TARGET:
        assert open_source(f"{address}#t", vector="v").facts().model is None
        return
    # The model's name is read from it, and the next flip copies the owner's part alone.
    source = open_source(f"{address}#t", vector="v")
    assert source.facts().model == COLUMN.model
    connection.execute("ALTER TABLE t DROP COLUMN v_before")
    carry(source, replace(COLUMN, dim=BACK.dims[1], computer_digest=BACK.digest), BACK, flip=True)
    again = one(connection, query)
    assert isinstance(again, str) and again.startswith(comment + "\n{")
    assert again.count("\n") == comment.count("\n") + 1


@ways
def test_the_mark_of_cluster_goes_to_the_new_index(table: tuple[str, Connection], how: str) -> None:
    address, connection = table
    connection.execute(
        "CREATE INDEX norms ON t (vector_norm(v), body) WITH (fillfactor = 80);"
        "CREATE INDEX other ON t (vector_dims(v)); ALTER TABLE t CLUSTER ON norms"
    )
    flipped(address, connection, how)
    query = "SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indisclustered"
    definition = str(one(connection, query))
    assert definition.endswith("USING btree (vector_norm(v), body) WITH (fillfactor='80')")
    assert one(connection, "SHOW search_path") == '"$user", public'


@ways
def test_views_have_their_settings_again(table: tuple[str, Connection], how: str) -> None:
    address, connection = table
    connection.execute(
        """CREATE MATERIALIZED VIEW m AS SELECT id, v FROM t;
        CREATE UNIQUE INDEX m_id ON m (id); ALTER MATERIALIZED VIEW m CLUSTER ON m_id;
        COMMENT ON INDEX m_id IS 'the key';
        ALTER MATERIALIZED VIEW m ALTER v SET STORAGE MAIN, ALTER v SET STATISTICS 17,
            ALTER v SET (n_distinct = -1), ALTER v SET COMPRESSION pglz;
        CREATE STATISTICS m_two ON id, (vector_norm(v)) FROM m; ALTER STATISTICS m_two SET
            STATISTICS 12; COMMENT ON STATISTICS m_two IS 'of a view';
        CREATE VIEW w AS SELECT id, v FROM m;
        COMMENT ON VIEW w IS 'a \\ and \\n,
a second line';
        COMMENT ON COLUMN w.v IS E'it''s \\\\ this
too'"""
    )
    settings = one(connection, SETTINGS.format("m"))
    assert settings == ("m", "p", 17, ["n_distinct=-1"])
    comments = "SELECT obj_description('w'::regclass), col_description('w'::regclass, 2)"
    before = one(connection, comments)
    flipped(address, connection, how)
    assert one(connection, "SELECT vector_dims(v) FROM w LIMIT 1") == MAP.dims[1]
    assert one(connection, SETTINGS.format("m")) == settings
    assert one(connection, comments) == before
    clustered = "SELECT indexrelid::regclass::text FROM pg_index WHERE indisclustered"
    assert one(connection, clustered) == "m_id"
    assert one(connection, "SELECT obj_description('m_id'::regclass)") == "the key"
    statistics = "SELECT stxstattarget, obj_description(oid) FROM pg_statistic_ext"
    assert one(connection, statistics) == (12, "of a view")


@ways
def test_what_is_made_again_has_its_comment(table: tuple[str, Connection], how: str) -> None:
    address, connection = table
    connection.execute(
        """ALTER TABLE t ADD CONSTRAINT unit CHECK (vector_norm(v) < 9), ADD NOT NULL v;
        CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$;
        CREATE TRIGGER see AFTER UPDATE OF v ON t FOR EACH ROW EXECUTE FUNCTION see();
        CREATE STATISTICS norms ON id, (vector_norm(v)) FROM t;
        CREATE RULE never AS ON UPDATE TO t WHERE NEW.v IS NULL DO INSTEAD NOTHING;
        COMMENT ON CONSTRAINT unit ON t IS 'a \\
check'; COMMENT ON TRIGGER see ON t IS 'a trigger'; COMMENT ON STATISTICS norms IS 'statistics';
        COMMENT ON RULE never ON t IS 'a rule'; COMMENT ON CONSTRAINT t_v_not_null ON t IS 'must'"""
    )
    query = (
        "SELECT array_agg(description ORDER BY description) FROM pg_description WHERE classoid IN "
        "('pg_constraint'::regclass, 'pg_trigger'::regclass, 'pg_rewrite'::regclass, "
        "'pg_statistic_ext'::regclass) AND objoid > 16384 AND description NOT LIKE '%vector%'"
    )
    before = one(connection, query)
    assert before == ["a \\\ncheck", "a rule", "a trigger", "must", "statistics"]
    flipped(address, connection, how)
    assert one(connection, query) == before
