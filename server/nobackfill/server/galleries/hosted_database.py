"""Galleries in PostgreSQL: it searches, filters and indexes; this process keeps plans alone, for
other gateways change what is there."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from nobackfill.errors import DamagedError, IncompatibleSpaceError, NotFoundError
from nobackfill.gallery.filters import Matches
from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.search.index import Neighbours, rank_origins
from nobackfill.gallery.spec import Metadata, SpaceInfo, SpaceSpec, space_of
from nobackfill.gallery.store import NewVectors
from nobackfill.server.galleries.hosted import EXACT, NOTE, ROLLOUT, Allowance, Hosted
from nobackfill.server.galleries.plan import Filling, Plan
from nobackfill.server.galleries.ranking import PlanPart
from nobackfill.server.state import OutdatedError
from nobackfill.server.stores.postgresql.conditions import EVERYTHING
from nobackfill.server.stores.postgresql.database import EF, Database
from nobackfill.server.stores.postgresql.gallery import PostgresqlGalleries, PostgresqlGallery
from nobackfill.server.stores.postgresql.graphs import (
    RECALL,
    K,
    graph_name,
    has_graph,
    make_graph,
    measured,
    wait_for_recall,
)
from nobackfill.server.stores.postgresql.search import (
    CandidateSource,
    PostgresqlFiltering,
    PostgresqlMatches,
    SpaceTable,
    compares,
    count_alone,
    search,
)
from nobackfill.vectors import Vectors

# The wait of a flip for a database's graph: until it finds what is there, and how wide it is to be
# searched for that.

log = structlog.get_logger("server.indexing")

# Key of `Hosted.state`: by space, how many candidates of its graph searches look at where EF find
# too few.
WIDTHS = "widths"


class GraphWait:
    """Of one space. A graph is built where there is none, beside puts and searches, and anew where
    it finds too little as wide as it can be searched; if the new one does, too, somebody has to
    make it denser, is told so, and waited for.

    Before and after, it is looked which items the space has, so that searches meanwhile, and the
    flip, look at later ones alone; a look that the database refuses is tried again, too."""

    def __init__(
        self, hosted: Hosted, gallery: PostgresqlGallery, info: SpaceInfo,
        between: Callable[[], None],
    ) -> None:  # fmt: skip
        """`between` is called again and again, and may raise to give up."""
        self._hosted, self._gallery, self._info = hosted, gallery, info
        self._between = between
        self._log = log.bind(gallery=hosted.name, release=info.spec.release)
        self._built, self._width, self._recall = False, EF, 1.0

    def wait(self) -> None:
        """Returns once it finds RECALL, and searches are as wide. Raises what `between` does, and
        CannotWriteError."""
        wait_for_recall(self._ready, self._measure, self._between, self._tell)
        if self._hosted.state(NOTE):
            self._hosted.remember({NOTE: None})

    def _ready(self) -> bool:
        self._gallery.look_ahead(self._info.spec.space)
        there = has_graph(self._gallery.database, self._gallery.schema, self._info)
        if not there or (self._recall < RECALL and not self._built):
            self._log.info("building a graph", there_is_one=there, recall=self._recall)
            make_graph(self._gallery.database, self._gallery.schema, self._info)
            self._built = True
        return True

    def _measure(self) -> float:
        database, schema = self._gallery.database, self._gallery.schema
        width, recall = measured(database, schema, self._info, self._between)
        if not has_graph(database, schema, self._info):
            # It went meanwhile, and every row was read.
            return 0.0
        self._log.info("measured a graph", ef=width, recall=recall)
        self._width, self._recall = width, recall
        if recall >= RECALL:
            self._remember_width()
            self._gallery.look_ahead(self._info.spec.space)
        return recall

    def _remember_width(self) -> None:
        """From the next plan on; a space that is gone is forgotten."""
        space = self._info.spec.space
        before: Mapping[str, int] = self._hosted.state(WIDTHS) or {}
        others = {one.spec.space for one in self._gallery.spaces()} - {space}
        widths = {one: ef for one, ef in before.items() if one in others}
        if self._width != EF:
            widths[space] = self._width
        if widths != before:
            self._hosted.remember({WIDTHS: widths or None})

    def _tell(self, recall: float) -> None:
        index = f"{self._gallery.schema}.{graph_name(self._info)}"
        note = (
            f"the graph of release {self._info.spec.release} finds {recall:.2f} of the {K} nearest "
            f"among {self._width} candidates, expected {RECALL}; it is waited for: make it denser ("
            f"ALTER INDEX {index} SET (m = 32, ef_construction = 256); REINDEX INDEX CONCURRENTLY "
            f"{index}), or cancel the activation"
        )
        self._log.warning("waiting for a graph", why=note)
        if self._hosted.state(NOTE) != note:
            self._hosted.remember({NOTE: note})


# Counts of items and vectors may be so old: others put and delete, too.
_COUNTED_S = 0.5
# Candidates, as a multiple of the hits asked for, that are ranked along a scale, and the most.
_WIDER, _WIDEST = 4, 500


class HostedInDatabase(Hosted):
    """One gallery in a database. There are no views, for the database has them.

    What a plan is made of is read anew for each, in one snapshot, and its epoch with it.
    """

    def __init__(
        self, name: str, folder: Path, store: PostgresqlGallery,
        candidates: CandidateSource | None = None,
    ) -> None:  # fmt: skip
        """`candidates`: in place of the database's graphs."""
        self._candidates = candidates
        super().__init__(name, folder, store, PostgresqlFiltering(store.database, store.schema))
        self._gallery = store
        self.number = store.number
        self._counted = 0.0
        self._widths: Mapping[str, int] = self.state(WIDTHS) or {}

    def _read(self) -> tuple[Sequence[SpaceInfo], Filling | None, int]:
        look = self._gallery.look()
        with self._lock:
            self._spaces, self._state = look.spaces, look.state
        self.exact = bool(look.state.get(EXACT))
        self._widths = look.state.get(WIDTHS) or {}
        return look.spaces, look.state.get(ROLLOUT), look.epoch

    def put(
        self, plan: Plan, ids: Sequence[str], vectors: Sequence[NewVectors],
        digests: Sequence[str | None], metadata: Sequence[Metadata | None],
        allowance: Allowance | None = None,
    ) -> None:  # fmt: skip
        def put() -> None:
            if allowance is not None:
                there = count_alone(database, allowance.galleries)
                allowance.check(there, len(set(ids)) - len(self._gallery.labels_of(list(ids))))
            self._gallery.put(ids, vectors, digests=digests, metadata=metadata, epoch=plan.epoch)

        database = self._gallery.database
        put() if allowance is None else database.together(put)

    def items(self, labels: list[int], space: str) -> list[StoredItem | None]:
        """Read each time: another gateway may have changed their metadata. Raises OutdatedError
        where one has dropped the space since the plan was made: a search then begins anew."""
        try:
            return self._gallery.items(labels, space)
        except (IncompatibleSpaceError, NotFoundError) as error:
            raise OutdatedError("another gateway has dropped a space; try again") from error

    def _count(self, space: str | None) -> int:
        now = time.monotonic()
        if now - self._counted > _COUNTED_S:
            self._counts, self._counted = {}, now
        try:
            return super()._count(space)
        except (IncompatibleSpaceError, NotFoundError):
            if space is None:
                raise
            # Another gateway has dropped it since the spaces were read: nothing is in it.
            return 0

    def wake(self) -> None:
        """Nothing is read before it is asked for."""

    def _prepare(self, plan: Plan) -> None:
        """The database has all that searches need."""

    def forget_views(self, plan: Plan) -> None:
        """There are none."""

    def search(
        self,
        parts: Sequence[PlanPart],
        queries: Sequence[Vectors],
        k: int,
        allowed: Matches | None,
        ef: int,
    ) -> list[Neighbours]:
        """All parts of one snapshot of the database."""
        condition = allowed.condition if isinstance(allowed, PostgresqlMatches) else EVERYTHING
        tables = [self._table(part.space) for part in parts]
        if len(parts) == 2:
            # Each item in the first part that has it.
            tables[1] = self._table(parts[1].space, parts[0].space)
        asked = list(zip(tables, queries, strict=True))
        # A graph cannot be asked for each origin alone without reading all rows: among more of the
        # nearest are those that the scale puts first.
        scaled = any(part.scale is not None for part in parts)
        most = max(k, min(_WIDER * k, _WIDEST)) if scaled else k
        try:
            found = search(
                self._gallery.database, asked, most, condition, ef, candidates=self._candidates
            )
            return [self._best(*pair, k) for pair in zip(parts, found, strict=True)]
        except NotFoundError as error:
            # A table was dropped after the plan was made, or all of them.
            raise OutdatedError("another gateway has dropped a space; try again") from error

    def _best(self, part: PlanPart, found: Neighbours, k: int) -> Neighbours:
        """The `k` best by the part's scale, if it has one."""
        if part.scale is not None:
            flat = found.labels.ravel()
            items = self.items(flat.tolist(), part.space)
            carried = np.array([one is not None and one.origin == "upgraded" for one in items])
            of_carried = carried.reshape(found.labels.shape)
            found = rank_origins(found, of_carried, part.scale)
        return Neighbours(found.labels[:, :k], found.distances[:, :k])

    def _table(self, space: str, without: str | None = None) -> SpaceTable:
        known = self.spaces()
        try:
            rest = None if without is None else space_of(known, without)
            width = self._widths.get(space, EF)
            return SpaceTable(self._gallery.schema, space_of(known, space), rest, width)
        except IncompatibleSpaceError as error:
            raise OutdatedError("another gateway has dropped a space; try again") from error

    def compares(self, part: PlanPart, ef: int) -> bool:
        """Whether a search of the part reads every vector."""
        return compares(self._table(part.space).spec, ef)

    def check_whole(self) -> None:
        missing = self._gallery.missing_table()
        if missing is not None:
            raise DamagedError(f"gallery {self.name!r} in the database", f"no table {missing}")

    def expect(self, space: str) -> None:
        """Look which items it has: a search looks for the others at later ones."""
        self._gallery.look_ahead(space)

    def make_ready(self, space: str, between: Callable[[], None]) -> None:
        """Build the graph of a space beside all else, unless it has a good one, and wait until it
        finds what is there."""
        between()
        GraphWait(self, self._gallery, self._gallery.space(space), between).wait()


class InDatabase:
    """What is said of each method: Home."""

    def __init__(self, database: Database, scratch: Path) -> None:
        """`scratch`: a folder of this gateway; nothing of a gallery is kept there."""
        self._galleries = PostgresqlGalleries(database)
        self._scratch = scratch

    def sweep(self) -> None:
        """There is nothing unfinished: galleries are made in one transaction."""

    def names(self) -> list[str]:
        return self._galleries.names()

    def open(self, name: str) -> Hosted:
        return HostedInDatabase(name, self._scratch / name, self._galleries.open(name))

    def create(self, name: str, specs: Sequence[SpaceSpec], state: Mapping[str, Any]) -> None:
        self._galleries.create(name, specs, state)

    def remove(self, name: str) -> Callable[[], None]:
        self._galleries.delete(name)
        return lambda: None
