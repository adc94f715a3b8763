"""Saving the intact rows of a damaged gallery file: every one that is read and passes, no other.

Rows are asked for by ranges of labels. A range that meets a damaged page is asked for in halves,
down to the rows that cannot be had. Labels stay as they were, so that vectors meet their items.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from nobackfill import durable
from nobackfill.durable import refusal
from nobackfill.errors import BusyError, DamagedError, InvalidInputError, UnusableRowsError
from nobackfill.gallery import reading, store
from nobackfill.gallery.connections import (
    BUSY_TIMEOUT_MS,
    SHARED,
    accesses,
    connect,
    lock_path,
    make_empty,
    open_lock,
    share,
)
from nobackfill.gallery.spec import Origin, SpaceInfo
from nobackfill.gallery.tables import (
    add,
    add_space,
    check_tables,
    find_space,
    from_blobs,
    read_spaces,
    vector_table,
)
from nobackfill.vectors import check_vectors

# Rows asked for, checked and written together.
_ROWS = 1024
# Of SQLite's integers.
_BEYOND = 1 << 63
Row = tuple[Any, ...]


@dataclass
class Rescued:
    """`items` saved; `vectors`: release -> how many were saved; `unreadable`: table -> labels that
    lie on damaged pages; `refused`: table -> rows that could be read and are not sound."""

    items: int = 0
    vectors: dict[int, int] = field(default_factory=dict)
    unreadable: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Rows that are not in the new file, as far as that can be known."""
        return sum(self.unreadable.values()) + sum(self.refused.values())


def rescue(source: Path, target: Path, others: Mapping[str, str]) -> Rescued:
    """Write all sound rows of the gallery `source` into the new file `target`.

    `others`: further tables by name, with the statement that makes each; a row goes along if the
    item that its column `item` names was saved. `source` stays as it is. Raises DamagedError where
    the tables that say what the gallery is cannot be read, BusyError, CannotWriteError.
    """
    with _source(source) as old:
        check_tables(old, source)
        try:
            spaces = read_spaces(old)
            state = {
                key: reading.state(old, key)
                for (key,) in old.execute("SELECT key FROM state").fetchall()
            }
        except sqlite3.DatabaseError as error:
            raise DamagedError(
                source, f"{error}, where it says what it is: nothing can be rescued"
            ) from error
        make_empty(target, None)
        with contextlib.closing(connect(target)) as new:
            return _Rescue(old, new, spaces).run(state, others)


@contextlib.contextmanager
def _source(path: Path) -> Iterator[sqlite3.Connection]:
    handle = open_lock(lock_path(path), path)
    try:
        alone = handle >= 0 and share(handle, path, BUSY_TIMEOUT_MS / 1000)
        if handle >= 0 and not alone:
            raise BusyError(f"{path}: another process has it open; end that first")
        access = next(accesses(path, alone), SHARED)
        try:
            with contextlib.closing(connect(path, access)) as connection:
                connection.execute("PRAGMA query_only = ON")
                yield connection
        except sqlite3.DatabaseError as error:
            raise refusal(path, error) or DamagedError(path, error) from error
    finally:
        if handle >= 0:
            os.close(handle)


