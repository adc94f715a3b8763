"""The new column beside an old one: what is pending, what is written by COPY, how to flip."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import LiteralString, Protocol

from nobackfill.adopt.sources.postgres_rows import products_of, written
from nobackfill.adopt.sources.source import Rows, SearchMetric, Target, Window
from nobackfill.errors import BusyError, InvalidInputError, few
from nobackfill.extras import extra
from nobackfill.vectors import Vectors

with extra("adopt"):
    from psycopg import sql

    from nobackfill.adopt.sources.postgres_dependents import Moves, index_definitions, moves
    from nobackfill.adopt.sources.postgres_table import Table, note

# pgvector's own bound for its HNSW index on `vector`; halfvec reaches twice as far.
_INDEXED_DIM = 2000
# As many rows are found by their keys, one by one.
_FEW = 1000
# As long as carrying waits while it holds rows that others may wait for: a second after they began,
# PostgreSQL would look for a deadlock, and end one of both.
WAIT = "50ms"
# Then it lets go for so many seconds, and what is pending is the next sweep's.
LET_GO = 0.5
# How to flip where others write.
HOW: LiteralString = (
    "in the same moment either `carry` with --flip, or let nobody write, carry once more, and run:"
)
# By its operator classes; a table's own sparse or binary ones are of other columns.
_NAMES: Mapping[str, SearchMetric] = {
    "cosine": "cosine", "l2": "squared_l2", "ip": "inner_product", "l1": "l1",
}  # fmt: skip
METRICS: Mapping[str, SearchMetric] = {
    f"{kind}_{name}_ops": metric
    for kind in ("vector", "halfvec")
    for name, metric in _NAMES.items()
}


# A row that is still as it was read, after what should have written it.
_AS_READ: LiteralString = (
    "SELECT FROM {table} t JOIN nobackfill_pass p ON t.ctid = p.place AND t.xmin = p.writer "
    "AND t.tableoid = p.relation LIMIT 1"
)


class Columns(Protocol):
    """The source whose old column it is."""

    vector: str

    @property
    def metric(self) -> SearchMetric | None: ...

    @property
    def halves(self) -> bool: ...

    def filled(self, column: str) -> int: ...

    def rows(self, column: str, window: Window, missing: str | None = None) -> Rows: ...


class PgvectorBeside:
    """See Flippable; `names`: both columns and the trigger function, quoted."""

    put_by_writers = False

    @property
    def at_once(self) -> int:
        """Two transactions side by side keep each other's dead rows, and an index of vectors costs
        more than the second one brings."""
        return 1 if self._table.indexes(self._source.vector) else 2

    def __init__(
        self,
        source: Columns,
        table: Table,
        names: dict[str, sql.Identifier],
        target: Target,
        flipped: bool,
    ) -> None:
        self._source, self._table, self._names, self._target = source, table, names, target
        self.flipped = flipped

    def pending(self, window: Window) -> Rows:
        return self._source.rows(self._source.vector, window, missing=self._target.name)

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Into rows that nobody has written since they were read. In passes: see PASSES."""
        try:
            self._write(rows, written(rows.seen, vectors))
        except BusyError:
            # A transaction is open that wrote to one of them: the rest stays pending.
            time.sleep(LET_GO)

    def _write(self, rows: Rows, passes: Iterator[bytes]) -> None:
        ids, kind = rows.ids, sql.SQL(self._table.key_type)
        # The window again, for nothing is known of how full the other table is. A few rows may lie
        # anywhere in it.
        which = self._table.composed(
            "t.{key} = ANY({ids}::{kind}[])"
            if len(ids) <= _FEW
            else "t.{key} BETWEEN {first}::{kind} AND {last}::{kind}",
            ids=ids,
            first=ids[0],
            last=ids[-1],
            kind=kind,
        )
        with self._table.connected() as changes:
            for rows_of_pass in passes:
                # All of a transaction: behind a pooler the next one may have another session.
                with changes.transaction(WAIT):
                    changes.run(
                        "CREATE TEMPORARY TABLE nobackfill_pass "
                        "(place tid, writer xid, relation oid, new {vector})"
                    )
                    changes.copy(sql.Identifier("nobackfill_pass"), rows_of_pass)
                    # Through the key's index, which clears pages of what is dead as it goes.
                    changes.run("SET LOCAL enable_tidscan = off")
                    done = changes.run(
                        "UPDATE {table} t SET {new} = p.new FROM nobackfill_pass p "
                        "WHERE t.ctid = p.place AND t.xmin = p.writer AND t.tableoid = p.relation "
                        "AND {which}",
                        which=which,
                        **self._names,
                    )
                    if not done and changes.all(_AS_READ):
                        raise InvalidInputError(
                            f"{self._table.name}: its rows cannot be changed: a trigger or a rule "
                            "of the table drops each UPDATE; have it let the column "
                            f"{self._target.name!r} pass, or carry into a table of their own "
                            "(--to table:NAME)"
                        )
                    changes.run("DROP TABLE pg_temp.nobackfill_pass")

    def read(self, window: Window) -> Rows:
        return self._source.rows(self._target.name, window)

    def products(self, window: Window, probe: Vectors) -> tuple[list[str], Vectors]:
        return products_of(
            self._table.copied(
                "SELECT t.{key}::text, t.{new} {product} {probe}::{vector} FROM {table} t "
                "WHERE t.{new} IS NOT NULL AND {within} ORDER BY t.{key}",
                probe=str(probe.tolist()),
                within=self._table.within(window, "t"),
                **self._names,
            )
        )

    def count(self) -> int:
        return self._source.filled(self._target.name)

    def build_indexes(self) -> None:
        if left := self._moves().left:
            raise InvalidInputError(f"{self._table.name}: {_left(self._source.vector, left)}")
        if len(self._table.valid_indexes(self._target.name)) < len(self._indexes()):
            for statement in self._indexes():
                self._table.run_alone(statement)

    def flip(self) -> AbstractContextManager[None]:
        return self._table.flipping(self._flip)

    def left(self) -> list[str]:
        return []

    def finish(self) -> list[str]:
        if self.flipped:
            return []
        if left := self._moves().left:
            return [*self._indexes(), _left(self._source.vector, left)]
        return [
            *self._indexes(),
            "switch the queries to the new model; " + HOW,
            f"BEGIN; {'; '.join(self._flip())}; COMMIT",
        ]

    def _moves(self) -> Moves:
        return moves(self._table, self._source.vector, self._dims)

    @property
    def _dims(self) -> tuple[int | None, int]:
        return self._table.dim(self._source.vector), self._target.dim

    def _indexes(self) -> list[str]:
        """As the old column has them; one where it has none, or where they are none of longer
        vectors."""
        old, new, found = self._source.vector, self._target.name, list[str]()
        if self._target.dim <= _INDEXED_DIM or self._source.halves:
            found = index_definitions(self._table, old, new, self._dims)
        index = index_of(self._table, self._source, self._names["new"], self._target.dim)
        return found or [f"{self._table.index_on()}hnsw {index.as_string()}"]

    def _flip(self) -> list[str]:
        """Statements of one transaction."""
        text, names = self._table.text, self._names
        kept = sql.Identifier(before(self._source.vector))
        moved = self._moves()
        demands = text(
            "ALTER TABLE {table} ALTER COLUMN {old} DROP NOT NULL, ALTER COLUMN {new} SET NOT NULL",
            **names,
        )
        return [
            text("LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"),
            unless(
                self._table,
                "EXISTS (SELECT FROM {table} WHERE {old} IS NOT NULL AND {new} IS NULL)",
                "rows have no new vector yet: run nobackfill carry again, or with --flip",
                **names,
            ),
            text("DROP FUNCTION {function}() CASCADE", **names),
            # From now on it is the source's own: the next model's map reads it. By this map, rows
            # are filled that have no new vector.
            text(
                "COMMENT ON COLUMN {table}.{new} IS {said}",
                said=note(model=self._target.model, carried=self._target.mark),
                **names,
            ),
            # From then on a writer sets one of both columns.
            *([demands] if self._table.demands(self._source.vector) else []),
            *moved.before,
            text("ALTER TABLE {table} RENAME COLUMN {old} TO {kept}", kept=kept, **names),
            text("ALTER TABLE {table} RENAME COLUMN {new} TO {old}", **names),
            *moved.after,
            unless(
                self._table,
                "EXISTS (SELECT FROM pg_depend JOIN pg_attribute ON attrelid = refobjid "
                "AND attnum = refobjsubid WHERE refclassid = 'pg_class'::regclass "
                "AND refobjid = {relation}::regclass AND attname = {kept} "
                "AND classid <> 'pg_class'::regclass AND NOT EXISTS (SELECT FROM pg_trigger t "
                "JOIN pg_proc p ON p.oid = tgfoid WHERE t.oid = objid "
                "AND starts_with(proname, 'nobackfill_')))",
                "something new depends on the old vectors: run nobackfill carry again",
                relation=text("{here}"),
                kept=before(self._source.vector),
            ),
        ]


