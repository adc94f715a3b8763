"""Find the nearest items of a space by pgvector: a graph's candidates, or every row.

Distances are computed here from the candidates' vectors, as all our engines do it (distances.py):
the same numbers for the same vectors, and equal distances in the order of labels.
"""

from collections.abc import Collection, Sequence
from itertools import count
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import psycopg
from psycopg import errors, pq

from nobackfill.gallery.filters import Filter
from nobackfill.gallery.search import index, view
from nobackfill.gallery.search.index import (
    Labels,
    Mask,
    Neighbours,
    membership_mask,
    nearest_candidates,
)
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.server.stores.postgresql.conditions import ALWAYS_TRUE, SqlCondition, sql_condition
from nobackfill.server.stores.postgresql.database import EF, Connection, Database, execute, scalar
from nobackfill.server.stores.postgresql.rows import from_binary, label_column, to_binary
from nobackfill.server.stores.postgresql.schema import (
    MOST_HALF,
    MOST_INDEXED,
    schema_name,
    table_name,
)
from nobackfill.server.stores.postgresql.writes import few_missing_labels
from nobackfill.vectors import Vectors, check_vectors

# Nearly all searches use one kind of statement, which is executed in a single call of libpq.
# psycopg's own path, with a cursor and a typed value, took a third of a search's time. A connection
# prepares the statement once, under a name of its own. psycopg drops all names now and then
# (`DEALLOCATE ALL` after a rollback); the statement is then prepared again.

# Most statements that a connection keeps prepared: one for each table and number of hits.
_MAX_STATEMENTS = 100
_BINARY = pq.Format.BINARY
_names: WeakKeyDictionary[Connection, dict[str, bytes]] = WeakKeyDictionary()
_numbers = count()


def is_idle(connection: Connection) -> bool:
    """Tell whether a connection is in no transaction, so that an error would end none."""
    return connection.pgconn.transaction_status == pq.TransactionStatus.IDLE


def execute_nearest(
    connection: Connection, statement: str, query: Vectors
) -> list[tuple[int, bytes]]:
    """Run a prepared statement outside of a transaction.

    A connection prepares each statement once and keeps up to 100. If the server has lost it, it is
    prepared and executed once more.

    Args:
        connection: the connection.
        statement: SQL with one placeholder, %s, for a vector.
        query: float32 [dim].

    Returns:
        Label and binary vector of each row, in the statement's order; empty without rows.
        `from_binary` reads the vectors.

    Raises:
        psycopg.Error: the statement failed.
    """
    server = connection.pgconn
    names = _names.setdefault(connection, {})
    values: Sequence[bytes] = [to_binary(query)]
    for _ in range(2):
        if statement not in names:
            _prepare_statement(server, names, statement)
        result = server.exec_prepared(names[statement], values, [_BINARY], _BINARY)
        if result.status == pq.ExecStatus.TUPLES_OK:
            break
        if result.error_field(pq.DiagnosticField.SQLSTATE) != b"26000":
            raise _result_error(server, result)
        names.clear()
    else:
        raise _result_error(server, result)
    value = result.get_value
    return [
        (int.from_bytes(value(row, 0) or b"", "big"), value(row, 1) or b"")
        for row in range(result.ntuples)
    ]


def _prepare_statement(server: pq.abc.PGconn, names: dict[str, bytes], statement: str) -> None:
    if len(names) >= _MAX_STATEMENTS:
        server.exec_(b"DEALLOCATE " + names.pop(next(iter(names))))
    name = b"near_%d" % next(_numbers)
    result = server.prepare(name, statement.replace("%s", "$1::vector").encode())
    if result.status != pq.ExecStatus.COMMAND_OK:
        raise _result_error(server, result)
    names[statement] = name


def _result_error(server: pq.abc.PGconn, result: pq.abc.PGresult) -> psycopg.Error:
    if server.status == pq.ConnStatus.BAD:
        # As psycopg does it: without a code, because no server sent one.
        return psycopg.OperationalError(server.get_error_message())
    return errors.error_from_result(result)


