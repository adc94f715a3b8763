"""Runs another tool in an environment that has it, and not nobackfill: see bench.adoption.peers.

Usage:
    peer.py search IN.npz OUT.npz DSN: Fit each tool to pairs, and search a gallery.
    peer.py fit IN.npz MAPPING: Fit isotrieve's default mapping to pairs.
    peer.py transform MAPPING IN.npy OUT.npy: Apply a mapping that `fit` saved.
    peer.py isotrieve MAPPING DSN: Migrate the column `embedding` of the table `items`.
    peer.py by-hand MAPPING DSN: The same as a script of a few lines.
"""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
# embedflow's default number of candidates.
_CANDIDATES = 50
_BATCH = 1000


def _search(source: str, out: str, dsn: str) -> None:
    with np.load(source) as given:
        old, new = given["old"], given["new"]
        items, items_new = given["items"], given["items_new"]
        queries, queries_new = given["queries"], given["queries_new"]
    tools: dict[str, Callable[[], Vectors]] = {
        "items: by hand, ridge": lambda: _ridge(old, new)(items),
        "items: by hand, Procrustes": lambda: _procrustes(old, new)(items),
        "items: by hand, residual MLP": lambda: _mlp(old, new)(items),
        "items: isotrieve, ridge": lambda: _isotrieve("RidgeMapping", old, new)(items),
        "items: isotrieve, Procrustes": lambda: _isotrieve("OrthogonalProcrustesMapping", old, new)(
            items
        ),
        "queries: drift-spark": lambda: _drift(old, new)(queries_new),
        "hits: embedflow": lambda: _embedflow(dsn, items_new, queries, queries_new),
    }
    made: dict[str, Any] = {}
    for name, run in tools.items():
        started = time.perf_counter()
        made[name] = run()
        made[f"seconds: {name}"] = time.perf_counter() - started
    np.savez(out, **made)


def _ridge(old: Vectors, new: Vectors) -> Callable[[Vectors], Vectors]:
    from sklearn.linear_model import Ridge

    return Ridge(alpha=1.0).fit(old, new).predict  # type: ignore[no-any-return]


def _procrustes(old: Vectors, new: Vectors) -> Callable[[Vectors], Vectors]:
    from scipy.linalg import orthogonal_procrustes

    weight = orthogonal_procrustes(old, new)[0]
    return lambda vectors: vectors @ weight


def _mlp(old: Vectors, new: Vectors) -> Callable[[Vectors], Vectors]:
    from sklearn.neural_network import MLPRegressor

    line = _ridge(old, new)
    network = MLPRegressor(hidden_layer_sizes=(512,), early_stopping=True, random_state=0)
    network.fit(old, new - line(old))
    return lambda vectors: line(vectors) + network.predict(vectors)


def _isotrieve(kind: str, old: Vectors, new: Vectors) -> Callable[[Vectors], Vectors]:
    mapping = getattr(importlib.import_module("isotrieve.mapping.linear"), kind)()
    mapping.fit(old, new)
    return mapping.transform  # type: ignore[no-any-return]


def _drift(old: Vectors, new: Vectors) -> Callable[[Vectors], Vectors]:
    adapter = importlib.import_module("drift.adapter").DriftAdapter().fit(old, new)
    return adapter.predict  # type: ignore[no-any-return]


def _embedflow(dsn: str, items_new: Vectors, queries: Vectors, queries_new: Vectors) -> Any:
    """Rank each query's candidates after each item has its new vector: the tool's best case."""

    class Model:
        def __init__(self, name: str, items: Vectors | None, asked: Vectors) -> None:
            self.model_id = self.fingerprint = name
            self._items, self._asked, self.dimension = items, asked, asked.shape[1]

        def encode_queries(self, texts: list[str]) -> Vectors:
            return self._asked[[int(text) for text in texts]]

        def encode_query(self, text: str) -> Vectors:
            return np.asarray(self._asked[int(text)])

        def encode_documents(self, texts: list[str], batch_size: int | None = None) -> Vectors:
            assert self._items is not None
            return self._items[[int(text) for text in texts]]

        def close(self) -> None:
            pass

    with TemporaryDirectory() as folder:
        session = importlib.import_module("embedflow.migration.facade").migrate(
            index=dsn, backend="pgvector", table="items", text_column="content",
            old_model=Model("old", None, queries), new_model=Model("new", items_new, queries_new),
            cache_path=Path(folder, "cache"), state_path=Path(folder, "state.json"),
            candidate_depth=_CANDIDATES, start_worker=False,
        )  # fmt: skip
        found = np.full((len(queries), _CANDIDATES), -1, np.int64)
        with session:
            for row in range(len(queries)):
                hits = session.search(str(row), top_k=_CANDIDATES, max_sync_misses=_CANDIDATES)
                ids = [int(hit["id"]) for hit in hits["results"]]
                found[row, : len(ids)] = ids
    return found


def _migrate_by_isotrieve(mapping: str, dsn: str) -> None:
    from psycopg.conninfo import conninfo_to_dict

    # Its argument `dsn` fails with psycopg 3: it is handed on as a parameter of that name.
    parts = conninfo_to_dict(dsn)
    words = {name: parts[name] for name in ("host", "dbname", "user")}
    adapter = importlib.import_module("isotrieve.adapters.pgvector").PgvectorAdapter
    adapter(_loaded(mapping), **words, table="items").migrate()


def _migrate_by_hand(mapping: str, dsn: str) -> None:
    """Add a column, update it in batches, rename: what one writes in a quarter of an hour."""
    import psycopg
    from pgvector.psycopg import register_vector

    transform = _loaded(mapping).transform
    with psycopg.connect(dsn, autocommit=True) as connection:
        register_vector(connection)
        dim = _loaded(mapping).d_tgt
        column = f"ALTER TABLE items ADD COLUMN IF NOT EXISTS embedding_new vector({dim})"
        connection.execute(column.encode())
        last, count = -1, _BATCH
        while count == _BATCH:
            rows = connection.execute(
                b"SELECT id, embedding FROM items WHERE id > %s ORDER BY id LIMIT %s",
                (last, _BATCH),
            ).fetchall()
            if not rows:
                break
            made = transform(np.stack([np.asarray(row[1].to_numpy()) for row in rows]))
            pairs = [(vector, row[0]) for vector, row in zip(made, rows, strict=True)]
            with connection.transaction():
                connection.cursor().executemany(
                    b"UPDATE items SET embedding_new = %s WHERE id = %s", pairs
                )
            last, count = rows[-1][0], len(rows)
        with connection.transaction():
            connection.execute(b"ALTER TABLE items RENAME COLUMN embedding TO embedding_before")
            connection.execute(b"ALTER TABLE items RENAME COLUMN embedding_new TO embedding")


def _loaded(mapping: str) -> Any:
    return importlib.import_module("isotrieve.mapping.registry").load_mapping(mapping)


def _fit(source: str, mapping: str) -> None:
    with np.load(source) as given:
        made = importlib.import_module("isotrieve.mapping.linear").RidgeMapping()
        made.fit(given["old"], given["new"])
    made.save(mapping)


def _transform(mapping: str, source: str, out: str) -> None:
    np.save(out, _loaded(mapping).transform(np.load(source)).astype(np.float32))


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    commands: dict[str, Callable[..., None]] = {
        "search": _search,
        "fit": _fit,
        "transform": _transform,
        "isotrieve": _migrate_by_isotrieve,
        "by-hand": _migrate_by_hand,
    }
    commands[command](*words)
