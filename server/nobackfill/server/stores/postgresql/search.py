"""The nearest items of a space, by pgvector: a graph's candidates, or every row.

What a search returns is computed here, from the vectors of the candidates, as every engine of ours
does it (distances.py): the same numbers for the same vectors, equal distances by label.
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
from nobackfill.gallery.search.index import Labels, Mask, Neighbours, best, mask_of
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.server.stores.postgresql.conditions import EVERYTHING, Condition, condition_of
from nobackfill.server.stores.postgresql.database import EF, Connection, Database, run
from nobackfill.server.stores.postgresql.rows import from_binary, label_column, to_binary
from nobackfill.server.stores.postgresql.schema import (
    MOST_HALF,
    MOST_INDEXED,
    schema_of,
    table_of,
)
from nobackfill.server.stores.postgresql.writing import few_left
from nobackfill.vectors import Vectors, check_vectors

# The statement that nearly every search is, asked in one call of libpq: psycopg's way around it, a
# cursor and each value in its type, took a third of the time that a search takes here.
#
# A connection prepares it once, under a name of its own. psycopg drops all names now and then
# (`DEALLOCATE ALL` after a rollback): it is prepared again.

# Statements that a connection keeps: one for each table and number of hits that are asked for.
_MOST = 100
_BINARY = pq.Format.BINARY
_names: WeakKeyDictionary[Connection, dict[str, bytes]] = WeakKeyDictionary()
_numbers = count()


def usable(connection: Connection) -> bool:
    """Whether a refusal ends no transaction."""
    return connection.pgconn.transaction_status == pq.TransactionStatus.IDLE


def rows_near(connection: Connection, statement: str, query: Vectors) -> list[tuple[int, bytes]]:
    """Rows of a label and a vector, in binary form, of a statement with one place, %s, for a vector
    [dim]. Not within a transaction. Raises psycopg.Error."""
    asked = connection.pgconn
    known = _names.setdefault(connection, {})
    values: Sequence[bytes] = [to_binary(query)]
    for _ in range(2):
        if statement not in known:
            _prepare(asked, known, statement)
        result = asked.exec_prepared(known[statement], values, [_BINARY], _BINARY)
        if result.status == pq.ExecStatus.TUPLES_OK:
            break
        if result.error_field(pq.DiagnosticField.SQLSTATE) != b"26000":
            raise _error(asked, result)
        known.clear()
    else:
        raise _error(asked, result)
    value = result.get_value
    return [
        (int.from_bytes(value(row, 0) or b"", "big"), value(row, 1) or b"")
        for row in range(result.ntuples)
    ]


def _prepare(asked: pq.abc.PGconn, known: dict[str, bytes], statement: str) -> None:
    if len(known) >= _MOST:
        asked.exec_(b"DEALLOCATE " + known.pop(next(iter(known))))
    name = b"near_%d" % next(_numbers)
    result = asked.prepare(name, statement.replace("%s", "$1::vector").encode())
    if result.status != pq.ExecStatus.COMMAND_OK:
        raise _error(asked, result)
    known[statement] = name


def _error(asked: pq.abc.PGconn, result: pq.abc.PGresult) -> psycopg.Error:
    if asked.status == pq.ConnStatus.BAD:
        # As psycopg says it: without a code, for no server does.
        return psycopg.OperationalError(asked.get_error_message())
    return errors.error_from_result(result)


# Candidates taken beyond k, so that rounding seldom leaves the k-th in doubt.
_SPARE = 8
# pgvector looks at no more at once.
MOST_EF = 1000


class SpaceTable:
    """A space's table, and how it is asked."""

    def __init__(
        self, schema: str, info: SpaceInfo, without: SpaceInfo | None = None, ef: int = EF
    ) -> None:
        """`without`: a space whose items are left out; it answers for them. `ef`: candidates of its
        graph that are looked at, unless a search asks for more."""
        self.spec: SpaceSpec = info.spec
        self.ef = ef
        self.schema = schema
        self.number = info.number
        self.name = table_of(schema, info.number)
        self._operator = "<->" if self.spec.metric == "squared_l2" else "<=>"
        self._without = None if without is None else without.number
        self._rest = ""
        if without is not None:
            other = table_of(schema, without.number)
            self._rest = f" AND NOT EXISTS (SELECT 1 FROM {other} o WHERE o.label = v.label)"

    def few(self, connection: Connection) -> list[int] | None:
        """Labels of all rows that it answers for, where another answers for nearly all: a graph
        would be looked through in vain, and then every row. None: as many as a graph needs."""
        if self._without is None:
            return None
        return few_left(connection, self.schema, self.number, self._without)

    def statement(self, condition: Condition, exact: bool, limit: int) -> str:
        """Of label, vector and, where it is exact, distance. Binds the query where it is exact, the
        condition's values, the query, and a limit where there is a condition."""
        apart = f"v.embedding {self._operator} %s"
        near = apart
        if self.spec.dim > MOST_INDEXED:
            half = f"halfvec({self.spec.dim:d})"
            near = f"v.embedding::{half} {self._operator} %s::{half}"
        # A zero vector has no direction: to PostgreSQL its distance is no number, to us 1. What is
        # added keeps the graph out of it.
        order = f"coalesce(nullif({apart}, 'NaN'), 1) + 0, v.label" if exact else near
        columns = f"v.label, v.embedding, {apart}" if exact else "v.label, v.embedding"
        # A limit that is bound is planned for at each call, as a filter is to be; a search without
        # one is planned once.
        most = "%s" if condition is not EVERYTHING else f"{limit:d}"
        return f"SELECT {columns} FROM {self._passing(condition)} ORDER BY {order} LIMIT {most}"

    def _passing(self, condition: Condition) -> str:
        items = "" if condition is EVERYTHING else f" JOIN {self.schema}.items i USING (label)"
        return f"{self.name} v{items} WHERE ({condition.text}){self._rest}"

    def rows_of(
        self, connection: Connection, labels: Sequence[int], condition: Condition
    ) -> list[Any]:
        """Label and vector of those of `labels` that pass."""
        statement = (
            f"SELECT v.label, v.embedding FROM {self._passing(condition)} AND v.label = ANY(%s)"
        )
        values = [*condition.values, list(labels)]
        found: list[Any] = run(
            connection, statement, values, filters=condition is not EVERYTHING
        ).fetchall()
        return found


