"""Tells a Milvus what changed in the database: a thread of each gateway, one of them a gallery."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import structlog

from nobackfill.errors import NobackfillError, NotFoundError
from nobackfill.gallery.change import Change
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.server.stores.milvus import journal
from nobackfill.server.stores.milvus.collections import Collections
from nobackfill.server.stores.milvus.columns import columns_of
from nobackfill.server.stores.milvus.names import name_of, prefix_of
from nobackfill.server.stores.postgresql.bulk import among, copy_out
from nobackfill.server.stores.postgresql.database import Connection, Database, run
from nobackfill.server.stores.postgresql.rows import facets_of, read_spaces
from nobackfill.server.stores.postgresql.schema import schema_of, table_of

log = structlog.get_logger("server.stores")

# Labels told in one transaction.
_BATCH = 4_000
# How often all galleries are looked at: for changes by other processes, and what is left over.
_SWEEP_S = 2.0
# After so many labels of a space, and when nothing is pending any more, a graph is made of them.
# Milvus compares as many within 5 ms; of fewer it would have many small graphs to put together.
_SEALED = 20_000
# How often it is asked for the graph.
_LOOK_S = 0.5


class Feeder:
    """From `start` to `close`; `feed` may be called by others as well."""

    def __init__(self, database: Database, collections: Collections, known: str) -> None:
        self._database = database
        self._collections = collections
        self._known = known
        # Collections that were loaded since the start.
        self._loaded: set[str] = set()
        # Labels that were told since a collection was sealed.
        self._unsealed: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="milvus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Twice is harmless."""
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self, _: Change) -> None:
        """A listener for GalleryStore.subscribe."""
        self._woken.set()

    def feed(self, schema: str) -> int:
        """Tell a batch of a gallery; how many labels, 0 where nothing is pending or another gateway
        tells it just now. Raises UnavailableError, and what the database raises."""

        def work(connection: Connection) -> int:
            if not journal.alone(connection, schema):
                return 0
            infos = {info.number: info for info in read_spaces(connection, schema)}
            told = 0
            for number, labels in journal.take(connection, schema, _BATCH):
                told += len(labels)
                if number in infos:
                    self._tell(connection, schema, infos[number], labels)
            return told

        return self._database.write(work)

    def settle(self, schema: str, info: SpaceInfo, between: Callable[[], None]) -> None:
        """Until Milvus knows all of a space and has a graph of it: it answers before, but compares
        what it has one by one. `between` is called again and again, and may raise. Raises
        UnavailableError."""

        def pending(connection: Connection) -> bool:
            return bool(len(journal.pending(connection, schema, info.number, 0)))

        while self._database.read(pending):
            between()
            # Another gateway may be telling it.
            if not self.feed(schema):
                time.sleep(_LOOK_S)
        name = name_of(self._known, schema, info.number)
        self._collections.seal(name)
        while not self._collections.has_graph(name):
            between()
            time.sleep(_LOOK_S)

    def _tell(
        self, connection: Connection, schema: str, info: SpaceInfo, labels: np.ndarray
    ) -> None:
        name = name_of(self._known, schema, info.number)
        known = journal.told(connection, schema, info.number) is not None
        if known and not self._collections.exists(name):
            # Lost a moment ago: that it is there again must not hide it.
            journal.note_all(connection, schema, info)
        self._collections.make(name, info.spec)
        table = table_of(schema, info.number)
        there, vectors, _ = copy_out(connection, table, among(labels), info.spec.dim)
        facets = facets_of(connection, schema, there)
        columns = [columns_of(facets.get(label, {})) for label in there.tolist()]
        moment = self._collections.upsert(name, there, vectors, columns)
        if moment:
            journal.tell(connection, schema, info.number, moment)
            self._unsealed[name] += len(there)
        self._collections.delete(name, np.setdiff1d(labels, there, assume_unique=True))

    def _run(self) -> None:
        away = False
        while not self._stopping.is_set():
            try:
                schemas = self._sweep()
                while not self._stopping.is_set() and self._round(schemas):
                    pass
                self._seal()
                away = False
            except NotFoundError:
                # A gallery was deleted meanwhile.
                continue
            except NobackfillError as error:
                if not away:
                    log.warning("Milvus is not told what changed", error=str(error))
                away = True
            self._woken.clear()
            self._woken.wait(_SWEEP_S)

    def _round(self, schemas: Sequence[str]) -> int:
        """A batch of each gallery; how many labels were told."""
        return sum([self.feed(schema) for schema in schemas])

    def _seal(self) -> None:
        for name, told in [*self._unsealed.items()]:
            if told >= _SEALED:
                del self._unsealed[name]
                self._collections.seal(name)

    def _sweep(self) -> list[str]:
        """Galleries with something pending. All of a space whose
        collection is missing is; collections of spaces that are gone are dropped."""
        there = set(self._collections.names())
        spaces = self._database.read(_spaces)
        wanted = {
            name_of(self._known, schema, info.number): (schema, info)
            for schema, infos in spaces.items()
            for info in infos
        }
        for name in there - set(wanted):
            if name.startswith(prefix_of(self._known)):
                self._collections.drop(name)
        self._loaded &= there
        for name in (set(wanted) & there) - self._loaded:
            self._collections.make(name, wanted[name][1].spec)
            self._loaded.add(name)
        for name in set(wanted) - there:
            self._note_again(*wanted[name])
        return self._database.read(lambda connection: journal.waiting(connection, [*spaces]))

    def _note_again(self, schema: str, info: SpaceInfo) -> None:
        """All of a space is pending, whose collection is made once that is durable."""

        def work(connection: Connection) -> None:
            if journal.alone(connection, schema):
                journal.note_all(connection, schema, info)

        self._database.write(work)


def _spaces(connection: Connection) -> Mapping[str, list[SpaceInfo]]:
    """Spaces of the galleries that have a journal."""
    numbers = run(connection, "SELECT number FROM nobackfill.galleries ORDER BY number").fetchall()
    schemas = [schema_of(number) for (number,) in numbers]
    return {
        schema: read_spaces(connection, schema)
        for schema in schemas
        if journal.kept(connection, schema)
    }
