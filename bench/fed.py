"""A gallery in PostgreSQL that a real Milvus searches, filled and told as a gateway does it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from bench.galleries import PUT_ROWS
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.gallery.store import NewVectors
from nobackfill.plugins.milvus import journal
from nobackfill.plugins.milvus.candidates import Candidates
from nobackfill.plugins.milvus.collections import Collections
from nobackfill.plugins.milvus.columns import collection_name, database_id
from nobackfill.plugins.milvus.gallery import InMilvus, MilvusGallery, wait_for_milvus_recall
from nobackfill.server.stores.postgresql import schema
from nobackfill.server.stores.postgresql.database import Database
from nobackfill.server.stores.postgresql.gallery import PostgresqlGalleries
from nobackfill.vectors import Vectors
from tests.support import milvus, postgres
from tests.support.postgresql_searcher import PostgresqlSearcher

_CONNECTIONS = 40
_LOOK_S = 0.05


class FedGallery:
    """One gallery; a thread tells Milvus what changes."""

    def __init__(self, database: Database, address: str, folder: Path, spec: SpaceSpec) -> None:
        self.collections = Collections(address)
        self._home = InMilvus(database, folder, self.collections)
        self._home.create("g", [spec], {})
        self.store = MilvusGallery(database, PostgresqlGalleries(database).open("g").number)
        self._known = database_id(database)
        self.candidates = Candidates(self.collections, self._known)
        self.store.subscribe(self._home.feeder.wake)
        self._home.feeder.start()

    def close(self) -> None:
        self._home.feeder.close()
        self.collections.close()

    def put(
        self, space: str, vectors: Vectors, side: Vectors | None,
        metadata: Sequence[Mapping[str, Any]],
    ) -> None:  # fmt: skip
        """Things, by number."""
        for start in range(0, len(vectors), PUT_ROWS):
            rows = slice(start, start + PUT_ROWS)
            some = metadata[rows]
            new = NewVectors(space, vectors[rows], None if side is None else side[rows])
            self.store.put([str(start + n) for n in range(len(some))], [new], metadata=some)

    def wait_until_told(self, info: SpaceInfo) -> None:
        """Wait until Milvus knows all of a space."""
        number = info.table_number
        while len(
            self.store.database.read(
                lambda connection: journal.pending_labels(connection, self.store.schema, number, 0)
            )
        ):
            time.sleep(_LOOK_S)

    def wait_until_ready(self, info: SpaceInfo) -> None:
        """Wait until a gateway would switch to a space."""
        self._home.feeder.wait_until_fed(self.store.schema, info, lambda: None)
        wait_for_milvus_recall(self.store, info, self.candidates, lambda: 0, lambda: None)

    def open_searcher(self, info: SpaceInfo) -> PostgresqlSearcher:
        return PostgresqlSearcher(self.store.database, self.store.schema, info, self.candidates)

    def search_milvus_alone(self, info: SpaceInfo) -> Callable[..., list[int]]:
        """Milvus alone: query, k, ef, expression and moment as Collections.search has them."""
        name = collection_name(self._known, self.store.schema, info.table_number)
        return lambda query, *rest: self.collections.search(name, info.spec, query, *rest)


@contextmanager
def open_fed_gallery(folder: Path, spec: SpaceSpec) -> Iterator[FedGallery]:
    """An empty gallery, to the end of the block. Raises UnavailableError where no Milvus starts."""
    with ExitStack() as stack:
        address = stack.enter_context(milvus.running())
        server = stack.enter_context(postgres.running({"shared_buffers": "512MB"}))
        url = stack.enter_context(server.database())
        database = stack.enter_context(closing(Database(url, _CONNECTIONS)))
        database.open(schema.prepare)
        yield stack.enter_context(closing(FedGallery(database, address, folder, spec)))
