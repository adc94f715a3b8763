"""The query adapter from `fit` and `migrate` to a search, and its file, which is no map."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import apsw
import numpy as np
import pytest
import sqlite_vec

from nobackfill.adopt.embedding.embedder import open_embedder
from nobackfill.adopt.maps import fit_maps, load_adapter, load_map, save_map
from nobackfill.adopt.sources.opening import open_searchable
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError, NotFoundError
from nobackfill.onnx_runtime import onnxruntime
from nobackfill.serve import AdapterSearch
from nobackfill.vectors import Vectors
from tests.adopt.command import run_nobackfill as run
from tests.adopt.made import world, write_parquet
from tests.adopt.models import WORDS, text_model, texts
from tests.support.postgres import Server

COUNT = 300
MADE = world(120)


def models(folder: Path) -> tuple[list[str], Vectors]:
    """Write a model `new`, and a model `old` that reads queries badly.

    Returns:
        Texts, and their vectors by the old model as it was: the new space, turned.
    """
    rng = np.random.default_rng(0)
    table = rng.normal(size=(len(WORDS), 24)).astype(np.float32)
    turn = np.linalg.qr(rng.normal(size=(24, 24)))[0].astype(np.float32)
    text_model(folder / "new", 0, table=table @ turn)
    was = text_model(folder / "was", 0, table=table)
    blur = 1.5 * rng.normal(size=table.shape).astype(np.float32)
    text_model(folder / "old", 0, table=table + blur)
    bodies = texts(COUNT)
    queries = [{"id": str(n), "text": " ".join(bodies[n].split()[:4])} for n in range(0, COUNT, 2)]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    return bodies, open_embedder(str(was)).embed(bodies)


@contextmanager
def sqlite_table(file: Path, bodies: list[str], vectors: Vectors) -> Iterator[str]:
    connection = apsw.Connection(str(file))
    connection.enable_load_extension(True)
    sqlite_vec.load(connection)
    connection.execute(
        "CREATE VIRTUAL TABLE docs USING vec0(id text primary key, "
        "vector float[24] distance_metric=cosine, +body text)"
    )
    connection.execute("BEGIN")
    for number, (body, vector) in enumerate(zip(bodies, vectors, strict=True)):
        row = (str(number), vector.astype("<f4").tobytes(), body)
        connection.execute("INSERT INTO docs (id, vector, body) VALUES (?, ?, ?)", row)
    connection.execute("COMMIT")
    connection.close()
    yield f"sqlite:{file}#docs"


START = ("--new", "new/model.onnx", "--column", "body", "-n", str(COUNT), "--items-gone", "--yes")
KNOWN = ("--old", "old/model.onnx", "--queries", "queries.jsonl")


def check_search(source: str, vectors: Vectors, shown: str) -> None:
    """Search by the adapter that `migrate` names, and compare with numpy alone."""
    assert "verdict: query adapter: " in shown
    assert "nothing was written: search by AdapterSearch.open(source, Path(" in shown
    file = Path("nobackfill-migration/adapter.npz")
    assert f"Path('{file}')" in shown
    asked = ["w1 w2 w3", "w7 w30"]
    by_new = open_embedder("new/model.onnx", queries=True).embed(asked)
    with np.load(file) as arrays:
        mapped = by_new @ arrays["weight"].T + arrays["bias"]
    searchable = open_searchable(source)
    search = AdapterSearch.open(searchable, file)
    for query, body in zip(mapped, by_new, strict=True):
        nearest = np.argsort(-(vectors @ query), kind="stable")[:10]
        assert search.search(body) == [str(row) for row in nearest]
    searchable.close()


@pytest.mark.slow
def test_migrate_ends_with_the_adapter_and_an_untouched_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bodies, vectors = models(tmp_path)
    with sqlite_table(tmp_path / "store.db", bodies, vectors) as source:
        before = hashlib.sha256((tmp_path / "store.db").read_bytes()).digest()
        # Judged by agreement with the new model, without any query of the old one.
        assert run("migrate", source, *START, "--old-gone") == 0
        check_search(source, vectors, capsys.readouterr().out)
        assert run("migrate", source, *START, "--old-gone", *KNOWN) == 65
        assert "got both: a model that embeds the queries is not gone" in capsys.readouterr().err
        assert hashlib.sha256((tmp_path / "store.db").read_bytes()).digest() == before


@pytest.mark.long
def test_migrate_ends_with_the_adapter_and_an_untouched_table(
    postgres: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    bodies, vectors = models(tmp_path)
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, body text, v vector(24))")
        rows = [(n, body, str(vectors[n].tolist())) for n, body in enumerate(bodies)]
        connection.cursor().executemany("INSERT INTO t VALUES (%s, %s, %s)", rows)

        def state() -> list[object]:
            queries = (
                "SELECT xmin::text, ctid::text, t.*::text FROM t ORDER BY id",
                "SELECT relname FROM pg_class ORDER BY oid",
                "SELECT proname FROM pg_proc ORDER BY oid",
                "SELECT tgname FROM pg_trigger ORDER BY oid",
                "SELECT attname, col_description(attrelid, attnum) FROM pg_attribute "
                "WHERE attrelid = 't'::regclass ORDER BY attnum",
            )
            return [connection.execute(query.encode()).fetchall() for query in queries]

        before = state()
        assert run("migrate", f"{address}#t", *START, *KNOWN) == 0
        shown = capsys.readouterr().out
        check_search(f"{address}#t", vectors, shown)
        assert state() == before
        assert run("migrate", "status", "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["state"], answer["way"]) == ("untouched", "query adapter")
        # A second run repeats the verdict.
        assert run("migrate", f"{address}#t", *START, *KNOWN) == 0
        assert "nothing was written: search by AdapterSearch" in capsys.readouterr().out
        assert state() == before


@pytest.mark.long
@pytest.mark.slow
def test_fit_writes_an_adapter_that_is_no_map(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, vectors in (("old", MADE.old), ("new", MADE.new)):
        write_parquet(tmp_path / f"{name}.parquet", MADE.ids, vectors)
    asked = [MADE.ids[row] for row in MADE.answers]
    for name, vectors in (("q-old", MADE.queries_old), ("q-new", MADE.queries_new)):
        write_parquet(tmp_path / f"{name}.parquet", asked, vectors)
    words = ("--old", "old.parquet", "--new", "new.parquet", "--old-gone", "--items-gone", "--json")
    queries = ("--queries-old", "q-old.parquet", "--queries-new", "q-new.parquet")
    assert run("fit", *words, *queries, "--adapter", "adapter.npz") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["adapter"] == "adapter.npz"
    assert answer["way"] == "query adapter"
    (step,) = answer["steps"]
    assert "AdapterSearch.open(source, Path('adapter.npz'))" in step
    # As a graph, for a release of a gateway.
    assert run("fit", *words, *queries, "--adapter", "adapter.ONNX") == 65
    assert "--adapter adapter.ONNX: expected FILE.npz" in capsys.readouterr().err
    graphs = ("--adapter", "adapter.onnx", "--onnx", "upgrade.onnx")
    assert run("fit", *words, *queries, *graphs) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert step == "next: publish the new model by export.py with --adapter adapter.onnx"
    session = onnxruntime.InferenceSession("adapter.onnx", providers=["CPUExecutionProvider"])
    (adapted,) = session.run(["adapted"], {"embedding": MADE.queries_new})
    expected = load_adapter(tmp_path / "adapter.npz")(MADE.queries_new)
    np.testing.assert_allclose(adapted, expected, atol=1e-5)
    assert run("fit", *words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["adapter"] is None
    # Each file is refused in the place of the other one.
    assert run("carry", "old.parquet", "--map", "adapter.npz", "--to", "new") == 65
    error = capsys.readouterr().err
    assert "expected a map from old vectors to new ones, found a query adapter" in error
    assert "search by AdapterSearch.open(source, Path('adapter.npz'))" in error
    assert run("carry", "old.parquet", "--map", "adapter.onnx", "--to", "new") == 65
    error = capsys.readouterr().err
    assert "new ones, found the graph of a query adapter, which maps new queries" in error
    assert "`python training/export.py --text-encoder FOLDER --adapter adapter.onnx`" in error
    assert "name the file of `nobackfill fit --out`" in error
    assert run("carry", "old.parquet", "--map", "upgrade.onnx", "--to", "new") == 65
    assert "found an ONNX file; name the .npz file of that command" in capsys.readouterr().err
    assert not (tmp_path / "_new").exists()
    with pytest.raises(InvalidInputError, match=r"with `nobackfill fit --adapter adapter\.npz`"):
        load_adapter(tmp_path / "adapter.onnx")
    (tmp_path / "damaged.onnx").write_bytes(b"\x08")
    with pytest.raises(InvalidInputError, match="expected a file that `nobackfill fit` wrote"):
        load_map(tmp_path / "damaged.onnx")
    with pytest.raises(InvalidInputError, match="expected a query adapter, found a map"):
        load_adapter(tmp_path / "map.npz")
    with pytest.raises(InvalidInputError, match="expected a map from old vectors to new ones"):
        load_map(tmp_path / "adapter.npz")
    with pytest.raises(NotFoundError, match="nobackfill fit --adapter"):
        load_adapter(tmp_path / "none.npz")
    adapter = load_adapter(tmp_path / "adapter.npz")
    assert adapter.dims == (32, 24)
    with pytest.raises(InvalidInputError, match="queries by the new model"):
        adapter(MADE.old)


def test_a_search_refuses_an_adapter_of_other_vectors(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array(MADE.ids))
    np.save(tmp_path / "old.npy", MADE.old)
    source = open_searchable(str(tmp_path))
    fitted = fit_maps(MADE.new, MADE.old, kinds=["affine"])["affine"]
    adapter = replace(fitted, direction="new to old")
    save_map(tmp_path / "adapter.npz", adapter)
    search = AdapterSearch.open(source, tmp_path / "adapter.npz")
    for query in MADE.queries_new[:5]:
        expected = np.argsort(-(MADE.old @ adapter(query[None])[0]), kind="stable")[:7]
        assert search.search(query, 7) == [MADE.ids[row] for row in expected]
    with pytest.raises(InvalidInputError, match="k, the number of hits: expected 1 or more, got 0"):
        search.search(MADE.queries_new[0], 0)
    with pytest.raises(InvalidInputError, match="queries by the new model"):
        search.search(MADE.queries_old[0])
    with pytest.raises(IncompatibleSpaceError, match="from old to new"):
        AdapterSearch(source, fitted)
    narrow = fit_maps(MADE.new, MADE.old[:, :9], kinds=["affine"])["affine"]
    with pytest.raises(IncompatibleSpaceError, match="that returns 9"):
        AdapterSearch(source, replace(narrow, direction="new to old"))