class CandidateSource(Protocol):
    """Where candidates come from that no graph of the database gives."""

    def rows(
        self, connection: Connection, table: SpaceTable, query: Vectors, limit: int,
        condition: Condition, ef: int,
    ) -> list[Any] | None:  # fmt: skip
        """Of label and vector, at least `limit` or of all that pass; None where all rows are to be
        compared."""
        ...


class PostgresqlSearcher:
    """What is said of it: Searcher."""

    def __init__(
        self,
        database: Database,
        schema: str,
        info: SpaceInfo,
        candidates: CandidateSource | None = None,
    ) -> None:
        self._database = database
        self._candidates = candidates
        self._asked = SpaceTable(schema, info)

    def search(
        self, queries: Vectors, k: int, filtered: Filter | None = None, ef: int = 0
    ) -> Neighbours:
        asked = [(self._asked, queries)]
        return search(
            self._database, asked, k, condition_of(filtered), ef, candidates=self._candidates
        )[0]


def search(
    database: Database,
    asked: Sequence[tuple[SpaceTable, Vectors]],
    k: int,
    condition: Condition = EVERYTHING,
    ef: int = 0,
    *,
    candidates: CandidateSource | None = None,
) -> list[Neighbours]:
    """What several tables of one gallery answer to queries float32 [q, dim], in one snapshot.

    `candidates`: in place of the database's graphs. Raises as Searcher.search.
    """
    checked = [
        check_vectors(queries, table.spec.dim, what="queries", unit=table.spec.unit)
        for table, queries in asked
    ]

    # The same for all of them, told the server once.
    width = max(_width(table, k, ef) for table, _ in asked)

    def work(connection: Connection) -> list[Neighbours]:
        found = []
        if width != EF and width <= MOST_EF and candidates is None:
            widen(connection, width)
        for (table, _), queries in zip(asked, checked, strict=True):
            few = table.few(connection)
            if few is None:
                answers = [
                    _nearest(connection, table, query, k, condition, width, candidates)
                    for query in queries
                ]
            else:
                rows = table.rows_of(connection, few, condition) if few else []
                answers = [ranked(table.spec, query, rows, k) for query in queries]
            found.append(_together(answers, k))
        return found

    # One statement is a snapshot by itself, and a quarter of the way to the server and back.
    alone = len(asked) == 1 and len(checked[0]) == 1 and width == EF
    alone = alone and candidates is None
    return database.read(work, snapshot=not alone)


def compares(spec: SpaceSpec, ef: int) -> bool:
    """Whether a search that looks at `ef` candidates reads every vector."""
    return spec.dim > MOST_HALF or ef > MOST_EF


def _width(table: SpaceTable, k: int, ef: int) -> int:
    """Candidates of a graph to look at."""
    return max(ef or table.ef, k + _SPARE)


def widen(connection: Connection, width: int) -> None:
    """Look at so many candidates, up to MOST_EF, to the end of the transaction."""
    run(connection, "SELECT set_config('hnsw.ef_search', %s, true)", [str(width)])


def _nearest(
    connection: Connection,
    table: SpaceTable,
    query: Vectors,
    k: int,
    condition: Condition,
    width: int,
    candidates: CandidateSource | None,
) -> Neighbours:
    limit = k + _SPARE
    cosine = table.spec.metric == "cosine"
    exact = compares(table.spec, width) or (cosine and not query.any())
    if not exact and candidates is not None:
        near = candidates.rows(connection, table, query, limit, condition, width)
        if near is not None:
            return ranked(table.spec, query, near, k)
    elif not exact:
        rows = _ask(connection, table, query, limit, condition, exact=False)
        if len(rows) == limit:
            return ranked(table.spec, query, rows, k)
        # Fewer pass, or the graph was left too early: only looking at all of them tells.
    while True:
        rows = _ask(connection, table, query, limit, condition, exact=True)
        if len(rows) < limit or _settled(
            rows, k, 1.0 if cosine else min(1.0, float(np.linalg.norm(query)))
        ):
            return ranked(table.spec, query, rows, k)
        limit *= 4


