"""Galleries in PostgreSQL whose vectors Milvus searches.

The database holds the truth, and a journal of changes for Milvus.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import structlog

from nobackfill.gallery.search.index import Neighbours
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.plugins.milvus import candidates as limits
from nobackfill.plugins.milvus import journal
from nobackfill.plugins.milvus.candidates import Candidates, too_many_pending
from nobackfill.plugins.milvus.collections import Collections
from nobackfill.plugins.milvus.columns import database_id
from nobackfill.plugins.milvus.feeder import Feeder
from nobackfill.server.galleries.hosted import HostedGallery
from nobackfill.server.galleries.hosted_database import DatabaseGalleryStorage, HostedInDatabase
from nobackfill.server.stores.postgresql import rows, writes
from nobackfill.server.stores.postgresql.conditions import ALWAYS_TRUE
from nobackfill.server.stores.postgresql.database import Connection, Database, execute
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.graphs import (
    RECALL,
    K,
    RecallProbes,
    draw_probes,
    wait_for_recall,
)
from nobackfill.server.stores.postgresql.search import SpaceTable, rank_rows
from nobackfill.vectors import Vectors

log = structlog.get_logger("server.stores")


class MilvusGallery(PostgresqlGallery):
    """A gallery in PostgreSQL with a journal of changes for Milvus."""

    def __init__(self, database: Database, gallery_number: int) -> None:
        """Open a gallery; start its journal if it is missing or lacks a space.

        All vectors of such a space are then pending. A started journal is logged.

        Args:
            database: the database.
            gallery_number: the number of the gallery.

        Raises:
            NotFoundError: there is no such gallery.
            UnavailableError: the database does not answer.
            BusyError: the gallery's rows are locked for too long, or the database refuses writes.
            CannotWriteError: the database cannot write.
            ConfigurationError, DamagedError: the database refuses a statement, or is damaged.
        """
        super().__init__(database, gallery_number)
        if not database.read(lambda connection: journal.covers_all_spaces(connection, self.schema)):
            database.write(lambda connection: journal.begin_journal(connection, self.schema))
            log.info("Milvus gets all vectors of a gallery", gallery=gallery_number)

    @staticmethod
    def begin_journal(gallery: PostgresqlGallery) -> None:
        """Start the journal of a new, empty gallery, and drop the database's own graph of it.

        Each put would extend that graph. It waits until no other transaction writes to the gallery.

        Args:
            gallery: the new gallery; an existing journal stays as it is.

        Raises:
            UnavailableError: the database does not answer.
            BusyError: the gallery's rows are locked for too long.
            CannotWriteError: the database is full or read-only.
            NotFoundError: the gallery was deleted.
            ConfigurationError, DamagedError: the database refuses a statement, or is damaged.
        """

        def work(connection: Connection) -> None:
            for info in rows.read_spaces(connection, gallery.schema):
                execute(
                    connection,
                    f"DROP INDEX IF EXISTS {gallery.schema}.vectors_{info.table_number:d}_graph",
                )
            journal.begin_journal(connection, gallery.schema)

        gallery.database.write(work)

    def add_staging_space(self, spec: SpaceSpec) -> None:
        """Add a staging space and its journal, unless the space exists.

        It waits until no other transaction writes to the gallery. All is one transaction. Listeners
        are called. If the space exists, listeners are called nevertheless, and the epoch grows.

        Raises:
            InvalidInputError: it exists with another release, dimension, metric, norm or side
                space, or has too many dimensions for pgvector.
            UnavailableError: the database does not answer.
            BusyError: the gallery's rows are locked for too long.
            CannotWriteError: the database is full or read-only.
            NotFoundError: the gallery was deleted.
            ConfigurationError, DamagedError: the database refuses a statement, or is damaged.
        """

        def work(connection: Connection) -> None:
            if writes.create_staging_space(connection, self.schema, spec):
                info = rows.find_space(connection, self.schema, spec.space)
                journal.watch_space(connection, self.schema, info)

        self._exclusive(work)


def wait_for_milvus_recall(
    gallery: PostgresqlGallery, info: SpaceInfo, candidates: Candidates,
    feed: Callable[[], int], check_stop: Callable[[], None],
) -> None:  # fmt: skip
    """Wait until Milvus finds nearly all true neighbours of probes in a space.

    Then the items of the space are checked, so that the flip checks only later ones. Spaces of at
    most 5,000 vectors need no Milvus and return at once. The wait has no end of its own: if recall
    stays low, it is logged and measured again, with new probes. Errors of Milvus and busy databases
    are logged, and tried again after a pause of 0.5 to 60 s.

    Args:
        gallery: the gallery.
        info: the space.
        candidates: the searches in Milvus.
        feed: sends pending labels to Milvus; returns how many.
        check_stop: called repeatedly while waiting; it may raise to stop.

    Raises:
        IncompatibleSpaceError: the gallery does not have the space any more.
        UnavailableError: the database does not answer at the start.
        BusyError: the database is busy at the start.
        NotFoundError: the gallery was deleted.
        CannotWriteError: the database is full or read-only when the items are checked.
        ConfigurationError, DamagedError: the database refuses a statement, or is damaged.
        Exception: any error of `check_stop`.
    """
    if gallery.count(info.spec.space) <= limits.SMALL:
        return
    probes: RecallProbes | None = None

    def ready() -> bool:
        # A search compares this many pending labels itself; under constant writes some always pend.
        while too_many_pending(gallery.database, gallery.schema, info):
            check_stop()
            # 0 means that the gateway's own thread is feeding: wait for it.
            if not feed():
                return False
        return True

    def measure() -> float:
        nonlocal probes
        if probes is None:
            with gallery.database.snapshot() as connection:
                probes = draw_probes(connection, gallery.schema, info, check_stop)
        share = probes.recall([_search(gallery, info, candidates, one) for one in probes.queries])
        if share >= RECALL:
            log.info("Milvus finds nearly all neighbours", release=info.spec.release, recall=share)
            gallery.advance_frontier(info.spec.space)
        return share

    def report(share: float) -> None:
        nonlocal probes
        log.warning("waiting for Milvus", release=info.spec.release, recall=share)
        # The true neighbours may have been deleted: draw new probes.
        probes = None

    wait_for_recall(ready, measure, check_stop, report)


def _search(
    gallery: PostgresqlGallery, info: SpaceInfo, candidates: Candidates, query: Vectors
) -> Neighbours:
    """Search as a query does: Milvus' candidates and pending labels, ranked in the database."""
    # Read before Milvus is searched: labels that are fed since are then in both.
    new = gallery.database.read(
        lambda one: journal.pending_labels(one, gallery.schema, info.table_number, limits.SMALL)
    )
    nearest = candidates.nearest_labels(gallery.schema, info, query, K)
    labels = [] if nearest is None else [*nearest, *new.tolist()]
    table = SpaceTable(gallery.schema, info)
    rows = gallery.database.read(lambda one: table.rows_of(one, labels, ALWAYS_TRUE))
    return rank_rows(info.spec, query, rows, K)


