"""The journal of changes that Milvus lacks.

    nobackfill_<number>.pending(number, label, described)

Triggers write it in the transaction of a change: labels whose vector was added, changed or deleted,
and labels whose metadata changed (`described`), which matter only for filters. Milvus and the
pending labels together cover the whole gallery, so a search of both misses nothing. A row is
deleted after Milvus has got the change; feeding a change twice is harmless. The time of the last
feed, by Milvus' clock, is stored in the same transaction:

    nobackfill_<number>.told(number, moment)

A search that sees all writes up to that time sees every change without a row in `pending`.
"""

from collections.abc import Sequence

import numpy as np

from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.server.stores.postgresql.database import Connection, execute
from nobackfill.server.stores.postgresql.rows import label_column, read_spaces
from nobackfill.server.stores.postgresql.schema import table_name
from nobackfill.server.stores.postgresql.writes import lock_gallery_exclusive

_TABLE = (
    "CREATE TABLE IF NOT EXISTS {0}.pending (number integer NOT NULL, label bigint NOT NULL,"
    " described boolean NOT NULL DEFAULT false)"
)
_FED = "CREATE TABLE IF NOT EXISTS {0}.told (number integer PRIMARY KEY, moment bigint NOT NULL)"
_INDEX = "CREATE INDEX IF NOT EXISTS pending_by_space ON {0}.pending (number, described, label)"
_FUNCTION = """
CREATE OR REPLACE FUNCTION {0}.note_pending() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO {0}.pending (number, label) SELECT TG_ARGV[0]::integer, label FROM changed;
    RETURN NULL;
END $$
"""
_DESCRIBED = """
CREATE OR REPLACE FUNCTION {0}.note_described() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO {0}.pending SELECT s.number, c.label, true FROM changed c CROSS JOIN {0}.spaces s;
    RETURN NULL;
END $$
"""
_DESCRIBING = (
    "CREATE OR REPLACE TRIGGER pending_update AFTER UPDATE ON {0}.items"
    " REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION {0}.note_described()"
)
_TRIGGER = (
    "CREATE TRIGGER pending_{1} AFTER {1} ON {2} REFERENCING {3} TABLE AS changed"
    " FOR EACH STATEMENT EXECUTE FUNCTION {0}.note_pending({4:d})"
)


def begin_journal(connection: Connection, schema: str) -> None:
    """Start the journal of a gallery, with all its vectors pending.

    Spaces that have a journal already stay as they are. The caller commits.

    Args:
        connection: in a transaction, which waits until no other one writes to the gallery.
        schema: the gallery's schema.

    Raises:
        psycopg.Error: a statement fails; `Database.read` and `Database.write` translate it.
    """
    lock_gallery_exclusive(connection, schema)
    if not has_journal(connection, schema):
        for statement in (_TABLE, _FED, _INDEX, _FUNCTION, _DESCRIBED, _DESCRIBING):
            execute(connection, statement.format(schema))
    for info in read_spaces(connection, schema):
        watch_space(connection, schema, info)


def has_journal(connection: Connection, schema: str) -> bool:
    """Return whether a gallery has a journal; False for an unknown schema. Its spaces may still
    lack one.

    Args:
        connection: a connection to the database.
        schema: the gallery's schema.

    Raises:
        psycopg.Error: a statement fails; `Database.read` and `Database.write` translate it.
    """
    rows = execute(
        connection,
        "SELECT to_regclass(%s) IS NOT NULL AND to_regclass(%s) IS NOT NULL",
        [f"{schema}.pending", f"{schema}.told"],
    )
    return bool(rows.fetchone()[0])


def covers_all_spaces(connection: Connection, schema: str) -> bool:
    """Return whether a gallery's journal covers each of its spaces.

    A gateway without Milvus adds spaces that it does not cover. Whether labels are pending does not
    matter.

    Args:
        connection: a connection to the database.
        schema: the gallery's schema.

    Returns:
        False if there is no journal.

    Raises:
        psycopg.Error: a statement fails; `Database.read` and `Database.write` translate it.
    """
    return has_journal(connection, schema) and all(
        _is_watched(connection, table_name(schema, info.table_number))
        for info in read_spaces(connection, schema)
    )


def _is_watched(connection: Connection, table: str) -> bool:
    triggers = execute(
        connection,
        "SELECT 1 FROM pg_trigger WHERE tgrelid = to_regclass(%s) AND tgname = 'pending_insert'",
        [table],
    )
    return triggers.fetchone() is not None


def watch_space(connection: Connection, schema: str, info: SpaceInfo) -> None:
    """Start the journal of one space, with all its vectors pending, unless it has one.

    Writes to the space wait until the caller commits.

    Args:
        connection: in a transaction.
        schema: the gallery's schema, which has a journal.
        info: the space.

    Raises:
        psycopg.Error: a statement fails; `Database.read` and `Database.write` translate it.
    """
    table = table_name(schema, info.table_number)
    if not _is_watched(connection, table):
        for event, which in (("insert", "NEW"), ("delete", "OLD")):
            execute(connection, _TRIGGER.format(schema, event, table, which, info.table_number))
        mark_all_pending(connection, schema, info)