def _left(column: str, left: list[str]) -> str:
    """Why nothing flips."""
    return (
        f"a flip would leave these with the old vectors of {column}: {few(left)}; drop them, carry "
        "again and flip, and make them anew for the new vectors"
    )


def before(column: str) -> str:
    """Name of the old vectors once the new ones have theirs."""
    return f"{column}_before"


def unless(table: Table, hindrance: LiteralString, sentence: str, **names: object) -> str:
    """A statement that ends a transaction by a sentence where a condition holds."""
    body = table.text(
        "BEGIN IF " + hindrance + " THEN RAISE EXCEPTION USING MESSAGE = {sentence}; END IF; END",
        sentence=f"{table.name}: {sentence}",
        **names,
    )
    return table.text("DO {body}", body=body)


def index_of(table: Table, source: Columns, column: sql.Identifier, dim: int) -> sql.Composed:
    """The bracketed expression of an HNSW index: by the old column's metric, of halves where its
    own is."""
    kind = "halfvec" if source.halves or dim > _INDEXED_DIM else "vector"
    metric = source.metric or "cosine"
    name = next(name for name, one in METRICS.items() if one == metric and name.startswith(kind))
    indexed: sql.Composable = column
    if kind != table.kind(source.vector):
        indexed = sql.SQL("({}::{}({}))").format(column, table.of_pgvector(kind), sql.SQL(str(dim)))
    return sql.SQL("({} {})").format(indexed, table.of_pgvector(name))
