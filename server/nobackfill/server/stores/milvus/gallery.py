"""A gallery whose vectors Milvus searches: the database has the truth, and notes what changes."""

import time
from collections.abc import Callable

import numpy as np
import structlog

from nobackfill.gallery.search.index import EVERY
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.server.stores.milvus import candidates as limits
from nobackfill.server.stores.milvus import journal
from nobackfill.server.stores.milvus.candidates import Candidates
from nobackfill.server.stores.postgresql import rows, spaces
from nobackfill.server.stores.postgresql.database import Connection, Database, run
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.searcher import PostgresqlSearcher

log = structlog.get_logger("server.stores")

# What is asked to see whether an index answers well, and what is well enough.
_PROBES, _K, RECALL = 30, 10, 0.9
_LOOK_S, _TELL_S = 0.5, 10.0


class MilvusGallery(PostgresqlGallery):
    """What is said of each method: GalleryStore."""

    def __init__(self, database: Database, number: int) -> None:
        """Of a gallery without a journal, one is begun, and all it has is pending."""
        super().__init__(database, number)
        if not database.read(lambda connection: journal.kept(connection, self.schema)):
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
            if spaces.begin(connection, self.schema, spec):
                info = rows.find_space(connection, self.schema, spec.space)
                journal.watch(connection, self.schema, info)

        self._alone(work)


def wait_for_recall(
    gallery: PostgresqlGallery, info: SpaceInfo, candidates: Candidates,
    feed: Callable[[], int], between: Callable[[], None],
) -> None:  # fmt: skip
    """Until the engine finds, of a space, what an exact search does: its word is not taken, for an
    index that says it is whole answers badly for a while.

    `feed` tells it what is pending; `between` is called again and again, and may raise. Raises
    UnavailableError.
    """
    if gallery.count(info.spec.space) <= limits.SMALL:
        return
    _, probes, _ = gallery.sample(info.spec.space, info.spec.space, _PROBES)
    exact = PostgresqlSearcher(gallery.database, gallery.schema, info)
    true = exact.search(probes, _K, None, EVERY).labels.tolist()
    told = time.monotonic()
    while True:
        between()
        # Where the gateway's own thread tells it, there is nothing to tell and much to come.
        if feed() or not _whole(gallery, info):
            continue
        found = [candidates.found(gallery.schema, info, probe, _K) or [] for probe in probes]
        pairs = zip(true, found, strict=True)
        recall = float(np.mean([len(set(a) & set(b)) / _K for a, b in pairs]))
        if recall >= RECALL:
            log.info("Milvus answers", release=info.spec.release, recall=recall)
            return
        if time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            log.warning("waiting for Milvus", release=info.spec.release, recall=recall)
        time.sleep(_LOOK_S)


def _whole(gallery: PostgresqlGallery, info: SpaceInfo) -> bool:
    """Whether nothing of a space is pending; waits a little where something is."""
    left = gallery.database.read(
        lambda connection: journal.pending(connection, gallery.schema, info.number, 0)
    )
    if len(left):
        time.sleep(_LOOK_S)
    return not len(left)
