"""What a Milvus has still to be told: labels whose vectors came, changed or went, and those whose
metadata did (`described`), for Milvus filters.

    nobackfill_<number>.pending(number, label, described)

by triggers, in the transaction of the change. What Milvus holds and what is pending cover,
together, all that the database has: a search that looks at both misses nothing, and one without a
filter need not look at what was described. Milvus is told, then the row goes; told twice is
harmless. When Milvus was last told of a space, by its own clock, is kept with that:

    nobackfill_<number>.told(number, moment)

A search that sees all up to then sees whatever has no row in `pending` any more.
"""

from collections.abc import Sequence

import numpy as np

from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.server.stores.postgresql.database import Connection, run
from nobackfill.server.stores.postgresql.rows import label_column, read_spaces
from nobackfill.server.stores.postgresql.schema import table_of
from nobackfill.server.stores.postgresql.writing import hold_gate

_TABLE = (
    "CREATE TABLE IF NOT EXISTS {0}.pending (number integer NOT NULL, label bigint NOT NULL,"
    " described boolean NOT NULL DEFAULT false)"
)
_TOLD = "CREATE TABLE IF NOT EXISTS {0}.told (number integer PRIMARY KEY, moment bigint NOT NULL)"
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


def begin(connection: Connection, schema: str) -> None:
    """Note every change of a gallery from now on, and all that is there; twice is harmless."""
    hold_gate(connection, schema)
    if not kept(connection, schema):
        for statement in (_TABLE, _TOLD, _INDEX, _FUNCTION, _DESCRIBED, _DESCRIBING):
            run(connection, statement.format(schema))
    for info in read_spaces(connection, schema):
        watch(connection, schema, info)


def kept(connection: Connection, schema: str) -> bool:
    """Whether a gallery has a journal."""
    found = run(
        connection,
        "SELECT to_regclass(%s) IS NOT NULL AND to_regclass(%s) IS NOT NULL",
        [f"{schema}.pending", f"{schema}.told"],
    )
    return bool(found.fetchone()[0])


def complete(connection: Connection, schema: str) -> bool:
    """Whether a gallery has a journal that notes the changes of each space: one that a gateway
    without Milvus began is not in it."""
    return kept(connection, schema) and all(
        _watched(connection, table_of(schema, info.number))
        for info in read_spaces(connection, schema)
    )


def _watched(connection: Connection, table: str) -> bool:
    there = run(
        connection,
        "SELECT 1 FROM pg_trigger WHERE tgrelid = to_regclass(%s) AND tgname = 'pending_insert'",
        [table],
    )
    return there.fetchone() is not None


def watch(connection: Connection, schema: str, info: SpaceInfo) -> None:
    """Note the changes of one space, and all that is in it; twice is harmless."""
    table = table_of(schema, info.number)
    if not _watched(connection, table):
        for event, which in (("insert", "NEW"), ("delete", "OLD")):
            run(connection, _TRIGGER.format(schema, event, table, which, info.number))
        note_all(connection, schema, info)


def note_all(connection: Connection, schema: str, info: SpaceInfo) -> None:
    """Everything in a space is pending: its collection has nothing."""
    run(connection, f"DELETE FROM {schema}.told WHERE number = %s", [info.number])
    run(
        connection,
        f"INSERT INTO {schema}.pending (number, label) SELECT {info.number:d}, v.label"
        f" FROM {table_of(schema, info.number)} v WHERE NOT EXISTS (SELECT 1 FROM {schema}.pending"
        f" p WHERE p.number = {info.number:d} AND p.label = v.label AND NOT p.described)",
    )


def alone(connection: Connection, schema: str) -> bool:
    """Until the transaction ends, nobody else tells Milvus of this gallery: an older vector would
    come after a newer one. False where somebody does."""
    lock = run(connection, "SELECT pg_try_advisory_xact_lock(hashtext(%s))", [f"feed {schema}"])
    return bool(lock.fetchone()[0])


def take(connection: Connection, schema: str, count: int) -> list[tuple[int, Labels]]:
    """Some that are pending, by number of their space; they go when the transaction commits."""
    rows = run(
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


def tell(connection: Connection, schema: str, number: int, moment: int) -> None:
    """Milvus was told of a space, at a moment by its clock; until the transaction ends nobody else
    tells it."""
    run(
        connection,
        f"INSERT INTO {schema}.told VALUES (%s, %s)"
        " ON CONFLICT (number) DO UPDATE SET moment = excluded.moment",
        [number, moment],
    )


def told(connection: Connection, schema: str, number: int) -> int | None:
    """When Milvus was last told of a space, by its clock; None: nobody knows."""
    found = run(
        connection, f"SELECT moment FROM {schema}.told WHERE number = %s", [number]
    ).fetchone()
    return None if found is None else int(found[0])


def pending(
    connection: Connection, schema: str, number: int, most: int, *, described: bool = False
) -> Labels:
    """Labels of a space that are pending, with `described` for their metadata alone, too; `most`
    + 1 of them where there are more."""
    some = "" if described else " AND NOT described"
    query = f"SELECT label FROM {schema}.pending WHERE number = %s{some} LIMIT %s"
    return label_column(run(connection, query, [number, most + 1]))


def waiting(connection: Connection, schemas: Sequence[str]) -> list[str]:
    """Those of some galleries that have something pending."""
    return [
        schema
        for schema in schemas
        if run(connection, f"SELECT EXISTS (SELECT 1 FROM {schema}.pending)").fetchone()[0]
    ]
