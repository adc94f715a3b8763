"""Candidates of a search from Milvus, ranked in the database.

Within one snapshot of the database: read the pending labels, search Milvus, then read the vectors
of both and rank those whose item passes the filter. So no deleted item is found, every acknowledged
put is found, and distances are the same as with every other engine. Milvus gets the part of a
filter that it can express (expressions.py); the database checks the rest.
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
from nobackfill.plugins.milvus.columns import collection_name
from nobackfill.plugins.milvus.expressions import EVERYTHING, expression_of
from nobackfill.server.stores.postgresql.conditions import ALWAYS_TRUE as EVERY_ITEM
from nobackfill.server.stores.postgresql.conditions import FEW_VALUES, SqlCondition, sql_condition
from nobackfill.server.stores.postgresql.database import EF, Connection, Database, execute
from nobackfill.server.stores.postgresql.search import SpaceTable
from nobackfill.vectors import Vectors

# The database compares this many vectors as fast as Milvus answers, and exactly.
SMALL = 5_000
# Factor of a second search if the first gives too few hits, and of candidates with a filter.
_WIDER = 8
# Factor of SMALL: the most rows of an index that are checked one by one for the other parts of a
# filter.
_ROWS_CHECKED = 4


class Candidates:
    """The candidates of searches in PostgreSQL, from Milvus in place of a graph in the database.

    Threads may share it.
    """

    def __init__(self, collections: Collections, database: str) -> None:
        """Use Milvus' collections of one database; nothing is read yet.

        Args:
            collections: the client of Milvus.
            database: the id of the database, from `database_id`.
        """
        self._collections = collections
        self._database = database
        # Tables known to have more than SMALL rows.
        self._large: set[str] = set()

    def find_candidates(
        self, connection: Connection, table: SpaceTable, query: Vectors, limit: int,
        condition: SqlCondition, ef: int,
    ) -> list[Any] | None:  # fmt: skip
        """Return candidates of a query that pass a filter, with their vectors, in any order.

        Rows of the journal are always included, so `limit` is no upper bound. A large space counts
        as large for this object's life.

        Args:
            connection: a snapshot of the database.
            table: the table of the space.
            query: float32 [dim].
            limit: the number of candidates that the caller needs.
            condition: the filter.
            ef: the least number of candidates that a graph search examines.

        Returns:
            Rows of label and vector: at least `limit`, or all that pass. None if the caller must
            compare all rows itself: the space is small, few items pass, more than 5,000 labels are
            pending, or Milvus has lost the collection or no search gave enough.

        Raises:
            UnavailableError: Milvus does not answer, although the collection is loaded or its state
                cannot be read.
            psycopg.Error: a statement fails; `Database.read` translates it.
        """
        if not self._is_large(connection, table):
            return None
        new = journal.pending_labels(
            connection,
            table.schema,
            table.space_number,
            SMALL,
            described=condition is not EVERY_ITEM,
        )
        if len(new) > SMALL or self._few_pass(connection, table, condition):
            return None
        name = collection_name(self._database, table.schema, table.space_number)
        since = journal.fed_until(connection, table.schema, table.space_number)
        try:
            for labels, is_all in self._growing(name, table, query, limit, condition, ef, since):
                rows = table.rows_of(connection, [*labels, *new.tolist()], condition)
                # Pending rows do not count: they say nothing about how far Milvus has searched.
                in_milvus = set(labels)
                if is_all or sum(row[0] in in_milvus for row in rows) >= limit:
                    return rows
        except UnavailableError:
            if self._collections.is_loaded(name):
                raise
            # The collection is lost and the feeder will refill it, or Milvus has just started.
        return None

    def _growing(
        self,
        name: str,
        table: SpaceTable,
        query: Vectors,
        limit: int,
        condition: SqlCondition,
        ef: int,
        since: int | None,
    ) -> Iterator[tuple[list[int], bool]]:
        """Yield growing lists of labels that may pass, with whether the list is complete.

        A short list is not complete by itself, because a graph search may stop too early. Only a
        scan of all rows, which `matching` does, is complete.
        """
        expression = (
            EVERYTHING
            if condition.source_filter is None
            else expression_of(condition.source_filter)
        )
        # If few rows of a graph match, more of it must be searched.
        wide = ef if expression == EVERYTHING else _WIDER * ef

        def nearest(count: int) -> list[int]:
            return self._collections.search(name, table.spec, query, count, wide, expression, since)

        labels = nearest(limit)
        if expression != EVERYTHING:
            # Also search without the filter: if a tenth of a graph matches, a walk over matching
            # rows misses some.
            more = min(_WIDER * limit, MOST)
            labels += self._collections.search(name, table.spec, query, more, ef, since=since)
        yield labels, False
        if expression != EVERYTHING:
            matching = self._collections.matching_labels(name, expression, SMALL, since)
            if matching is not None:
                yield matching, True
        yield nearest(min(_WIDER * limit, MOST)), False
        yield nearest(MOST), False

    def nearest_labels(
        self, schema: str, info: SpaceInfo, query: Vectors, k: int
    ) -> list[int] | None:
        """Search Milvus alone, without pending labels and without a filter.

        Args:
            schema: the gallery's schema.
            info: the space.
            query: float32 [dim].
            k: the most labels, 1 to 16,384.

        Returns:
            About the k nearest labels, nearest first, perhaps also of items that were deleted
            since; None if Milvus cannot search the collection yet, or has lost it.

        Raises:
            UnavailableError: Milvus does not answer within 10 s, or refuses the search.
        """
        name = collection_name(self._database, schema, info.table_number)
        if not self._collections.is_loaded(name):
            return None
        return self._collections.search(name, info.spec, query, k, EF)

    def _is_large(self, connection: Connection, table: SpaceTable) -> bool:
        if table.table_name not in self._large:
            if _count_passing_rows(connection, f"{table.table_name} v", EVERY_ITEM, SMALL) <= SMALL:
                return False
            self._large.add(table.table_name)
        return True

    def _few_pass(self, connection: Connection, table: SpaceTable, condition: SqlCondition) -> bool:
        """Return whether an index of the database shows that few items pass; Milvus would scan its
        columns for that."""
        part = (
            None
            if condition.source_filter is None
            else _indexed_filter_part(condition.source_filter)
        )
        if part is None:
            return False
        items = f"{table.schema}.items i"
        if part != condition.source_filter:
            # The rows that the index yields are checked one by one, so there must not be many.
            most = _ROWS_CHECKED * SMALL
            if _count_passing_rows(connection, items, sql_condition(part), most) > most:
                return False
        return _count_passing_rows(connection, items, condition, SMALL) <= SMALL


def too_many_pending(database: Database, schema: str, info: SpaceInfo) -> bool:
    """Return whether so many labels of a space are pending that searches do not use Milvus.

    Args:
        database: the database.
        schema: the gallery's schema, which has a journal.
        info: the space.

    Returns:
        True for more than 5,000 labels.

    Raises:
        UnavailableError: the database does not answer.
        BusyError: a statement took too long, or no connection was free (OverloadedError).
        NotFoundError: the gallery was deleted.
    """
    labels = database.read(
        lambda one: journal.pending_labels(one, schema, info.table_number, SMALL)
    )
    return len(labels) > SMALL


def _indexed_filter_part(filtered: Filter) -> Filter | None:
    """Return a part of the filter that a PostgreSQL index answers and that every passing item
    passes; None if there is none."""
    if isinstance(filtered, All):
        parts = [
            one for part in filtered.filters if (one := _indexed_filter_part(part)) is not None
        ]
        return All(tuple(parts)) if parts else None
    if isinstance(filtered, AnyOf):
        parts = [
            one for part in filtered.filters if (one := _indexed_filter_part(part)) is not None
        ]
        # PostgreSQL does not use the index for conditions with many values.
        values = sum(len(part.values) for part in parts if isinstance(part, OneOf))
        is_indexed = len(parts) == len(filtered.filters) and values <= FEW_VALUES
        return AnyOf(tuple(parts)) if is_indexed else None
    if isinstance(filtered, OneOf):
        return filtered if len(filtered.values) <= FEW_VALUES else None
    return filtered if isinstance(filtered, Exists) else None


def _count_passing_rows(
    connection: Connection, where: str, condition: SqlCondition, most: int
) -> int:
    """Count passing rows, up to `most` + 1."""
    rows = execute(
        connection,
        f"SELECT count(*) FROM (SELECT 1 FROM {where} WHERE {condition.sql} LIMIT {most + 1}) c",
        condition.parameters,
        plans_for_values=True,
    )
    return int(rows.fetchone()[0])