class _Rescue:
    def __init__(
        self, old: sqlite3.Connection, new: sqlite3.Connection, spaces: list[SpaceInfo]
    ) -> None:
        self._old = old
        self._new = new
        self._spaces = spaces
        self._done = Rescued()
        # Of the items that were saved: id -> label.
        self._saved: dict[str, int] = {}

    def run(self, state: Mapping[str, Any], others: Mapping[str, str]) -> Rescued:
        tables = {vector_table(space.number): space for space in self._spaces}
        last = max(self._last("items"), *map(self._last, tables))
        with durable.transaction(self._new):
            reading.set_state(self._new, state)
            for space in self._spaces:
                add_space(self._new, space.spec, space.state)
                self._new.execute(
                    "UPDATE spaces SET activated = ? WHERE space = ?",
                    (space.activated, space.spec.space),
                )
        columns = "label, id, digest, metadata, NULL, NULL"
        for rows in self._pieces("items", columns, "label", last):
            self._items(rows)
        self._done.items = len(self._saved)
        labels = set(self._saved.values())
        for table, space in tables.items():
            fields = "label, origin, uncertainty, embedding, side"
            for rows in self._pieces(table, fields, "label", last):
                self._vectors(table, space, [row for row in rows if row[0] in labels])
        for name, statement in others.items():
            self._other(name, statement)
        return self._done

    def _last(self, table: str, key: str = "label") -> int:
        with contextlib.suppress(sqlite3.DatabaseError):
            found = self._old.execute(f"SELECT max({key}) FROM {table}").fetchone()[0]
            # The largest label can lie on a damaged page of one table and be intact in another.
            return found if isinstance(found, int) else 0
        return 0

    def _pieces(self, table: str, columns: str, key: str, last: int) -> Iterator[list[Row]]:
        """Rows of a table up to key `last`, increasing, each once; counts what cannot be read."""
        query = f"SELECT {columns} FROM {table} WHERE {key} BETWEEN ? AND ? ORDER BY {key}"
        before = 0
        start = 1
        while (start := self._next(table, key, start)) <= last:
            ranges = [(start, min(start + _ROWS - 1, last))]
            start += _ROWS
            rows: list[Row] = []
            while ranges:
                low, high = ranges.pop()
                try:
                    found = self._old.execute(query, (low, high)).fetchall()
                except sqlite3.DatabaseError:
                    if low == high:
                        _count(self._done.unreadable, table)
                        continue
                    middle = (low + high) // 2
                    ranges += [(middle + 1, high), (low, middle)]
                    continue
                for row in found:
                    if before < row[0] <= high:
                        before = row[0]
                        rows.append(row)
                    else:
                        _count(self._done.refused, table)
            yield rows

    def _next(self, table: str, key: str, start: int) -> int:
        """The first key from `start` on, so that a gap of any size takes one step; `start` itself
        where that cannot be read."""
        query = f"SELECT min({key}) FROM {table} WHERE {key} >= ?"
        if start >= _BEYOND:
            return _BEYOND
        with contextlib.suppress(sqlite3.DatabaseError):
            found = self._old.execute(query, (start,)).fetchone()[0]
            return found if isinstance(found, int) else _BEYOND
        return start

    def _items(self, rows: list[Row]) -> None:
        with durable.transaction(self._new):
            for row in rows:
                try:
                    item = reading.item_of(row)
                    if item.id in self._saved:
                        raise InvalidInputError(f"{item.id}: twice")
                    batch = store.check_batch([item.id], [item.digest], [item.metadata])
                except (DamagedError, InvalidInputError):
                    _count(self._done.refused, "items")
                    continue
                self._saved[item.id] = item.label
                self._new.execute(
                    "INSERT INTO items (label, id, digest, metadata) VALUES (?, ?, ?, ?)",
                    (item.label, item.id, item.digest, batch.metadata[0]),
                )
            if rows:
                add(self._new, rows[0][0], rows[-1][0])

    def _vectors(self, table: str, space: SpaceInfo, rows: list[Row]) -> None:
        good = [row for row in rows if _is_sound(row, space)]
        bad: set[int] = set()
        for column, dim, unit in (
            (3, space.spec.dim, space.spec.unit), (4, space.spec.side_dim, False),
        ):  # fmt: skip
            there = [place for place, row in enumerate(good) if row[column] is not None]
            vectors = from_blobs([good[place][column] for place in there], dim)
            try:
                check_vectors(vectors, dim, what=table, unit=unit)
            except UnusableRowsError as error:
                bad |= {there[row] for row in error.rows}
        kept = [row for place, row in enumerate(good) if place not in bad]
        if len(kept) < len(rows):
            _count(self._done.refused, table, len(rows) - len(kept))
        release = space.spec.release
        self._done.vectors[release] = self._done.vectors.get(release, 0) + len(kept)
        name = vector_table(find_space(self._new, space.spec.space).number)
        with durable.transaction(self._new):
            self._new.executemany(
                f"INSERT INTO {name} (label, origin, uncertainty, embedding, side)"
                " VALUES (?, ?, ?, ?, ?)",
                kept,
            )

    def _other(self, name: str, statement: str) -> None:
        try:
            found = self._old.execute(f"SELECT name FROM pragma_table_info('{name}')").fetchall()
        except sqlite3.DatabaseError:
            found = []
        columns = ["rowid", *(column for (column,) in found)]
        if not found:
            return
        listed = ", ".join(columns)
        marks = ", ".join("?" * len(columns))
        self._new.execute(statement)
        item = columns.index("item")
        for rows in self._pieces(name, listed, "rowid", self._last(name, "rowid")):
            with durable.transaction(self._new):
                for row in rows:
                    try:
                        if row[item] in self._saved:
                            self._new.execute(
                                f"INSERT INTO {name} ({listed}) VALUES ({marks})", row
                            )
                    except sqlite3.IntegrityError:
                        _count(self._done.refused, name)


def _is_sound(row: Row, space: SpaceInfo) -> bool:
    _, origin, uncertainty, embedding, side = row
    sizes = (len(embedding) if isinstance(embedding, bytes) else -1) == 4 * space.spec.dim and (
        side is None or (isinstance(side, bytes) and len(side) == 4 * space.spec.side_dim)
    )
    known = isinstance(origin, str) and origin in get_args(Origin)
    return sizes and known and isinstance(uncertainty, float | None)


def _count(counts: dict[str, int], name: str, more: int = 1) -> None:
    counts[name] = counts.get(name, 0) + more
