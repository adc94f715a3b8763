"""`--where`: one model's rows of a table that holds vectors of several models."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import lancedb
import numpy as np
import psycopg
import pyarrow as pa
import pytest
import sqlite_vec

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.embedding.embedder import open_embedder
from nobackfill.adopt.embedding.vector_folder import read_items
from nobackfill.adopt.pairs import inspect, read_all
from nobackfill.adopt.sources.opening import open_item_vectors, open_searchable, open_source
from nobackfill.adopt.sources.source import Searchable, Source, Target
from nobackfill.errors import AlreadyExistsError, InvalidInputError
from tests.adopt.command import run_nobackfill as run
from tests.adopt.models import topical
from tests.adopt.racing import Racing
from tests.adopt.table_beside import MADE, MAP, Connection
from tests.support.postgres import Server
from tests.support.waiting import wait_until

TARGET = Target("table:new_rows", MAP.dims[1], MAP.digest)
WHERE = "model = 'a' AND place IS NOT NULL"
# Rows of model `a`: every second one.
OWN = range(0, 200, 2)


@pytest.fixture(params=[24, 16], ids=["same dimension", "other dimension"])
def shared(request: pytest.FixtureRequest, postgres: Server) -> Iterator[tuple[str, Connection]]:
    """A table of 200 rows by two models; its columns have names that our statements use, too."""
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute(
            'CREATE TABLE t (id int PRIMARY KEY, model text NOT NULL, place text, "key" text, '
            "body text, v vector)"
        )
        rng = np.random.default_rng(0)
        for number in range(200):
            own = number in OWN
            vector = MADE.old[number] if own else rng.normal(size=request.param)
            connection.execute(
                "INSERT INTO t VALUES (%s, %s, 'here', '', %s, %s)",
                [number, "ab"[not own], f"text {number}", str(vector.tolist())],
            )
        connection.execute(
            f"CREATE INDEX ON t USING hnsw ((v::vector(24)) vector_l2_ops) WHERE {WHERE}".encode()
        )
        connection.execute(
            f"CREATE INDEX ON t USING hnsw ((v::vector({request.param})) vector_cosine_ops) "
            "WHERE model = 'b'".encode()
        )
        yield f"{address}#t", connection


def migrated(connection: Connection, table: str = "new_rows") -> dict[int, list[float]]:
    query = f"SELECT id, v::real[] FROM {table} WHERE v IS NOT NULL"
    return dict(connection.execute(query.encode()).fetchall())


def check(connection: Connection, numbers: set[int]) -> None:
    """Each of these rows, and no other, has what the map makes of its old vector now."""
    made = migrated(connection)
    assert set(made) == numbers
    rows: dict[int, list[float]] = dict(
        connection.execute("SELECT id, v::real[] FROM t").fetchall()
    )
    expected = MAP(np.array([rows[number] for number in sorted(made)], np.float32))
    np.testing.assert_allclose([made[number] for number in sorted(made)], expected, atol=1e-5)


def test_only_rows_of_the_condition_are_read_and_searched(shared: tuple[str, Connection]) -> None:
    address, _ = shared
    source = open_searchable(address, where=WHERE)
    ids = {str(number) for number in OWN}
    assert set(read_all(source).ids) == ids and source.count() == len(ids)
    found = inspect(open_source(address, where=WHERE))
    assert (found.count, found.dim) == (100, 24)
    # The metric of the index with this condition, not of the other model's.
    assert source.facts().metric == "squared_l2"
    query = MADE.old[7]
    distances = {number: float(((MADE.old[number] - query) ** 2).sum()) for number in OWN}
    nearest = sorted(distances, key=lambda number: distances[number])
    assert source.nearest(query, 10) == [str(number) for number in nearest[:10]]
    assert set(source.lookup(["0", "1", "2", "3"]).ids) == {"0", "2"}
    assert source.texts(["0", "1"], "body") == {"0": "text 0"}
    assert set(read_items(address, column="body", where=WHERE).ids) == ids
    source.close()


def test_an_index_of_all_rows_finds_each_row_of_the_condition(
    shared: tuple[str, Connection],
) -> None:
    address, connection = shared
    where = "model = 'a' AND id < 60"
    with pytest.raises(InvalidInputError, match="build one for the same rows, with WHERE"):
        open_source(address, where=where).facts()
    connection.execute("DROP INDEX t_v_idx, t_v_idx1")
    connection.execute("DELETE FROM t WHERE vector_dims(v) <> 24")
    connection.execute("CREATE INDEX ON t USING hnsw ((v::vector(24)) vector_ip_ops)")
    server, table = address.split("#")
    scans = open_searchable(f"{server}&options=-c%20enable_seqscan%3Doff#{table}", where=where)
    assert scans.facts().metric == "inner_product"
    # Without reading on, the index would stop after 40 candidates of all rows.
    assert set(scans.nearest(MADE.old[7], 30)) == {str(number) for number in OWN if number < 60}
    scans.close()


def test_new_vectors_go_to_a_table_of_their_own(shared: tuple[str, Connection]) -> None:
    address, connection = shared
    source = open_item_vectors(address, address, where=WHERE)
    with pytest.raises(InvalidInputError, match="expected --to table:NAME with --where"):
        carry(source, Target("v_new", MAP.dims[1], MAP.digest), MAP)
    with pytest.raises(
        InvalidInputError, match="cannot flip to the new vectors: expected --to table:NAME"
    ):
        carry(source, Target("v_new", MAP.dims[1], MAP.digest), MAP, flip=True)
    before = connection.execute("SELECT * FROM t ORDER BY id").fetchall()
    done = carry(source, TARGET, MAP)
    assert (done.write_count, done.new_vector_count) == (100, 100)
    check(connection, set(OWN))
    for other in ("model = 'b'", None):
        with pytest.raises(AlreadyExistsError, match="use the same --where"):
            open_source(address, where=other).open_target(TARGET)
    # The same condition in other words continues.
    same = open_source(address, where="(model='a') and place is not null -- ours")
    assert carry(same, TARGET, MAP).write_count == 0
    assert carry(source, TARGET, MAP, flip=True).write_count == 0
    check(connection, set(OWN))
    assert connection.execute("SELECT * FROM t ORDER BY id").fetchall() == before
    connection.execute("DELETE FROM t WHERE id IN (0, 1)")
    check(connection, set(OWN) - {0})
    source = open_searchable(address, where=WHERE)
    assert "0" not in source.nearest(MADE.new[2], 200, "table:new_rows")


def changes(connection: Connection, statements: list[str]) -> Callable[[], None]:
    """Run the next statement at each call, and none after the last."""
    left = iter(statements)

    def change() -> None:
        for statement in left:
            connection.execute(statement.encode())
            break

    return change


def test_rows_enter_and_leave_the_condition_while_others_are_written(
    shared: tuple[str, Connection],
) -> None:
    address, connection = shared
    vector = str(MADE.old[3].tolist())
    before = [
        # Before their window is written, and after it.
        "UPDATE t SET model = 'c' WHERE id = 2",
        f"UPDATE t SET model = 'a', v = '{vector}' WHERE id = 3",
        "UPDATE t SET place = NULL WHERE id = 4",
    ]
    after = [
        "UPDATE t SET model = 'c' WHERE id = 6",
        f"INSERT INTO t VALUES (1000, 'a', 'here', '', 'new', '{vector}')",
        f"INSERT INTO t VALUES (1001, 'c', 'here', '', 'new', '{vector}')",
    ]
    source: Source = Racing(  # type: ignore[assignment]
        open_source(address, where=WHERE), changes(connection, before), changes(connection, after)
    )
    carry(source, TARGET, MAP, rows_per_window=20)
    expected = set(OWN) - {2, 4, 6} | {3, 1000}
    check(connection, expected)
    # Rows change between two runs, and the last ones are those of the flip.
    connection.execute("UPDATE t SET model = 'a' WHERE id = 6")
    connection.execute("UPDATE t SET place = NULL WHERE id = 8")
    check(connection, expected - {8})
    carry(open_source(address, where=WHERE), TARGET, MAP, flip=True)
    check(connection, expected - {8} | {6})


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("model = ", "syntax error"),
        ("", "syntax error"),
        ("colour = 'a'", 'column "colour" does not exist'),
        ("1", "must be type boolean"),
        ("id IN (SELECT 1)", "cannot use subquery"),
        ("count(*) > 1", "aggregate functions are not allowed"),
        ("now() > '2020-01-01'", "must be marked IMMUTABLE"),
        ("ctid IS NOT NULL", "system columns"),
        ("true); DROP TABLE t; SELECT (1", "multiple commands"),
    ],
)
def test_postgresql_says_what_is_wrong_with_a_condition(
    shared: tuple[str, Connection], where: str, reason: str
) -> None:
    address, connection = shared
    with pytest.raises(InvalidInputError, match=f"--where .*PostgreSQL reports: .*{reason}"):
        open_source(address, where=where)
    assert connection.execute("SELECT count(*) FROM t").fetchall() == [(200,)]


def test_a_condition_is_one_expression_wherever_it_stands(shared: tuple[str, Connection]) -> None:
    address, _ = shared
    assert open_source(address, where="model = 'a' OR model = 'b'").count() == 200
    assert open_source(address, where="true").count() == 200
    assert open_source(address, where="NULL").count() == 0
    assert open_source(address, where="body LIKE '%{text} 7%' OR id = 3").count() == 1


def test_other_stores_refuse_a_condition(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(3))
    np.save(tmp_path / "v.npy", np.ones((3, 4), np.float32))
    with pytest.raises(InvalidInputError, match="--where: expected a table of PostgreSQL"):
        open_source(str(tmp_path), where="true")
    (tmp_path / "items.jsonl").write_text('{"id": 1, "text": "one"}')
    with pytest.raises(InvalidInputError, match="--where: expected a table of PostgreSQL"):
        read_items(str(tmp_path / "items.jsonl"), column="text", where="true")
    with pytest.raises(InvalidInputError, match=r"qdrant: .* copy the vectors of one model"):
        open_source(f"qdrant:{tmp_path}#docs", where="true")


class Embedded:
    """A table of LanceDB or sqlite-vec with 60 rows by two models, and what others do to it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        rows = [(n, "ab"[n % 2], f"text {n}", MADE.old[n]) for n in range(60)]
        if kind == "lancedb":
            self.address = f"lancedb:{folder}#docs"
            self.table = lancedb.connect(folder).create_table(
                "docs",
                pa.table({
                    "id": [n for n, *_ in rows], "model": [m for _, m, *_ in rows],
                    "body": [b for _, _, b, _ in rows],
                    "v": pa.FixedSizeListArray.from_arrays(pa.array(MADE.old[:60].ravel()), 24),
                }),
            )  # fmt: skip
        else:
            self.address = f"sqlite:{folder}.db#docs"
            self.connection = apsw.Connection(f"{folder}.db")
            self.connection.enable_load_extension(True)
            sqlite_vec.load(self.connection)
            self.connection.execute(
                "CREATE VIRTUAL TABLE docs USING vec0(id integer primary key, model text, "
                "v float[24], +body text)"
            )
            for number, model, body, vector in rows:
                self.connection.execute(
                    "INSERT INTO docs (id, model, body, v) VALUES (?, ?, ?, ?)",
                    (number, model, body, vector.astype("<f4").tobytes()),
                )

    def move(self, number: int, model: str) -> None:
        """Give a row to another model."""
        if self.kind == "lancedb":
            self.table.update(where=f"id = {number}", values={"model": model})
        else:
            self.connection.execute("UPDATE docs SET model = ? WHERE id = ?", (model, number))

    def open(self) -> Searchable:
        return open_searchable(self.address, where="model = 'a'")


