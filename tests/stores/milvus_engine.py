"""Milvus behind the face of tests/stores/conftest.py; apart, for it needs the extra `milvus`."""

from nobackfill.gallery.gallery_store import GalleryStore, Searcher
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.plugins.milvus import candidates
from nobackfill.plugins.milvus.candidates import Candidates
from nobackfill.plugins.milvus.collections import Collections
from nobackfill.plugins.milvus.columns import collection_name, database_id
from nobackfill.plugins.milvus.feeder import Feeder
from nobackfill.plugins.milvus.gallery import MilvusGallery
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from tests.stores.conftest import PostgresqlEngine
from tests.support.postgres import Server
from tests.support.postgresql_searcher import PostgresqlSearcher


class MilvusEngine(PostgresqlEngine):
    """A database for a test, and its collections in one Milvus."""

    def __init__(self, server: Server, address: str) -> None:
        super().__init__(server)
        self.collections = Collections(address)
        self.closing.callback(self.collections.close)
        self.known = database_id(self.galleries.database)
        self.candidates = Candidates(self.collections, self.known)
        self.feeder = Feeder(self.galleries.database, self.collections, self.known)

    def create(self, spec: SpaceSpec) -> GalleryStore:
        made = super().create(spec)
        assert isinstance(made, PostgresqlGallery)
        return MilvusGallery(made.database, made.number)

    def open_again(self, store: GalleryStore) -> GalleryStore:
        found = super().open_again(store)
        assert isinstance(found, PostgresqlGallery)
        return MilvusGallery(found.database, found.number)

    def feed(self, store: GalleryStore) -> None:
        assert isinstance(store, PostgresqlGallery)
        while self.feeder.feed(store.schema):
            pass

    def searcher(self, store: GalleryStore, space: str) -> Searcher:
        """Once Milvus knows all that is there, where it is asked at all."""
        assert isinstance(store, PostgresqlGallery)
        if store.count() > candidates.SMALL:
            self.feed(store)
        return self.unfed(store, space)

    def unfed(self, store: PostgresqlGallery, space: str) -> Searcher:
        return PostgresqlSearcher(store.database, store.schema, store.space(space), self.candidates)

    def collection(self, store: GalleryStore, space: str) -> str:
        assert isinstance(store, PostgresqlGallery)
        return collection_name(self.known, store.schema, store.space(space).table_number)