# Candidates beyond k, so that rounding seldom leaves the k-th in doubt.
_EXTRA_CANDIDATES = 8
# pgvector's largest ef_search.
MAX_EF = 1000


class SpaceTable:
    """Describe how a space's table is searched."""

    def __init__(
        self, schema: str, info: SpaceInfo, excluded: SpaceInfo | None = None, ef: int = EF
    ) -> None:
        """Describe a table.

        Nothing is read.

        Args:
            schema: schema of the gallery.
            info: the space.
            excluded: a space whose items are left out; None leaves out none.
            ef: candidates of its graph, unless a search asks for more or sets others.
        """
        self.spec: SpaceSpec = info.spec
        self.ef = ef
        self.schema = schema
        self.space_number = info.table_number
        self.table_name = table_name(schema, info.table_number)
        self._operator = "<->" if self.spec.metric == "squared_l2" else "<=>"
        self._excluded = None if excluded is None else excluded.table_number
        self._exclusion = ""
        if excluded is not None:
            other = table_name(schema, excluded.table_number)
            self._exclusion = f" AND NOT EXISTS (SELECT 1 FROM {other} o WHERE o.label = v.label)"

    def remaining_labels(self, connection: Connection) -> list[int] | None:
        """Return the labels of all its rows, if the excluded space leaves only a few.

        A graph would be searched in vain for them, and then every row compared. None: there are
        enough for a graph.

        Returns:
            The labels, increasing, at most 2000; may be empty. Filters do not count. None without
            an excluded space.

        Raises:
            psycopg.Error: the statement fails, as without the table; the caller translates it.
        """
        if self._excluded is None:
            return None
        return few_missing_labels(connection, self.schema, self.space_number, self._excluded)

    def statement(self, condition: SqlCondition, exact: bool, limit: int) -> str:
        """Make the SQL of a search: label, vector and, if exact, distance.

        It binds the query if exact, the condition's values, the query, and a limit if there is a
        condition.

        Items of the excluded space are left out. By cosine, the distance of a zero vector, or to a
        zero query, is NaN, which an exact search orders as 1.

        With more than MOST_INDEXED dimensions the graph orders by 16-bit floats. A search that is
        not exact may return fewer rows than exist, in no strict order.

        Args:
            condition: a condition on the items; ALWAYS_TRUE needs no join.
            exact: compare every row; equal distances by label.
            limit: most rows; it is part of the text if the condition is ALWAYS_TRUE, and a
                placeholder otherwise.
        """
        distance = f"v.embedding {self._operator} %s"
        order_by_graph = distance
        if self.spec.dim > MOST_INDEXED:
            half = f"halfvec({self.spec.dim:d})"
            order_by_graph = f"v.embedding::{half} {self._operator} %s::{half}"
        # A zero vector has no direction: its distance is NaN for PostgreSQL, and 1 for us. The
        # added 0 keeps PostgreSQL from using the graph.
        ordering = (
            f"coalesce(nullif({distance}, 'NaN'), 1) + 0, v.label" if exact else order_by_graph
        )
        columns = f"v.label, v.embedding, {distance}" if exact else "v.label, v.embedding"
        # A bound limit is planned at each call, as a filter must be; a search without a filter is
        # planned once.
        limit_text = "%s" if condition is not ALWAYS_TRUE else f"{limit:d}"
        tables = self._from_clause(condition)
        return f"SELECT {columns} FROM {tables} ORDER BY {ordering} LIMIT {limit_text}"

    def _from_clause(self, condition: SqlCondition) -> str:
        items = "" if condition is ALWAYS_TRUE else f" JOIN {self.schema}.items i USING (label)"
        return f"{self.table_name} v{items} WHERE ({condition.sql}){self._exclusion}"

    def rows_of(
        self, connection: Connection, labels: Sequence[int], condition: SqlCondition
    ) -> list[Any]:
        """Return label and vector of those labels that pass a condition.

        Labels without a row, and items of the excluded space, are left out. The rows have no order,
        and a repeated label gives one.

        Raises:
            psycopg.Error: the statement fails, as without the table; the caller translates it.
        """
        statement = (
            f"SELECT v.label, v.embedding FROM {self._from_clause(condition)} AND v.label = ANY(%s)"
        )
        values = [*condition.parameters, list(labels)]
        is_filtered = condition is not ALWAYS_TRUE
        rows: list[Any] = execute(
            connection, statement, values, plans_for_values=is_filtered
        ).fetchall()
        return rows


