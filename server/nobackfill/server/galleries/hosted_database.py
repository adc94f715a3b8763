"""Serve a gallery in PostgreSQL, which searches, filters and indexes.

This process keeps only plans, because other gateways change the galleries, too.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from nobackfill.errors import DamagedError, IncompatibleSpaceError, NotFoundError
from nobackfill.gallery.filters import Matches
from nobackfill.gallery.search.index import Neighbours, rank_on_native_scale
from nobackfill.gallery.spec import Metadata, SpaceInfo, SpaceSpec, select_space
from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.gallery.store import NewVectors
from nobackfill.server.galleries.hosted import (
    EXACT_DISTANCES_KEY,
    NOTE,
    ROLLOUT,
    HostedGallery,
    ItemQuota,
)
from nobackfill.server.galleries.plan import FillMode, Plan, PlanPart
from nobackfill.server.state import OutdatedPlanError
from nobackfill.server.stores.postgresql.conditions import ALWAYS_TRUE
from nobackfill.server.stores.postgresql.database import EF, Database
from nobackfill.server.stores.postgresql.gallery import PostgresqlGalleries, PostgresqlGallery
from nobackfill.server.stores.postgresql.graphs import (
    RECALL,
    K,
    build_graph,
    graph_name,
    has_graph,
    measure_recall,
    wait_for_recall,
)
from nobackfill.server.stores.postgresql.search import (
    CandidateSource,
    PostgresqlFiltering,
    PostgresqlMatches,
    SpaceTable,
    count_locked,
    scans_all_vectors,
    search,
)
from nobackfill.vectors import Vectors

log = structlog.get_logger("server.indexing")

# Key of `HostedGallery.state_value`: by space, the search width (candidates of its graph) if EF
# finds too few.
SEARCH_WIDTHS_KEY = "widths"


class GraphRecallWait:
    """Wait before a flip until the graph of a space has the required recall.

    A graph is built if there is none, while puts and searches go on. It is built again if its
    recall is too low at the largest search width. If that does not help, a note asks an operator to
    make it denser, and the wait goes on.

    Before and after, the gallery records which items the space has, so that searches and the flip
    only check later ones.
    """

    def __init__(
        self, hosted: HostedGallery, gallery: PostgresqlGallery, info: SpaceInfo,
        check_stop: Callable[[], None],
    ) -> None:  # fmt: skip
        """Prepare to wait.

        Args:
            hosted: the gallery.
            gallery: its store.
            info: the space.
            check_stop: called often; it may raise to stop.
        """
        self._hosted, self._gallery, self._info = hosted, gallery, info
        self._check_stop = check_stop
        self._log = log.bind(gallery=hosted.name, release=info.spec.release)
        self._built, self._width, self._recall = False, EF, 1.0

    def wait(self) -> None:
        """Return once the graph has the required recall, and searches are wide enough for it.

        It waits without a time limit. The search width that suffices is stored for later plans. A
        busy or absent database is tried again while the graph is built or measured. A note that an
        earlier wait wrote is removed at the end.

        Raises:
            CannotWriteError: the graph cannot be built, or the note cannot be written.
            BusyError, UnavailableError: the database is busy, or does not answer, when a note is
                written or removed.
            NobackfillError: whatever `check_stop` raises.
            IncompatibleSpaceError, GalleryDeletedError: the space or the gallery was deleted.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        wait_for_recall(self._ready, self._measure, self._check_stop, self._report)
        if self._hosted.state_value(NOTE):
            self._hosted.store_state({NOTE: None})

    def _ready(self) -> bool:
        self._gallery.advance_frontier(self._info.spec.space)
        has_one = has_graph(self._gallery.database, self._gallery.schema, self._info)
        if not has_one or (self._recall < RECALL and not self._built):
            self._log.info("building a graph", there_is_one=has_one, recall=self._recall)
            build_graph(self._gallery.database, self._gallery.schema, self._info)
            self._built = True
        return True

    def _measure(self) -> float:
        database, schema = self._gallery.database, self._gallery.schema
        width, recall = measure_recall(database, schema, self._info, self._check_stop)
        if not has_graph(database, schema, self._info):
            # The graph was dropped during the measurement, so every row was read.
            return 0.0
        self._log.info("measured a graph", ef=width, recall=recall)
        self._width, self._recall = width, recall
        if recall >= RECALL:
            self._remember_width()
            self._gallery.advance_frontier(self._info.spec.space)
        return recall

    def _remember_width(self) -> None:
        """Store the search width, used from the next plan on; widths of deleted spaces are
        removed.
        """
        space = self._info.spec.space
        old_widths: Mapping[str, int] = self._hosted.state_value(SEARCH_WIDTHS_KEY) or {}
        others = {other.spec.space for other in self._gallery.spaces()} - {space}
        widths = {other: ef for other, ef in old_widths.items() if other in others}
        if self._width != EF:
            widths[space] = self._width
        if widths != old_widths:
            self._hosted.store_state({SEARCH_WIDTHS_KEY: widths or None})

    def _report(self, recall: float) -> None:
        index = f"{self._gallery.schema}.{graph_name(self._info)}"
        note = (
            f"the graph of release {self._info.spec.release} finds {recall:.2f} of the {K} nearest "
            f"among {self._width} candidates, expected {RECALL}; the activation waits: make the "
            f"graph denser (ALTER INDEX {index} SET (m = 32, ef_construction = 256); REINDEX INDEX "
            f"CONCURRENTLY {index}), or cancel the activation with `gateway rollback --yes`"
        )
        self._log.warning("waiting for a graph", why=note)
        if self._hosted.state_value(NOTE) != note:
            self._hosted.store_state({NOTE: note})


