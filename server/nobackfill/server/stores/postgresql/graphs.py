"""Build HNSW graphs of spaces while puts and searches go on, and measure how wide to search
them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psycopg
import structlog

from nobackfill.errors import BusyError, UnavailableError
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Neighbours, merge_neighbours
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.server.stores.postgresql.database import (
    EF,
    Connection,
    Database,
    execute,
    translate_error,
)
from nobackfill.server.stores.postgresql.rows import copy_out, labels_condition, random_labels
from nobackfill.server.stores.postgresql.schema import MOST_HALF, index_statements, table_name
from nobackfill.server.stores.postgresql.search import (
    MAX_EF,
    SpaceTable,
    search_graph,
    set_candidate_count,
)
from nobackfill.vectors import Vectors

# The recall of an index is measured before a flip; no engine's own word counts. Milvus reports an
# index as complete and answers badly for a while. A graph of pgvector may be too sparse for its
# vectors, without a sign. Stored vectors are the queries, and the answers are compared with a full
# scan by distance, because equal vectors are equally good.

log = structlog.get_logger("server.stores")

# Number of queries, number of nearest neighbours, and the required recall.
PROBES, K, RECALL = 30, 10, 0.9
# Numbers in a piece of the scan: a statement far below its timeout, and 16 MB here.
_NUMBERS = 4_000_000
# Pause (seconds) between two measurements: at least this, or this multiple of the last one's
# duration, up to a limit; and seconds between two reports.
_LOOK_S, _REST, _LONGEST_S, _TELL_S = 0.5, 4, 60.0, 10.0


@dataclass(frozen=True)
class RecallProbes:
    """Hold queries and their true neighbours.

    Attributes:
        queries: float32 [q, dim].
        farthest_distances: distance of the last true neighbour of each query, [q, 1].
        neighbour_count: number of true neighbours: K, or all if there are fewer.
        rounding_slack: what rounding may add to a distance, [q, 1].
    """

    queries: Vectors
    farthest_distances: Vectors
    neighbour_count: int
    rounding_slack: Vectors

    def recall(self, answers: Sequence[Neighbours]) -> float:
        """Return the share of true neighbours that was found; 1 for an empty space.

        A distance counts as found up to a relative 1e-5 and the slack above the last true one, so
        that equal vectors are equally good. A missing neighbour, at infinity, counts as not found.

        Args:
            answers: Neighbours of one query each, at least `neighbour_count` wide, in the order of
                `queries`.

        Raises:
            ValueError: `answers` is empty, or has another number than the queries; a single one is
                not refused.
        """
        if not self.farthest_distances.size:
            return 1.0
        distances = np.concatenate([answer.distances for answer in answers])[
            :, : self.neighbour_count
        ]
        return float(
            (distances <= self.farthest_distances * (1 + 1e-5) + self.rounding_slack).mean()
        )


def draw_probes(
    connection: Connection, schema: str, info: SpaceInfo, check_stop: Callable[[], None]
) -> RecallProbes:
    """Draw random vectors of a space, and find their neighbours by a full scan in pieces.

    With the metric cosine, zero vectors are no queries. An empty space gives no queries. Memory
    holds one piece of about 16 MB at a time. The draw is not reproducible. At most 30 vectors are
    queries.

    Args:
        connection: the connection.
        schema: schema of the gallery.
        info: the space.
        check_stop: called after each piece; it may raise to stop.

    Raises:
        psycopg.Error: a statement failed.
        NobackfillError: whatever `check_stop` raises.
    """
    table, spec = table_name(schema, info.table_number), info.spec
    sample = random_labels(connection, table, PROBES)
    queries = copy_out(connection, table, labels_condition(sample), spec.dim)[1]
    if spec.metric == "cosine":
        # A zero vector is never searched by a graph: every row is read for it.
        queries = queries[queries.any(axis=1)]
    bounds = f"SELECT coalesce(min(label), 1), coalesce(max(label), 0) FROM {table}"
    first, last = execute(connection, bounds).fetchone()
    step = max(1, _NUMBERS // spec.dim)
    count, best = 0, ExactIndex(spec, sample[:0], queries[:0]).search(queries, K)
    for start in range(first, last + 1, step):
        piece = f"label >= {start:d} AND label < {start + step:d}"
        labels, vectors, _ = copy_out(connection, table, piece, spec.dim)
        if len(labels):
            neighbours = ExactIndex(spec, labels, vectors).search(queries, K)
            best, count = merge_neighbours([best, neighbours], K), count + len(labels)
        check_stop()
    nearest = min(K, count)
    # All squared_l2 distances of short vectors are small, and must not count as rounding.
    scale = np.ones((len(queries), 1), np.float32)
    if spec.metric == "squared_l2":
        scale = np.minimum((queries**2).sum(axis=1, keepdims=True), 1)
    return RecallProbes(queries, best.distances[:, nearest - 1 : nearest], nearest, 1e-6 * scale)


def wait_for_recall(
    ready: Callable[[], bool], measure: Callable[[], float], check_stop: Callable[[], None],
    report: Callable[[float], None],
) -> None:  # fmt: skip
    """Wait, without end, until a measured recall is at least RECALL.

    A BusyError or UnavailableError of `ready` or `measure`, also a CancelledError, is logged, and
    both are tried again; other errors pass through. A pause lasts four times the last measurement,
    at least 0.5 and at most 60 s.

    Args:
        ready: does what can be done first, and tells whether a measurement makes sense.
        measure: measures the recall, 0 to 1.
        check_stop: called at least every 0.5 s between measurements; it may raise to stop.
        report: called with a recall that is too low, at most every 10 s, first after 10 s.

    Raises:
        NobackfillError: whatever `check_stop` or `report` raises, and other errors of `ready` and
            `measure`.
    """
    last_report = time.monotonic()
    while True:
        check_stop()
        seconds, recall = 0.0, None
        try:
            if ready():
                began = time.monotonic()
                recall = measure()
                seconds = time.monotonic() - began
        except (BusyError, UnavailableError) as error:
            log.warning(
                "cannot measure the recall of a search graph; the gateway tries again",
                error=str(error),
            )
        if recall is not None and recall >= RECALL:
            return
        if recall is not None and time.monotonic() - last_report >= _TELL_S:
            report(recall)
            last_report = time.monotonic()
        _pause(min(max(_LOOK_S, _REST * seconds), _LONGEST_S), check_stop)


def _pause(seconds: float, check_stop: Callable[[], None]) -> None:
    until = time.monotonic() + seconds
    while (remaining := until - time.monotonic()) > 0:
        check_stop()
        time.sleep(min(remaining, _LOOK_S))


# Widths that are tried in this order, until one has the required recall.
_WIDTHS = (EF, 200, 400, MAX_EF)


def has_graph(database: Database, schema: str, info: SpaceInfo) -> bool:
    """Tell whether a space has a complete graph, or too many dimensions for one.

    A graph that an interrupted build has left counts as none. A gallery or space that was deleted
    gives False.

    Raises:
        BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
            gone.
        ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
    """
    if info.spec.dim > MOST_HALF:
        return True
    is_valid = database.fetch(
        "SELECT i.indisvalid FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid"
        " JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = %s",
        [schema, graph_name(info)],
    )
    return is_valid == [(True,)]


def build_graph(database: Database, schema: str, info: SpaceInfo) -> None:
    """Build a graph while others write and search; the rest of an interrupted build is removed
    first.

    A graph that exists is dropped and built again, so that searches compare all rows meanwhile. It
    blocks until the graph is complete, perhaps for hours, without a time limit. Nothing is built
    for more than MOST_HALF dimensions. After an error an incomplete graph may stay.

    Raises:
        UnavailableError: the database does not answer.
        BusyError: the database is busy.
        CannotWriteError: the database cannot write.
        GalleryDeletedError: the gallery or its space was deleted.
        ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        psycopg.Error: another call builds the same graph at this time; otherwise the later call
            builds it again.
    """
    statements = index_statements(schema, info.table_number, info.spec, "CONCURRENTLY")
    try:
        # Outside the pool, because it may take hours.
        with database.connect() as connection:
            execute(connection, f"DROP INDEX CONCURRENTLY IF EXISTS {schema}.{graph_name(info)}")
            for statement in statements:
                execute(connection, statement)
    except psycopg.Error as error:
        raise translate_error(error) or error from error


def measure_recall(
    database: Database, schema: str, info: SpaceInfo, check_stop: Callable[[], None]
) -> tuple[int, float]:
    """Measure the recall of a space's graph in one snapshot, at rising widths.

    The whole space is read once, by a connection of its own. With more than MOST_HALF dimensions
    nothing is measured: the result is EF and 1. An empty space has recall 1. The queries are drawn
    again at each call.

    Args:
        database: the database.
        schema: schema of the gallery.
        info: the space.
        check_stop: called often; it may raise to stop.

    Returns:
        The smallest width with the required recall, or the largest width, and its recall.

    Raises:
        BusyError: the database is busy.
        UnavailableError: the database does not answer.
        GalleryDeletedError: the gallery or its space was deleted.
        ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        NobackfillError: whatever `check_stop` raises.
        psycopg.Error: any other error, a defect of this program.
    """
    if info.spec.dim > MOST_HALF:
        return EF, 1.0
    table, width, recall = SpaceTable(schema, info), EF, 0.0
    with database.snapshot() as connection:
        probes = draw_probes(connection, schema, info, check_stop)
        # A sequential scan, which PostgreSQL prefers for few rows, would say nothing about the
        # graph.
        execute(connection, "SET LOCAL enable_seqscan = off")
        execute(connection, "SET LOCAL enable_sort = off")
        for width in _WIDTHS:
            set_candidate_count(connection, width)
            answers = []
            for query in probes.queries:
                answers.append(search_graph(connection, table, query, K))
                check_stop()
            if (recall := probes.recall(answers)) >= RECALL:
                break
    return width, recall


def graph_name(info: SpaceInfo) -> str:
    """Return the name of a space's graph in the gallery's schema.

    The graph itself may not exist.
    """
    return f"vectors_{info.table_number:d}_graph"