class CandidateSource(Protocol):
    """Find candidates with another engine than the database's graphs."""

    def find_candidates(
        self, connection: Connection, table: SpaceTable, query: Vectors, limit: int,
        condition: SqlCondition, ef: int,
    ) -> list[Any] | None:  # fmt: skip
        """Find candidates.

        It may return more than `limit`, in any order. An error passes through the search.

        Args:
            connection: the connection.
            table: the space.
            query: float32 [dim].
            limit: least number of candidates.
            condition: candidates must pass it.
            ef: width of the search.

        Returns:
            Label and vector of at least `limit` items, or of all that pass; None if all rows must
            be compared.
        """


def search(
    database: Database,
    requests: Sequence[tuple[SpaceTable, Vectors]],
    k: int,
    condition: SqlCondition = ALWAYS_TRUE,
    ef: int = 0,
    *,
    candidates: CandidateSource | None = None,
) -> list[Neighbours]:
    """Search several tables of one gallery in one snapshot.

    Tables without enough passing candidates are compared row by row, so that a filter never leaves
    out hits. Within one call all tables have one width, the largest. With no queries a table's
    neighbours have shape [0, k].

    Args:
        database: the database.
        requests: each table with its queries, float32 [q, dim]; at least one table. Items of a
            table's excluded space are left out.
        k: most neighbours of each query, at least 1.
        condition: items must pass it.
        ef: width of the graph search; 0 means the table's own, and at least k + 8. Above 1000, and
            above MOST_HALF dimensions, every row is compared.
        candidates: finds candidates instead of the database's graphs; None means the graphs.

    Returns:
        The neighbours of all queries, for each table: nearest first, equal distances by label,
        padded with -1 and infinity.

    Raises:
        InvalidInputError: queries have another shape, or are no floats; UnusableRowsError names
            those with a wrong norm, NaN or infinity.
        UnavailableError: the database does not answer, or the caller is gone.
        GalleryDeletedError: the gallery or a table was deleted.
        BusyError: no connection is free, or a statement takes too long.
        ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        ValueError: there is no table, or queries are nested lists of unequal lengths.
        Exception: an error of `candidates`.
    """
    checked = [
        check_vectors(queries, table.spec.dim, error_name="queries", unit_norm=table.spec.unit_norm)
        for table, queries in requests
    ]

    # One width for all tables, set once.
    width = max(_candidate_count(table, k, ef) for table, _ in requests)

    def work(connection: Connection) -> list[Neighbours]:
        results = []
        if width != EF and width <= MAX_EF and candidates is None:
            set_candidate_count(connection, width)
        for (table, _), queries in zip(requests, checked, strict=True):
            labels = table.remaining_labels(connection)
            if labels is None:
                answers = [
                    _nearest(connection, table, query, k, condition, width, candidates)
                    for query in queries
                ]
            else:
                rows = table.rows_of(connection, labels, condition) if labels else []
                answers = [rank_rows(table.spec, query, rows, k) for query in queries]
            results.append(_concatenate(answers, k))
        return results

    # A single statement is a snapshot by itself, and saves a quarter of the round trips.
    is_single = len(requests) == 1 and len(checked[0]) == 1 and width == EF
    is_single = is_single and candidates is None
    return database.read(work, snapshot=not is_single)


def scans_all_vectors(spec: SpaceSpec, ef: int) -> bool:
    """Tell whether a search with `ef` candidates reads every vector.

    Args:
        spec: the space.
        ef: number of candidates; more than MAX_EF means all.
    """
    return spec.dim > MOST_HALF or ef > MAX_EF


def _candidate_count(table: SpaceTable, k: int, ef: int) -> int:
    """Return the number of candidates of a graph search."""
    return max(ef or table.ef, k + _EXTRA_CANDIDATES)