# Longest age (seconds) of cached counts: other gateways put and delete, too.
_COUNT_SECONDS = 0.5
# Candidates that are ranked along a scale: this multiple of the requested hits, and at most so
# many.
_SCALE_FACTOR, _MAX_SCALED = 4, 500


class HostedInDatabase(HostedGallery):
    """Serve a gallery in a database.

    It has no views: the database has the indexes. The data for each plan, and its epoch, are read
    in one snapshot.
    """

    def __init__(
        self, name: str, folder: Path, store: PostgresqlGallery,
        candidates: CandidateSource | None = None,
    ) -> None:  # fmt: skip
        """Serve an open store.

        The state is read once; there is no plan yet.

        Args:
            name: the gallery's name.
            folder: unused folder of this gateway.
            store: the store; closed with the gallery.
            candidates: finds candidates instead of the database's graphs; None means the graphs.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        self._candidates = candidates
        super().__init__(name, folder, store, PostgresqlFiltering(store.database, store.schema))
        self._gallery = store
        self.number = store.number
        self._count_time = 0.0
        self._widths: Mapping[str, int] = self.state_value(SEARCH_WIDTHS_KEY) or {}

    def _read(self) -> tuple[Sequence[SpaceInfo], FillMode | None, int]:
        look = self._gallery.read_snapshot()
        with self._lock:
            self._spaces, self._state = look.spaces, look.state
        self.exact_distances = bool(look.state.get(EXACT_DISTANCES_KEY))
        self._widths = look.state.get(SEARCH_WIDTHS_KEY) or {}
        return look.spaces, look.state.get(ROLLOUT), look.epoch

    def put(
        self, plan: Plan, ids: Sequence[str], vectors: Sequence[NewVectors],
        digests: Sequence[str | None], metadata: Sequence[Metadata | None],
        allowance: ItemQuota | None = None,
    ) -> None:  # fmt: skip
        """Store items whose vectors were made for a plan; see HostedGallery.put.

        With an allowance, the count and the put are one transaction, so that other gateways cannot
        exceed it meanwhile.

        Args:
            plan: the plan, whose epoch must be the gallery's.
            ids: ids of the items, without repeats.
            vectors: vectors of all items, for each space of the plan.
            digests: digest of each item's content; None replaces an existing item.
            metadata: metadata of each item; None keeps what an unchanged item has.
            allowance: limit of the caller's items; None means no limit.

        Raises:
            OutdatedPlanError: another gateway has replaced the plan; nothing was stored.
            ItemQuotaError: there would be too many items; nothing was stored.
            InvalidInputError: an id, a vector or metadata is not valid, or an id is repeated.
            GalleryDeletedError: the gallery was deleted; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """

        def put() -> None:
            if allowance is not None:
                present = count_locked(database, allowance.galleries)
                allowance.check(present, len(set(ids)) - len(self._gallery.labels_of(list(ids))))
            self._gallery.put(ids, vectors, digests=digests, metadata=metadata, epoch=plan.epoch)

        database = self._gallery.database
        put() if allowance is None else database.transact(put)

    def items(self, labels: list[int], space: str) -> list[StoredItem | None]:
        """Read items, uncached: another gateway may have changed their metadata.

        Args:
            labels: labels of the items.
            space: id of the space whose origin and uncertainty they get.

        Returns:
            The items in the order of `labels`, which may repeat; None for deleted ones. An item
            without a vector in the space has no origin and no uncertainty.

        Raises:
            OutdatedPlanError: another gateway has deleted the space or the gallery; the search
                begins again.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        try:
            return self._gallery.items(labels, space)
        except (IncompatibleSpaceError, NotFoundError) as error:
            raise self._outdated_error() from error

    def _outdated_error(self) -> OutdatedPlanError:
        return OutdatedPlanError(
            f"another gateway has just deleted a release's vectors in gallery {self.name!r}, and "
            "this call was using these vectors; try again"
        )

    def _count(self, space: str | None) -> int:
        now = time.monotonic()
        if now - self._count_time > _COUNT_SECONDS:
            self._counts, self._count_time = {}, now
        try:
            return super()._count(space)
        except (IncompatibleSpaceError, NotFoundError):
            if space is None:
                raise
            # Another gateway has deleted the space since it was listed.
            return 0

    def search(
        self,
        parts: Sequence[PlanPart],
        queries: Sequence[Vectors],
        k: int,
        matches: Matches | None,
        ef: int,
    ) -> list[Neighbours]:
        """Search all parts in one snapshot of the database; see HostedGallery.search.

        With a scale, four times as many of the nearest are fetched, at most 500, and ranked along
        it.

        Args:
            parts: one part, or two; each item is found in the first part that has it.
            queries: for each part float32 [q, dim].
            k: most neighbours of each query, at least 1.
            matches: items that may be found; None, and matches of another engine, mean all.
            ef: width of the graph search; 0 means the stored width.

        Returns:
            The neighbours of all queries, for each part, nearest first; padded with label -1 where
            there are fewer.

        Raises:
            InvalidInputError: a query is not a valid vector.
            OutdatedPlanError: another gateway has deleted a space or the gallery; the search begins
                again.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            GalleryDeletedError: the gallery was deleted, and its spaces are read for this search.
        """
        condition = matches.condition if isinstance(matches, PostgresqlMatches) else ALWAYS_TRUE
        tables = [self._table(part.space) for part in parts]
        if len(parts) == 2:
            # Items that the first part has are left out of the second.
            tables[1] = self._table(parts[1].space, parts[0].space)
        requests = list(zip(tables, queries, strict=True))
        # A graph cannot search one origin without reading all rows. So more of the nearest are
        # fetched; the best by the scale are among them.
        is_scaled = any(part.distance_scale is not None for part in parts)
        count = max(k, min(_SCALE_FACTOR * k, _MAX_SCALED)) if is_scaled else k
        try:
            neighbours = search(
                self._gallery.database, requests, count, condition, ef, candidates=self._candidates
            )
            return [self._best(*pair, k) for pair in zip(parts, neighbours, strict=True)]
        except NotFoundError as error:
            # A table was dropped after the plan was made, or the gallery was deleted.
            raise self._outdated_error() from error

    def _best(self, part: PlanPart, neighbours: Neighbours, k: int) -> Neighbours:
        """Return the `k` best neighbours along the part's scale; the nearest without one."""
        if part.distance_scale is not None:
            flat = neighbours.labels.ravel()
            items = self.items(flat.tolist(), part.space)
            is_migrated = np.array(
                [item is not None and item.origin == "upgraded" for item in items]
            )
            migrated = is_migrated.reshape(neighbours.labels.shape)
            neighbours = rank_on_native_scale(neighbours, migrated, part.distance_scale)
        return Neighbours(neighbours.labels[:, :k], neighbours.distances[:, :k])

    def _table(self, space: str, excluded: str | None = None) -> SpaceTable:
        spaces = self.spaces()
        try:
            excluded_space = None if excluded is None else select_space(spaces, excluded)
            width = self._widths.get(space, EF)
            return SpaceTable(
                self._gallery.schema, select_space(spaces, space), excluded_space, width
            )
        except IncompatibleSpaceError as error:
            raise self._outdated_error() from error

    def scans_all_vectors(self, part: PlanPart, ef: int) -> bool:
        """Tell whether a search of a part reads every vector, as above 1000 candidates or MOST_HALF
        dimensions.

        Args:
            part: the part.
            ef: width of the graph search; 0 means the space's own.

        Raises:
            OutdatedPlanError: another gateway has deleted the space; the search begins again.
            BusyError, UnavailableError: the database is busy, or does not answer.
            GalleryDeletedError: the gallery was deleted, and its spaces are read for this call.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        return scans_all_vectors(self._table(part.space).spec, ef)

    def check_complete(self) -> None:
        """Check that no part of the gallery is missing; see HostedGallery.check_complete.

        A gallery that was deleted as a whole passes.

        Raises:
            DamagedError: a table is missing, which the message names; or the database is damaged.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError: the database refuses the statement.
            GalleryDeletedError: the gallery was deleted during the check.
        """
        missing = self._gallery.missing_table()
        if missing is not None:
            raise DamagedError(
                f"gallery {self.name!r} in the database", f"table {missing} is missing"
            )

    def prepare_space(self, space: str) -> None:
        """Record in the database up to which item a space has all vectors, so that searches only
        check later ones.

        Within a transaction it does nothing.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            BusyError: the database is busy.
            UnavailableError: it does not answer.
            GalleryDeletedError: the gallery was deleted.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        self._gallery.advance_frontier(space)

    def build_first_index(self, space: str, check_stop: Callable[[], None]) -> None:
        """Build the graph of a space unless it has a good one, and wait until its recall is high
        enough.

        A graph with too little recall is built again once. If that does not help, a note asks an
        operator, and the wait goes on. A busy or absent database is tried again while the graph is
        built or measured.

        It may take hours. Puts and searches go on meanwhile.

        Args:
            space: id of the space.
            check_stop: called at least every 0.5 s between measurements; it may raise to stop.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            CannotWriteError: the graph cannot be built, or the note cannot be written.
            BusyError, UnavailableError: the database is busy, or does not answer, when the wait
                begins, ends or writes a note.
            NobackfillError: whatever `check_stop` raises.
            GalleryDeletedError: the gallery was deleted.
            ConfigurationError, DamagedError: the database refuses a statement, or is damaged.
        """
        check_stop()
        GraphRecallWait(self, self._gallery, self._gallery.space(space), check_stop).wait()


