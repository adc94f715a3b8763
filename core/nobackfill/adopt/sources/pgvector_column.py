"""The new column beside an old one: what is pending, what is written by COPY, how to flip."""

import json
from typing import Protocol

from nobackfill.adopt.sources.postgres_rows import products_of, written
from nobackfill.adopt.sources.source import Facts, Rows, Target, Window
from nobackfill.extras import extra
from nobackfill.vectors import Metric, Vectors

with extra("adopt"):
    from psycopg import sql

    from nobackfill.adopt.sources.postgres_table import Table

# pgvector's own bound for its HNSW index on `vector`; halfvec reaches twice as far.
_INDEXED_DIM = 2000


class Columns(Protocol):
    """The source whose old column it is."""

    vector: str

    def facts(self) -> Facts: ...

    def filled(self, column: str) -> int: ...

    def rows(self, column: str, window: Window, missing: str | None = None) -> Rows: ...


class PgvectorBeside:
    """See Beside; `names`: both columns, the trigger and its function, quoted."""

    @property
    def at_once(self) -> int:
        """Two transactions side by side keep each other's dead rows, and an index of vectors costs
        more than the second one brings."""
        return 1 if self._table.operator_classes(self._source.vector) else 2

    def __init__(
        self, source: Columns, table: Table, names: dict[str, sql.Identifier], target: Target
    ) -> None:
        self._source, self._table, self._names, self._target = source, table, names, target

    def pending(self, window: Window) -> Rows:
        return self._source.rows(self._source.vector, window, missing=self._target.name)

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Into rows that nobody has written since they were read. In passes: see PASSES."""
        rows_of_window, passes = written(rows.seen, vectors)
        kind = sql.SQL(self._table.key_type)
        with self._table.connected() as changes:
            changes.run("DROP TABLE IF EXISTS pg_temp.nobackfill_window")
            changes.run(
                "CREATE TEMPORARY TABLE nobackfill_window "
                "(place tid, writer xid, relation oid, pass int2, new vector)"
            )
            changes.copy(sql.Identifier("nobackfill_window"), rows_of_window)
            for number in range(passes):
                with changes.transaction():
                    # Through the key's index, which clears pages of what is dead as it goes; the
                    # window again, for nothing is known of how full the other table is.
                    changes.run("SET LOCAL enable_tidscan = off")
                    changes.run(
                        "UPDATE {table} t SET {new} = w.new FROM nobackfill_window w "
                        "WHERE t.ctid = w.place AND t.xmin = w.writer AND t.tableoid = w.relation "
                        "AND w.pass = {number} "
                        "AND t.{key} BETWEEN {first}::{kind} AND {last}::{kind}",
                        number=number,
                        kind=kind,
                        first=rows.ids[0],
                        last=rows.ids[-1],
                        **self._names,
                    )

    def read(self, window: Window) -> Rows:
        return self._source.rows(self._target.name, window)

    def products(self, window: Window, probe: Vectors) -> tuple[list[str], Vectors]:
        return products_of(
            self._table.copied(
                "SELECT t.{key}::text, t.{new} <#> {probe}::vector FROM {table} t "
                "WHERE t.{new} IS NOT NULL AND {within} ORDER BY t.{key}",
                probe=str(probe.tolist()),
                within=self._table.within(window, "t"),
                **self._names,
            )
        )

    def count(self) -> int:
        return self._source.filled(self._target.name)

    def finish(self) -> list[str]:
        metric = self._source.facts().metric or "cosine"
        # Whose vectors they are stays known.
        said = json.dumps({"model": self._target.model}) if self._target.model else None
        swap = (
            "BEGIN; DROP FUNCTION {function}() CASCADE; "
            # From now on it is the source's own: the next model's map reads it.
            "COMMENT ON COLUMN {table}.{new} IS {said}; "
            "{demands}ALTER TABLE {table} RENAME COLUMN {old} TO {kept}; "
            "ALTER TABLE {table} RENAME COLUMN {new} TO {old}; COMMIT"
        )
        demands: sql.Composable = sql.SQL("")
        if self._table.demands(self._source.vector):
            # Who puts an item writes one of both from then on.
            demands = self._table.composed(
                "ALTER TABLE {table} ALTER COLUMN {old} DROP NOT NULL, "
                "ALTER COLUMN {new} SET NOT NULL; ",
                **self._names,
            )
        return [
            self._table.text(
                "CREATE INDEX CONCURRENTLY ON {table} USING hnsw {index}",
                index=index_of(self._names["new"], self._target.dim, metric),
            ),
            "switch the queries to the new model, and in the same moment:",
            self._table.text(
                swap,
                said=said,
                kept=sql.Identifier(f"{self._source.vector}_before"),
                demands=demands,
                **self._names,
            ),
        ]


def index_of(column: sql.Identifier, dim: int, metric: Metric) -> sql.Composed:
    """What an HNSW index is on, in brackets."""
    kind = "vector" if dim <= _INDEXED_DIM else "halfvec"
    operators = "l2" if metric == "squared_l2" else "cosine"
    indexed: sql.Composable = column
    if kind == "halfvec":
        indexed = sql.SQL("({}::halfvec({}))").format(column, sql.SQL(str(dim)))
    return sql.SQL("({} {})").format(indexed, sql.SQL(f"{kind}_{operators}_ops"))