class HostedInMilvus(HostedInDatabase):
    """One hosted gallery whose vectors Milvus searches."""

    def __init__(
        self, name: str, folder: Path, store: MilvusGallery, candidates: Candidates, feeder: Feeder
    ) -> None:
        """Host an open gallery, whose changes wake the feeder.

        Args:
            name: the gallery's name.
            folder: its scratch folder.
            store: the gallery.
            candidates: the searches in Milvus.
            feeder: sends its changes to Milvus.
        """
        super().__init__(name, folder, store, candidates)
        self._feeder = feeder
        self._candidates_of_milvus = candidates
        store.subscribe(feeder.wake)

    def build_first_index(self, space: str, check_stop: Callable[[], None]) -> None:
        """Wait until Milvus has a space with a graph of it, and finds nearly all true neighbours.

        A space of at most 5,000 vectors is ready at once. Blocks for as long as this takes; without
        `check_stop`, a low recall lasts for ever.

        Args:
            space: id of the space.
            check_stop: called repeatedly while waiting; it may raise to stop.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            UnavailableError: Milvus or the database does not answer for ten minutes, or the
                database does not answer at the start.
            BusyError: the database is busy at the start, or for ten minutes.
            NotFoundError: the gallery was deleted.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses a statement, or is damaged.
            Exception: any error of `check_stop`.
        """
        info = self._gallery.space(space)
        self._gallery.advance_frontier(space)
        if self._gallery.count(space) > limits.SMALL:
            self._feeder.wait_until_fed(self._gallery.schema, info, check_stop)
        wait_for_milvus_recall(
            self._gallery,
            info,
            self._candidates_of_milvus,
            lambda: self._feeder.feed(self._gallery.schema),
            check_stop,
        )