def set_candidate_count(connection: Connection, width: int) -> None:
    """Set the number of candidates, up to MAX_EF, until the end of the transaction.

    It changes searches of this connection only.

    Args:
        connection: a connection inside a transaction.
        width: number of candidates, 1 to MAX_EF.

    Raises:
        psycopg.Error: the width is out of range, or the connection is broken.
    """
    execute(connection, "SELECT set_config('hnsw.ef_search', %s, true)", [str(width)])


def _nearest(
    connection: Connection,
    table: SpaceTable,
    query: Vectors,
    k: int,
    condition: SqlCondition,
    width: int,
    candidates: CandidateSource | None,
) -> Neighbours:
    limit = k + _EXTRA_CANDIDATES
    cosine = table.spec.metric == "cosine"
    exact = scans_all_vectors(table.spec, width) or (cosine and not query.any())
    if not exact and candidates is not None:
        rows_found = candidates.find_candidates(connection, table, query, limit, condition, width)
        if rows_found is not None:
            return rank_rows(table.spec, query, rows_found, k)
    elif not exact:
        rows = _query_candidates(connection, table, query, limit, condition, exact=False)
        if len(rows) == limit:
            return rank_rows(table.spec, query, rows, k)
        # Too few pass, or the graph scan ended early: only comparing all rows tells.
    scale = 1.0 if cosine else min(1.0, float(np.linalg.norm(query)))
    while True:
        rows = _query_candidates(connection, table, query, limit, condition, exact=True)
        if len(rows) < limit or _is_settled(rows, k, scale):
            return rank_rows(table.spec, query, rows, k)
        limit *= 4


