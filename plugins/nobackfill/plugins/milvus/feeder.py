"""Feed changes of galleries in PostgreSQL to Milvus: one thread per gateway, one per gallery."""

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
from nobackfill.plugins.milvus.columns import collection_name, collection_prefix, columns_of
from nobackfill.server.stores.postgresql.database import Connection, Database, execute
from nobackfill.server.stores.postgresql.rows import (
    copy_out,
    labels_condition,
    read_facets,
    read_spaces,
)
from nobackfill.server.stores.postgresql.schema import schema_name, table_name

log = structlog.get_logger("server.stores")

# Labels per transaction.
_BATCH = 4_000
# How often all galleries are checked for changes of other processes and for leftovers.
_SWEEP_S = 2.0
# After this many labels of a space, and when nothing is pending, its segment is sealed and indexed.
# Milvus compares this many in 5 ms without a graph; smaller segments would give many small graphs.
_SEGMENT = 20_000
# How often `settle` checks for the graph.
_CHECK_S = 0.5
# How long a switch waits for a Milvus that does not answer, because it may be restarting.
_LONGEST_OUTAGE_S = 600.0


class Feeder:
    """Sends pending changes of all galleries to Milvus on a thread, from `start` to `close`.

    Several gateways may feed the same galleries: one transaction of one gateway at a time.

    Args:
        database: the database of the galleries.
        collections: the client of Milvus.
        database_id: the id of the database, from nobackfill.plugins.milvus.columns.database_id.
    """

    def __init__(self, database: Database, collections: Collections, database_id: str) -> None:
        self._database = database
        self._collections = collections
        self._database_id = database_id
        # Collections that this process has loaded.
        self._loaded: set[str] = set()
        # Labels that were fed since a collection was sealed, by gallery and collection.
        self._unsealed: Counter[tuple[str, str]] = Counter()
        # Galleries with more pending labels than the last batch held.
        self._lagging: set[str] = set()
        # Galleries whose failure was logged.
        self._failing: set[str] = set()
        self._stopping = threading.Event()
        self._wake_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="milvus", daemon=True)

    def start(self) -> None:
        """Start the thread, which logs its errors and tries again every 2 s.

        Raises:
            RuntimeError: it was started before.
        """
        self._thread.start()

    def close(self) -> None:
        """Stop the thread after its present call to Milvus, which has a deadline.

        A second call, or one without `start`, does nothing. It may block for a minute, which is the
        longest deadline of a call.
        """
        self._stopping.set()
        self._wake_event.set()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self, _: Change) -> None:
        """Wake the thread after a change; a listener for GalleryStore.subscribe.

        Returns at once, and does nothing visible if no thread runs. The change itself is ignored.
        """
        self._wake_event.set()

    def feed(self, schema: str) -> int:
        """Send up to 4,000 pending labels of a gallery to Milvus, in one transaction.

        It creates and loads missing collections. A collection that was lost makes all vectors of
        its space pending again. Any thread may call it.

        Args:
            schema: the gallery's schema; the gallery must have a journal.

        Returns:
            How many labels are no longer pending, with those of dropped spaces, which are not sent.
            0 if none is pending, or another thread or gateway feeds the gallery.

        Raises:
            UnavailableError: Milvus or the database does not answer; the labels stay pending,
                though Milvus may have some already.
            NotFoundError: the gallery was deleted.
            BusyError: the database could not lock the rows in time, or refuses writes.
            CannotWriteError: the database cannot write.
            ConfigurationError, DamagedError: the database refuses a statement, or is damaged.
        """

        def work(connection: Connection) -> int:
            if not journal.try_lock(connection, schema):
                return 0
            infos = {info.table_number: info for info in read_spaces(connection, schema)}
            fed = 0
            for number, labels in journal.take_pending(connection, schema, _BATCH):
                fed += len(labels)
                if number in infos:
                    self._send_vectors(connection, schema, infos[number], labels)
            return fed

        return self._database.write(work)

    def wait_until_fed(self, schema: str, info: SpaceInfo, check_stop: Callable[[], None]) -> None:
        """Wait until Milvus has the vectors of a space and a graph of them; feed them if necessary.

        Milvus can answer before, but without a graph it compares vectors one by one. Pending labels
        that a search compares by itself are allowed. It has no end of its own while Milvus answers.
        It works on the caller's thread, also without `start`.

        Args:
            schema: the gallery's schema.
            info: the space.
            check_stop: called repeatedly while waiting; it may raise to stop.

        Raises:
            UnavailableError: Milvus or the database does not answer for ten minutes.
            BusyError: the database could not lock the rows for ten minutes.
            NotFoundError: the gallery was deleted meanwhile.
            CannotWriteError: the database cannot write.
            ConfigurationError, DamagedError: the database refuses a statement, or is damaged.
            Exception: any error of `check_stop`.
        """
        name = collection_name(self._database_id, schema, info.table_number)
        sealed, last_answer = False, time.monotonic()
        while True:
            check_stop()
            idle = True
            try:
                if too_many_pending(self._database, schema, info):
                    sealed = False
                    # If 0 labels were fed, another gateway may be feeding the gallery.
                    idle = not self.feed(schema)
                elif not sealed:
                    self._collections.seal(name)
                    sealed, idle = True, False
                elif self._collections.has_graph(name):
                    return
                last_answer = time.monotonic()
            except (BusyError, UnavailableError):
                if time.monotonic() - last_answer > _LONGEST_OUTAGE_S:
                    raise
            if idle:
                time.sleep(_CHECK_S)

    def _send_vectors(
        self, connection: Connection, schema: str, info: SpaceInfo, labels: np.ndarray
    ) -> None:
        name = collection_name(self._database_id, schema, info.table_number)
        was_fed = journal.fed_until(connection, schema, info.table_number) is not None
        if was_fed and not self._collections.exists(name):
            # The collection was lost: mark all of the space as pending before creating it again.
            journal.mark_all_pending(connection, schema, info)
        self._collections.make(name, info.spec)
        table = table_name(schema, info.table_number)
        present, vectors, _ = copy_out(connection, table, labels_condition(labels), info.spec.dim)
        facets = read_facets(connection, schema, present)
        columns = [columns_of(facets.get(label, {})) for label in present.tolist()]
        moment = self._collections.upsert(name, present, vectors, columns)
        if moment:
            journal.set_fed_until(connection, schema, info.table_number, moment)
            self._unsealed[schema, name] += len(present)
        self._collections.delete(name, np.setdiff1d(labels, present, assume_unique=True))

    def _run(self) -> None:
        is_down = False
        while not self._stopping.is_set():
            remaining = 0
            try:
                remaining = self._sweep_and_feed()
                is_down = False
            except NotFoundError:
                # A gallery was deleted since.
                continue
            except NobackfillError as error:
                if not is_down and not self._stopping.is_set():
                    log.warning(
                        "changes of galleries do not reach Milvus; the gateway tries again every 2 "
                        "s",
                        error=str(error),
                    )
                is_down = True
            except Exception as error:
                # The thread must survive: without it, Milvus gets no changes any more.
                name = type(error).__name__
                log.exception("unexpected error, going on", thread="milvus", error=name)
            if not remaining:
                self._wake_event.clear()
                self._wake_event.wait(_SWEEP_S)

    def _sweep_and_feed(self) -> int:
        """Sweep, then feed until nothing is pending or the next sweep is due.

        Returns:
            The number of labels of the last round.
        """
        schemas = self._sweep_collections()
        end = time.monotonic() + _SWEEP_S
        while (fed := self._feed_each_gallery(schemas)) and time.monotonic() < end:
            pass
        self._seal_full_segments()
        return fed

    def _feed_each_gallery(self, schemas: Sequence[str]) -> int:
        """Feed a batch of each gallery; return the number of labels."""
        fed = 0
        for schema in schemas:
            with self._isolate(schema):
                batch = self.feed(schema)
                fed += batch
                (self._lagging.add if batch >= _BATCH else self._lagging.discard)(schema)
        return fed

    def _seal_full_segments(self) -> None:
        for (schema, name), fed in [*self._unsealed.items()]:
            # Sealing while far behind would make many small graphs.
            if fed >= _SEGMENT and schema not in self._lagging:
                with self._isolate(name):
                    del self._unsealed[schema, name]
                    self._collections.seal(name)

    @contextmanager
    def _isolate(self, which: str) -> Iterator[None]:
        """Log an error of one gallery or collection, so that it does not block the others.

        Raises:
            UnavailableError: Milvus answers no call at all, or the thread must stop.
        """
        if self._stopping.is_set():
            raise UnavailableError("the gateway is stopping, so that Milvus gets no more changes")
        try:
            yield
        except NotFoundError:
            # The gallery was deleted since.
            return
        except NobackfillError as error:
            if which not in self._failing:
                log.warning(
                    "changes of one gallery do not reach Milvus; the gateway tries again every 2 s",
                    which=which,
                    error=str(error),
                )
            self._failing.add(which)
            self._collections.names()
        else:
            self._failing.discard(which)

    def _sweep_collections(self) -> list[str]:
        """Compare Milvus' collections with the spaces of all galleries.

        Loads collections, marks spaces without one as pending, and drops collections of deleted
        spaces.

        Returns:
            The galleries with pending labels.
        """
        present = set(self._collections.names())
        spaces = self._database.read(_journaled_spaces)
        owners = {
            collection_name(self._database_id, schema, info.table_number): (schema, info)
            for schema, infos in spaces.items()
            for info in infos
        }
        for name in present - set(owners):
            if name.startswith(collection_prefix(self._database_id)):
                with self._isolate(name):
                    self._collections.drop(name)
        self._loaded &= present
        for name in (set(owners) & present) - self._loaded:
            with self._isolate(name):
                self._collections.make(name, owners[name][1].spec)
                self._loaded.add(name)
        for name in set(owners) - present:
            with self._isolate(name):
                self._mark_all_pending(*owners[name])
        return self._database.read(
            lambda connection: journal.galleries_with_pending(connection, [*spaces])
        )

    def _mark_all_pending(self, schema: str, info: SpaceInfo) -> None:
        """Mark all of a space as pending; the next batch creates its collection."""

        def work(connection: Connection) -> None:
            if journal.try_lock(connection, schema):
                journal.mark_all_pending(connection, schema, info)

        self._database.write(work)


def _journaled_spaces(connection: Connection) -> Mapping[str, list[SpaceInfo]]:
    """Return the spaces of all galleries that have a journal."""
    numbers = execute(
        connection, "SELECT number FROM nobackfill.galleries ORDER BY number"
    ).fetchall()
    schemas = [schema_name(number) for (number,) in numbers]
    return {
        schema: read_spaces(connection, schema)
        for schema in schemas
        if journal.has_journal(connection, schema)
    }