def by_graph(connection: Connection, table: SpaceTable, query: Vectors, k: int) -> Neighbours:
    """What the graph alone answers to one query [dim], as wide as it is looked through now."""
    rows = _ask(connection, table, query, k + _SPARE, EVERYTHING, exact=False)
    return ranked(table.spec, query, rows, k)


def _ask(
    connection: Connection, table: SpaceTable, query: Vectors, limit: int, condition: Condition, *,
    exact: bool,
) -> list[Any]:  # fmt: skip
    if not exact and condition is EVERYTHING and usable(connection):
        return rows_near(connection, table.statement(condition, exact, limit), query)
    values = [*([query] if exact else []), *condition.values, query]
    if condition is not EVERYTHING:
        values.append(limit)
    statement = table.statement(condition, exact, limit)
    found: list[Any] = run(
        connection, statement, values, filters=condition is not EVERYTHING
    ).fetchall()
    return found


def _settled(rows: list[Any], k: int, scale: float) -> bool:
    """Whether no row beyond the limit can belong to the k nearest: PostgreSQL's distances are of
    float32, and many equal vectors leave the k-th in doubt. `scale`: of what they are rounded."""
    kth, last = rows[k - 1][2], rows[-1][2]
    return bool(np.isnan(last) or last > kth * (1 + 1e-4) + 1e-6 * scale)


def ranked(spec: SpaceSpec, query: Vectors, rows: list[Any], k: int) -> Neighbours:
    """The `k` nearest to one query [dim] of rows of label and vector: Neighbours of one row."""
    if view.ranked is not None:
        found = view.ranked(spec.metric == "cosine", query, rows, k)
        if found is not None:
            return Neighbours(*found)
    if not rows:
        return best(np.empty((1, 0), np.int64), np.empty((1, 0), np.float32), k)
    labels = np.array([row[0] for row in rows], np.int64)
    vectors = index.prepare(spec.metric, from_binary([row[1] for row in rows], spec.dim))
    prepared = index.prepare(spec.metric, query[None])
    return best(labels[None], index.between(spec.metric, prepared, vectors[None]), k)


def _together(rows: list[Neighbours], k: int) -> Neighbours:
    if len(rows) == 1:
        return rows[0]
    labels: list[Labels] = [row.labels for row in rows]
    return Neighbours(
        np.concatenate([np.empty((0, k), np.int64), *labels]),
        np.concatenate([np.empty((0, k), np.float32), *(row.distances for row in rows)]),
    )


# Filters that PostgreSQL answers, from an index of `facets`.


class PostgresqlMatches:
    """The items that pass, asked for when they are needed. `condition` is for other statements."""

    def __init__(self, database: Database, schema: str, condition: Condition) -> None:
        self._database = database
        self._items = f"{schema}.items i WHERE {condition.text}"
        self.condition = condition

    def labels(self) -> Labels:
        """All of them, increasing."""
        query = f"SELECT i.label FROM {self._items} ORDER BY i.label"
        return self._database.read(
            lambda connection: label_column(
                run(connection, query, self.condition.values, filters=True)
            )
        )

    def __len__(self) -> int:
        query = f"SELECT count(*) FROM {self._items}"
        return self._database.read(
            lambda connection: int(
                run(connection, query, self.condition.values, filters=True).fetchone()[0]
            )
        )

    def mask(self, labels: Labels) -> Mask:
        """Which of `labels` (increasing) pass."""
        return mask_of(np.asarray(labels), self.labels())


class PostgresqlFiltering:
    """What is said of it: Filtering."""

    def __init__(self, database: Database, schema: str) -> None:
        self._database = database
        self._schema = schema

    def passing(self, filtered: Filter) -> PostgresqlMatches:
        return PostgresqlMatches(self._database, self._schema, condition_of(filtered))

    def close(self) -> None:
        """There is nothing to let go of."""


# How many items several galleries hold together, for who adds some in the same transaction.


def count_alone(database: Database, names: Collection[str]) -> int:
    """Items in the galleries of these names that are there. Within Database.together nobody else
    counts one of them here, nor drops one, before the end of the transaction."""

    def work(connection: Connection) -> int:
        # One after the other, in one order. Locks of their own: an upgrade's flip waits for none.
        for name in sorted(names):
            run(
                connection,
                "SELECT pg_advisory_xact_lock(hashtext('nobackfill items'), hashtext(%s))",
                [name],
            )
        rows = run(
            connection,
            "SELECT number FROM nobackfill.galleries WHERE name = ANY(%s) ORDER BY number"
            " FOR KEY SHARE",
            [list(names)],
        ).fetchall()
        counts = " UNION ALL ".join(
            f"SELECT count(*) AS items FROM {schema_of(number)}.items" for (number,) in rows
        )
        if not counts:
            return 0
        return int(run(connection, f"SELECT sum(items) FROM ({counts}) AS counts").fetchone()[0])

    return database.write(work)
