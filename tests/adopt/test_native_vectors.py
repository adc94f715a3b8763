"""`carry --with MODEL` and `--vectors FOLDER` write the new model's own vectors into a store."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.embedding.embedder import open_embedder
from nobackfill.adopt.embedding.native_vectors import (
    ColumnTexts,
    NativeVectorComputer,
    open_native_vectors,
)
from nobackfill.adopt.pairs import read_all
from nobackfill.adopt.sources.opening import open_source
from nobackfill.errors import InvalidInputError
from tests.adopt.command import run_nobackfill as run
from tests.adopt.made import write_parquet
from tests.adopt.models import expected, text_model
from tests.adopt.table_beside import Connection, drawn, put
from tests.support.postgres import Server
from tests.support.waiting import wait_until

COUNT = 120


def text_of(number: int) -> str:
    return f"w{number % 40} w{number * 7 % 40}"


@pytest.fixture
def texts(postgres: Server, tmp_path: Path) -> Iterator[tuple[str, Connection, Path]]:
    """A table `t` of texts with vectors of a model that is gone, and the new model's file."""
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v vector(24), body text)")
        put(connection, range(COUNT), drawn(0, COUNT))
        for number in range(COUNT):
            connection.execute("UPDATE t SET body = %s WHERE id = %s", [text_of(number), number])
        connection.execute("CREATE INDEX ON t USING hnsw (v vector_cosine_ops)")
        yield address, connection, text_model(tmp_path / "m", 3)


def native(connection: Connection, column: str, model: Path) -> int:
    """How many vectors of a column are what the model makes of the row's present text."""
    query = f"SELECT body, {column}::real[] FROM t WHERE {column} IS NOT NULL"
    rows = connection.execute(query.encode()).fetchall()
    for body, vector in rows:
        np.testing.assert_allclose(vector, expected(model.parent, body), atol=1e-5)
    return len(rows)


@pytest.mark.parametrize("to", ["n", "table:beside"])
def test_every_row_is_embedded_and_flipped_while_others_write(
    texts: tuple[str, Connection, Path], to: str
) -> None:
    address, connection, model = texts
    stop = threading.Event()
    written: list[int] = []

    def write() -> None:
        # By the old model alone: a text changes, and its old vector does not.
        with psycopg.connect(address, autocommit=True) as other:
            for number in range(10_000):
                if stop.wait(0.002):
                    return
                body = text_of(number + 1000)
                other.execute("UPDATE t SET body = %s WHERE id = %s", [body, number % COUNT])
                written.append(number)

    writer = threading.Thread(target=write)
    writer.start()
    wait_until(lambda: len(written) > 5, "others write")
    # After the flip a text may change, and only its writer knows the new vector.
    source = open_source(f"{address}#t", vector="v")
    maker = open_native_vectors(source, ColumnTexts(source, "body"), model=str(model))
    target = maker.target(to)

    def ended(count: int) -> None:
        if count >= COUNT:
            stop.set()

    try:
        carry(source, target, maker, rows_per_window=20, progress=ended)
    finally:
        stop.set()
        writer.join()
    done = carry(source, target, maker, flip=True)
    assert done.new_vector_count == COUNT
    if to == "n":
        assert native(connection, "v", model) == COUNT
    else:
        rows = connection.execute("SELECT body, b.v::real[] FROM t JOIN beside b USING (id)")
        for body, vector in rows.fetchall():
            np.testing.assert_allclose(vector, expected(model.parent, body), atol=1e-5)
        assert rows.rowcount == COUNT


def test_a_changed_text_makes_its_new_vector_stale(
    texts: tuple[str, Connection, Path],
) -> None:
    address, connection, model = texts
    words = ["carry", f"{address}#t", "--with", str(model), "--column", "body", "--to", "n"]
    assert run(*words, "--vector", "v") == 0
    assert native(connection, "n", model) == COUNT
    connection.execute("UPDATE t SET body = 'w1 w2 w3' WHERE id = 5")
    # Equal for the collation of the database in some cases, but another text.
    connection.execute("UPDATE t SET body = body || ' ' WHERE id = 6")
    connection.execute("UPDATE t SET body = body WHERE id = 7")
    assert native(connection, "n", model) == COUNT - 2
    assert run(*words, "--vector", "v") == 0
    assert native(connection, "n", model) == COUNT