class DatabaseGalleryStorage:
    """Store galleries in a database."""

    def __init__(self, database: Database, scratch: Path) -> None:
        """Use a database.

        Args:
            database: the database.
            scratch: a folder of this gateway; no gallery data is stored there.
        """
        self._galleries = PostgresqlGalleries(database)
        self._scratch = scratch

    def remove_leftovers(self) -> None:
        """Do nothing: a gallery is created in one transaction."""

    def names(self) -> list[str]:
        """Return the names of all galleries, in order; see GalleryStorage.names.

        Raises:
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        return self._galleries.names()

    def open(self, name: str) -> HostedGallery:
        """Open a gallery; it has no plan yet.

        Whether its tables are complete is not checked.

        Raises:
            NotFoundError: no gallery has this name, or it has just been deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        return HostedInDatabase(name, self._scratch / name, self._galleries.open(name))

    def create(self, name: str, specs: Sequence[SpaceSpec], state: Mapping[str, Any]) -> None:
        """Create a gallery atomically; see GalleryStorage.create.

        Other gateways are notified.

        Args:
            name: its name, which is not checked.
            specs: its spaces, at least one; the last one is active, the others previous.
            state: its first state.

        Raises:
            AlreadyExistsError: a gallery has this name.
            InvalidInputError: a space has too many dimensions for pgvector.
            BusyError: a lock is held for too long, or other calls change the same rows.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        self._galleries.create(name, specs, state)

    def remove(self, name: str) -> Callable[[], None]:
        """Remove a gallery that nobody uses, atomically; see GalleryStorage.remove.

        All is deleted at once, and other gateways are notified. An unknown name is ignored.

        Returns:
            A function that does nothing.

        Raises:
            BusyError: a lock is held for too long, or other calls change the same rows.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        self._galleries.delete(name)
        return lambda: None