@pytest.fixture(params=["lancedb", "sqlite"])
def embedded(request: pytest.FixtureRequest, tmp_path: Path) -> Embedded:
    return Embedded(request.param, tmp_path / "store")


def test_an_embedded_store_reads_and_searches_rows_of_the_condition(embedded: Embedded) -> None:
    own = {str(number) for number in range(0, 60, 2)}
    source = embedded.open()
    assert source.count() == 30 and set(read_all(source).ids) == own
    assert set(read_items(embedded.address, column="body", where="model = 'a'").ids) == own
    query = MADE.old[7]
    order = np.argsort(((MADE.old[:60:2] - query) ** 2).sum(1), kind="stable")
    assert source.nearest(query, 12) == [str(2 * row) for row in order[:12]]
    assert set(source.lookup(["0", "1", "2"]).ids) == {"0", "2"}
    assert source.texts(["0", "1"], "body") == {"0": "text 0"}
    either = "model = 'a' OR model = 'b' -- ours"
    assert open_source(embedded.address, where=either).count() == 60
    for wrong in ("model = ", "colour = 'a'", "model = 'a') OR (true", "model = 'a')"):
        with pytest.raises(InvalidInputError, match="--where"):
            open_source(embedded.address, where=wrong)


def test_an_embedded_store_carries_rows_of_the_condition_without_a_flip(
    embedded: Embedded, capsys: pytest.CaptureFixture[str]
) -> None:
    to = Target("v_new", MAP.dims[1], MAP.digest)
    done = carry(embedded.open(), to, MAP)
    assert (done.write_count, done.new_vector_count) == (30, 30)
    assert "v_new" in done.next_steps[0]
    embedded.move(2, "b")
    embedded.move(3, "a")
    assert carry(embedded.open(), to, MAP).write_count == 1
    own = {*range(0, 60, 2), 3} - {2}
    source = embedded.open()
    place = source.open_target(to)
    rows = [place.read(window) for window in source.windows(20)]
    made = {name: v for one in rows for name, v in zip(one.ids, one.vectors, strict=True)}
    assert set(made) == {str(number) for number in own} and place.count() == len(own)
    for number in own:
        np.testing.assert_allclose(made[str(number)], MAP(MADE.old[number][None])[0], atol=1e-5)
    assert set(source.nearest(MADE.new[2], 60, "v_new")) == {str(number) for number in own}
    with pytest.raises(AlreadyExistsError, match="use the same --where"):
        carry(open_source(embedded.address), to, MAP)
    with pytest.raises(InvalidInputError, match=r"no flip .* with --where"):
        carry(embedded.open(), to, MAP, flip=True)
    assert run("migrate", embedded.address, *START) == 65
    assert "no `nobackfill migrate` with --where" in capsys.readouterr().err
    assert source.drop_new_vectors("v_new") and source.count() == len(own)


