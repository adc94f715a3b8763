"""Candidates of a search from Milvus, ranked in the database that has the truth.

In one snapshot of the database: what is pending, then what Milvus finds, then the vectors of both
as the database has them, of the items that pass. So no deleted item is found, every acknowledged
put is, and distances are those of every other engine. A filter is said to Milvus as far as it can
be (expressions.py): it gives what may pass, and the database takes what does.
"""

from collections.abc import Iterator
from typing import Any

from nobackfill.errors import UnavailableError
from nobackfill.gallery.filters import (
    All,
    AnyOf,
    Exists,
    Filter,
    OneOf,
)
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.plugins.milvus import journal
from nobackfill.plugins.milvus.collections import MOST, Collections
from nobackfill.plugins.milvus.columns import name_of
from nobackfill.plugins.milvus.expressions import EVERYTHING, expression_of
from nobackfill.server.stores.postgresql.conditions import EVERYTHING as EVERY_ITEM
from nobackfill.server.stores.postgresql.conditions import FEW_VALUES, Condition, condition_of
from nobackfill.server.stores.postgresql.database import EF, Connection, Database, run
from nobackfill.server.stores.postgresql.search import SpaceTable
from nobackfill.vectors import Vectors

# So many vectors are compared in the database as quickly, and exactly.
SMALL = 5_000
# How many more candidates are asked for where too few of the first are left, and how many more are
# looked at with a filter.
_WIDER = 8
# How many more than SMALL an index may let through where the rest of a filter is looked at by row.
_LOOKED = 4


class Candidates:
    """Where PostgresqlSearcher gets candidates from, in place of a graph in the database."""

    def __init__(self, collections: Collections, database: str) -> None:
        """`database`: what tells this one from others that share the Milvus."""
        self._collections = collections
        self._database = database
        # Tables that were seen to have more than SMALL rows.
        self._large: set[str] = set()

    def rows(
        self, connection: Connection, table: SpaceTable, query: Vectors, limit: int,
        condition: Condition, ef: int,
    ) -> list[Any] | None:  # fmt: skip
        """Of label and vector, at least `limit` or of all that pass; None where all rows are to be
        compared."""
        if not self._is_large(connection, table):
            return None
        new = journal.pending(
            connection, table.schema, table.number, SMALL, described=condition is not EVERY_ITEM
        )
        if len(new) > SMALL or self._few_pass(connection, table, condition):
            return None
        name = name_of(self._database, table.schema, table.number)
        since = journal.told(connection, table.schema, table.number)
        try:
            for near, is_all in self._near(name, table, query, limit, condition, ef, since):
                rows = table.rows_of(connection, [*near, *new.tolist()], condition)
                # What is pending says nothing of how far Milvus has looked.
                known = set(near)
                if is_all or sum(row[0] in known for row in rows) >= limit:
                    return rows
        except UnavailableError:
            if self._collections.loaded(name):
                raise
            # Milvus has lost it, and the feeder is about to notice; or it has just started.
        return None

    def _near(
        self,
        name: str,
        table: SpaceTable,
        query: Vectors,
        limit: int,
        condition: Condition,
        ef: int,
        since: int | None,
    ) -> Iterator[tuple[list[int], bool]]:
        """Labels that may pass, more and more of the nearest, and whether they are all there are.

        That fewer come than were asked for does not say so: a graph may be left too early. But
        Milvus goes through all of its rows when it is asked which of them match.
        """
        said = EVERYTHING if condition.says is None else expression_of(condition.says)
        # Of a graph most of which does not match more has to be looked at.
        wide = ef if said == EVERYTHING else _WIDER * ef

        def nearest(count: int) -> list[int]:
            return self._collections.search(name, table.spec, query, count, wide, said, since)

        near = nearest(limit)
        if said != EVERYTHING:
            # And what is near whether it matches or not: of a graph of which a tenth matches, a
            # walk misses some.
            more = min(_WIDER * limit, MOST)
            near += self._collections.search(name, table.spec, query, more, ef, since=since)
        yield near, False
        if said != EVERYTHING:
            matching = self._collections.matching(name, said, SMALL, since)
            if matching is not None:
                yield matching, True
        yield nearest(min(_WIDER * limit, MOST)), False
        yield nearest(MOST), False

    def found(self, schema: str, info: SpaceInfo, query: Vectors, k: int) -> list[int] | None:
        """Labels that Milvus alone gives; None where it cannot say yet."""
        name = name_of(self._database, schema, info.number)
        if not self._collections.loaded(name):
            return None
        return self._collections.search(name, info.spec, query, k, EF)

    def _is_large(self, connection: Connection, table: SpaceTable) -> bool:
        if table.name not in self._large:
            if _count(connection, f"{table.name} v", EVERY_ITEM, SMALL) <= SMALL:
                return False
            self._large.add(table.name)
        return True

    def _few_pass(self, connection: Connection, table: SpaceTable, condition: Condition) -> bool:
        """Whether an index of the database says so: sooner than Milvus, which goes through its
        columns."""
        found = None if condition.says is None else _indexed(condition.says)
        if found is None:
            return False
        items = f"{table.schema}.items i"
        if found != condition.says:
            # Of what an index lets through each row is looked at: not of half of the items.
            most = _LOOKED * SMALL
            if _count(connection, items, condition_of(found), most) > most:
                return False
        return _count(connection, items, condition, SMALL) <= SMALL


def too_many_pending(database: Database, schema: str, info: SpaceInfo) -> bool:
    """Whether more of a space is pending than a search compares beside what Milvus finds."""
    left = database.read(lambda connection: journal.pending(connection, schema, info.number, SMALL))
    return len(left) > SMALL


def _indexed(filtered: Filter) -> Filter | None:
    """What PostgreSQL finds by its index, and lets through all that passes; None: no part of the
    filter is such."""
    if isinstance(filtered, All):
        parts = [found for part in filtered.of if (found := _indexed(part)) is not None]
        return All(tuple(parts)) if parts else None
    if isinstance(filtered, AnyOf):
        parts = [found for part in filtered.of if (found := _indexed(part)) is not None]
        # Conditions with many values do not use an index.
        values = sum(len(part.values) for part in parts if isinstance(part, OneOf))
        whole = len(parts) == len(filtered.of) and values <= FEW_VALUES
        return AnyOf(tuple(parts)) if whole else None
    if isinstance(filtered, OneOf):
        return filtered if len(filtered.values) <= FEW_VALUES else None
    return filtered if isinstance(filtered, Exists) else None


def _count(connection: Connection, where: str, condition: Condition, most: int) -> int:
    """Up to `most` + 1."""
    found = run(
        connection,
        f"SELECT count(*) FROM (SELECT 1 FROM {where} WHERE {condition.text} LIMIT {most + 1}) c",
        condition.values,
        filters=True,
    )
    return int(found.fetchone()[0])
