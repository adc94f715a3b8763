"""HNSW graphs of spaces, made beside puts and searches, and how wide they are to be searched."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psycopg
import structlog

from nobackfill.errors import BusyError, UnavailableError
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Neighbours, merge
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.server.stores.postgresql.database import EF, Connection, Database, refusal, run
from nobackfill.server.stores.postgresql.rows import among, copy_out, random_labels
from nobackfill.server.stores.postgresql.schema import MOST_HALF, index_statements, table_of
from nobackfill.server.stores.postgresql.search import (
    MOST_EF,
    SpaceTable,
    by_graph,
    widen,
)
from nobackfill.vectors import Vectors

# Whether an index finds what is there: measured before a flip waits for it no more, since no
# engine's word is taken. Milvus says that it is whole and answers badly for a while; a graph of
# pgvector may be too thin for its vectors and say nothing.
#
# Vectors that are stored are asked for, and what is found compared with what a pass over all of
# them finds: by distance, for one of several equal vectors is as good as another.

log = structlog.get_logger("server.stores")

# What is asked for, and the share of its nearest that is well enough.
PROBES, K, RECALL = 30, 10, 0.9
# Numbers of a piece of the pass: a statement far below its timeout, and 16 MB here.
_NUMBERS = 4_000_000
# Between two looks passes so much time, or so many times what one took, up to a bound; what is
# waited for is told so often.
_LOOK_S, _REST, _LONGEST_S, _TELL_S = 0.5, 4, 60.0, 10.0


@dataclass(frozen=True)
class RecallProbes:
    """Queries [q, dim], and how far the last of the nearest lies of each, [q, 1]; `nearest`: how
    many they are, K where there are as many vectors; `slack` [q, 1]: what rounding may add."""

    queries: Vectors
    farthest: Vectors
    nearest: int
    slack: Vectors

    def recall(self, found: Sequence[Neighbours]) -> float:
        """Share of the nearest that is in `found`, one of K for each query; 1 where nothing is."""
        if not self.farthest.size:
            return 1.0
        apart = np.concatenate([one.distances for one in found])[:, : self.nearest]
        return float((apart <= self.farthest * (1 + 1e-5) + self.slack).mean())


def probes_of(
    connection: Connection, schema: str, info: SpaceInfo, between: Callable[[], None]
) -> RecallProbes:
    """Vectors of a space at random, and what a pass over all of them finds. It reads pieces of
    bounded size; `between` is called after each, and may raise. Raises psycopg.Error."""
    table, spec = table_of(schema, info.number), info.spec
    drawn = random_labels(connection, table, PROBES)
    queries = copy_out(connection, table, among(drawn), spec.dim)[1]
    if spec.metric == "cosine":
        # A vector without a direction is asked of no graph: every row is read for it.
        queries = queries[queries.any(axis=1)]
    first, last = run(
        connection, f"SELECT coalesce(min(label), 1), coalesce(max(label), 0) FROM {table}"
    ).fetchone()
    step = max(1, _NUMBERS // spec.dim)
    count, best = 0, ExactIndex(spec, drawn[:0], queries[:0]).search(queries, K)
    for start in range(first, last + 1, step):
        piece = f"label >= {start:d} AND label < {start + step:d}"
        labels, vectors, _ = copy_out(connection, table, piece, spec.dim)
        if len(labels):
            near = ExactIndex(spec, labels, vectors).search(queries, K)
            best, count = merge([best, near], K), count + len(labels)
        between()
    nearest = min(K, count)
    # Of short vectors all distances of squared_l2 are small, and none may pass for rounding.
    scale = np.ones((len(queries), 1), np.float32)
    if spec.metric == "squared_l2":
        scale = np.minimum((queries**2).sum(axis=1, keepdims=True), 1)
    return RecallProbes(queries, best.distances[:, nearest - 1 : nearest], nearest, 1e-6 * scale)


def wait_for_recall(
    ready: Callable[[], bool], measure: Callable[[], float], between: Callable[[], None],
    tell: Callable[[float], None],
) -> None:  # fmt: skip
    """Until `measure` gives RECALL. Before it is asked, `ready` does what can be done and says
    whether there is something to measure. What the database refuses for a moment is tried again.
    `between` is called again and again, and may raise; `tell` now and then, with what was measured.
    """
    told = time.monotonic()
    while True:
        between()
        took, found = 0.0, None
        try:
            if ready():
                began = time.monotonic()
                found = measure()
                took = time.monotonic() - began
        except (BusyError, UnavailableError) as error:
            log.warning("recall was not measured, and will be again", error=str(error))
        if found is not None and found >= RECALL:
            return
        if found is not None and time.monotonic() - told >= _TELL_S:
            tell(found)
            told = time.monotonic()
        _rest(min(max(_LOOK_S, _REST * took), _LONGEST_S), between)


def _rest(seconds: float, between: Callable[[], None]) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        between()
        time.sleep(min(left, _LOOK_S))


# Candidates that are looked at: the first that finds RECALL.
_TRIED_EF = (EF, 200, 400, MOST_EF)


def has_graph(database: Database, schema: str, info: SpaceInfo) -> bool:
    """Whether a space has a whole graph, or has too many dimensions for any."""
    if info.spec.dim > MOST_HALF:
        return True
    found = database.read(
        lambda connection: run(
            connection,
            "SELECT i.indisvalid FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid"
            " JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = %s AND c.relname = %s",
            [schema, graph_name(info)],
        ).fetchone()
    )
    return found is not None and bool(found[0])


def make_graph(database: Database, schema: str, info: SpaceInfo) -> None:
    """Build one; others write and search meanwhile. What an interrupted build left is removed.

    Raises UnavailableError, BusyError, CannotWriteError.
    """
    statements = index_statements(schema, info.number, info.spec, "CONCURRENTLY")
    try:
        # Not of the pool: it takes as long as it takes.
        with database.connect() as connection:
            run(connection, f"DROP INDEX CONCURRENTLY IF EXISTS {schema}.{graph_name(info)}")
            for statement in statements:
                run(connection, statement)
    except psycopg.Error as error:
        raise refusal(error) or error from error


def measure_recall(
    database: Database, schema: str, info: SpaceInfo, between: Callable[[], None]
) -> tuple[int, float]:
    """How many candidates of a space's graph are to be looked at, and the recall that this gives:
    the least width that finds RECALL, or the widest. In one snapshot, on a connection of its own;
    `between` is called again and again, and may raise. Raises BusyError, UnavailableError."""
    if info.spec.dim > MOST_HALF:
        return EF, 1.0
    table, width, recall = SpaceTable(schema, info), EF, 0.0
    with database.snapshot() as connection:
        probes = probes_of(connection, schema, info, between)
        # Reading every row, as is done of few, says nothing of the graph.
        run(connection, "SET LOCAL enable_seqscan = off")
        run(connection, "SET LOCAL enable_sort = off")
        for width in _TRIED_EF:
            widen(connection, width)
            found = []
            for query in probes.queries:
                found.append(by_graph(connection, table, query, K))
                between()
            if (recall := probes.recall(found)) >= RECALL:
                break
    return width, recall


def graph_name(info: SpaceInfo) -> str:
    """Of the index, in the gallery's schema."""
    return f"vectors_{info.number:d}_graph"
