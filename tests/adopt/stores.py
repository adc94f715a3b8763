"""Stores with MADE's items, one of each kind, and what others do to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import LiteralString, Protocol

import apsw
import lancedb
import numpy as np
import psycopg
import pyarrow as pa
import pytest
import sqlite_vec
from qdrant_client import QdrantClient, models

from nobackfill.adopt.sources.opening import open_searchable, open_source
from nobackfill.adopt.sources.pgvector import PgvectorSource
from nobackfill.adopt.sources.source import Searchable, Source, Target, TargetVectors
from nobackfill.plugins import qdrant
from nobackfill.vectors import Vectors
from tests.adopt.copies import Chroma, Milvus
from tests.adopt.made import World, world, write_parquet
from tests.support.postgres import Server


class Numbered(World):
    """Ids that every store can have."""

    @property
    def ids(self) -> list[str]:
        return [f"00000000-0000-4000-8000-{row:012d}" for row in range(len(self.old))]


MADE = Numbered(**vars(world(230)))


class Store(Protocol):
    """A store with MADE's items, and what others do to it."""

    def open(self, vector: str | None = None) -> Source: ...

    def search(self) -> Searchable: ...


@dataclass
class Parquet:
    folder: Path

    def __post_init__(self) -> None:
        write_parquet(self.folder / "a.parquet", MADE.ids[:150], MADE.old[:150], 60)
        write_parquet(self.folder / "b.parquet", MADE.ids[150:], MADE.old[150:], 60)

    def open(self, vector: str | None = None) -> Source:
        return open_source(str(self.folder), vector=vector)

    def search(self) -> Searchable:
        return open_searchable(str(self.folder))


@dataclass
class Arrays:
    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        np.save(self.folder / "ids.npy", np.array(MADE.ids))
        np.save(self.folder / "vector.npy", MADE.old)
        np.save(self.folder / "text.npy", np.array([f"on {name}" for name in MADE.ids]))

    def open(self, vector: str | None = None) -> Source:
        return open_source(str(self.folder), vector=vector)

    def search(self) -> Searchable:
        return open_searchable(str(self.folder))


PUT: LiteralString = (
    'INSERT INTO "Documents" (id, vector, text) VALUES (%s, %s, %s) '
    "ON CONFLICT (id) DO UPDATE SET vector = EXCLUDED.vector"
)


class Written(Store, Protocol):
    """One that an application writes to."""

    def put(self, name: str, vector: Vectors) -> None: ...

    def delete(self, name: str) -> None: ...

    def touch(self, name: str) -> None: ...

    def names(self) -> list[str]: ...


class Pgvector:
    """A table that an application writes to by `run`."""

    def __init__(self, address: str, connection: psycopg.Connection) -> None:
        self.address, self.connection = address, connection
        self.run("CREATE EXTENSION vector")
        self.run(
            'CREATE TABLE "Documents" (id text PRIMARY KEY, vector vector(24), text text, n serial)'
        )
        rows = zip(MADE.ids, MADE.old, strict=True)
        with self.connection.transaction(), self.connection.cursor() as cursor:
            cursor.executemany(PUT, [self.values(*row) for row in rows])

    def run(self, query: LiteralString, *values: object) -> list[tuple[object, ...]]:
        cursor = self.connection.execute(query, values)
        return cursor.fetchall() if cursor.description else []

    def values(self, name: str, vector: Vectors) -> tuple[str, str, str]:
        return name, str(vector.tolist()), f"on {name}"

    def put(self, name: str, vector: Vectors) -> None:
        self.run(PUT, *self.values(name, vector))

    def delete(self, name: str) -> None:
        self.run('DELETE FROM "Documents" WHERE id = %s', name)

    def names(self) -> list[str]:
        return [str(name) for (name,) in self.run('SELECT id FROM "Documents"')]

    def touch(self, name: str) -> None:
        """Change what is no vector."""
        self.run('UPDATE "Documents" SET text = %s WHERE id = %s', "changed", name)

    def open(self, vector: str | None = None) -> Source:
        return open_source(f"{self.address}#Documents", vector=vector)

    def search(self) -> Searchable:
        return open_searchable(f"{self.address}#Documents")


class _InTables(PgvectorSource):
    """Its new vectors go into tables of their own."""

    def open_target(self, target: Target) -> TargetVectors:
        return super().open_target(replace(target, name=f"table:{target.name}"))

    def drop_new_vectors(self, name: str) -> bool:
        return super().drop_new_vectors(f"table:{name}")


class PgvectorTable(Pgvector):
    """The same table, whose new vectors go into others beside it."""

    def open(self, vector: str | None = None) -> Source:
        if vector is not None:
            return open_source(f"{self.address}#{vector}")
        return _InTables(self.address, "Documents")


