"""Tells a Milvus what changed in the database: a thread of each gateway, one of them a gallery."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import structlog

from nobackfill.errors import BusyError, NobackfillError, NotFoundError, UnavailableError
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.gallery.store import Change
from nobackfill.plugins.milvus import journal
from nobackfill.plugins.milvus.candidates import too_many_pending
from nobackfill.plugins.milvus.collections import Collections
from nobackfill.plugins.milvus.columns import columns_of, name_of, prefix_of
from nobackfill.server.stores.postgresql.database import Connection, Database, run
from nobackfill.server.stores.postgresql.rows import among, copy_out, facets_of, read_spaces
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
# A switch waits so long for a Milvus that does not answer: it may be restarted.
_AWAY_S = 600.0


class Feeder:
    """From `start` to `close`; `feed` may be called by others as well."""

    def __init__(self, database: Database, collections: Collections, known: str) -> None:
        self._database = database
        self._collections = collections
        self._known = known
        # Collections that were loaded since the start.
        self._loaded: set[str] = set()
        # Labels that were told since a collection was sealed; with its gallery.
        self._unsealed: Counter[tuple[str, str]] = Counter()
        # Galleries of which more is pending than was told last.
        self._behind: set[str] = set()
        # Galleries that could not be told, which was said.
        self._failing: set[str] = set()
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="milvus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Once the call to Milvus that it is in has ended, which has a deadline. Twice is
        harmless."""
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
        """Until Milvus knows all of a space but what a search compares beside it, and has a graph
        of it: it answers before, but compares what it has one by one. `between` is called again and
        again, and may raise. Raises UnavailableError where Milvus, or the database, does not answer
        for _AWAY_S."""
        name = name_of(self._known, schema, info.number)
        sealed, answered = False, time.monotonic()
        while True:
            between()
            rest = True
            try:
                if too_many_pending(self._database, schema, info):
                    sealed = False
                    # Another gateway may be telling it.
                    rest = not self.feed(schema)
                elif not sealed:
                    self._collections.seal(name)
                    sealed, rest = True, False
                elif self._collections.has_graph(name):
                    return
                answered = time.monotonic()
            except (BusyError, UnavailableError):
                if time.monotonic() - answered > _AWAY_S:
                    raise
            if rest:
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
            self._unsealed[schema, name] += len(there)
        self._collections.delete(name, np.setdiff1d(labels, there, assume_unique=True))

    def _run(self) -> None:
        away = False
        while not self._stopping.is_set():
            left = 0
            try:
                left = self._turn()
                away = False
            except NotFoundError:
                # A gallery was deleted meanwhile.
                continue
            except NobackfillError as error:
                if not away and not self._stopping.is_set():
                    log.warning("Milvus is not told what changed", error=str(error))
                away = True
            except Exception as error:
                # Without this thread Milvus is told nothing any more.
                log.exception("unforeseen, going on", thread="milvus", error=type(error).__name__)
            if not left:
                self._woken.clear()
                self._woken.wait(_SWEEP_S)

    def _turn(self) -> int:
        """A sweep, then batches until nothing is pending or another sweep is due; how many labels
        the last ones were."""
        schemas = self._sweep()
        end = time.monotonic() + _SWEEP_S
        while (told := self._round(schemas)) and time.monotonic() < end:
            pass
        self._seal()
        return told

    def _round(self, schemas: Sequence[str]) -> int:
        """A batch of each gallery; how many labels were told."""
        told = 0
        for schema in schemas:
            with self._alone(schema):
                batch = self.feed(schema)
                told += batch
                (self._behind.add if batch >= _BATCH else self._behind.discard)(schema)
        return told

    def _seal(self) -> None:
        for (schema, name), told in [*self._unsealed.items()]:
            # What Milvus is far behind with would become many small graphs.
            if told >= _SEALED and schema not in self._behind:
                with self._alone(name):
                    del self._unsealed[schema, name]
                    self._collections.seal(name)

    @contextmanager
    def _alone(self, which: str) -> Iterator[None]:
        """What is refused of a gallery or a collection holds up no other one; where Milvus answers
        nobody, or the thread is to end, that is raised."""
        if self._stopping.is_set():
            raise UnavailableError("the gateway ends")
        try:
            yield
        except NotFoundError:
            # It was deleted meanwhile.
            return
        except NobackfillError as error:
            if which not in self._failing:
                log.warning("Milvus is not told what changed", which=which, error=str(error))
            self._failing.add(which)
            self._collections.names()
        else:
            self._failing.discard(which)

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
                with self._alone(name):
                    self._collections.drop(name)
        self._loaded &= there
        for name in (set(wanted) & there) - self._loaded:
            with self._alone(name):
                self._collections.make(name, wanted[name][1].spec)
                self._loaded.add(name)
        for name in set(wanted) - there:
            with self._alone(name):
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