def search_graph(connection: Connection, table: SpaceTable, query: Vectors, k: int) -> Neighbours:
    """Search one query [dim] by the graph alone, at its present width.

    Items of the table's excluded space are left out.

    Returns:
        Neighbours of one query; fewer than `k`, padded with -1, if the graph finds no more.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    rows = _query_candidates(
        connection, table, query, k + _EXTRA_CANDIDATES, ALWAYS_TRUE, exact=False
    )
    return rank_rows(table.spec, query, rows, k)


def _query_candidates(
    connection: Connection, table: SpaceTable, query: Vectors, limit: int,
    condition: SqlCondition, *, exact: bool,
) -> list[Any]:  # fmt: skip
    if not exact and condition is ALWAYS_TRUE and is_idle(connection):
        return execute_nearest(connection, table.statement(condition, exact, limit), query)
    values = [*([query] if exact else []), *condition.parameters, query]
    is_filtered = condition is not ALWAYS_TRUE
    if is_filtered:
        values.append(limit)
    statement = table.statement(condition, exact, limit)
    rows: list[Any] = execute(
        connection, statement, values, plans_for_values=is_filtered
    ).fetchall()
    return rows


def _is_settled(rows: list[Any], k: int, scale: float) -> bool:
    """Tell whether no row beyond the limit can be among the k nearest.

    PostgreSQL's distances are float32, so many almost equal vectors leave the k-th in doubt.
    `scale` is the size of the rounded values.
    """
    kth, last = rows[k - 1][2], rows[-1][2]
    return bool(np.isnan(last) or last > kth * (1 + 1e-4) + 1e-6 * scale)


def rank_rows(spec: SpaceSpec, query: Vectors, rows: list[Any], k: int) -> Neighbours:
    """Rank rows of label and vector by their distance to one query [dim].

    Distances are computed from the vectors, as all engines do it. Further columns are ignored, and
    a label that occurs twice is not merged. The rows' vectors must have the space's dimension,
    which is not checked.

    Args:
        spec: the space.
        query: float32 [dim].
        rows: label and binary vector of each; may be empty.
        k: most neighbours, at least 1.

    Returns:
        The `k` nearest as Neighbours of one query, equal distances by label, padded with -1 and
        infinity.
    """
    if view.rank_binary_rows is not None:
        neighbours = view.rank_binary_rows(spec.metric == "cosine", query, rows, k)
        if neighbours is not None:
            return Neighbours(*neighbours)
    if not rows:
        return nearest_candidates(np.empty((1, 0), np.int64), np.empty((1, 0), np.float32), k)
    labels = np.array([row[0] for row in rows], np.int64)
    vectors = index.prepare_vectors(spec.metric, from_binary([row[1] for row in rows], spec.dim))
    prepared = index.prepare_vectors(spec.metric, query[None])
    return nearest_candidates(
        labels[None], index.pair_distances(spec.metric, prepared, vectors[None]), k
    )


def _concatenate(rows: list[Neighbours], k: int) -> Neighbours:
    if len(rows) == 1:
        return rows[0]
    labels: list[Labels] = [row.labels for row in rows]
    return Neighbours(
        np.concatenate([np.empty((0, k), np.int64), *labels]),
        np.concatenate([np.empty((0, k), np.float32), *(row.distances for row in rows)]),
    )


class PostgresqlMatches:
    """Match the items that pass a filter, read when needed; `condition` is for other statements."""

    def __init__(self, database: Database, schema: str, condition: SqlCondition) -> None:
        self._database = database
        self._items = f"{schema}.items i WHERE {condition.sql}"
        self.condition = condition

    def labels(self) -> Labels:
        """Return the labels of all items that pass now, int64, increasing.

        Each call reads the database again.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        query = f"SELECT i.label FROM {self._items} ORDER BY i.label"
        values = self.condition.parameters
        return label_column(self._database.fetch(query, values, plans_for_values=True))

    def __len__(self) -> int:
        query, values = f"SELECT count(*) FROM {self._items}", self.condition.parameters
        ((total,),) = self._database.fetch(query, values, plans_for_values=True)
        return int(total)

    def mask(self, labels: Labels) -> Mask:
        """Return which of `labels` (int64 [n], increasing) pass now, as bool [n].

        Each call reads all labels that pass. A label without an item is False.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        return membership_mask(np.asarray(labels), self.labels())


class PostgresqlFiltering:
    """Evaluate filters in PostgreSQL; implements Filtering."""

    def __init__(self, database: Database, schema: str) -> None:
        self._database = database
        self._schema = schema

    def find_matches(self, filtered: Filter) -> PostgresqlMatches:
        """Return the items that pass a filter; the database is read when they are used.

        Raises:
            InvalidInputError: the filter has too many tests, values or levels, a NaN, or an integer
                of more than 64 bits.
            TypeError: a part of it is no filter, such as a mapping.
        """
        return PostgresqlMatches(self._database, self._schema, sql_condition(filtered))

    def close(self) -> None:
        """Do nothing: the connections belong to the database."""


def count_locked(database: Database, names: Collection[str]) -> int:
    """Count the items of several galleries, before adding some in the same transaction.

    Within Database.transact no other call counts one of them here, or deletes one, before the
    transaction ends; such calls wait. Without a transaction the locks end at once.

    Args:
        database: the database.
        names: names of galleries; unknown ones count 0, and repeated ones count once.

    Returns:
        The sum of their items; 0 without names.

    Raises:
        GalleryDeletedError: the gallery was deleted; nothing has changed.
        BusyError: a lock is held for too long, or other calls change the same items.
        UnavailableError: the database does not answer, or the outcome of the commit is unknown;
            repeating the call is safe.
        CannotWriteError: the database is full or read-only.
        ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
    """

    def work(connection: Connection) -> int:
        # In one order, with locks of their own, which no upgrade's flip waits for.
        lock = "SELECT pg_advisory_xact_lock(hashtext('nobackfill items'), hashtext(%s))"
        for name in sorted(names):
            execute(connection, lock, [name])
        rows = execute(
            connection,
            "SELECT number FROM nobackfill.galleries WHERE name = ANY(%s) ORDER BY number"
            " FOR KEY SHARE",
            [list(names)],
        ).fetchall()
        counts = " UNION ALL ".join(
            f"SELECT count(*) AS items FROM {schema_name(number)}.items" for (number,) in rows
        )
        if not counts:
            return 0
        return int(scalar(connection, f"SELECT sum(items) FROM ({counts}) AS counts"))

    return database.write(work)
