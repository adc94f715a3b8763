"""HNSW graphs of spaces, made beside puts and searches, and how wide they are to be searched."""

from collections.abc import Callable

import psycopg

from nobackfill.gallery.spec import SpaceInfo
from nobackfill.server.stores.postgresql.database import EF, Database, run
from nobackfill.server.stores.postgresql.failures import refusal
from nobackfill.server.stores.postgresql.recall import RECALL, K, probes_of
from nobackfill.server.stores.postgresql.schema import MOST_HALF, index_statements
from nobackfill.server.stores.postgresql.searcher import MOST_EF, Table, by_graph, widen

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


def measured(
    database: Database, schema: str, info: SpaceInfo, between: Callable[[], None]
) -> tuple[int, float]:
    """How many candidates of a space's graph are to be looked at, and the recall that this gives:
    the least width that finds RECALL, or the widest. In one snapshot, on a connection of its own;
    `between` is called again and again, and may raise. Raises BusyError, UnavailableError."""
    if info.spec.dim > MOST_HALF:
        return EF, 1.0
    table, width, recall = Table(schema, info), EF, 0.0
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
