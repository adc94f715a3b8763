"""Galleries in PostgreSQL whose vectors a Milvus searches."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nobackfill.gallery.spec import SpaceSpec
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.hosted_database import HostedInDatabase, InDatabase
from nobackfill.server.stores.milvus import candidates as limits
from nobackfill.server.stores.milvus.candidates import Candidates
from nobackfill.server.stores.milvus.collections import Collections
from nobackfill.server.stores.milvus.columns import database_id
from nobackfill.server.stores.milvus.feeder import Feeder
from nobackfill.server.stores.milvus.gallery import MilvusGallery, wait_for_milvus
from nobackfill.server.stores.postgresql.database import Database


class HostedInMilvus(HostedInDatabase):
    """One gallery."""

    def __init__(
        self, name: str, folder: Path, store: MilvusGallery, candidates: Candidates, feeder: Feeder
    ) -> None:
        super().__init__(name, folder, store, candidates)
        self._feeder = feeder
        self._near = candidates
        store.subscribe(feeder.wake)

    def make_ready(self, space: str, between: Callable[[], None]) -> None:
        """Wait until Milvus knows the space, has a graph of it, and answers well."""
        info = self._gallery.space(space)
        self._gallery.look_ahead(space)
        if self._gallery.count(space) > limits.SMALL:
            self._feeder.settle(self._gallery.schema, info, between)
        wait_for_milvus(
            self._gallery,
            info,
            self._near,
            lambda: self._feeder.feed(self._gallery.schema),
            between,
        )


class InMilvus(InDatabase):
    """What is said of each method: Home."""

    def __init__(self, database: Database, scratch: Path, collections: Collections) -> None:
        super().__init__(database, scratch)
        known = database_id(database)
        self._candidates = Candidates(collections, known)
        self.feeder = Feeder(database, collections, known)

    def open(self, name: str) -> Hosted:
        found = self._galleries.open(name)
        gallery = MilvusGallery(found.database, found.number)
        return HostedInMilvus(name, self._scratch / name, gallery, self._candidates, self.feeder)

    def create(self, name: str, specs: Sequence[SpaceSpec], state: Mapping[str, Any]) -> None:
        made = self._galleries.create(name, specs, state)
        MilvusGallery.begun(made)
