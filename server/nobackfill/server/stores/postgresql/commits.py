"""Whether a transaction was committed whose connection broke while it was.

Its number alone does not tell: numbers of which a crash left nothing on the disk are given out
again, and then the server speaks of another transaction. So each transaction that writes leaves a
mark of its own, and takes away the one that its thread left before. (A row that each of them
updates would gather versions while a backup holds a snapshot, and every write would go through
them: three times as slow after 20,000.)
"""

from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import psycopg

_Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

TABLE = """
CREATE TABLE IF NOT EXISTS nobackfill.commits (
    mark uuid PRIMARY KEY, at timestamptz NOT NULL DEFAULT now()
)
"""
DROP = "DROP TABLE IF EXISTS nobackfill.commits"
# The number is read before the mark takes one: a transaction that wrote nothing leaves none.
_SIGN = b"""
WITH own AS MATERIALIZED (SELECT pg_current_xact_id_if_assigned() AS number),
former AS (DELETE FROM nobackfill.commits USING own WHERE mark = %s AND number IS NOT NULL),
signed AS (INSERT INTO nobackfill.commits (mark) SELECT %s FROM own WHERE number IS NOT NULL)
SELECT number::text FROM own
"""
_STATUS = b"SELECT pg_xact_status(%s::xid8)"
_FOUND = b"SELECT EXISTS (SELECT FROM nobackfill.commits WHERE mark = %s)"
# No transaction is asked for so long after its end.
_FORGET = b"DELETE FROM nobackfill.commits WHERE at < now() - interval '1 day'"


@dataclass(frozen=True)
class Signature:
    """A transaction by its number on a server that has not crashed since, and by its mark."""

    number: str
    mark: UUID


def sign(connection: _Connection, former: UUID | None) -> Signature | None:
    """The last statement of a transaction; None where it wrote nothing. `former`: the mark of one
    that is known to be committed, which goes."""
    mark = uuid4()
    row = connection.execute(_SIGN, [former, mark], binary=True).fetchone()
    assert row is not None, "a SELECT without a condition"
    return None if row[0] is None else Signature(row[0], mark)


def committed(connection: _Connection, signature: Signature) -> bool | None:
    """Whether it was, on a connection that commits each statement; None while it is under way."""
    try:
        row = connection.execute(_STATUS, [signature.number], binary=True).fetchone()
    except psycopg.errors.InvalidParameterValue:
        # "In the future": the server crashed before anything of it was on its disk.
        return False
    if row is not None and row[0] == "in progress":
        return None
    # Asked only now: what was under way when a statement began is not seen by it.
    found = connection.execute(_FOUND, [signature.mark]).fetchone()
    assert found is not None, "a SELECT without a condition"
    return bool(found[0])


def forget(connection: _Connection) -> None:
    """Drop the marks of threads that are gone."""
    connection.execute(_FORGET)
