"""New vectors in a table of their own beside the one that has the old: no row of that is written,
whatever indexes it has.

Whoever writes to a key there leaves an empty vector for that key here, by a trigger. The unique key
has him and the carrying wait for one another, so that one comes first: carrying fills what is not
here, and what is empty and has not been emptied again since it was read.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from nobackfill.adopt.sources.postgres_rows import Packable, packed, parsed, products_of
from nobackfill.adopt.sources.source import Rows, Target, Window
from nobackfill.errors import BusyError, few
from nobackfill.extras import extra
from nobackfill.vectors import Vectors

with extra("adopt"):
    from psycopg import errors as states
    from psycopg import sql

    from nobackfill.adopt.sources.pgvector_column import (
        HOW,
        LET_GO,
        WAIT,
        Columns,
        index_of,
        unless,
    )
    from nobackfill.adopt.sources.pgvector_table_made import names_of
    from nobackfill.adopt.sources.postgres_dependents import dependents, grants, owner, security
    from nobackfill.adopt.sources.postgres_table import Table, note

# A row's place (tid) and its writer (xid), in binary; that of one that is not here.
_SEEN = 10
_NOWHERE = bytes(_SEEN)


class PgvectorTable:
    """See Flippable. A table with the key and the column of vectors, both called as in the old
    one."""

    # No index of the old table's learns of it.
    at_once = 2
    put_by_writers = False

    def __init__(self, source: Columns, table: Table, target: Target, flipped: bool) -> None:
        self._source, self._table, self._target, self.flipped = source, table, target, flipped
        self._names = names_of(table, source.vector, target.name)
        # Windows that were written whole: what has come since was emptied first. And, of each
        # thread, the one that it has read last.
        self._whole: set[str] = set()
        self._own = threading.local()

    def pending(self, window: Window) -> Rows:
        self._own.window = repr(window)
        whole = self._own.window in self._whole
        if not whole and not self._any(window):
            # Looked for before the vectors are read: what is emptied after that is met by writing.
            rows = parsed(
                self._table.copied(
                    "SELECT t.{key}::text, t.{old}::{vector}, t.{key} FROM {table} t "
                    "WHERE t.{old} IS NOT NULL AND {within} ORDER BY t.{key}",
                    within=self._table.within(window, "t"),
                    **self._names,
                ),
                self._table.name,
            )
            return replace(rows, seen=[one + _NOWHERE for one in _bytes(rows.seen)])
        found = self._table.copied(
            "SELECT t.{key}::text, t.{old}::{vector}, t.{key}, "
            "coalesce(b.place, '(0,0)'), coalesce(b.writer, '0') FROM {table} t {join} JOIN "
            "(SELECT {key} AS key, ctid AS place, xmin AS writer, {old} IS NULL AS empty "
            "FROM {beside} b WHERE {which} AND {within_beside}) b ON b.key = t.{key} "
            "WHERE t.{old} IS NOT NULL AND b.empty IS NOT FALSE AND {within} ORDER BY t.{key}",
            # Of a window that was carried, only what has been emptied since.
            join=sql.SQL("INNER" if whole else "LEFT"),
            which=sql.SQL("{} IS NULL" if whole else "true").format(self._names["old"]),
            within=self._table.within(window, "t"),
            within_beside=self._table.within(window, "b"),
            **self._names,
        )
        return parsed(found, self._table.name)

    def _any(self, window: Window) -> bool:
        query = "SELECT EXISTS (SELECT FROM {beside} b WHERE {within})"
        within = self._table.within(window, "b")
        return bool(self._table.one(query, within=within, **self._names))

    def write(self, rows: Rows, vectors: Vectors) -> None:
        seen = _bytes(rows.seen)
        keys, places = [one[:-_SEEN] for one in seen], [one[-_SEEN:] for one in seen]
        if self._table.kind(self._source.vector) == "halfvec":
            vectors = vectors.astype(np.float16)
        try:
            absent = all(place == _NOWHERE for place in places)
            if not (absent and self._filled(keys, vectors)):
                self._fill_some(keys, places, vectors)
        except BusyError:
            # A transaction is open that wrote to one of them: all stay pending.
            time.sleep(LET_GO)
            return
        self._whole.add(self._own.window)

    def _filled(self, keys: list[bytes], vectors: Packable) -> bool:
        """At once, unless somebody has written to one of the keys since they were read."""
        with self._table.connected() as changes:
            try:
                with changes.transaction(WAIT):
                    changes.copy(self._names["beside"], packed(keys, vectors))
            except states.UniqueViolation:
                return False
        return True

    def _fill_some(self, keys: list[bytes], places: list[bytes], vectors: Packable) -> None:
        """Those that nobody has written to since."""
        seen = [place[:6] for place in places], [place[6:] for place in places]
        with self._table.connected() as changes, changes.transaction(WAIT):
            changes.run(
                "CREATE TEMPORARY TABLE nobackfill_window ON COMMIT DROP AS SELECT {key} AS key, "
                "{old} AS new, ctid AS place, xmin AS writer FROM {beside} WITH NO DATA",
                **self._names,
            )
            changes.copy(sql.Identifier("nobackfill_window"), packed(keys, vectors, *seen))
            changes.run(
                "INSERT INTO {beside} SELECT key, new FROM nobackfill_window "
                "WHERE place = '(0,0)' ORDER BY key ON CONFLICT DO NOTHING",
                **self._names,
            )
            changes.run(
                "UPDATE {beside} b SET {old} = w.new FROM nobackfill_window w "
                "WHERE b.{key} = w.key AND b.ctid = w.place AND b.xmin = w.writer",
                **self._names,
            )

    def read(self, window: Window) -> Rows:
        found = self._table.copied(
            "SELECT b.{key}::text, b.{old}::{vector} FROM {beside} b "
            "WHERE b.{old} IS NOT NULL AND {within} ORDER BY b.{key}",
            within=self._table.within(window, "b"),
            **self._names,
        )
        return parsed(found, self._table.name)

    def products(self, window: Window, probe: Vectors) -> tuple[list[str], Vectors]:
        return products_of(
            self._table.copied(
                "SELECT b.{key}::text, b.{old} {product} {probe}::{vector} FROM {beside} b "
                "WHERE b.{old} IS NOT NULL AND {within} ORDER BY b.{key}",
                probe=str(probe.tolist()),
                within=self._table.within(window, "b"),
                **self._names,
            )
        )

    def count(self) -> int:
        query = "SELECT count(*) FROM {beside} WHERE {old} IS NOT NULL"
        return int(self._table.one(query, **self._names))

    def build_indexes(self) -> None:
        indexed = self._table.one(
            "SELECT EXISTS (SELECT FROM pg_index i JOIN pg_class c ON c.oid = indexrelid "
            "JOIN pg_am m ON m.oid = relam WHERE indrelid = to_regclass({beside}) AND indisvalid "
            "AND amname <> 'btree')",
            beside=self._names["beside"].as_string(),
        )
        if not indexed:
            self._table.run_alone(self._index())

    def flip(self) -> AbstractContextManager[None]:
        return self._table.flipping(self._flip)

    def finish(self) -> list[str]:
        if self.flipped:
            return []
        with self._table.connected() as changes:
            # Of rows that went without a word to the trigger, as with a partition.
            changes.run(
                "DELETE FROM {beside} b WHERE {old} IS NOT NULL "
                "AND NOT EXISTS (SELECT FROM {table} t WHERE t.{key} = b.{key})",
                **self._names,
            )
        return [
            self._index(),
            *self.left(),
            self._table.text(
                "switch the queries to the new model, FROM {beside} JOIN {table} USING ({key}); "
                + HOW,
                **self._names,
            ),
            f"BEGIN; {'; '.join(self._flip())}; COMMIT",
        ]

    def left(self) -> list[str]:
        old = [name for _, name in dependents(self._table, self._source.vector)]
        return self._security()[1] + [f"the old vectors are still read by {few(old)}"][: len(old)]

    def _security(self) -> tuple[list[str], list[str]]:
        both = (self._table.key, self._source.vector)
        return security(self._table, self._names["beside"], both)

    def _index(self) -> str:
        return self._table.text(
            "CREATE INDEX CONCURRENTLY ON {beside} USING hnsw {index}",
            index=index_of(self._table, self._source, self._names["old"], self._target.dim),
            **self._names,
        )

    def _flip(self) -> list[str]:
        """Statements of one transaction."""
        text, names = self._table.text, self._names
        beside, here = names["beside"].as_string(), text("{here}")
        # By this map, rows are filled that have no new vector.
        said = {"carried": self._target.mark, "of": names["function"].as_string()}
        return [
            text("LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"),
            unless(
                self._table,
                "EXISTS (SELECT FROM {table} t LEFT JOIN {beside} b ON b.{key} = t.{key} "
                "WHERE t.{old} IS NOT NULL AND b.{old} IS NULL)",
                "rows have no new vector yet: run nobackfill carry again, or with --flip",
                **names,
            ),
            text("DROP FUNCTION {function}() CASCADE", **names),
            text("DROP INDEX {empty}", **names),
            text(
                "DELETE FROM {beside} b WHERE {old} IS NULL "
                "OR NOT EXISTS (SELECT FROM {table} t WHERE t.{key} = b.{key})",
                **names,
            ),
            text(
                "ALTER TABLE {beside} ALTER COLUMN {old} SET NOT NULL, "
                "ADD FOREIGN KEY ({key}) REFERENCES {table} ({key}) "
                "ON UPDATE CASCADE ON DELETE CASCADE",
                **names,
            ),
            text(
                "COMMENT ON TABLE {beside} IS {said}",
                said=note(model=self._target.model, **said),
                **names,
            ),
            # Up to here it was its owner's alone.
            *owner(self._table, beside),
            *self._security()[0],
            *grants(self._table, here, beside, (self._table.key, self._source.vector)),
        ]


def _bytes(seen: Sequence[object]) -> list[bytes]:
    return [one for one in seen if isinstance(one, bytes)]
