"""A gallery whose vectors Milvus searches: the database has the truth, and notes what changes."""

from collections.abc import Callable

import structlog

from nobackfill.gallery.search.index import Neighbours
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.server.stores.milvus import candidates as limits
from nobackfill.server.stores.milvus import journal
from nobackfill.server.stores.milvus.candidates import Candidates, too_many_pending
from nobackfill.server.stores.postgresql import rows, writing
from nobackfill.server.stores.postgresql.conditions import EVERYTHING
from nobackfill.server.stores.postgresql.database import Connection, Database, run
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.graphs import (
    RECALL,
    K,
    RecallProbes,
    probes_of,
    wait_for_recall,
)
from nobackfill.server.stores.postgresql.search import SpaceTable, ranked
from nobackfill.vectors import Vectors

log = structlog.get_logger("server.stores")


class MilvusGallery(PostgresqlGallery):
    """What is said of each method: GalleryStore."""

    def __init__(self, database: Database, number: int) -> None:
        """Of a gallery without a journal, one is begun, and all it has is pending; so it is with a
        space that is not in its journal."""
        super().__init__(database, number)
        if not database.read(lambda connection: journal.complete(connection, self.schema)):
            database.write(lambda connection: journal.begin(connection, self.schema))
            log.info("Milvus is told everything", gallery=number)

    @staticmethod
    def begun(made: PostgresqlGallery) -> None:
        """Of a gallery that was just made: nothing is noted yet, and no graph of the database is to
        grow by each put."""

        def work(connection: Connection) -> None:
            for info in rows.read_spaces(connection, made.schema):
                run(connection, f"DROP INDEX IF EXISTS {made.schema}.vectors_{info.number:d}_graph")
            journal.begin(connection, made.schema)

        made.database.write(work)

    def begin(self, spec: SpaceSpec) -> None:
        def work(connection: Connection) -> None:
            if writing.begin(connection, self.schema, spec):
                info = rows.find_space(connection, self.schema, spec.space)
                journal.watch(connection, self.schema, info)

        self._alone(work)


def wait_for_milvus(
    gallery: PostgresqlGallery, info: SpaceInfo, candidates: Candidates,
    feed: Callable[[], int], between: Callable[[], None],
) -> None:  # fmt: skip
    """Until Milvus finds, of a space, what is there (recall.py); then it is looked which items the
    space has, for the flip to look at later ones alone.

    `feed` tells it what is pending; `between` is called again and again, and may raise.
    """
    if gallery.count(info.spec.space) <= limits.SMALL:
        return
    probes: RecallProbes | None = None

    def ready() -> bool:
        # Searches compare as many beside Milvus: of a gallery that is put to, some always are.
        while too_many_pending(gallery.database, gallery.schema, info):
            between()
            # Where the gateway's own thread tells it, there is nothing to tell and much to come.
            if not feed():
                return False
        return True

    def measure() -> float:
        nonlocal probes
        if probes is None:
            with gallery.database.snapshot() as connection:
                probes = probes_of(connection, gallery.schema, info, between)
        share = probes.recall([_found(gallery, info, candidates, one) for one in probes.queries])
        if share >= RECALL:
            log.info("Milvus answers", release=info.spec.release, recall=share)
            gallery.look_ahead(info.spec.space)
        return share

    def tell(share: float) -> None:
        nonlocal probes
        log.warning("waiting for Milvus", release=info.spec.release, recall=share)
        # What was the nearest may be gone.
        probes = None

    wait_for_recall(ready, measure, between, tell)


def _found(
    gallery: PostgresqlGallery, info: SpaceInfo, candidates: Candidates, query: Vectors
) -> Neighbours:
    """What Milvus answers to one query [dim], and what it is still to be told, as in a search."""
    # Before Milvus is asked: what is told meanwhile is in both.
    new = gallery.database.read(
        lambda one: journal.pending(one, gallery.schema, info.number, limits.SMALL)
    )
    found = candidates.found(gallery.schema, info, query, K)
    labels = [] if found is None else [*found, *new.tolist()]
    table = SpaceTable(gallery.schema, info)
    rows = gallery.database.read(lambda one: table.rows_of(one, labels, EVERYTHING))
    return ranked(info.spec, query, rows, K)
