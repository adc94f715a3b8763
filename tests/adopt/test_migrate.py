"""`nobackfill migrate`: a table ends flipped or untouched, and goes back until it is finished."""

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from PIL import Image

from nobackfill.adopt.embedding.embedder import open_embedder
from nobackfill.adopt.embedding.native_vectors import NativeVectorComputer
from nobackfill.adopt.embedding.vector_folder import EmbeddingRun
from nobackfill.adopt.migrating import Migration, MigrationPlan
from nobackfill.adopt.pairs import include_query_items, sample_spread_rows
from nobackfill.adopt.sources.source import Rows, Window
from nobackfill.errors import PreconditionError
from nobackfill.serving.natives import NativeVectorFile, digest_old_vector
from tests.adopt.command import run_nobackfill
from tests.adopt.models import image_model, text_model, topical
from tests.adopt.table_beside import Connection
from tests.support.disks import fill, small_disk
from tests.support.postgres import Server

COUNT = 300


def test_the_sample_holds_the_items_of_queries() -> None:
    """In a large table, a random sample would hold too few of them for a verdict."""
    vectors = np.random.default_rng(0).normal(size=(2000, 8)).astype(np.float32)
    rows = Rows([str(number) for number in range(2000)], vectors)
    wanted = [str(number) for number in range(0, 2000, 50)]
    ids, random = set(rows.ids), sample_spread_rows(rows, 100)
    chosen = include_query_items(random, ids, [*wanted, "unknown"])
    assert len(chosen) == len(set(chosen)) == 100 and set(wanted) <= set(chosen)
    many = include_query_items(random, ids, rows.ids[::-1])
    assert len(many) == len(set(many)) == 100
    assert set(include_query_items(rows.ids, ids, wanted)) == ids


def text_of(number: int) -> str:
    rng = np.random.default_rng(number)
    return " ".join(f"w{word}" for word in rng.integers(0, 40, size=6))


@pytest.fixture
def documents(
    postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Connection, Path]]:
    """A table `t` of texts by the model `old`; the working folder holds `old` and `new`."""
    monkeypatch.chdir(tmp_path)
    old = topical(tmp_path / "old", 12, 24, strength=0.05, turned=1)
    topical(tmp_path / "new", 12, 24, strength=3, turned=2)
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute(
            "CREATE TABLE t (id int PRIMARY KEY, body text NOT NULL, v vector(24) NOT NULL)"
        )
        bodies = [text_of(number) for number in range(COUNT)]
        vectors = open_embedder(str(old)).embed(bodies)
        rows = [(n, bodies[n], str(vectors[n].tolist())) for n in range(COUNT)]
        connection.cursor().executemany("INSERT INTO t VALUES (%s, %s, %s)", rows)
        connection.execute("CREATE INDEX t_v ON t USING hnsw (v vector_cosine_ops)")
        connection.execute("CREATE VIEW seen AS SELECT id, v FROM t")
        yield f"{address}#t", connection, tmp_path


def run(*words: str) -> int:
    return run_nobackfill("migrate", *words)


def vectors(
    connection: Connection, column: str = "v", relation: str = "t"
) -> dict[int, list[float]]:
    query = f"SELECT id, {column}::real[] FROM {relation} WHERE {column} IS NOT NULL"
    return dict(connection.execute(query.encode()).fetchall())


def columns(connection: Connection) -> set[str]:
    rows = connection.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0 "
        "AND NOT attisdropped"
    ).fetchall()
    return {name for (name,) in rows}


def same(found: dict[int, list[float]], model: Path, connection: Connection) -> None:
    """Every vector is what a model makes of the row's text."""
    rows = connection.execute("SELECT id, body FROM t").fetchall()
    made = open_embedder(str(model / "model.onnx")).embed([body for _, body in rows])
    wanted = dict(zip([key for key, _ in rows], made, strict=True))
    for key, vector in found.items():
        np.testing.assert_allclose(vector, wanted[key], atol=1e-5)


START = ("--new", "new/model.onnx", "--column", "body", "-n", "120")