class Qdrant:
    """A collection with one named vector, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = QdrantClient(path=str(folder), force_disable_check_same_thread=True)
        vectors = {"vector": models.VectorParams(size=24, distance=models.Distance.COSINE)}
        self.client.create_collection("docs", vectors_config=vectors)
        self.client.upsert(
            "docs", [self._point(*one) for one in zip(MADE.ids, MADE.old, strict=True)]
        )
        # From here on, as others share the folder.
        qdrant._FOLDERS[folder.resolve()] = self.client

    def _point(self, name: str, vector: Vectors) -> models.PointStruct:
        payload = {"text": f"on {name}"}
        return models.PointStruct(id=name, vector={"vector": vector.tolist()}, payload=payload)

    def put(self, name: str, vector: Vectors) -> None:
        self.client.upsert("docs", [self._point(name, vector)])

    def delete(self, name: str) -> None:
        self.client.delete("docs", [name])

    def names(self) -> list[str]:
        return [str(point.id) for point in self.client.scroll("docs", limit=1000)[0]]

    def touch(self, name: str) -> None:
        self.client.set_payload("docs", {"text": "changed"}, points=[name])

    def open(self, vector: str | None = None) -> Source:
        return open_source(f"qdrant:{self.folder}#docs", vector=vector)

    def search(self) -> Searchable:
        return open_searchable(f"qdrant:{self.folder}#docs")


class Lance:
    """A table of LanceDB that an application writes to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = lancedb.connect(folder, read_consistency_interval=timedelta(0))
        self.table = self.database.create_table("docs", self._rows(MADE.ids, MADE.old))

    def _rows(self, names: list[str], vectors: Vectors) -> pa.Table:
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
        texts = [f"on {name}" for name in names]
        return pa.table({"id": names, "vector": column, "text": texts})

    def put(self, name: str, vector: Vectors) -> None:
        upsert = self.table.merge_insert("id").when_matched_update_all()
        upsert.when_not_matched_insert_all().execute(self._rows([name], vector[None]))

    def delete(self, name: str) -> None:
        self.table.delete(f"id = '{name}'")

    def names(self) -> list[str]:
        return sorted(self.table.search().select(["id"]).to_arrow()["id"].to_pylist())

    def touch(self, name: str) -> None:
        self.table.update(where=f"id = '{name}'", values={"text": "changed"})

    def open(self, vector: str | None = None) -> Source:
        return open_source(f"lancedb:{self.folder}#docs", vector=vector)

    def search(self) -> Searchable:
        return open_searchable(f"lancedb:{self.folder}#docs")


class SqliteVec:
    """A virtual table of sqlite-vec that an application writes to, with columns of all kinds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection = apsw.Connection(str(path))
        self.connection.set_busy_timeout(10_000)
        self.connection.enable_load_extension(True)
        sqlite_vec.load(self.connection)
        self.connection.execute(
            "CREATE VIRTUAL TABLE docs USING vec0(id text primary key, kind text partition key, "
            "vector float[24] distance_metric=cosine, bits bit[8], number integer, +text text)"
        )
        self.connection.execute("BEGIN")
        for row in zip(MADE.ids, MADE.old, strict=True):
            self.put(*row)
        self.connection.execute("COMMIT")

    def put(self, name: str, vector: Vectors, table: str = "docs") -> None:
        self.connection.execute(f"DELETE FROM {table} WHERE id = ?", (name,))
        self.connection.execute(
            f"INSERT INTO {table} (id, kind, vector, bits, number, text) "
            "VALUES (?, ?, ?, vec_bit(x'0f'), ?, ?)",
            (name, name[-1], vector.astype("<f4").tobytes(), len(name), f"on {name}"),
        )

    def delete(self, name: str) -> None:
        self.connection.execute("DELETE FROM docs WHERE id = ?", (name,))

    def names(self) -> list[str]:
        return sorted(name for (name,) in self.connection.execute("SELECT id FROM docs"))

    def touch(self, name: str) -> None:
        self.connection.execute("UPDATE docs SET text = 'changed' WHERE id = ?", (name,))

    def open(self, vector: str | None = None) -> Source:
        return open_source(f"sqlite:{self.path}#{vector or 'docs'}")

    def search(self) -> Searchable:
        return open_searchable(f"sqlite:{self.path}#docs")


@contextmanager
def opened(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Store]:
    """The store of a kind, filled."""
    if kind in ("pgvector", "pgvector-table"):
        server: Server = request.getfixturevalue("postgres")
        with server.connected() as (address, connection):
            yield (Pgvector if kind == "pgvector" else PgvectorTable)(address, connection)
    elif kind == "qdrant":
        # In memory, where there is such a folder: it commits each point to the disk on its own.
        memory = Path("/dev/shm")
        place = memory if memory.is_dir() else folder.parent
        with TemporaryDirectory(dir=place) as short:
            made = Qdrant(Path(short))
            yield made
            made.client.close()
    elif kind == "lancedb":
        yield Lance(folder)
    elif kind == "sqlite-vec":
        made_here = SqliteVec(folder.with_suffix(".db"))
        yield made_here
        made_here.connection.close()
    elif kind in ("chroma", "milvus-lite", "milvus"):
        yield from _copied(kind, request, folder)
    else:
        yield (Parquet if kind == "parquet" else Arrays)(folder)


def _copied(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Store]:
    """Those beside whose vectors a copy is made; an engine is started once for all."""
    made: Chroma | Milvus
    if kind == "chroma":
        made = Chroma(request.getfixturevalue("chroma_address"), MADE)
    elif kind == "milvus":
        made = Milvus(request.getfixturevalue("milvus_address").removeprefix("milvus+"), MADE)
    else:
        pytest.importorskip("milvus_lite", reason="milvus-lite is not installed")
        made = Milvus(str(folder.with_suffix(".db")), MADE)
    yield made
    made.close()
