"""What is carried in a table costs its indexes little, and leaves it as its owner expects."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.fitting import FitFiles
from nobackfill.adopt.fitting import fit_and_judge as fit
from nobackfill.adopt.maps import fit_maps, load_map
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import CostEstimator, MigrationTrial, Target
from tests.adopt.made import world, write_parquet
from tests.support.postgres import Server
from tests.support.waiting import wait_until

MADE = world(400)
MAP = fit_maps(MADE.old, MADE.new)["procrustes"]
TARGET = Target("n", MAP.dims[1], MAP.digest)


@pytest.fixture
def table(postgres: Server) -> Iterator[tuple[str, psycopg.Connection]]:
    """A table `t` of NOT NULL vectors, wide rows, and an index of the vectors."""
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        _fill(connection)
        yield address, connection


def _fill(connection: psycopg.Connection) -> None:
    connection.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v vector(24) NOT NULL, body text NOT NULL)"
    )
    rows = [(n, str(v.tolist()), "x" * 700) for n, v in enumerate(MADE.old)]
    connection.cursor().executemany("INSERT INTO t VALUES (%s, %s, %s)", rows)
    connection.execute("CREATE INDEX ON t USING hnsw (v vector_cosine_ops)")


def test_most_rows_stay_on_their_page_and_no_index_learns_of_them(
    table: tuple[str, psycopg.Connection],
) -> None:
    address, connection = table
    before = connection.execute("SELECT pg_relation_size('t')").fetchone()
    # Its connections end with the source, and what they did is counted then.
    assert carry(open_source(f"{address}#t"), TARGET, MAP).new_vector_count == 400
    after = connection.execute("SELECT pg_relation_size('t')").fetchone()

    def hot_and_all() -> tuple[int, int]:
        (counts,) = connection.execute(
            "SELECT n_tup_hot_upd, n_tup_upd FROM pg_stat_user_tables WHERE relname = 't'"
        ).fetchall()
        return counts

    wait_until(lambda: hot_and_all()[1], what="updates are counted")
    found = hot_and_all()
    assert before and after
    # Ten rows a page, eight passes: two of ten go elsewhere. Others on this server may hold back
    # what is cleared for a moment.
    assert found[1] == 400 and found[0] > 200
    assert after[0] < 1.7 * before[0]


def test_after_the_flip_rows_are_put_as_before(table: tuple[str, psycopg.Connection]) -> None:
    address, connection = table
    steps = carry(open_source(f"{address}#t"), TARGET, MAP).next_steps
    connection.execute(steps[-1].encode())
    put = "INSERT INTO t (id, v, body) VALUES (%s, %s, 'x')"
    connection.execute(put, (1000, str(MADE.new[0].tolist())))
    with pytest.raises(psycopg.errors.NotNullViolation):
        connection.execute(put, (1001, None))


def test_a_table_that_was_dropped_and_made_again_is_carried(
    table: tuple[str, psycopg.Connection],
) -> None:
    address, connection = table
    carry(open_source(f"{address}#t"), TARGET, MAP)
    connection.execute("DROP TABLE t")
    _fill(connection)
    assert carry(open_source(f"{address}#t"), TARGET, MAP).write_count == 400


def test_rows_of_partitions_are_told_apart(postgres: Server) -> None:
    """Two partitions have rows at the same places, written by the same transaction."""
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute(
            "CREATE TABLE t (id int PRIMARY KEY, v vector(24)) PARTITION BY HASH (id)"
        )
        for number in range(2):
            connection.execute(
                f"CREATE TABLE t{number} PARTITION OF t "
                f"FOR VALUES WITH (MODULUS 2, REMAINDER {number})".encode()
            )
        rows = [(n, str(v.tolist())) for n, v in enumerate(MADE.old)]
        with connection.transaction(), connection.cursor() as cursor:
            cursor.executemany("INSERT INTO t VALUES (%s, %s)", rows)
        assert (
            carry(open_source(f"{address}#t"), TARGET, MAP, rows_per_window=150).new_vector_count
            == 400
        )
        wrong = 0
        for number, vector in connection.execute("SELECT id, n::text FROM t").fetchall():
            expected = MAP(MADE.old[number : number + 1])[0]
            got = [float(value) for value in vector[1:-1].split(",")]
            wrong += abs(expected - got).max() > 1e-5
        assert not wrong


def test_columns_may_be_called_as_the_trigger_calls_its_rows(postgres: Server) -> None:
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute(
            'CREATE TABLE "Old" ("new" int PRIMARY KEY, "old" vector(24)) PARTITION BY HASH ("new")'
        )
        connection.execute(
            'CREATE TABLE part PARTITION OF "Old" FOR VALUES WITH (MODULUS 1, REMAINDER 0)'
        )
        put = 'INSERT INTO "Old" VALUES (%s, %s) ON CONFLICT ("new") DO UPDATE SET "old" = %s'
        for key in range(5):
            vectors = [str(MADE.old[n].tolist()) for n in (key, key + 1)]
            connection.execute(put, (key, *vectors))
        to = Target("table:beside", MAP.dims[1], MAP.digest)
        assert carry(open_source(f"{address}#Old"), to, MAP).write_count == 5
        connection.execute(put, (3, *[str(MADE.old[9].tolist())] * 2))
        connection.execute('DELETE FROM "Old" WHERE "new" = 1')
        assert carry(open_source(f"{address}#Old"), to, MAP).new_vector_count == 4
        found = connection.execute('SELECT "old"::real[] FROM beside WHERE "new" = 3').fetchall()
        np.testing.assert_allclose(MAP(MADE.old[9:10]), np.array(found[0], np.float32), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("text", ["", "a", "Ä's \\ key", "x" * 300, "\t", "b" * 7, 'say "so"', "%s {key}"]),
        ("uuid", [f"00000000-0000-4000-8000-{n:012d}" for n in range(8)]),
        ("numeric", ["-1", "0", "1.50", "99999999999999999999", "7", "8", "9", "10"]),
        ("timestamptz", [f"20{n:02d}-01-01 00:00:00+00" for n in range(8)]),
    ],
)
def test_keys_of_any_type_find_their_vectors(postgres: Server, kind: str, keys: list[str]) -> None:
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute(
            f'CREATE TABLE "T; --" ("k {{}} %" {kind} PRIMARY KEY, "v""w" vector(24))'.encode()
        )
        rows = [(key, str(v.tolist())) for key, v in zip(keys, MADE.old, strict=False)]
        connection.cursor().executemany('INSERT INTO "T; --" VALUES (%s, %s)', rows)
        to = Target('table:new "table"', MAP.dims[1], MAP.digest)
        assert (
            carry(open_source(f"{address}#T; --"), to, MAP, rows_per_window=3).new_vector_count == 8
        )
        found = connection.execute(
            'SELECT o."v""w"::real[], n."v""w"::real[] FROM "T; --" o '
            'JOIN "new ""table""" n ON o."k {} %%" = n."k {} %%"',
            (),
        ).fetchall()
        old, new = (np.array(part, np.float32) for part in zip(*found, strict=True))
        np.testing.assert_allclose(MAP(old), new, atol=1e-5)
        assert open_source(f"{address}#T; --").drop_new_vectors(to.name)
        left = connection.execute("SELECT relname FROM pg_class WHERE relname LIKE 'new%%'", ())
        assert left.fetchall() == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["table", "numpy", "parquet"])
