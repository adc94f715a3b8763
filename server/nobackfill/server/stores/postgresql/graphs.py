"""HNSW graphs of spaces, made beside puts and searches."""

import psycopg

from nobackfill.gallery.spec import SpaceInfo
from nobackfill.server.stores.postgresql.database import Database, run
from nobackfill.server.stores.postgresql.failures import refusal
from nobackfill.server.stores.postgresql.schema import index_statements


def has_graph(database: Database, schema: str, info: SpaceInfo) -> bool:
    """Whether a space has a whole graph, or has too many dimensions for any."""
    if not index_statements(schema, info.number, info.spec):
        return True
    found = database.read(
        lambda connection: run(
            connection,
            "SELECT i.indisvalid FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid"
            " JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = %s AND c.relname = %s",
            [schema, _name(info)],
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
            run(connection, f"DROP INDEX CONCURRENTLY IF EXISTS {schema}.{_name(info)}")
            for statement in statements:
                run(connection, statement)
    except psycopg.Error as error:
        raise refusal(error) or error from error


def _name(info: SpaceInfo) -> str:
    return f"vectors_{info.number:d}_graph"
