"""`python -m bench.adoption.throughput`: re-embedding a table beside the model alone.

The same texts, the same batches: the model in a loop, and `carry --with`, which also reads the
rows, writes their vectors into a new column, reads these back and compares them.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import psycopg
import typer
from pgvector.psycopg import register_vector

from bench.adoption.packaged import draw_operations, write_model_files
from nobackfill.adopt.carrying import carry
from nobackfill.adopt.embedding import open_embedder
from nobackfill.adopt.embedding.native_vectors import ColumnTexts, NativeVectorComputer
from nobackfill.adopt.sources.opening import open_source
from nobackfill.vectors import normalise
from tests.support.postgres import running

DIM = 384
# Texts that the model gets at a time, as `carry --with` gives them.
BATCH = 32


def main(
    packages: Annotated[
        Path, typer.Option(help="Folder of packages as `make demo-adopt` fills it; only read.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to which models are written, and used again.")
    ] = Path("build/throughput"),
    rows: Annotated[int, typer.Option(help="Texts of the table.")] = 4000,
    rounds: Annotated[int, typer.Option(help="Rounds; each measures both ways.")] = 3,
    model: Annotated[
        str, typer.Option(help="The new model: minilm-l3 or minilm-l6.")
    ] = "minilm-l6",
) -> None:
    """Print one line of JSON for each round: rows a second of both ways, and their ratio."""
    texts = [one.body for one in draw_operations(packages, rows).documents]
    embedder = open_embedder(str(write_model_files(packages, out / "models")[model]))
    embedder.embed(texts[:BATCH])
    with running() as server, server.connected() as (address, connection):
        _fill(connection, texts)
        for number in range(rounds):
            started = time.perf_counter()
            for first in range(0, len(texts), BATCH):
                embedder.embed(texts[first : first + BATCH])
            alone = time.perf_counter() - started
            source = open_source(f"{address}#items")
            maker = NativeVectorComputer(ColumnTexts(source, "body"), DIM, embedder=embedder)
            started = time.perf_counter()
            done = carry(source, maker.target(f"new_{number}"), maker)
            whole = time.perf_counter() - started
            if done.new_vector_count != len(texts) or maker.missing_reasons:
                raise RuntimeError(f"{done.new_vector_count} of {len(texts)} have a new vector")
            line = {"rows": len(texts), "model": model}
            line |= {"model alone, rows/s": round(len(texts) / alone, 1)}
            line |= {
                "carry, rows/s": round(len(texts) / whole, 1),
                "ratio": round(alone / whole, 3),
            }
            print(json.dumps(line), flush=True)


def _fill(connection: psycopg.Connection[tuple[object, ...]], texts: list[str]) -> None:
    connection.execute("CREATE EXTENSION vector")
    register_vector(connection)
    connection.execute(f"CREATE TABLE items (id bigint PRIMARY KEY, body text, old vector({DIM}))")
    vectors = normalise(np.random.default_rng(0).normal(size=(len(texts), DIM)).astype(np.float32))
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO items VALUES (%s, %s, %s)",
            list(zip(range(len(texts)), texts, vectors, strict=True)),
        )


if __name__ == "__main__":
    typer.run(main)
