"""Candidates of a search from Milvus, ranked in the database that has the truth.

In one snapshot of the database: what is pending, then what Milvus finds, then the vectors of both
as the database has them, of the items that pass. So no deleted item is found, every acknowledged
put is, and distances are those of every other engine.
"""

from typing import Any

from nobackfill.errors import UnavailableError
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.server.stores.milvus import journal
from nobackfill.server.stores.milvus.collections import MOST, Collections
from nobackfill.server.stores.milvus.names import name_of
from nobackfill.server.stores.postgresql.conditions import EVERYTHING, Condition
from nobackfill.server.stores.postgresql.database import EF, Connection, run
from nobackfill.server.stores.postgresql.searcher import Table
from nobackfill.vectors import Vectors

# So many vectors are compared in the database as quickly, and exactly.
SMALL = 5_000
# With a filter, how many more candidates are asked for, in turn.
_WIDER = (8, 64)


class Candidates:
    """Where PostgresqlSearcher gets candidates from, in place of a graph in the database."""

    def __init__(self, collections: Collections, database: str) -> None:
        """`database`: what tells this one from others that share the Milvus."""
        self._collections = collections
        self._database = database
        # Tables that were seen to have more than SMALL rows.
        self._large: set[str] = set()

    def rows(
        self, connection: Connection, table: Table, query: Vectors, limit: int,
        condition: Condition, ef: int,
    ) -> list[Any] | None:  # fmt: skip
        """Of label and vector, at least `limit`; None where all rows are to be compared."""
        if not self._is_large(connection, table):
            return None
        new = journal.pending(connection, table.schema, table.number, SMALL)
        if len(new) > SMALL or self._few_pass(connection, table, condition):
            return None
        name = name_of(self._database, table.schema, table.number)
        for factor in (1,) if condition is EVERYTHING else _WIDER:
            asked = min(limit * factor, MOST)
            try:
                near = self._collections.search(name, table.spec, query, asked, ef)
            except UnavailableError:
                if self._collections.loaded(name):
                    raise
                # Milvus has lost it, and the feeder is about to notice; or it has just started.
                return None
            rows = table.rows_of(connection, [*near, *new.tolist()], condition)
            if len(rows) >= limit:
                return rows
        return None

    def found(self, schema: str, info: SpaceInfo, query: Vectors, k: int) -> list[int] | None:
        """Labels that Milvus alone gives; None where it cannot say yet."""
        name = name_of(self._database, schema, info.number)
        if not self._collections.loaded(name):
            return None
        return self._collections.search(name, info.spec, query, k, EF)

    def _is_large(self, connection: Connection, table: Table) -> bool:
        if table.name not in self._large:
            count = _count(connection, f"{table.name} v", EVERYTHING)
            if count <= SMALL:
                return False
            self._large.add(table.name)
        return True

    def _few_pass(self, connection: Connection, table: Table, condition: Condition) -> bool:
        if condition is EVERYTHING:
            return False
        return _count(connection, f"{table.schema}.items i", condition) <= SMALL


def _count(connection: Connection, where: str, condition: Condition) -> int:
    """Up to SMALL + 1."""
    found = run(
        connection,
        f"SELECT count(*) FROM (SELECT 1 FROM {where} WHERE {condition.text} LIMIT {SMALL + 1}) c",
        condition.values,
    )
    return int(found.fetchone()[0])