@pytest.fixture
def documents(
    postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Connection]]:
    """A table of 200 texts by the model `old`, and of others' vectors."""
    monkeypatch.chdir(tmp_path)
    old = topical(tmp_path / "old", 12, 24, strength=0.05, turned=1)
    topical(tmp_path / "new", 12, 24, strength=3, turned=2)
    rng = np.random.default_rng(0)
    bodies = [" ".join(f"w{word}" for word in rng.integers(0, 40, size=6)) for _ in range(200)]
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, model text, body text, v vector)")
        vectors = open_embedder(str(old)).embed(bodies)
        rows = [(n, "a", bodies[n], str(vectors[n].tolist())) for n in range(200)]
        rows += [(1000 + n, "b", bodies[n], "[1, 2, 3]") for n in range(50)]
        connection.cursor().executemany("INSERT INTO t VALUES (%s, %s, %s, %s)", rows)
        yield f"{address}#t", connection


START = ("--new", "new/model.onnx", "--column", "body", "-n", "80", "--where", "model = 'a'")


def check_native(connection: Connection, numbers: set[int]) -> None:
    made = migrated(connection, "t_new")
    assert set(made) == numbers
    rows: dict[int, str] = dict(connection.execute("SELECT id, body FROM t").fetchall())
    expected = open_embedder("new/model.onnx").embed([rows[number] for number in sorted(made)])
    np.testing.assert_allclose([made[number] for number in sorted(made)], expected, atol=1e-5)


