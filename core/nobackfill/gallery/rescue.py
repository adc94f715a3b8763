"""Save the intact rows of a damaged gallery file into a new one.

Rows are read by ranges of labels. A range that meets a damaged page is read in halves, down to
single unreadable rows. Labels stay the same, so that vectors match their items.
"""

import contextlib
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from nobackfill import durable
from nobackfill.durable import error_from_sqlite
from nobackfill.errors import BusyError, DamagedError, InvalidInputError, UnusableRowsError
from nobackfill.gallery import store
from nobackfill.gallery.spec import Origin, SpaceInfo
from nobackfill.gallery.sqlite_file import (
    FileAccess,
    add_space,
    check_tables,
    create_in_place,
    explain_unwritable,
    find_space,
    has_free_bytes,
    index_metadata,
    item_from_row,
    lock_gallery,
    lock_path,
    open_connection,
    open_lock,
    read_only_access,
    read_spaces,
    read_state_values,
    set_state_values,
    vector_table_name,
    vectors_from_blobs,
)
from nobackfill.vectors import check_vectors

# Rows that are read, checked and written at a time.
_ROWS = 1024
# First number beyond SQLite's integers.
_BEYOND = 1 << 63
Row = tuple[Any, ...]


@dataclass
class RescueReport:
    """The result of a rescue.

    Attributes:
        saved_item_count: Number of saved items.
        saved_vector_counts: Number of saved vectors by release.
        unreadable_label_counts: By table, number of labels on damaged pages.
        invalid_row_counts: By table, number of readable but invalid rows.
    """

    saved_item_count: int = 0
    saved_vector_counts: Counter[int] = field(default_factory=Counter)
    unreadable_label_counts: Counter[str] = field(default_factory=Counter)
    invalid_row_counts: Counter[str] = field(default_factory=Counter)

    @property
    def missing_rows(self) -> int:
        """Return the number of rows that the new file lacks, as far as it can be known.

        It counts unreadable and invalid rows of all tables.
        """
        return self.unreadable_label_counts.total() + self.invalid_row_counts.total()


def rescue_gallery(source: Path, target: Path, other_tables: Mapping[str, str]) -> RescueReport:
    """Write all valid rows of a gallery into a new file, in transactions of 1024 rows.

    Rows that cannot be read or are invalid are counted and left out; of items with the same id, the
    first stays. A vector is saved only with its item. Labels, the states of spaces and the state of
    the gallery stay the same. After an error, a part of `target` stays.

    Args:
        source: The damaged file, which exists. It stays unchanged, and so does the log (-wal) that
            a killed process left; the log's rows are saved, too. A lock file, which is held during
            the rescue, and SQLite's -shm may be created next to it.
        target: The new file; it must not exist.
        other_tables: Further tables by name, with the statement that creates each; may be empty. A
            row is copied if the item named by its column `item` was saved. A table that `source`
            lacks is skipped.

    Raises:
        DamagedError: The tables that describe the gallery cannot be read, or differ from a
            gallery's. No database of SQLite counts as damaged, too, and so does a statement of
            `other_tables` that fails.
        BusyError: Another process has the gallery open; one that has it to itself is waited for up
            to 5 s.
        CannotWriteError: `source` is missing or cannot be read, or its log only in another folder;
            `target` exists or cannot be written; or its disk is full. The file system of `source`
            has no locks (flock).
        ValueError: A table of `other_tables` has no column `item`.
    """
    with _source(source) as old:
        check_tables(old, source)
        try:
            spaces = read_spaces(old)
            state = read_state_values(old)
        except sqlite3.DatabaseError as error:
            raise DamagedError(
                source,
                f"{error}, in the tables that name the model of each vector, so nothing can be "
                "rescued",
            ) from error
        create_in_place(target, None)
        with contextlib.closing(open_connection(target)) as new:
            return _Rescue(old, new, spaces).run(state, other_tables)


@contextlib.contextmanager
def _source(path: Path) -> Iterator[sqlite3.Connection]:
    handle = open_lock(lock_path(path), path)
    try:
        exclusive = handle >= 0 and lock_gallery(handle, path)
        if handle >= 0 and not exclusive:
            raise BusyError(
                f"{path}: another process has this gallery open; stop that process first"
            )
        try:
            with contextlib.closing(open_connection(path, _source_access(path))) as connection:
                yield connection
        except sqlite3.DatabaseError as error:
            raise error_from_sqlite(path, error) or DamagedError(path, error) from error
    finally:
        if handle >= 0:
            os.close(handle)


def _source_access(path: Path) -> FileAccess:
    """Return a way to read a file that leaves it and its log as they are.

    A connection that can write would move the log into the damaged file when it is closed.
    """
    log, shared = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    if (
        log.exists() and not shared.exists()
        and explain_unwritable(path) is None and has_free_bytes(path.parent)
    ):  # fmt: skip
        # SQLite makes the missing -shm; it needs one to read the log.
        return FileAccess("mode=ro")
    return read_only_access(path, "")


