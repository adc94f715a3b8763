"""The new column beside an old one: what is pending, what is written by COPY, how to flip."""

import json
from typing import Protocol

import numpy as np

from nobackfill.adopt.sources.source import Facts, Rows, Target, Window
from nobackfill.extras import extra
from nobackfill.vectors import Vectors

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

    def __init__(
        self, source: Columns, table: Table, names: dict[str, sql.Identifier], target: Target
    ) -> None:
        self._source, self._table, self._names, self._target = source, table, names, target

    def pending(self, window: Window) -> Rows:
        return self._source.rows(self._source.vector, window, missing=self._target.name)

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Into rows that nobody has written since they were read: xmin is the row's last writer."""
        head = np.array([self._target.dim, 0], ">i2").tobytes()
        values = np.ascontiguousarray(vectors, ">f4")
        # Keys as text: COPY knows no domains and no enumerations.
        kind = sql.SQL(self._table.key_type)
        with self._table.changing() as changes:
            changes.run(
                "CREATE TEMPORARY TABLE nobackfill_window (key text, seen text, new vector) "
                "ON COMMIT DROP"
            )
            written = (
                (key.encode(), seen.encode(), head + value.tobytes())
                for key, seen, value in zip(rows.ids, rows.seen, values, strict=True)
            )
            changes.copy("nobackfill_window", written)
            changes.run(
                "UPDATE {table} t SET {new} = w.new FROM nobackfill_window w "
                "WHERE t.{key} = w.key::{kind} AND t.xmin = w.seen::xid "
                # The window again: nothing is known of how full the other table is.
                "AND t.{key} BETWEEN {first}::{kind} AND {last}::{kind}",
                kind=kind,
                first=rows.ids[0],
                last=rows.ids[-1],
                **self._names,
            )

    def read(self, window: Window) -> Rows:
        return self._source.rows(self._target.name, window)

    def count(self) -> int:
        return self._source.filled(self._target.name)

    def finish(self) -> list[str]:
        facts = self._source.facts()
        kind = "vector" if self._target.dim <= _INDEXED_DIM else "halfvec"
        operators = "l2" if facts.metric == "squared_l2" else "cosine"
        dim, index = sql.SQL(str(self._target.dim)), sql.SQL(f"{kind}_{operators}_ops")
        indexed = self._names["new"] if kind == "vector" else None
        column = indexed or sql.SQL("({}::halfvec({}))").format(self._names["new"], dim)
        # Whose vectors they are stays known.
        said = json.dumps({"model": self._target.model}) if self._target.model else None
        swap = (
            "BEGIN; DROP FUNCTION {function}() CASCADE; "
            # From now on it is the source's own: the next model's map reads it.
            "COMMENT ON COLUMN {table}.{new} IS {said}; "
            "ALTER TABLE {table} RENAME COLUMN {old} TO {kept}; "
            "ALTER TABLE {table} RENAME COLUMN {new} TO {old}; COMMIT"
        )
        return [
            self._table.text(
                "CREATE INDEX CONCURRENTLY ON {table} USING hnsw ({column} {index})",
                column=column,
                index=index,
            ),
            "switch the queries to the new model, and in the same moment:",
            self._table.text(
                swap, said=said, kept=sql.Identifier(f"{self._source.vector}_before"), **self._names
            ),
        ]