def test_a_migration_without_a_verdict_writes_nothing(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, folder = documents
    migration = Migration(folder / "work")

    def kill(line: str) -> None:
        raise KeyboardInterrupt(line)

    request = MigrationPlan(source, "new/model.onnx", text_column="body", sample_size=120)
    with pytest.raises(KeyboardInterrupt):
        migration.decide(request, kill)
    with pytest.raises(PreconditionError, match=r"with a verdict, .* the state 'deciding'"):
        migration.write(print)
    assert columns(connection) == {"id", "body", "v"}
    assert migration.plan().state == "deciding"
    assert run("status", "--work", str(folder / "work")) == 0
    assert "nothing is written to the table yet" in capsys.readouterr().out


@pytest.mark.long
def test_a_table_is_decided_flipped_and_finished(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, folder = documents
    before = vectors(connection)
    assert run(source, *START, "--price-per-1000", "5") == 0
    shown = capsys.readouterr().out
    assert "verdict: re-embed" in shown
    assert "re-embedding the rest costs about 0.90" in shown
    assert "nothing was written; run it again with --yes" in shown
    assert columns(connection) == {"id", "body", "v"}
    assert vectors(connection) == before
    assert run("status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "decided"
    assert run(source, *START, "--price-per-1000", "5", "--yes") == 0
    assert "flipped: v holds the new vectors, v_before the old ones" in capsys.readouterr().out
    same(vectors(connection), folder / "new", connection)
    # What hangs on the column has moved with its name.
    assert len(vectors(connection)) == COUNT == len(vectors(connection, relation="seen"))
    same(vectors(connection, relation="seen"), folder / "new", connection)
    assert vectors(connection, "v_before") == before
    # A second run has nothing to do, and says what comes next.
    assert run(source, *START, "--price-per-1000", "5", "--yes") != 0
    assert "migrate finish" in capsys.readouterr().err
    assert run("finish") == 0
    assert columns(connection) == {"id", "body", "v"}
    same(vectors(connection), folder / "new", connection)
    left = connection.execute(
        "SELECT proname FROM pg_proc WHERE starts_with(proname, 'nobackfill_')"
    ).fetchall()
    assert left == []
    assert run("back") != 0
    assert "the migration is finished: the old vectors are dropped" in capsys.readouterr().err


@pytest.mark.long
def test_a_flip_is_taken_back_as_long_as_no_row_would_be_lost(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, _ = documents
    before = vectors(connection)
    assert run(source, *START, "--yes") == 0
    assert run("back") == 0
    assert vectors(connection) == before == vectors(connection, relation="seen")
    assert columns(connection) == {"id", "body", "v"}
    indexes = connection.execute("SELECT indexname FROM pg_indexes WHERE tablename = 't'")
    assert {name for (name,) in indexes.fetchall()} == {"t_pkey", "t_v"}
    capsys.readouterr()
    # Once more, and this time rows are written after the flip, by the new model alone.
    assert run(source, *START, "--yes") == 0
    new = open_embedder("new/model.onnx").embed(["w1 w2", "w3"])
    first, second = (str(vector.tolist()) for vector in new)
    connection.execute("INSERT INTO t (id, body, v) VALUES (900, 'w1 w2', %s)", [first])
    connection.execute("UPDATE t SET body = 'w3', v = %s WHERE id = 7", [second])
    assert run("back") == 65
    assert "2 rows were written since the flip and have no old vector" in capsys.readouterr().err
    assert len(vectors(connection)) == COUNT + 1
    # The column is NOT NULL: no flag can lose them.
    assert run("back", "--yes") == 65
    assert "delete these rows, or fill 'v_before'" in capsys.readouterr().err
    connection.execute("ALTER TABLE t ALTER COLUMN v DROP NOT NULL")
    assert run("back", "--yes") == 0
    assert "2 rows have no vector any more" in capsys.readouterr().out
    del before[7]
    assert vectors(connection) == before


@pytest.mark.long
def test_a_paused_migration_goes_on_and_is_taken_back_before_the_flip(
    documents: tuple[str, Connection, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, connection, folder = documents
    monkeypatch.setattr(NativeVectorComputer, "window_rows", 50)
    make = NativeVectorComputer.compute
    calls: list[int] = []

    def counting(self: NativeVectorComputer, *parts: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            assert run("pause") == 0
        return make(self, *parts)

    monkeypatch.setattr(NativeVectorComputer, "compute", counting)
    assert run(source, *START, "--yes") == 75
    assert "paused; run the same" in capsys.readouterr().err
    assert run("status", "--json") == 0
    state = json.loads(capsys.readouterr().out)
    assert state["state"] == "writing" and 0 < state["rows"] < COUNT == state["total"]
    assert run("back") == 0
    assert columns(connection) == {"id", "body", "v"}
    assert run(source, *START, "--yes") == 0
    same(vectors(connection), folder / "new", connection)


@pytest.mark.long
def test_mapped_vectors_are_there_to_search_by_until_every_row_is_native(
    documents: tuple[str, Connection, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, connection, folder = documents
    assert run(source, *START) == 0
    plan = json.loads((folder / "nobackfill-migration" / "migration.json").read_text())
    plan["way"] = "lazily"
    (folder / "nobackfill-migration" / "migration.json").write_text(json.dumps(plan))
    make = NativeVectorComputer.compute
    counts: list[tuple[int, int]] = []

    def counting(self: NativeVectorComputer, *parts: Any) -> Any:
        indexed = connection.execute("SELECT count(*) FROM pg_indexes WHERE indexdef ~ '_mapped'")
        counts.append((len(vectors(connection, "v_new_mapped")), indexed.fetchall()[0][0]))
        return make(self, *parts)

    monkeypatch.setattr(NativeVectorComputer, "compute", counting)
    assert run(source, *START, "--yes") == 0
    assert set(counts) == {(COUNT, 1)}
    same(vectors(connection), folder / "new", connection)
    assert columns(connection) == {"id", "body", "v", "v_before"}


def test_a_worse_model_leaves_the_table_untouched(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, folder = documents
    connection.execute('ALTER TABLE t ADD COLUMN "other.v" vector(3)')
    text_model(folder / "worse", 9, dim=2)
    with (folder / "queries.jsonl").open("w") as file:
        for number in range(0, COUNT, 2):
            file.write(json.dumps({"id": str(number), "text": text_of(number)}) + "\n")
    words = ("--new", "worse/model.onnx", "--column", "body", "-n", "300")
    asked = ("--old", "old/model.onnx", "--queries", "queries.jsonl")
    assert run(source, *words, *asked, "--yes") == 65
    assert "name one with --vector" in capsys.readouterr().err
    assert run(source, *words, *asked, "--yes", "--vector", "v") == 0
    shown = capsys.readouterr().out
    assert re.search("verdict: stay", shown)
    assert "nothing was written: stay with the old model" in shown
    assert columns(connection) == {"id", "body", "v", "other.v"}


def test_the_same_model_in_half_precision_is_named_and_nothing_is_written(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, folder = documents
    table = np.load(folder / "old.table.npy").astype(np.float16).astype(np.float32)
    half = text_model(folder / "half", 0, table=table)
    connection.execute("COMMENT ON COLUMN t.v IS 'of the owner'")
    before = vectors(connection)
    assert run(source, "--new", "half/model.onnx", "--column", "body", "-n", "120", "--yes") == 0
    shown = capsys.readouterr().out
    assert "verdict: switch" in shown and "no vector was written" in shown
    assert vectors(connection) == before
    assert columns(connection) == {"id", "body", "v"}
    found = connection.execute("SELECT col_description('t'::regclass, 3)").fetchall()
    owners, ours = found[0][0].split("\n")
    assert owners == "of the owner"
    assert json.loads(ours)["model"] == open_embedder(str(half)).fingerprint


@pytest.mark.long
def test_old_vectors_are_not_given_back_where_their_triggers_were_off(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, _ = documents
    assert run(source, *START, "--yes") == 0
    triggers = connection.execute(
        "SELECT tgname FROM pg_trigger WHERE tgrelid = 't'::regclass AND NOT tgisinternal"
    ).fetchall()
    assert triggers
    (vector,) = open_embedder("new/model.onnx").embed(["w3"])
    states = ("DISABLE", "ENABLE ALWAYS")
    statements = [
        [f"ALTER TABLE t {state} TRIGGER {name}" for (name,) in triggers] for state in states
    ]
    for statement in statements[0]:
        connection.execute(statement.encode())
    connection.execute("UPDATE t SET body = 'w3', v = %s WHERE id = 7", [str(vector.tolist())])
    for statement in statements[1]:
        connection.execute(statement.encode())
    assert run("back") == 65
    assert "column 'v_before' may hold stale vectors" in capsys.readouterr().err


@pytest.mark.long
def test_both_models_answer_from_now_on_where_the_items_are_gone(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, folder = documents
    words = (source, *START, "--items-gone")
    assert run(*words) == 0
    file = folder / "nobackfill-migration" / "migration.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"way": "both"}))
    assert run(*words, "--yes") == 0
    assert "search by both models" in capsys.readouterr().out
    assert columns(connection) == {"id", "body", "v", "v_new"}
    assert run("status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "mapped"
    assert run("back") == 0
    assert columns(connection) == {"id", "body", "v"}


def test_another_store_or_another_question_is_refused_by_name(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, _, folder = documents
    assert run(source, *START) == 0
    capsys.readouterr()
    assert run(source, "--new", "old/model.onnx", "--column", "body") == 73
    error = capsys.readouterr().err
    assert "--new was 'new/model.onnx' and is now 'old/model.onnx'" in error and "--work" in error
    password = source.replace("postgresql://", "postgresql://me:secret@")
    assert run(password, *START, "--work", "other") == 65
    error = capsys.readouterr().err
    assert "expected no password" in error and "secret" not in error
    (folder / "vectors").mkdir()
    np.save(folder / "vectors" / "ids.npy", np.arange(30))
    np.save(folder / "vectors" / "v.npy", np.ones((30, 4), np.float32))
    assert run("vectors", *START, "--work", "other") == 65
    assert "for others use `nobackfill fit`, then `nobackfill carry`" in capsys.readouterr().err
    assert run("status", "--work", "nowhere") == 66
    assert "no migration is here" in capsys.readouterr().err


@pytest.mark.long
def test_ctrl_c_says_what_is_done_and_how_to_continue(
    documents: tuple[str, Connection, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, connection, folder = documents
    monkeypatch.setattr(NativeVectorComputer, "window_rows", 50)

    def interrupted(kind: Any, method: str, call: int) -> str:
        """Send SIGINT, as Ctrl-C does, in one call of a method."""
        original, calls = getattr(kind, method), []

        def counting(self: Any, *parts: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGINT)
            return original(self, *parts, **options)

        with monkeypatch.context() as patch:
            patch.setattr(kind, method, counting)
            assert run(source, *START, "--yes") == 130
        (line,) = [
            one for one in capsys.readouterr().err.splitlines() if one.startswith("interrupted")
        ]
        return line

    line = interrupted(EmbeddingRun, "embed", 1)
    again = shlex.join(["nobackfill", "migrate", source, *START, "--yes"])
    assert "nothing was written to the table" in line and line.endswith(f"run: {again}")
    assert columns(connection) == {"id", "body", "v"}
    line = interrupted(NativeVectorComputer, "compute", 3)
    # Two windows of 50 rows, if the signal came before the third.
    assert re.search(r"100 of 300 rows have a new vector, 200 remain", line), line
    assert f"run: {again}; to undo it, run: nobackfill migrate back --work" in line
    assert len(vectors(connection, "v_new")) == 100
    words = shlex.split(line.partition("to continue, run: ")[2].partition("; to undo")[0])
    assert run(*words[2:]) == 0
    same(vectors(connection), folder / "new", connection)


@pytest.mark.long
def test_a_second_back_says_that_nothing_is_left(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, _ = documents
    nothing, undone = "nothing is left to take back: the table has its old", "taken back: the table"
    assert run(source, *START) == 0 == run("back")
    assert nothing in capsys.readouterr().out
    assert run(source, *START, "--yes") == 0 == run("back")
    shown = capsys.readouterr().out
    assert undone in shown and nothing not in shown
    before = vectors(connection)
    assert run("back") == 0
    shown = capsys.readouterr().out
    assert nothing in shown and undone not in shown.replace(nothing, "")
    assert vectors(connection) == before


@pytest.mark.long
def test_a_lost_lock_ends_the_writing(
    documents: tuple[str, Connection, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, connection, folder = documents
    monkeypatch.setattr(NativeVectorComputer, "window_rows", 50)
    make = NativeVectorComputer.compute
    ended: list[Any] = []

    def ending(self: NativeVectorComputer, *parts: Any) -> Any:
        if not ended:
            ended.extend(
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
                ).fetchall()
            )
        return make(self, *parts)

    with monkeypatch.context() as patch:
        patch.setattr(NativeVectorComputer, "compute", ending)
        assert run(source, *START, "--yes") == 69
    assert ended == [(True,)]
    assert "the session that locked the table is gone" in capsys.readouterr().err
    assert not vectors(connection, "v_new")
    assert run(source, *START, "--yes") == 0
    same(vectors(connection), folder / "new", connection)


def set_plan(folder: Path, **parts: object) -> None:
    """Change the saved plan, as a kill between the table's change and its note leaves it."""
    file = folder / "nobackfill-migration" / "migration.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))


def state_of(capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run("status", "--json") == 0
    return str(json.loads(capsys.readouterr().out)["state"])


@pytest.mark.long
def test_a_kill_before_the_note_of_a_flip_or_its_reverse_misleads_no_command(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, folder = documents
    before = vectors(connection)
    assert run(source, *START, "--yes") == 0
    set_plan(folder, state="writing")
    assert state_of(capsys) == "flipped"
    connection.execute("ALTER TABLE t ADD v_new_mapped vector(24)")
    assert run("back") == 0
    # The column is the owner's own.
    assert columns(connection) == {"id", "body", "v", "v_new_mapped"}
    assert vectors(connection) == before
    # Killed before the note, `back` has done its work: there is nothing to finish.
    set_plan(folder, state="flipped")
    assert state_of(capsys) == "taken back"
    assert run("finish") != 0
    assert "nothing was dropped" in capsys.readouterr().err
    assert run("back") == 0
    connection.execute("ALTER TABLE t DROP v_new_mapped")
    assert run(source, *START, "--yes") == 0
    set_plan(folder, state="writing")
    assert run("finish") == 0
    set_plan(folder, state="flipped")
    # Killed before its note, `finish` has dropped the old vectors: `back` claims nothing else.
    assert state_of(capsys) == "finished"
    assert run("back") != 0
    assert "the old vectors are dropped" in capsys.readouterr().err
    assert run(source, *START, "--yes") != 0
    assert "finished; start another one in a folder of its own" in capsys.readouterr().err
    same(vectors(connection), folder / "new", connection)


@pytest.mark.long
def test_a_lost_comment_is_named_and_nothing_is_said_to_be_taken_back(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, _ = documents
    before = vectors(connection)
    assert run(source, *START, "--yes") == 0
    connection.execute("COMMENT ON COLUMN t.v IS 'what users search'")
    for command in ("back", "finish", "status"):
        capsys.readouterr()
        assert run(command) != 0
        error = capsys.readouterr().err
        assert "comment on this column does not name this migration any more" in error
    assert columns(connection) == {"id", "body", "v", "v_before"}
    connection.execute(error[error.index("COMMENT ON") :].strip().encode())
    assert run("back") == 0
    assert vectors(connection) == before


@pytest.mark.long
def test_back_does_not_lose_rows_that_policies_hide(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, _ = documents
    role = f"owner_{id(object())}"
    connection.execute(
        f"CREATE ROLE {role}; GRANT CREATE ON SCHEMA public TO {role};"
        f"ALTER TABLE t OWNER TO {role}; ALTER VIEW seen OWNER TO {role};"
        "ALTER TABLE t ALTER v DROP NOT NULL".encode()
    )
    try:
        source = source.replace("#t", f"&options=-c%20role%3D{role}#t")
        assert run(source, *START, "--yes") == 0
        connection.execute("INSERT INTO t (id, body, v) SELECT 900, body, v FROM t WHERE id = 1")
        connection.execute(
            "ALTER TABLE t ENABLE ROW LEVEL SECURITY; ALTER TABLE t FORCE ROW LEVEL SECURITY;"
            "CREATE POLICY few ON t USING (id < 900)"
        )
        assert run("back") == 77
        assert "row-level security may hide rows" in capsys.readouterr().err
        assert 900 in vectors(connection)
    finally:
        connection.execute(f"REASSIGN OWNED BY {role} TO CURRENT_USER".encode())
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_back_removes_no_column_that_carry_has_made(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, _ = documents
    connection.execute("ALTER TABLE t ADD v_new vector(24)")
    connection.execute('COMMENT ON COLUMN t.v_new IS \'{"nobackfill": "of another map"}\'')
    assert run(source, *START, "--yes") == 73
    assert run("back") == 0
    assert columns(connection) == {"id", "body", "v", "v_new"}


@pytest.mark.long
def test_a_busy_table_is_not_called_another_migration(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, _ = documents
    connection.execute("DROP VIEW seen; ALTER TABLE t RENAME TO blocks")
    source = source.replace("#t", "#blocks")
    with psycopg.connect(source.partition("#")[0]) as other:
        other.execute("SELECT count(*) FROM blocks")
        assert run(source, *START, "--yes") == 75
    assert "another process works on this migration" not in capsys.readouterr().err
    assert run(source, *START, "--yes") == 0


def test_pause_stops_a_decision_and_is_refused_where_nothing_runs(
    documents: tuple[str, Connection, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, connection, folder = documents
    both = (source, "--new", "new/model.onnx", "--column", "body", "--items", "items.jsonl")
    for words in (both, both[:3]):
        assert run(*words) == 65
        assert "--column NAME or --items PATH" in capsys.readouterr().err
    assert not (folder / "nobackfill-migration").exists()
    embed = EmbeddingRun.embed

    def pausing(self: EmbeddingRun, *parts: Any) -> Any:
        assert run("pause") == 0
        return embed(self, *parts)

    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingRun, "embed", pausing)
        assert run(source, *START, "--yes") == 75
    assert "paused; run the same" in capsys.readouterr().err
    assert columns(connection) == {"id", "body", "v"}
    assert run("pause") != 0
    assert "no process works on this migration" in capsys.readouterr().err
    # The pause that was asked for is over.
    assert run(source, *START) == 0


@pytest.mark.parametrize(
    ("word", "hint"), [("stauts", "Did you mean `nobackfill migrate status`?"), ("documents", "")]
)
def test_a_misspelt_command_is_answered_with_the_commands(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(word) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{word!r} is no command of migrate and no SOURCE" in error
    assert "start, status, pause, back, finish" in error and hint in error


@pytest.mark.long
def test_another_sample_or_price_continues_the_migration(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, folder = documents
    words = (source, "--new", "new/model.onnx", "--column", "body")
    sample = folder / "nobackfill-migration" / "sample.txt"
    assert run(*words, "-n", "60") == 0
    assert len(sample.read_text().split()) == 60
    assert "costs about" not in capsys.readouterr().out
    # Another price changes the costs alone; a run that gives neither keeps both.
    assert run(*words, "--price-per-1000", "5") == 0
    shown = capsys.readouterr()
    assert "costs about 1.20" in shown.out and "embedding" not in shown.err
    assert len(sample.read_text().split()) == 60
    assert run(*words, "-n", "120") == 0
    shown = capsys.readouterr()
    assert len(sample.read_text().split()) == 120
    assert "costs about 0.90" in shown.out and "embedding 120 items" in shown.err
    set_plan(folder, state="writing", mark="0" * 64)
    assert run(*words, "-n", "60") == 0
    error = capsys.readouterr().err
    assert "-n 60 is ignored: vectors are being written by the verdict of 120 items" in error
    assert columns(connection) == {"id", "body", "v"}


@pytest.mark.long
def test_a_second_folder_of_the_same_model_claims_nothing(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, folder = documents
    # The verdict of the second folder is older than the flip of the first.
    assert run(source, *START, "--work", "second") == 0
    assert run(source, *START, "--yes") == 0
    for state, ending in (("flipped", "run `nobackfill migrate finish`"), ("finished", "nothing")):
        capsys.readouterr()
        assert run(source, *START, "--yes", "--work", "third") == 73
        error = capsys.readouterr().err
        assert "already holds the vectors of new/model.onnx" in error and ending in error, state
        assert run(source, *START, "--yes", "--work", "second") != 0
        assert (
            "another migration has changed which vectors answer searches" in capsys.readouterr().err
        )
        assert run("finish") == 0
    assert columns(connection) == {"id", "body", "v"}
    same(vectors(connection), folder / "new", connection)


@pytest.mark.long
def test_an_id_with_a_line_break_is_migrated_without_being_in_the_sample(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, folder = documents
    connection.execute("DROP VIEW seen")
    connection.execute("ALTER TABLE t ALTER id TYPE text")
    for number, name in (("5", "a\nb"), ("6", "a\rb")):
        connection.execute("UPDATE t SET id = %s WHERE id = %s", [name, number])
    assert run(source, *START[:-1], str(COUNT), "--yes") == 0
    assert "2 items whose id has a line break are left out" in capsys.readouterr().err
    found = connection.execute("SELECT body, v::real[] FROM t").fetchall()
    wanted = open_embedder(str(folder / "new/model.onnx")).embed([body for body, _ in found])
    assert len(found) == COUNT
    np.testing.assert_allclose([vector for _, vector in found], wanted, atol=1e-5)


@pytest.mark.long
def test_what_searches_want_is_embedded_first_and_shown_to_them(
    documents: tuple[str, Connection, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, connection, folder = documents
    assert run(source, *START) == 0
    set_plan(folder, way="lazily")
    sample = (folder / "nobackfill-migration" / "sample.txt").read_text().split()
    others = [str(number) for number in range(COUNT) if str(number) not in sample]
    stored, wanted, late = others[100:110], [others[150], sample[9]], others[160]
    model = open_embedder("new/model.onnx")
    old = vectors(connection)
    natives = NativeVectorFile(folder / "natives.db", model.fingerprint, 24)
    versions = [digest_old_vector(np.array(old[int(name)], np.float32)) for name in stored]
    # The first of them belongs to an earlier text.
    made = model.embed([text_of(int(name)) for name in stored])
    natives.store_vectors(stored, [b"0" * 16, *versions[1:]], made)
    natives.claim([(name, b"") for name in wanted], "2026-11-27", 0)
    embeddings: list[list[str]] = []
    embed = NativeVectorComputer._embedded

    def counting(self: NativeVectorComputer, ids: list[str], *parts: Any) -> Any:
        embeddings.append(ids)
        if len(embeddings) == 3:
            # Somebody searches meanwhile.
            natives.claim([(late, b"")], "2026-11-27", 0)
        return embed(self, ids, *parts)

    monkeypatch.setattr(NativeVectorComputer, "_embedded", counting)
    monkeypatch.setattr(NativeVectorComputer, "window_rows", 50)
    assert run(source, *START, "--yes", "--natives", "natives.db") == 0
    # A vector of the sample is reused; the third is the first window in the order of keys.
    assert embeddings[:2] == [stored[:1], wanted[:1]] and embeddings[3] == [late]
    assert set(natives.read_vectors([*wanted, late])) == {*wanted, late}
    assert natives.requested_ids(9) == [] and len(natives) == 13
    same(vectors(connection), folder / "new", connection)
    natives.close()


@pytest.mark.long
def test_pictures_are_migrated_under_their_names(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, folder = documents
    rng = np.random.default_rng(1)
    (folder / "pictures").mkdir()
    for number in range(60):
        pixels = rng.integers(0, 255, (6, 6, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{number}.png")
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    first = open_embedder(str(image_model(folder / "first.onnx")))
    second = open_embedder(str(image_model(folder / "second.onnx", weight=turn)))
    files = sorted((folder / "pictures").iterdir())
    connection.execute("CREATE TABLE p (name text PRIMARY KEY, v vector(3))")
    rows = [
        (file.name, str(vector.tolist()))
        for file, vector in zip(files, first.embed(files), strict=True)
    ]
    connection.cursor().executemany("INSERT INTO p VALUES (%s, %s)", rows)
    connection.execute("INSERT INTO p VALUES ('none.png', '[1,2,3]')")
    words = (source.replace("#t", "#p"), "--new", "second.onnx", "--items", "pictures", "-n", "30")
    assert run(*words) == 0
    set_plan(folder, state="decided", way="re-embed")
    capsys.readouterr()
    assert run(*words, "--yes") == 65
    error = capsys.readouterr().err
    assert "1 items have an old vector and no new one: 'none.png'" in error
    connection.execute("DELETE FROM p WHERE name = 'none.png'")
    assert run(*words, "--yes") == 0
    found: dict[str, list[float]] = dict(
        connection.execute("SELECT name, v::real[] FROM p").fetchall()
    )
    for file, vector in zip(files, second.embed(files), strict=True):
        np.testing.assert_allclose(found[file.name], vector, atol=1e-5)
    assert run("back") == 0


@pytest.mark.long
def test_a_full_disk_leaves_a_migration_that_continues(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, folder = documents
    before = vectors(connection)
    with small_disk(folder / "disk", 4) as disk:
        words = (source, *START, "--work", str(disk / "work"))
        fill(disk, but=30_000)
        assert run(*words, "--yes") == 73
        assert "No space left on device" in capsys.readouterr().err
        (disk / "filler").unlink()
        assert run(*words) == 0
        fill(disk, but=0)
        assert run(*words, "--yes") == 73
        assert vectors(connection) == before
        (disk / "filler").unlink()
        assert run(*words, "--yes") == 0
    same(vectors(connection), folder / "new", connection)


@pytest.mark.long
def test_a_full_disk_of_the_database_leaves_a_migration_that_continues(
    documents: tuple[str, Connection, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, connection, folder = documents
    monkeypatch.setattr(NativeVectorComputer, "window_rows", 50)
    assert run(source, *START) == 0
    place = Path(f"/dev/shm/small-disk-{os.getpid()}")
    with small_disk(place, 8) as disk:
        folder_of_tables = disk / "tables"
        folder_of_tables.mkdir()
        owner = connection.execute("SHOW data_directory").fetchall()[0][0]
        state = Path(owner).stat()
        os.chown(folder_of_tables, state.st_uid, state.st_gid)
        name = f"small_{os.getpid()}"
        connection.execute(f"CREATE TABLESPACE {name} LOCATION '{folder_of_tables}'".encode())
        try:
            connection.execute(f"ALTER TABLE t SET TABLESPACE {name}".encode())
            connection.execute("CHECKPOINT")
            fill(disk, but=0)
            assert run(source, *START, "--yes") == 73
            assert "No space left on device" in capsys.readouterr().err
            (disk / "filler").unlink()
            assert run(source, *START, "--yes") == 0
            same(vectors(connection), folder / "new", connection)
        finally:
            connection.execute("ALTER TABLE t SET TABLESPACE pg_default")
            connection.execute("DROP VIEW seen; DROP TABLE t")
            connection.execute("CHECKPOINT")
            connection.execute(f"DROP TABLESPACE {name}".encode())


def restore(postgres: Server, address: str, connection: Connection) -> None:
    """Replace the table by what a dump of it restores."""
    dump = [str(postgres.programs / "pg_dump"), "--dbname", address]
    text = subprocess.run(dump, check=True, capture_output=True).stdout
    connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    load = [str(postgres.programs / "psql"), "-qX", "-v", "ON_ERROR_STOP=1", "--dbname", address]
    subprocess.run(load, input=text, check=True, capture_output=True)


@pytest.mark.long
def test_a_restored_dump_can_be_taken_back_and_continued(
    documents: tuple[str, Connection, Path],
    capsys: pytest.CaptureFixture[str],
    postgres: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, connection, folder = documents
    address = source.partition("#")[0]
    before = vectors(connection)
    assert run(source, *START, "--yes") == 0
    restore(postgres, address, connection)
    (vector,) = open_embedder("new/model.onnx").embed(["w3"])
    connection.execute("UPDATE t SET body = 'w3', v = %s WHERE id = 7", [str(vector.tolist())])
    assert len(vectors(connection, "v_before")) == COUNT - 1
    assert state_of(capsys) == "flipped"
    connection.execute("DELETE FROM t WHERE id = 7")
    assert run("back") == 65
    error = capsys.readouterr().err
    assert "If the database was restored from a dump" in error
    connection.execute(error[error.index("COMMENT ON") :].strip().encode())
    assert run("back") == 0
    del before[7]
    assert vectors(connection) == before == vectors(connection, relation="seen")
    assert columns(connection) == {"id", "body", "v"}
    # The same before a flip: the rows that an interrupted run wrote are not embedded again.
    monkeypatch.setattr(NativeVectorComputer, "window_rows", 50)
    make = NativeVectorComputer.compute
    calls, pauses = list[int](), [3]

    def counting(self: NativeVectorComputer, rows: Rows, window: Window) -> Any:
        calls.append(len(rows))
        if [len(calls)] == pauses:
            pauses.clear()
            assert run("pause") == 0
        return make(self, rows, window)

    monkeypatch.setattr(NativeVectorComputer, "compute", counting)
    assert run(source, *START, "--yes") == 75
    restore(postgres, address, connection)
    capsys.readouterr()
    assert run(source, *START, "--yes") == 73
    error = capsys.readouterr().err
    statement = error[error.index("COMMENT ON") : error.index(". Otherwise")]
    connection.execute(statement.encode())
    calls.clear()
    assert run(source, *START, "--yes") == 0
    assert sum(calls) == COUNT - 1 - 100
    same(vectors(connection), folder / "new", connection)


@pytest.mark.long
def test_progress_counts_what_an_earlier_run_wrote(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source, _, _ = documents
    monkeypatch.setattr("nobackfill.adopt.migrating._EVERY", 0.0)
    monkeypatch.setattr(NativeVectorComputer, "window_rows", 100)
    assert run(source, *START) == 0
    shown = capsys.readouterr().err
    assert re.search(r"120 of 120 items embedded, \d+ a second, [\d.]+ \w+ left", shown)
    assert "less than 2 s left" in shown and "ms left" not in shown
    make = NativeVectorComputer.compute
    calls: list[int] = []

    def pausing(self: NativeVectorComputer, *parts: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            assert run("pause") == 0
        return make(self, *parts)

    monkeypatch.setattr(NativeVectorComputer, "compute", pausing)
    assert run(source, *START, "--yes") == 75
    assert "100 of 300 rows re-embedded" in capsys.readouterr().err
    assert run(source, *START, "--yes") == 0
    shown = capsys.readouterr().err
    assert "200 of 300 rows re-embedded" in shown
    assert re.search(r"300 of 300 rows re-embedded, \d+ a second, the index is built next", shown)
    assert "100 of 300" not in shown


def test_a_run_that_opens_nothing_leaves_nothing(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, _, folder = documents
    queries = folder / "queries.jsonl"
    queries.write_text('{"id": 1, "txt": "w1"}\n')
    new = ("--new", "new/model.onnx", "--column", "body")
    cases = {
        ("postgresql:///t?host=/nowhere#t", *new): 69,
        (f"{source}x", *new): 66,
        (source, "--new", "new/modle.onnx", "--column", "body"): 66,
        (source, *new, "--old", "old/modle.onnx", "--queries", "queries.jsonl"): 66,
        (source, *new, "--old", "old/model.onnx", "--queries", "query.jsonl"): 66,
        (source, *new, "--old", "old/model.onnx", "--queries", "queries.jsonl"): 65,
    }
    for words, code in cases.items():
        assert run(*words) == code, words
        assert not (folder / "nobackfill-migration").exists(), words
    assert "queries.jsonl:1: expected a JSON object" in capsys.readouterr().err


def test_a_mistyped_column_does_not_bind_the_next_run(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, connection, folder = documents
    # It is refused before the model is opened, or any vector read.
    for model in ("new/model.onnx", "new/modle.onnx"):
        assert run(source, "--new", model, "--column", "bodi", "-n", "60") == 65
        error = capsys.readouterr().err
        assert "expected --column to name a column of texts, got 'bodi'" in error
        assert (
            "Besides the key and the vectors, the columns are body" in error
            and "sampling" not in error
        )
        assert run(source, "--new", model, "--items", "nowhere.jsonl") in (65, 66)
        assert "nowhere.jsonl" in capsys.readouterr().err
    assert not (folder / "nobackfill-migration").exists()
    assert run(source, *START) == 0
    assert "sampling 120 of 300 items" in capsys.readouterr().err
    # From here on, vectors are in the folder: another column would mix texts.
    assert run(source, "--new", "new/model.onnx", "--column", "bodi") == 73
    assert "--column was 'body' and is now 'bodi'" in capsys.readouterr().err
    connection.execute("DROP VIEW seen; DELETE FROM t")
    assert run(source, *START, "--work", "empty") == 65
    assert "expected rows with a vector in 'v', found none" in capsys.readouterr().err


def test_an_old_model_of_other_dimensions_is_refused_before_the_sample(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, _, folder = documents
    topical(folder / "other", 12, 16, strength=3, turned=2)
    lines = [json.dumps({"id": number, "text": text_of(number)}) for number in range(20)]
    (folder / "queries.jsonl").write_text("\n".join(lines))
    words = (source, *START, "--queries", "queries.jsonl", "--old")
    assert run(*words, "other/model.onnx") == 65
    error = capsys.readouterr().err
    assert "--old, other/model.onnx, computes vectors of 16 dimensions, but" in error
    assert "has 24; name the model that computed the stored vectors" in error
    assert not (folder / "nobackfill-migration").exists()
    # The corrected command begins.
    assert run(*words, "old/model.onnx") == 0


def test_a_query_that_the_old_model_refuses_is_left_out(
    documents: tuple[str, Connection, Path],
) -> None:
    source, _, folder = documents
    (folder / "odd_model.py").write_text(
        "from nobackfill.adopt.embedding.embedder import open_embedder\n"
        "model = open_embedder('old/model.onnx')\n"
        "def embed(texts):\n"
        "    if 'bad' in texts:\n"
        "        raise ValueError('bad text')\n"
        "    return model.embed(texts)\n"
    )
    texts = ["bad", *(text_of(number) for number in range(1, 25))]
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(texts)]
    (folder / "queries.jsonl").write_text("\n".join(lines))
    words = ("--old", "odd_model:embed", "--queries", "queries.jsonl")
    assert run(source, *START, *words) == 0


def test_queries_without_an_item_are_named(
    documents: tuple[str, Connection, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, _, folder = documents
    words = (source, *START, "--old", "old/model.onnx", "--queries", "queries.jsonl")
    ids = [*range(19), 999]
    for wanted in ("found 19 of 20", "1 of 21 queries are left out"):
        lines = [json.dumps({"id": name, "text": text_of(name)}) for name in ids]
        (folder / "queries.jsonl").write_text("\n".join(lines))
        code = run(*words)
        error = capsys.readouterr().err
        assert wanted in error, error
        assert code == (65 if "found" in wanted else 0)
        ids.append(19)
    assert "has no vector of their items: '999'" in error