def mark_all_pending(connection: Connection, schema: str, info: SpaceInfo) -> None:
    """Mark all vectors of a space as pending, and forget when it was last fed.

    Labels that are pending already are not added again. The caller commits.

    Args:
        connection: in a transaction.
        schema: the gallery's schema, which has a journal.
        info: the space, whose collection is empty or lost.

    Raises:
        psycopg.Error: a statement fails; `Database.read` and `Database.write` translate it.
    """
    execute(connection, f"DELETE FROM {schema}.told WHERE number = %s", [info.table_number])
    execute(
        connection,
        f"INSERT INTO {schema}.pending (number, label) SELECT {info.table_number:d}, v.label"
        f" FROM {table_name(schema, info.table_number)} v WHERE NOT EXISTS"
        f" (SELECT 1 FROM {schema}.pending p WHERE p.number = {info.table_number:d}"
        " AND p.label = v.label AND NOT p.described)",
    )


def try_lock(connection: Connection, schema: str) -> bool:
    """Lock the feeding of a gallery until the transaction ends; do not wait.

    Without the lock, an older vector could overwrite a newer one.

    Args:
        connection: in a transaction.
        schema: the gallery's schema.

    Returns:
        False if another process holds the lock.

    Raises:
        psycopg.Error: a statement fails; `Database.read` and `Database.write` translate it.
    """
    lock = execute(connection, "SELECT pg_try_advisory_xact_lock(hashtext(%s))", [f"feed {schema}"])
    return bool(lock.fetchone()[0])


def take_pending(connection: Connection, schema: str, count: int) -> list[tuple[int, Labels]]:
    """Take pending labels of a gallery out of its journal; the commit makes it durable.

    If there are more than `count`, it is not defined which are taken. Labels of deleted items, and
    of changed metadata only, are among them without a mark. The caller holds `try_lock`.

    Args:
        connection: in a transaction.
        schema: the gallery's schema.
        count: the most rows to take.

    Returns:
        For each space with such rows its number and its labels, int64 [n], increasing, each once;
        spaces by increasing number. Numbers of dropped spaces may be among them. Empty if nothing
        is pending.

    Raises:
        psycopg.Error: a statement fails; `Database.read` and `Database.write` translate it.
    """
    rows = execute(
        connection,
        f"DELETE FROM {schema}.pending WHERE ctid = ANY(ARRAY(SELECT ctid FROM {schema}.pending"
        " LIMIT %s)) RETURNING number, label",
        [count],
    ).fetchall()
    numbers = sorted({number for number, _ in rows})
    return [
        (number, np.unique(np.array([label for n, label in rows if n == number], np.int64)))
        for number in numbers
    ]


def set_fed_until(connection: Connection, schema: str, space_number: int, moment: int) -> None:
    """Record the time, by Milvus' clock, until which a space was fed, in place of the last one.

    An earlier time replaces a later one, too. The caller commits.

    Args:
        connection: in a transaction.
        schema: the gallery's schema.
        space_number: the number of the space.
        moment: the timestamp of the last write.

    Raises:
        psycopg.Error: a statement fails; `Database.read` and `Database.write` translate it.
    """
    execute(
        connection,
        f"INSERT INTO {schema}.told VALUES (%s, %s)"
        " ON CONFLICT (number) DO UPDATE SET moment = excluded.moment",
        [space_number, moment],
    )


def fed_until(connection: Connection, schema: str, space_number: int) -> int | None:
    """Return the time, by Milvus' clock, until which a space was fed.

    Args:
        connection: a connection to the database.
        schema: the gallery's schema, which has a journal.
        space_number: the number of the space.

    Returns:
        The timestamp of the last write; None if the space was never fed, or must be fed again.

    Raises:
        psycopg.Error: a statement fails; `Database.read` and `Database.write` translate it.
    """
    row = execute(
        connection, f"SELECT moment FROM {schema}.told WHERE number = %s", [space_number]
    ).fetchone()
    return None if row is None else int(row[0])


def pending_labels(
    connection: Connection,
    schema: str,
    space_number: int,
    max_count: int,
    *,
    described: bool = False,
) -> Labels:
    """Return pending labels of a space.

    If there are more, it is not defined which are returned. Labels of deleted items are among them.

    Args:
        connection: a snapshot of the database.
        schema: the gallery's schema.
        space_number: the number of the space.
        max_count: at most one more label than this is returned.
        described: include labels of which only the metadata changed.

    Returns:
        int64 [n], in no order; a label may occur several times.

    Raises:
        psycopg.Error: a statement fails; `Database.read` and `Database.write` translate it.
    """
    filtering = "" if described else " AND NOT described"
    query = f"SELECT label FROM {schema}.pending WHERE number = %s{filtering} LIMIT %s"
    return label_column(execute(connection, query, [space_number, max_count + 1]))


def galleries_with_pending(connection: Connection, schemas: Sequence[str]) -> list[str]:
    """Return the galleries that have pending labels.

    Labels of which only the metadata changed count, too. One statement runs for each schema. The
    names are not quoted: pass only names that `schema_name` made.

    Args:
        connection: a connection to the database.
        schemas: schemas of galleries that have a journal; none: no statement runs.

    Returns:
        Each of `schemas` that has at least one label, in the same order; a repeated one is
        repeated.

    Raises:
        psycopg.Error: a statement fails; `Database.read` and `Database.write` translate it.
    """
    return [
        schema
        for schema in schemas
        if execute(connection, f"SELECT EXISTS (SELECT 1 FROM {schema}.pending)").fetchone()[0]
    ]