class InMilvus(DatabaseGalleryStorage):
    """The home of galleries in PostgreSQL whose vectors Milvus searches.

    Attributes:
        feeder: sends changes to Milvus; the caller starts and closes it.

    Raises:
        UnavailableError, BusyError, ConfigurationError: the id of the database cannot be read.
    """

    def __init__(self, database: Database, scratch: Path, collections: Collections) -> None:
        super().__init__(database, scratch)
        identity = database_id(database)
        self._candidates = Candidates(collections, identity)
        self.feeder = Feeder(database, collections, identity)

    def open(self, name: str) -> HostedGallery:
        """Open a gallery by its name; start its journal if it has none.

        Each call makes another object, which the caller closes.

        Returns:
            The hosted gallery, which wakes the feeder at each change.

        Raises:
            NotFoundError: there is no such gallery.
            UnavailableError: the database does not answer.
            BusyError: its journal is missing, and the gallery's rows are locked for too long.
            CannotWriteError: its journal is missing, and the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses a statement, or is damaged.
        """
        plain = self._galleries.open(name)
        gallery = MilvusGallery(plain.database, plain.number)
        return HostedInMilvus(name, self._scratch / name, gallery, self._candidates, self.feeder)

    def create(self, name: str, specs: Sequence[SpaceSpec], state: Mapping[str, Any]) -> None:
        """Create an empty gallery with a journal.

        If the process ends in between, the gallery has no journal; `open` then starts it. The call
        returns before Milvus knows the gallery. After an error of the journal the gallery exists.

        Args:
            name: its name.
            specs: its spaces, at least one; the last one is active, the others are previous ones.
            state: JSON values to store with it.

        Raises:
            AlreadyExistsError: the name is in use.
            UnavailableError: the database does not answer.
            InvalidInputError: a space has too many dimensions for pgvector.
            BusyError: the rows are locked for too long, no connection was free (OverloadedError),
                or writes are refused.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses a statement, or is damaged.
        """
        MilvusGallery.begin_journal(self._galleries.create(name, specs, state))


@contextmanager
def open_home(
    address: str, database: Database, scratch: Path, *, feeds: bool
) -> Iterator[InMilvus]:
    """Search the vectors of a database's galleries in Milvus, until the block ends.

    The database stays open; the caller closes it. At the end of the block, the thread and the
    connection to Milvus are stopped.

    Args:
        address: Milvus, as Collections takes it.
        database: the database of the galleries.
        scratch: the folder of DatabaseGalleryStorage.
        feeds: start a thread that sends changes to Milvus; another process must do it otherwise.

    Raises:
        ConfigurationError: the address has another form, names another machine without TLS, or the
            database's user may not call pg_control_system().
        UnavailableError: Milvus or the database does not answer.
        BusyError: the database is busy.
    """
    with closing(Collections(address)) as collections:
        home = InMilvus(database, scratch, collections)
        with closing(home.feeder):
            if feeds:
                home.feeder.start()
            yield home