class _Rescue:
    def __init__(
        self, old: sqlite3.Connection, new: sqlite3.Connection, spaces: list[SpaceInfo]
    ) -> None:
        self._old = old
        self._new = new
        self._spaces = spaces
        self._report = RescueReport()
        # Label of each saved item, by id.
        self._saved: dict[str, int] = {}

    def run(self, state: Mapping[str, Any], others: Mapping[str, str]) -> RescueReport:
        tables = {vector_table_name(space.table_number): space for space in self._spaces}
        last = max(self._last("items"), *map(self._last, tables))
        with durable.transaction(self._new):
            set_state_values(self._new, state)
            for space in self._spaces:
                add_space(self._new, space.spec, space.state)
                self._new.execute(
                    "UPDATE spaces SET activated = ? WHERE space = ?",
                    (space.activation_rank, space.spec.space),
                )
        columns = "label, id, digest, metadata, NULL, NULL"
        for rows in self._pieces("items", columns, "label", last):
            self._items(rows)
        self._report.saved_item_count = len(self._saved)
        labels = set(self._saved.values())
        for table, space in tables.items():
            fields = "label, origin, uncertainty, embedding, side"
            for rows in self._pieces(table, fields, "label", last):
                self._vectors(table, space, [row for row in rows if row[0] in labels])
        for name, statement in others.items():
            self._other(name, statement)
        return self._report

    def _last(self, table: str, key: str = "label") -> int:
        with contextlib.suppress(sqlite3.DatabaseError):
            key_value = self._old.execute(f"SELECT max({key}) FROM {table}").fetchone()[0]
            # The largest label may be unreadable in one table and intact in another.
            return key_value if isinstance(key_value, int) else 0
        return 0

    def _pieces(self, table: str, columns: str, key: str, last: int) -> Iterator[list[Row]]:
        """Yield the rows of a table up to a key, increasing and each once; count unreadable
        ones."""
        query = f"SELECT {columns} FROM {table} WHERE {key} BETWEEN ? AND ? ORDER BY {key}"
        previous = 0
        start = 1
        while (start := self._next(table, key, start)) <= last:
            ranges = [(start, min(start + _ROWS - 1, last))]
            start += _ROWS
            rows: list[Row] = []
            while ranges:
                low, high = ranges.pop()
                try:
                    row_range = self._old.execute(query, (low, high)).fetchall()
                except sqlite3.DatabaseError:
                    if low == high:
                        self._report.unreadable_label_counts[table] += 1
                        continue
                    middle = (low + high) // 2
                    ranges += [(middle + 1, high), (low, middle)]
                    continue
                for row in row_range:
                    if previous < row[0] <= high:
                        previous = row[0]
                        rows.append(row)
                    else:
                        self._report.invalid_row_counts[table] += 1
            yield rows

    def _next(self, table: str, key: str, start: int) -> int:
        """Return the first key from `start` on, so that a gap takes one step; `start` if it is
        unreadable."""
        query = f"SELECT min({key}) FROM {table} WHERE {key} >= ?"
        if start >= _BEYOND:
            return _BEYOND
        with contextlib.suppress(sqlite3.DatabaseError):
            key_value = self._old.execute(query, (start,)).fetchone()[0]
            return key_value if isinstance(key_value, int) else _BEYOND
        return start

    def _items(self, rows: list[Row]) -> None:
        with durable.transaction(self._new):
            for row in rows:
                try:
                    item = item_from_row(row)
                    if item.id in self._saved:
                        raise InvalidInputError(f"{item.id}: the damaged gallery has this id twice")
                    batch = store.check_batch([item.id], [item.digest], [item.metadata])
                except (DamagedError, InvalidInputError):
                    self._report.invalid_row_counts["items"] += 1
                    continue
                self._saved[item.id] = item.label
                self._new.execute(
                    "INSERT INTO items (label, id, digest, metadata) VALUES (?, ?, ?, ?)",
                    (item.label, item.id, item.digest, batch.metadata[0]),
                )
            if rows:
                index_metadata(self._new, rows[0][0], rows[-1][0])

    def _vectors(self, table: str, space: SpaceInfo, rows: list[Row]) -> None:
        good = [row for row in rows if _is_sound(row, space)]
        bad: set[int] = set()
        for column, dim, unit in (
            (3, space.spec.dim, space.spec.unit_norm), (4, space.spec.side_dim, False),
        ):  # fmt: skip
            present = [place for place, row in enumerate(good) if row[column] is not None]
            vectors = vectors_from_blobs([good[place][column] for place in present], dim)
            try:
                check_vectors(vectors, dim, error_name=table, unit_norm=unit)
            except UnusableRowsError as error:
                bad |= {present[row] for row in error.unusable_rows}
        valid = [row for place, row in enumerate(good) if place not in bad]
        if len(valid) < len(rows):
            self._report.invalid_row_counts[table] += len(rows) - len(valid)
        self._report.saved_vector_counts[space.spec.release] += len(valid)
        name = vector_table_name(find_space(self._new, space.spec.space).table_number)
        with durable.transaction(self._new):
            self._new.executemany(
                f"INSERT INTO {name} (label, origin, uncertainty, embedding, side)"
                " VALUES (?, ?, ?, ?, ?)",
                valid,
            )

    def _other(self, name: str, statement: str) -> None:
        try:
            info = self._old.execute(f"SELECT name FROM pragma_table_info('{name}')").fetchall()
        except sqlite3.DatabaseError:
            info = []
        columns = ["rowid", *(column for (column,) in info)]
        if not info:
            return
        names = ", ".join(columns)
        marks = ", ".join("?" * len(columns))
        self._new.execute(statement)
        item = columns.index("item")
        for rows in self._pieces(name, names, "rowid", self._last(name, "rowid")):
            with durable.transaction(self._new):
                for row in rows:
                    try:
                        if row[item] in self._saved:
                            self._new.execute(f"INSERT INTO {name} ({names}) VALUES ({marks})", row)
                    except sqlite3.IntegrityError:
                        self._report.invalid_row_counts[name] += 1


def _is_sound(row: Row, space: SpaceInfo) -> bool:
    _, origin, uncertainty, embedding, side = row
    sizes = (len(embedding) if isinstance(embedding, bytes) else -1) == 4 * space.spec.dim and (
        side is None or (isinstance(side, bytes) and len(side) == 4 * space.spec.side_dim)
    )
    origin_known = isinstance(origin, str) and origin in get_args(Origin)
    return sizes and origin_known and isinstance(uncertainty, float | None)