@pytest.mark.long
def test_migrate_flips_to_a_table_and_goes_back(
    documents: tuple[str, Connection], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection = documents
    before = connection.execute("SELECT * FROM t ORDER BY id").fetchall()
    assert run("inspect", source, "--where", "model = 'a'") == 0
    assert "200 vectors of dimension 24" in capsys.readouterr().out
    assert run("migrate", source, *START) == 0
    assert "verdict: re-embed" in capsys.readouterr().out
    assert run("migrate", source, *START[:-1], "model = 'b'") == 73
    assert "--where was \"model = 'a'\" and is now \"model = 'b'\"" in capsys.readouterr().err
    assert run("migrate", source, *START, "--yes") == 0
    assert "flipped: the table t_new holds the new vectors" in capsys.readouterr().out
    check_native(connection, set(range(200)))
    assert connection.execute("SELECT * FROM t ORDER BY id").fetchall() == before
    assert run("migrate", "status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "flipped"
    # A row that was written since the flip has a stale old vector; one of another model has not.
    connection.execute("UPDATE t_new SET v = v WHERE id IN (7, 8)")
    connection.execute("UPDATE t SET model = 'c' WHERE id = 8")
    assert run("migrate", "back") == 65
    assert "2 rows were written since the flip" in capsys.readouterr().err
    check_native(connection, set(range(200)))
    assert run("migrate", "back", "--yes") == 0
    empty = connection.execute("SELECT id FROM t WHERE v IS NULL").fetchall()
    assert empty == [(7,)]
    assert connection.execute("SELECT to_regclass('t_new')").fetchall() == [(None,)]
    assert run("migrate", "back") == 0
    assert "nothing is left to take back" in capsys.readouterr().out
    # Once more, to the end.
    assert run("migrate", source, *START, "--yes") == 0
    assert run("migrate", "finish") == 0
    assert "the old vectors stay in their column" in capsys.readouterr().out
    check_native(connection, set(range(200)) - {7, 8})
    assert run("migrate", "back") != 0
    assert "finished" in capsys.readouterr().err
    assert run("migrate", source, *START, "--yes", "--work", "second") == 73
    assert "already holds the vectors of new/model.onnx; nothing is left to do" in (
        capsys.readouterr().err
    )


MODEL = """
import hashlib, os, time
import numpy as np

FINGERPRINT = "newmodel"

def embed(texts):
    if os.path.exists("slow"):
        open("reached", "w").close()
        time.sleep(600)
    seeds = [hashlib.sha256(text.encode()).digest() for text in texts]
    rows = [np.random.default_rng(list(seed)).normal(size=8) for seed in seeds]
    return [row / np.linalg.norm(row) for row in rows]
"""


@pytest.mark.long
def test_a_killed_migration_continues_with_rows_that_entered_and_left(
    documents: tuple[str, Connection], tmp_path: Path
) -> None:
    source, connection = documents
    (tmp_path / "newmodel.py").write_text(MODEL)

    def start(*words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "nobackfill.adopt.cli", "migrate", source]
        return subprocess.Popen(
            [*command, "--new", "newmodel:embed", *START[2:], *words],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    decision = start()
    error = decision.communicate(timeout=600)[1].decode()
    assert decision.returncode == 0, error
    (tmp_path / "slow").touch()
    first = start("--yes")
    wait_until(
        lambda: (tmp_path / "reached").exists() or first.poll() is not None,
        "the migration embeds rows",
        seconds=300,
    )
    assert first.poll() is None
    first.kill()
    first.communicate()
    (tmp_path / "slow").unlink()
    vector = connection.execute("SELECT v::text FROM t WHERE id = 1").fetchall()[0][0]
    connection.execute("UPDATE t SET model = 'b' WHERE id = 3")
    connection.execute("UPDATE t SET model = 'a', v = %s WHERE id = 1004", [vector])
    second = start("--yes")
    error = second.communicate(timeout=600)[1].decode()
    assert second.returncode == 0, error
    rows = connection.execute("SELECT id, body FROM t WHERE model = 'a'").fetchall()
    made = migrated(connection, "t_new")
    assert set(made) == {number for number, _ in rows} == set(range(200)) - {3} | {1004}
    scope: dict[str, Callable[[list[str]], list[list[float]]]] = {}
    exec(MODEL, scope)
    expected = scope["embed"]([body for _, body in rows])
    np.testing.assert_allclose([made[number] for number, _ in rows], expected, atol=1e-5)


def test_a_restored_dump_does_not_clear_old_vectors(
    documents: tuple[str, Connection], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection = documents
    assert run("migrate", source, *START, "--yes") == 0
    # As a dump writes it: the same rows and comment in a table with another number.
    comment = "SELECT obj_description('t_new'::regclass)"
    ((mark,),) = connection.execute(comment).fetchall()
    connection.execute(
        "CREATE TABLE restored (LIKE t_new INCLUDING ALL);"
        "INSERT INTO restored SELECT * FROM t_new;"
        "DROP TABLE t_new; ALTER TABLE restored RENAME TO t_new;"
        "ALTER TABLE t_new ADD FOREIGN KEY (id) REFERENCES t"
    )
    connection.execute(psycopg.sql.SQL("COMMENT ON TABLE t_new IS {}").format(mark))
    assert run("migrate", "back", "--yes") == 65
    assert "was restored from a dump since the flip" in capsys.readouterr().err
    assert connection.execute("SELECT count(v) FROM t").fetchall() == [(250,)]
