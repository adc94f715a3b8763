"""Stores with MADE's items, one of each kind, and what others do to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import LiteralString, Protocol

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.sources.opening import open_searchable, open_source
from nobackfill.adopt.sources.source import Searchable, Source
from nobackfill.vectors import Vectors
from tests.adopt.made import world, write_parquet
from tests.support.postgres import Server

MADE = world(230)


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

    def open(self, vector: str | None = None) -> Source:
        return open_source(f"{self.address}#Documents", vector=vector)

    def search(self) -> Searchable:
        return open_searchable(f"{self.address}#Documents")


@contextmanager
def opened(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Store]:
    """The store of a kind, filled."""
    if kind == "pgvector":
        server: Server = request.getfixturevalue("postgres")
        with (
            server.database() as address,
            psycopg.connect(address, autocommit=True) as connection,
        ):
            yield Pgvector(address, connection)
    else:
        yield (Parquet if kind == "parquet" else Arrays)(folder)
