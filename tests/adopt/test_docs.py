"""docs/adopt.md, and README.md in short: a stranger's table of texts, two ONNX files, the commands
as they stand on the page."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from numpy.typing import NDArray

from nobackfill.adopt.maps import load_adapter, load_map
from tests.adopt.models import expected, text_model, texts
from tests.support.documents import blocks, page, run_script, section
from tests.support.postgres import Server

PAGE, README = page("docs/adopt.md"), page("README.md")
ITEMS = 2300


def test_a_stranger_gets_from_the_table_to_a_flipped_column(
    postgres: Server, tmp_path: Path
) -> None:
    bodies, old = stranger(tmp_path, ITEMS)
    write_queries(bodies, tmp_path)
    with postgres.connected() as (address, connection):
        fill(connection, bodies, old)
        shell = [content for _, content in blocks(PAGE, "sh")]
        *steps, by_itself, rollback, table, publish, foreign = shell
        first, count = re.subn(r"^export SOURCE=.*$", f"export SOURCE='{address}#documents'",
                               "".join(steps), flags=re.MULTILINE)  # fmt: skip
        assert count == 1
        said = run_script(first, tmp_path, {}, 240)
        assert f"documents.embedding: {ITEMS} vectors of dimension 8" in said
        assert "verdict: " in said
        assert f"{ITEMS} vectors written now, {ITEMS} in the store and checked" in said
        assert "<h1>Verdict: " in (tmp_path / "verdict.html").read_text("utf-8")
        carried = connection.execute("SELECT embedding_new::text FROM documents ORDER BY id")
        vectors = np.array([json.loads(vector) for (vector,) in carried], np.float32)
        mapping = load_map(tmp_path / "map.npz")
        np.testing.assert_allclose(vectors, mapping(old.astype(np.float32)), atol=1e-5)
        run_python(address, old.astype(np.float32), tmp_path)
        said_by_map = check_publishing(publish + foreign, address, tmp_path)
        assert f"{ITEMS} vectors written" in said_by_map
        assert "embedding_foreign: removed" in said_by_map
        check_rollback_and_again(connection, rollback, address, tmp_path, steps[-1])
        given = {"SOURCE": f"{address}#documents"}
        flip(connection, run_script(table, tmp_path, given, 60))
        joined = connection.execute(
            "SELECT n.embedding::text FROM documents_new n JOIN documents USING (id) ORDER BY id"
        )
        found = np.array([json.loads(vector) for (vector,) in joined], np.float32)
        np.testing.assert_array_equal(found, vectors)
        assert run_script(by_itself, tmp_path, given, 60).endswith("the store is flipped\n")
        flipped = connection.execute("SELECT embedding::text FROM documents ORDER BY id")
        found = np.array([json.loads(vector) for (vector,) in flipped], np.float32)
        np.testing.assert_array_equal(found, vectors)


def test_one_command_migrates_the_table_and_goes_back(postgres: Server, tmp_path: Path) -> None:
    bodies, old = stranger(tmp_path, 400)
    asked = [{"id": n + 1, "text": bodies[n]} for n in range(0, 400, 2)]
    (tmp_path / "queries.jsonl").write_text("\n".join(map(json.dumps, asked)))
    start, others, native = (content for _, content in blocks(PAGE, "bash"))
    status, pause, back, finish = (line.partition("#")[0].strip() for line in others.splitlines())
    with postgres.connected() as (address, connection):
        fill(connection, bodies, old)
        start = re.sub(r"^SOURCE=.*$", f"SOURCE='{address}#documents'", start, flags=re.MULTILINE)
        said = run_script(start + status + "\n", tmp_path, {}, 120)
        assert re.search("^verdict: ", said, re.MULTILINE)
        (way,) = re.findall(r"^verdict: ([a-z -]+):", said, re.MULTILINE)
        assert f"verdict {way}" in said.splitlines()[-1]
        before = connection.execute("SELECT embedding::text FROM documents ORDER BY id").fetchall()
        # Judged by agreement with the new model alone, staying cannot win.
        again = re.sub(r"--old \S+ --queries \S+", "--work second --yes", start)
        assert "flipped" in run_script(again, tmp_path, {}, 120)
        assert pause == "nobackfill migrate pause"
        assert "taken back" in run_script(f"{back} --work second\n", tmp_path, {}, 60)
        after = connection.execute("SELECT embedding::text FROM documents ORDER BY id").fetchall()
        assert before == after
        run_script(f"{again.rstrip()}\n{finish} --work second\n", tmp_path, {}, 120)
        vectors = connection.execute("SELECT embedding::real[] FROM documents ORDER BY id")
        wanted = [expected(tmp_path / "new", body) for body in bodies]
        np.testing.assert_allclose(
            [vector for (vector,) in vectors.fetchall()], np.array(wanted), atol=1e-5
        )
        given = {"SOURCE": f"{address}#documents"}
        said = run_script(native, tmp_path, given, 60)
        assert "400 vectors written now, 400 in the store and checked" in said and "removed" in said


def test_readme_shows_the_command_of_the_guide() -> None:
    (shown,) = [text for _, text in blocks(section(README, "Try it on a pgvector table"), "sh")]
    guide = blocks(PAGE, "bash")[0][1].replace("\\\n", " ").split()
    words = re.sub(r"\s#.*$", "", shown, flags=re.MULTILINE).split()
    assert set(words) <= set(guide) and "migrate" in words
    others = re.findall(r"`(nobackfill migrate [a-z]+)`", README)
    assert others and all(command in PAGE for command in others)


def test_the_printed_statements_flip_the_column(postgres: Server, tmp_path: Path) -> None:
    bodies, old = stranger(tmp_path, 400)
    write_queries(bodies, tmp_path)
    inspect, sample, fit, carry, *_ = (content for _, content in blocks(PAGE, "sh"))
    with postgres.connected() as (address, connection):
        fill(connection, bodies, old)
        given = {"SOURCE": f"{address}#documents"}
        steps = re.sub(r"^export SOURCE=.*$", "", inspect + sample + fit, flags=re.MULTILINE)
        said = run_script(steps, tmp_path, given, 240)
        (way,) = re.findall(r"^verdict: ([a-z -]+):", said, re.MULTILINE)
        assert load_map(tmp_path / "map.npz").facts["verdict"] == way
        printed = run_script(carry, tmp_path, given, 60)
        assert "400 vectors written now, 400 in the store and checked" in printed
        assert ("the verdict of map.npz was" in printed) == (way != "map")
        flip(connection, printed)
        flipped = connection.execute("SELECT embedding::text FROM documents ORDER BY id")
        found = np.array([json.loads(vector) for (vector,) in flipped], np.float32)
        mapping = load_map(tmp_path / "map.npz")
        np.testing.assert_allclose(found, mapping(old.astype(np.float32)), atol=1e-5)


def stranger(folder: Path, count: int) -> tuple[list[str], NDArray[np.float64]]:
    """Two models in folders, texts, and their vectors by the old one."""
    for name, seed in (("old", 0), ("new", 1)):
        text_model(folder / name, seed)
    bodies = texts(count)
    return bodies, np.array([expected(folder / "old", text) for text in bodies])


def write_queries(bodies: list[str], folder: Path) -> None:
    """Write queries.jsonl: the first four words of every fifth text, which is their answer."""
    queries = [
        {"id": row + 1, "text": " ".join(bodies[row].split()[:4])}
        for row in range(0, len(bodies), 5)
    ]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))


def fill(connection: psycopg.Connection, bodies: list[str], vectors: NDArray[np.float64]) -> None:
    """The table of the pages."""
    connection.execute("CREATE EXTENSION vector")
    connection.execute(
        "CREATE TABLE documents (id serial PRIMARY KEY, body text, embedding vector(8))"
    )
    with connection.cursor() as cursor, connection.transaction():
        rows = [(text, str(v.tolist())) for text, v in zip(bodies, vectors, strict=True)]
        cursor.executemany("INSERT INTO documents (body, embedding) VALUES (%s, %s)", rows)


def run_python(address: str, old: NDArray[np.float32], folder: Path) -> None:
    """The page's Python, with the query's vectors that it takes as there."""
    (searching, adapter, by_hand, mapping) = (text for _, text in blocks(PAGE, "python"))
    new = expected(folder / "new", texts(1)[0]).astype(np.float32)
    given = {
        "query_by_old_model": old[0], "query_by_new_model": new, "old_vectors": old, "Path": Path,
    }  # fmt: skip
    program = (searching + adapter + by_hand + mapping).replace("postgresql:///shop", address)
    with contextlib.chdir(folder):
        exec(compile(program, "docs/adopt.md", "exec"), given)
    assert len(by_hand.splitlines()) <= 20
    nearest = np.argsort(-(old @ load_adapter(folder / "adapter.npz")(new[None])[0]))[:10]
    assert given["best"].tolist() == nearest.tolist()
    assert given["ids"] == [str(row + 1) for row in nearest]
    answer: Any = given["answer"]
    assert answer.hits[0].id == "1" and len(answer.hits) == 10
    assert np.shape(given["new_vectors"]) == (ITEMS, 8)


def check_publishing(commands: str, address: str, folder: Path) -> str:
    ((_, card),) = blocks(PAGE, "json")
    (folder / "card.json").write_text(card)
    given = {"SOURCE": f"{address}#documents", "XDG_STATE_HOME": str(folder / "state")}
    return run_script(commands, folder, given, 120)


def check_rollback_and_again(
    connection: psycopg.Connection, rollback: str, address: str, folder: Path, carry: str
) -> None:
    source = {"SOURCE": f"{address}#documents"}
    assert "embedding_new: removed" in run_script(rollback, folder, source, 60)
    found = connection.execute("SELECT * FROM documents LIMIT 1")
    assert [column.name for column in found.description or ()] == ["id", "body", "embedding"]
    assert f"{ITEMS} vectors written" in run_script(carry, folder, source, 60)


def flip(connection: psycopg.Connection, said: str) -> None:
    """Run what `carry` printed."""
    statements = [line.strip() for line in said.splitlines() if re.match(r"  (CREATE|BEGIN)", line)]
    assert len(statements) == 2
    for statement in statements:
        connection.execute(statement.encode())


@pytest.mark.parametrize("command", ["inspect", "sample", "embed", "fit", "carry"])
def test_every_command_is_on_the_page(command: str) -> None:
    assert f"nobackfill {command}" in PAGE
