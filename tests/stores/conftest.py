"""Each engine behind the same face: a test that asks for `engine` runs on every one of them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nobackfill.gallery.filter_engine import FilterEngine
from nobackfill.gallery.filters import StoreFilter
from nobackfill.gallery.gallery_store import GalleryStore, Searcher
from nobackfill.gallery.search.view import LiveView
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery, SqliteSearcher
from nobackfill.server.stores.postgresql import schema
from nobackfill.server.stores.postgresql.database import Database
from nobackfill.server.stores.postgresql.gallery import PostgresqlGalleries, PostgresqlGallery
from nobackfill.server.stores.postgresql.search import PostgresqlFiltering
from tests.gallery.making import spec
from tests.support.postgresql_searcher import PostgresqlSearcher

if TYPE_CHECKING:
    from tests.support.postgres import Server


class SqliteEngine:
    """A file for each gallery."""

    holds_any_dimension = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.closing = ExitStack()

    def create(self, spec: SpaceSpec) -> GalleryStore:
        self._count += 1
        folder = self._folder / f"g{self._count}"
        folder.mkdir(parents=True)
        return self._kept(SqliteGallery.create(folder / "gallery.sqlite", spec))

    def _kept(self, store: SqliteGallery) -> SqliteGallery:
        self.closing.callback(store.close)
        return store

    def open_again(self, store: GalleryStore) -> GalleryStore:
        """As another process, later, would."""
        assert isinstance(store, SqliteGallery)
        store.close()
        return self._kept(SqliteGallery.open(store.path))

    def filtering(self, store: GalleryStore) -> StoreFilter:
        assert isinstance(store, SqliteGallery)
        return FilterEngine(store)

    def searcher(self, store: GalleryStore, space: str) -> Searcher:
        assert isinstance(store, SqliteGallery)
        return SqliteSearcher(LiveView(store, space), FilterEngine(store))


class PostgresqlEngine:
    """A database for a test."""

    holds_any_dimension = False

    def __init__(self, server: "Server") -> None:
        self.closing = ExitStack()
        self.url = self.closing.enter_context(server.database())
        self._count = 0
        self.galleries = PostgresqlGalleries(self._opened())

    def _opened(self) -> Database:
        database = Database(self.url)
        database.open(schema.prepare)
        self.closing.callback(database.close)
        return database

    def create(self, spec: SpaceSpec) -> GalleryStore:
        self._count += 1
        return self.galleries.create(f"g{self._count}", [spec], {})

    def open_again(self, store: GalleryStore) -> GalleryStore:
        assert isinstance(store, PostgresqlGallery)
        return PostgresqlGallery(self._opened(), store.number)

    def filtering(self, store: GalleryStore) -> StoreFilter:
        assert isinstance(store, PostgresqlGallery)
        return PostgresqlFiltering(store.database, store.schema)

    def searcher(self, store: GalleryStore, space: str) -> Searcher:
        assert isinstance(store, PostgresqlGallery)
        return PostgresqlSearcher(store.database, store.schema, store.space(space))


Engine = SqliteEngine | PostgresqlEngine


@pytest.fixture
def empty(postgres: "Server") -> Iterator[PostgresqlGallery]:
    """A gallery of one space, alone in its database."""
    with postgres.database() as url:
        database = Database(url, most_connections=4)
        database.open(schema.prepare)
        yield PostgresqlGalleries(database).create("g", [spec()], {})
        database.close()


@pytest.fixture(params=["sqlite", "postgresql", pytest.param("milvus", marks=pytest.mark.scale)])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made: Engine
    if request.param == "milvus":
        yield request.getfixturevalue("milvus_engine")
        return
    if request.param == "sqlite":
        made = SqliteEngine(tmp_path)
    else:
        made = PostgresqlEngine(request.getfixturevalue("postgres"))
    with made.closing:
        yield made
