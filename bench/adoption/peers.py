"""`python -m bench.adoption.peers`: nobackfill beside other tools, into bench/results/peers.json.

The other tools run in an environment of their own, from bench/adoption/requirements-peers.txt.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import psycopg
import typer
from pgvector import Vector
from pgvector.psycopg import register_vector

from bench.adoption.curves import mean_gain
from bench.adoption.parts import Part, run_parts
from bench.adoption.texts import embed_documents, read_operations
from bench.adoption.trial import Trial
from bench.harness import Row, Value
from demo.adoption.models import write_model_files
from nobackfill.adopt.judgement import Figures, figures_from_distances, query_item_distances
from nobackfill.adopt.maps import Map, save_map
from nobackfill.adopt.pairs import Pairs
from nobackfill.serving.fusion import Block
from nobackfill.vectors import Vectors, normalise
from tests.support.postgres import Server, running

_PEER = Path(__file__).with_name("peer.py")
_PAIRS, _ITEMS = 2000, 4000
_OLD_DIM, _NEW_DIM = 384, 256
# Writes a second while a table migrates: half of them new rows, half new vectors of old rows.
_WRITES = 10
# The writer gives up after so many seconds: a tool that reads until it finds no further row may
# never end beside one.
_WRITER_SECONDS = 300
# A vector of a tool counts as that of its row's old vector up to this difference.
_TOLERANCE = 1e-3
_FIGURES = ("R@1", "R@10", "MRR", "agreement@10")
_SIGNS = {"holds": "+", "fails": "-", "undecided": "="}
SEARCHES = (
    f"In %. Each tool is fitted to {_PAIRS:,} pairs of L3 and L6 vectors. The queries ask for "
    "items that no tool was fitted to. `against`: whether R@1, R@10, MRR and agreement@10 are "
    "measurably better (+) or worse (-) than those of the old model, by a paired bootstrap over "
    "queries. embedflow is measured after every item has its new vector, its best case; the old "
    "model's 50 candidates limit it. embedding-adapters downloads its adapters when it runs, so "
    "it is not measured. `fit, s` includes the search for drift-spark's and embedflow's rows."
)
MIGRATIONS = (
    "A table (id, content, embedding) in PostgreSQL with an HNSW index. `alone`: seconds without "
    "other work. `outdated`, `missing`: rows that hold the new vector of a replaced old vector, or "
    f"none, after a migration beside {_WRITES} writes a second, half of them new rows and half "
    "new vectors of rows, out of `written`. `again`: seconds of a second run after kill -9 at half "
    "of the rows, and `wrong`: rows then wrong. `index`: whether the new column has one at the "
    "end. `way back`: whether the old vectors are still there. The server is that of the tests "
    "(fsync off)."
)


def main(
    packages: Annotated[
        Path, typer.Option(help="Folder of packages as `make demo-adopt` fills it; only read.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to which vectors are written; those in it are used again.")
    ],
    peers: Annotated[
        Path,
        typer.Option(help="Python of an environment with bench/adoption/requirements-peers.txt."),
    ],
    rows: Annotated[int, typer.Option(help="Rows of the table that migrates.")] = 20_000,
) -> None:
    """Measure what searches find and how a table migrates, by nobackfill and by other tools."""
    models = dict(zip(("L3", "L6"), write_model_files(packages, out / "models"), strict=True))
    corpus = read_operations(packages, _ITEMS)
    old, new = (
        embed_documents(corpus.documents, models[name], out / f"{corpus.name}-{name}.npz")
        for name in ("L3", "L6")
    )
    trial = Trial(f"L3 to L6, {corpus.name}", old, new, _PAIRS)
    searches = Part("What searches find", trial.name, partial(_searches, trial, peers))
    name = f"{rows:,} rows, {_OLD_DIM} to {_NEW_DIM} dims"
    moves = Part("A table migrates", name, partial(_migrations, name, rows, peers))
    run_parts("peers", [searches, moves], {searches.title: SEARCHES, moves.title: MIGRATIONS}, "")


def _searches(trial: Trial, peers: Path) -> list[Row]:
    pairs, gallery = trial.take_pairs(slice(0, _PAIRS)), trial.take_pairs(trial.held_out_slice)
    asked = trial.take_queries(trial.held_out_slice)
    started = time.perf_counter()
    verdict = trial.fitted_verdict
    seconds = {"nobackfill": time.perf_counter() - started}
    found: dict[str, Figures] = {
        f"nobackfill, {way}": figures
        for way, figures in trial.true_figures.items()
        if way not in ("stay", "re-embed")
    }
    with running() as server, server.connected() as (dsn, connection), TemporaryDirectory() as made:
        _fill(connection, gallery.old)
        source, result = Path(made, "in.npz"), Path(made, "out.npz")
        np.savez(
            source, old=pairs.old, new=pairs.new, items=gallery.old, items_new=gallery.new,
            queries=asked.old, queries_new=asked.new,
        )  # fmt: skip
        subprocess.run([peers, _PEER, "search", source, result, dsn], check=True)
        with np.load(result) as arrays:
            for key in arrays:
                kind, _, name = key.partition(": ")
                if kind == "seconds":
                    seconds[name.partition(": ")[2]] = float(arrays[key])
                    continue
                block = _block(kind, arrays[key].astype(np.float32), gallery, asked.new)
                found[name] = figures_from_distances(block, gallery, asked)
    ways = {
        "the old model": trial.true_figures["stay"],
        **found,
        "the new model": trial.true_figures["re-embed"],
    }
    named = {f"nobackfill, {verdict.way}": "named by fit"}
    return [
        {
            "pair": trial.name,
            "way": way,
            **{f: 100 * float(np.mean(figures[f])) for f in _FIGURES},
            "against": None if way == "the old model" else _signs(figures, ways["the old model"]),
            "fit, s": seconds.get(way, seconds.get(way.partition(",")[0])),
            "verdict": named.get(way),
        }
        for way, figures in ways.items()
    ]


def _signs(figures: Figures, stay: Figures) -> str:
    return "".join(_SIGNS[mean_gain([figures[f]], [stay[f]], None).verdict] for f in _FIGURES)


def _block(kind: str, made: Vectors, gallery: Pairs, queries: Vectors) -> Block:
    """Compute distances [q, g] from mapped items, mapped queries, or hits in their order."""
    if kind == "items":
        return query_item_distances(queries, made)
    if kind == "queries":
        return query_item_distances(made, gallery.old)
    block = np.full((len(queries), len(gallery)), np.inf, np.float32)
    for row, hits in enumerate(made.astype(np.int64)):
        hits = hits[hits >= 0]
        block[row, hits] = np.arange(len(hits))
    return block


def _migrations(name: str, rows: int, peers: Path) -> list[Row]:
    rng = np.random.default_rng(0)
    old = normalise(rng.standard_normal((rows, _OLD_DIM)).astype(np.float32))
    turn = np.linalg.qr(rng.standard_normal((_OLD_DIM, _OLD_DIM)))[0][:, :_NEW_DIM]
    with TemporaryDirectory() as made, running({"shared_buffers": "1GB"}) as server:
        pairs, mapping, own = (Path(made, f) for f in ("pairs.npz", "m.isotrieve", "map.npz"))
        np.savez(pairs, old=old[:_PAIRS], new=old[:_PAIRS] @ turn)
        subprocess.run([peers, _PEER, "fit", pairs, mapping], check=True)
        save_map(
            own, Map("affine", turn.T.astype(np.float32), np.zeros(_NEW_DIM, np.float32), True)
        )

        def peer(command: str, dsn: str) -> list[str]:
            return [str(peers), str(_PEER), command, str(mapping), dsn]

        def ours(dsn: str) -> list[str]:
            program = str(Path(sys.executable).with_name("nobackfill"))
            return [program, "carry", f"{dsn}#items", "--map", str(own),
                    "--to", "embedding_new", "--flip"]  # fmt: skip

        def by_peer(vectors: Vectors) -> Vectors:
            source, result = Path(made, "in.npy"), Path(made, "out.npy")
            np.save(source, vectors)
            subprocess.run([peers, _PEER, "transform", mapping, source, result], check=True)
            return np.load(result)  # type: ignore[no-any-return]

        tools: dict[str, tuple[Callable[[str], list[str]], Callable[[Vectors], Vectors], str]] = {
            "by hand": (partial(peer, "by-hand"), by_peer, "embedding_new"),
            "isotrieve": (partial(peer, "isotrieve"), by_peer, "embedding_isotrieve_new"),
            "nobackfill carry --flip": (ours, lambda one: one @ turn, "embedding_new"),
        }
        return [
            {"pair": name, "way": tool, **_migrated(server, old, *words)}
            for tool, words in tools.items()
        ]


def _migrated(
    server: Server,
    old: Vectors,
    command: Callable[[str], list[str]],
    mapped: Callable[[Vectors], Vectors],
    column: str,
) -> Row:
    row: dict[str, Value] = {}
    with server.connected() as (dsn, connection):
        _fill(connection, old)
        started = time.perf_counter()
        subprocess.run(command(dsn), check=True, stdout=subprocess.DEVNULL)
        row["alone, s"] = time.perf_counter() - started
        row["index"] = "yes" if _has_index(connection) else "no"
        row["way back"] = "yes" if _has_old(connection) else "no"
    with server.connected() as (dsn, connection):
        _fill(connection, old)
        with _Writer(dsn, old) as writer:
            subprocess.run(command(dsn), check=True, stdout=subprocess.DEVNULL)
        row["written"] = len(writer.vectors)
        row["missing"], row["outdated"] = _wrong(connection, old, writer.vectors, mapped)
    with server.connected() as (dsn, connection):
        _fill(connection, old)
        _killed_half_way(command(dsn), connection, column, len(old))
        started = time.perf_counter()
        done = subprocess.run(command(dsn), check=False, stdout=subprocess.DEVNULL)
        row["again, s"] = time.perf_counter() - started
        row["wrong"] = "fails" if done.returncode else sum(_wrong(connection, old, {}, mapped))
    return row


def _fill(connection: psycopg.Connection[Any], vectors: Vectors) -> None:
    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    register_vector(connection)
    dim = vectors.shape[1]
    table = f"CREATE TABLE items (id bigint PRIMARY KEY, content text, embedding vector({dim}))"
    connection.execute(table.encode())
    with connection.cursor().copy("COPY items FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(["int8", "text", "vector"])
        for row, vector in enumerate(vectors):
            copy.write_row((row, str(row), vector))
    connection.execute("CREATE INDEX ON items USING hnsw (embedding vector_cosine_ops)")
    connection.execute("VACUUM ANALYZE items")


class _Writer:
    """Puts and replaces old vectors in a table until its column takes no old vector any more."""

    def __init__(self, dsn: str, old: Vectors) -> None:
        self._dsn, self._old = dsn, old
        self.vectors: dict[int, Vectors] = {}
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "_Writer":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        rng = np.random.default_rng(1)
        begun, count = time.monotonic(), 0
        put = (
            "INSERT INTO items (id, content, embedding) VALUES (%s, '', %s) "
            "ON CONFLICT (id) DO UPDATE SET embedding = EXCLUDED.embedding"
        )
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            register_vector(connection)
            while time.monotonic() < begun + _WRITER_SECONDS:
                new = len(self._old) + count
                name = new if count % 2 else int(rng.integers(len(self._old)))
                vector = normalise(rng.standard_normal((1, _OLD_DIM)).astype(np.float32))[0]
                try:
                    connection.execute(put, (name, vector))
                except psycopg.errors.DataException:  # Another dimension: the column has changed.
                    return
                self.vectors[name] = vector
                count += 1
                time.sleep(max(0.0, begun + count / _WRITES - time.monotonic()))


def _wrong(
    connection: psycopg.Connection[Any],
    old: Vectors,
    written: dict[int, Vectors],
    mapped: Callable[[Vectors], Vectors],
) -> tuple[int, int]:
    """Count rows without a new vector, and rows whose new vector is not that of their old one."""
    rows = connection.execute("SELECT id, embedding FROM items").fetchall()
    vectors = dict(enumerate(old)) | written
    if missing_rows := len(vectors) - len(rows):
        raise RuntimeError(f"{missing_rows} rows are gone")
    missing = sum(row[1] is None for row in rows)
    rows = [row for row in rows if row[1] is not None]
    expected = normalise(mapped(np.stack([vectors[row[0]] for row in rows])).astype(np.float32))
    stored = [one.to_numpy() if isinstance(one, Vector) else one for _, one in rows]
    found = normalise(np.stack(stored).astype(np.float32))
    return missing, int((np.abs(expected - found).max(axis=1) > _TOLERANCE).sum())


def _killed_half_way(
    command: list[str], connection: psycopg.Connection[Any], column: str, rows: int
) -> None:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    query = f"SELECT count({column}) FROM items"  # noqa: S608
    while process.poll() is None:
        with suppress(psycopg.errors.UndefinedColumn):
            found = connection.execute(query.encode()).fetchone()
            if found and found[0] >= rows / 2:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return
        time.sleep(0.02)
    raise RuntimeError(f"{json.dumps(command)} ended before it was killed")


def _has_index(connection: psycopg.Connection[Any]) -> bool:
    query = "SELECT 1 FROM pg_indexes WHERE tablename = 'items' AND indexdef LIKE '%(embedding %'"
    return connection.execute(query).fetchone() is not None


def _has_old(connection: psycopg.Connection[Any]) -> bool:
    query = (
        "SELECT 1 FROM pg_attribute WHERE attrelid = 'items'::regclass AND atttypmod = %s "
        "AND NOT attisdropped"
    )
    return connection.execute(query, (_OLD_DIM,)).fetchone() is not None


if __name__ == "__main__":
    typer.run(main)