def test_vectors_of_embed_are_used_for_the_text_that_they_are_of(
    texts: tuple[str, Connection, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address, connection, model = texts
    source, new = f"{address}#t", tmp_path / "new"
    assert run("embed", source, "--column", "body", "--with", str(model), "--out", str(new)) == 0
    connection.execute("UPDATE t SET body = 'w9 w8' WHERE id = 17")
    words = ["carry", source, "--vectors", str(new), "--column", "body", "--to", "n"]
    # Neither the old text's vector nor none: the item is named.
    assert run(*words, "--vector", "v") == 65
    assert "1 items have an old vector and no new one: '17'" in capsys.readouterr().err
    assert native(connection, "n", model) == COUNT - 1
    # The model embeds what the folder lacks, under the same mark.
    assert run(*words, "--vector", "v", "--with", str(model), "--flip") == 0
    assert native(connection, "v", model) == COUNT


@pytest.mark.parametrize("to", ["n", "table:beside"])
def test_an_item_without_a_text_is_named_and_nothing_flips(
    texts: tuple[str, Connection, Path], to: str
) -> None:
    address, connection, model = texts
    connection.execute("UPDATE t SET body = NULL WHERE id IN (3, 4)")
    source = open_source(f"{address}#t", vector="v")
    maker = open_native_vectors(source, ColumnTexts(source, "body"), model=str(model))
    target = maker.target(to)
    for flip in (False, True):
        with pytest.raises(
            InvalidInputError, match=r"2 items have an old vector .*'3' \(it has no"
        ):
            carry(source, target, maker, flip=flip)
    count = "SELECT count(n) FROM t" if to == "n" else "SELECT count(v) FROM beside"
    assert connection.execute(count.encode()).fetchone() == (COUNT - 2,)
    connection.execute("UPDATE t SET v = NULL WHERE id IN (3, 4)")
    assert carry(source, target, maker, flip=True).new_vector_count == COUNT - 2
    if to == "n":
        assert native(connection, "v", model) == COUNT - 2


def test_a_killed_run_embeds_only_what_is_missing(texts: tuple[str, Connection, Path]) -> None:
    address, connection, model = texts
    source = open_source(f"{address}#t", vector="v")
    embedder = open_embedder(str(model))
    seen: list[str] = []

    class Counting:
        fingerprint, input_kind, text_role = (
            embedder.fingerprint,
            embedder.input_kind,
            embedder.text_role,
        )

        def embed(self, items: list[str] | list[Path] | list[bytes]) -> np.ndarray:
            seen.extend(map(str, items))
            return embedder.embed(items)

    def killed() -> None:
        if len(seen) >= 50:
            raise KeyboardInterrupt

    maker = NativeVectorComputer(ColumnTexts(source, "body"), 8, embedder=Counting(), pause=killed)
    target = maker.target("n")
    with pytest.raises(KeyboardInterrupt):
        carry(source, target, maker, rows_per_window=25)
    again = NativeVectorComputer(ColumnTexts(source, "body"), 8, embedder=Counting())
    assert carry(source, target, again, rows_per_window=25).new_vector_count == COUNT
    assert len(seen) == COUNT
    assert native(connection, "n", model) == COUNT


def test_files_take_native_vectors_too(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    model = text_model(tmp_path / "m", 3)
    ids = [f"i{number}" for number in range(50)]
    write_parquet(tmp_path / "old.parquet", ids, drawn(0, 50), 20)
    table = pq.read_table(tmp_path / "old.parquet")
    bodies = pa.array([text_of(number) for number in range(50)])
    pq.write_table(table.append_column("body", bodies), tmp_path / "old.parquet", row_group_size=20)
    source = str(tmp_path / "old.parquet")
    words = ["carry", source, "--with", str(model), "--column", "body", "--to", "n"]
    assert run(*words) == 0
    found = {
        name: vector
        for file in (tmp_path / "_old.n").glob("*.parquet")
        for name, vector in zip(*pq.read_table(file).to_pydict().values(), strict=True)
    }
    assert set(found) == set(ids)
    for number, name in enumerate(ids):
        np.testing.assert_allclose(found[name], expected(model.parent, text_of(number)), atol=1e-5)


@pytest.mark.parametrize("kind", ["parquet", "arrays"])
def test_files_name_items_without_a_vector_and_complete_them(tmp_path: Path, kind: str) -> None:
    model, items = text_model(tmp_path / "m", 3), tmp_path / "items.jsonl"
    ids = [f"i{number}" for number in range(50)]
    if kind == "parquet":
        write_parquet(tmp_path / "old.parquet", ids, drawn(0, 50), 20)
        source, new = tmp_path / "old.parquet", tmp_path / "_old.n"
    else:
        source = new = tmp_path / "old"
        source.mkdir()
        np.save(source / "ids.npy", np.array(ids))
        np.save(source / "v.npy", drawn(0, 50))
    words = ["carry", str(source), "--with", str(model), "--items", str(items), "--to", "n"]
    # Without all of the last row group, without some of it, and complete.
    for count, code in ((40, 65), (45, 65), (45, 65), (50, 0)):
        lines = [{"id": name, "text": text_of(row)} for row, name in enumerate(ids[:count])]
        items.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        assert run(*words) == code
    rows = read_all(open_source(str(new), vector="n"))
    assert rows.ids == ids
    for number, vector in enumerate(rows.vectors):
        np.testing.assert_allclose(vector, expected(model.parent, text_of(number)), atol=1e-5)


@pytest.mark.parametrize("to", ["n", "table:beside"])
def test_native_vectors_whose_triggers_were_off_are_refused(
    texts: tuple[str, Connection, Path], to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address, connection, model = texts
    words = [
        "carry", f"{address}#t", "--to", to, "--with", str(model), "--column", "body",
        "--vector", "v",
    ]  # fmt: skip
    assert run(*words) == run(*words) == 0
    names = connection.execute(
        "SELECT tgname FROM pg_trigger WHERE tgrelid = 't'::regclass AND NOT tgisinternal"
    ).fetchall()
    for state in ("DISABLE", "ENABLE ALWAYS"):
        for (name,) in names:
            connection.execute(f"ALTER TABLE t {state} TRIGGER {name}".encode())
        if state == "DISABLE":
            connection.execute("UPDATE t SET body = 'w1 w1' WHERE id = 3")
    capsys.readouterr()
    assert run(*words) == 73
    error = capsys.readouterr().err
    assert "may hold stale vectors" in error and "restored from a dump" in error
    # Its owner may confirm that no vector is stale; here one is, so it is removed.
    connection.execute("UPDATE t SET body = %s WHERE id = 3", [text_of(3)])
    statement = error[error.index("COMMENT ON") : error.index(". Otherwise")]
    connection.execute(statement.encode())
    assert run(*words) == 0
    assert run("carry", f"{address}#t", "--to", to, "--vector", "v", "--rollback") == 0
    assert run(*words) == 0
    column, relation = ("n", "t") if to == "n" else ("v", "beside")
    query = f"SELECT count({column}) FROM {relation}"
    assert connection.execute(query.encode()).fetchall() == [(COUNT,)]