def test_fit_tells_what_carrying_takes(kind: str, postgres: Server, tmp_path: Path) -> None:
    """Within a factor of ten, on a machine that others use; the map alone is a hundredth of it."""
    made = world(3000)
    write_parquet(tmp_path / "new.parquet", made.ids, made.new)
    if kind == "numpy":
        np.save(tmp_path / "ids.npy", np.array(made.ids))
        np.save(tmp_path / "old.npy", made.old)
    write_parquet(tmp_path / "old.parquet", made.ids, made.old)
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE t (id text PRIMARY KEY, v vector(24))")
        rows = [(name, str(v.tolist())) for name, v in zip(made.ids, made.old, strict=True)]
        connection.cursor().executemany("INSERT INTO t VALUES (%s, %s)", rows)
        where = {"numpy": tmp_path, "parquet": tmp_path / "old.parquet", "table": f"{address}#t"}
        old = str(where[kind])
        found = fit(old, str(tmp_path / "new.parquet"), FitFiles(tmp_path / "map.npz"), None, None,
                    items_available=False, key=None, vector=None)  # fmt: skip
        mapping = load_map(tmp_path / "map.npz")
        begun = time.perf_counter()
        carry(open_source(old), replace(TARGET, computer_digest=mapping.digest), mapping)
        took = time.perf_counter() - begun
    ways = found.json_answer["ways"]
    assert isinstance(ways, list)
    (told,) = (way["all_seconds"] for way in ways if way["name"] == "map")
    assert took / 10 < told < took * 10
    # Files have no index.
    assert sum("building the index" in note for note in found.terminal_lines) == (kind == "table")


def test_the_time_of_an_index_is_estimated_by_that_of_some_vectors(
    table: tuple[str, psycopg.Connection],
) -> None:
    address, connection = table
    vectors = np.random.default_rng(0).normal(size=(4000, 24)).astype(np.float32)

    def estimate() -> float | None:
        source = open_source(f"{address}#t")
        assert isinstance(source, CostEstimator)
        some = vectors[:500]
        trial = MigrationTrial(some, some, len(vectors), 0.0, lambda scratch: 0.0)
        return source.estimate_costs(trial).index_seconds

    told = estimate()
    left = connection.execute("SELECT relname FROM pg_class WHERE relname LIKE 'nobackfill%'")
    assert left.fetchall() == []
    connection.execute("CREATE TABLE whole (v vector(24))")
    with connection.transaction(), connection.cursor() as cursor:
        rows = [(str(one.tolist()),) for one in vectors]
        cursor.executemany("INSERT INTO whole VALUES (%s)", rows)
    begun = time.perf_counter()
    connection.execute("CREATE INDEX ON whole USING hnsw (v vector_cosine_ops)")
    took = time.perf_counter() - begun
    assert told is not None and took / 10 < told < took * 10
    # A graph that does not fit into memory is built in another way, several times as slowly.
    ((database,),) = connection.execute("SELECT current_database()").fetchall()
    connection.execute(f"ALTER DATABASE {database} SET maintenance_work_mem = '1MB'".encode())
    assert estimate() is None
    connection.execute(f"ALTER DATABASE {database} RESET maintenance_work_mem".encode())
    assert estimate() is not None
    connection.execute("CREATE INDEX ON t USING hnsw (v vector_cosine_ops) WITH (m = 4)")
    assert estimate() is None
