"""Open, lock and read the SQLite file of a gallery, and write its tables.

A lock file next to the gallery is held in shared mode while the gallery is open. A process that is
alone and finds a write-ahead log knows that the last process died, and checks the pages before use.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import sqlite3
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from nobackfill import durable
from nobackfill.durable import error_from_sqlite, translate_sqlite_errors
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    CannotWriteError,
    DamagedError,
    NotFoundError,
    VerificationError,
    describe_writer,
)
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import (
    Metadata,
    Origin,
    SpaceInfo,
    SpaceSpec,
    State,
    missing_space_error,
)
from nobackfill.vectors import Metric, Vectors

VECTOR_TABLE = (
    "CREATE TABLE {name} (label INTEGER PRIMARY KEY REFERENCES items (label) ON DELETE CASCADE,"
    " origin TEXT NOT NULL, uncertainty REAL, embedding BLOB NOT NULL, side BLOB)"
)
# Labels of one text; parsing it blocks other threads for 3 ms.
_LABELS_AT_ONCE = 1 << 15
# A value in SQLite has at most 1e9 bytes.
_MOST_JOINED_BYTES = 1 << 28

_SPACE_COLUMNS = "space, release, dim, metric, unit, side_space, side_dim, state, number, activated"

# "l2" occurs in files of early commits, which are still read; it was never checked.
_METRICS = (*get_args(Metric), "l2")
# Far above the dimension of any model.
_MOST_DIMS = 1 << 20
_SPACE_KINDS = (str, int, int, str, int, str, int, str, int, int)
# For a release without side-information.
_SPACE_KINDS_WITHOUT_SIDE = (str, int, int, str, int, type(None), int, str, int, int)


def vector_table_name(table_number: int) -> str:
    """Return the name of the table of a space's vectors, by the space's number."""
    return f"vectors_{table_number:d}"


def add_space(connection: sqlite3.Connection, spec: SpaceSpec, state: State) -> None:
    """Record a space and create its table. The number of commits does not change.

    Args:
        connection: In a transaction; without one, the row may stay after an error.
        spec: The space. Its values are not checked: an impossible one makes `read_spaces` refuse
            the gallery.
        state: The state; an active space counts as activated once.

    Raises:
        sqlite3.IntegrityError: The gallery has the space, or an active space and `state` is active.
        sqlite3.Error: A statement failed; the caller rolls back.
    """
    number = connection.execute(
        "INSERT INTO spaces (space, release, dim, metric, unit, side_space, side_dim, state,"
        " activated) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            spec.space, spec.release, spec.dim, spec.metric, spec.unit_norm, spec.side_space,
            spec.side_dim, state, int(state == "active"),
        ),
    ).lastrowid  # fmt: skip
    assert number is not None
    connection.execute(VECTOR_TABLE.format(name=vector_table_name(number)))


def read_spaces(connection: sqlite3.Connection) -> list[SpaceInfo]:
    """Return all spaces, oldest table first.

    Raises:
        DamagedError: A row is invalid, such as with an unknown state or metric, or a dimension
            below 1.
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    rows = connection.execute(f"SELECT {_SPACE_COLUMNS} FROM spaces ORDER BY number").fetchall()
    for row in rows:
        # In the order of _SPACE_COLUMNS.
        kinds = tuple(map(type, row))
        sound = kinds in (_SPACE_KINDS, _SPACE_KINDS_WITHOUT_SIDE) and row[7] in get_args(State)
        if not sound or not _is_possible(row):
            raise DamagedError(None, "a row of its table 'spaces' has invalid values")
    return [
        SpaceInfo(SpaceSpec(space, release, dim, metric, bool(unit), side_space, side_dim), *others)
        for space, release, dim, metric, unit, side_space, side_dim, *others in rows
    ]


def _is_possible(row: Sequence[Any]) -> bool:
    """Check the numbers and the metric of a space, in the order of _SPACE_COLUMNS."""
    _, release, dim, metric, _, side_space, side_dim, _, number, _ = row
    dims = 0 < dim <= _MOST_DIMS and 0 <= side_dim <= _MOST_DIMS
    sides = (side_space is None) == (side_dim == 0)
    return dims and sides and metric in _METRICS and 0 < release < 2**32 and number > 0


def find_space(connection: sqlite3.Connection, space: str) -> SpaceInfo:
    """Return a space by its id.

    Raises:
        IncompatibleSpaceError: The gallery does not have it; the message lists its spaces.
        DamagedError: A row of the table of spaces is invalid.
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    spaces = read_spaces(connection)
    for info in spaces:
        if info.spec.space == space:
            return info
    raise missing_space_error(spaces, space)


def read_commit_count(connection: sqlite3.Connection) -> int:
    """Return the number of transactions so far that changed vectors, metadata or spaces.

    Raises:
        DamagedError: It is missing, or no integer.
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    rows = connection.execute("SELECT count FROM commits").fetchall()
    if len(rows) != 1 or not isinstance(rows[0][0], int):
        raise DamagedError(None, "its table 'commits' lacks the number of commits")
    return int(rows[0][0])


def vectors_to_blobs(vectors: Vectors | None, row_count: int) -> Sequence[bytes | None]:
    """Return each row as bytes of little-endian float32.

    Args:
        vectors: float32 [rows, dim], dim at least 1; other dtypes are converted; None returns
            `row_count` times None.
        row_count: Number of rows; used only where `vectors` is None.

    Raises:
        IndexError: `vectors` has one dimension.
    """
    if vectors is None:
        return [None] * row_count
    packed = np.ascontiguousarray(vectors, "<f4")
    # As one opaque value for each row, the array becomes bytes objects in one call.
    blobs: list[bytes] = packed.view(f"V{4 * packed.shape[1]}").ravel().tolist()
    return blobs


def vectors_from_blobs(blobs: Sequence[bytes], dim: int) -> Vectors:
    """Return n blobs of little-endian float32 as rows [n, dim], read-only.

    Without blobs, the array is [0, dim]. The values are not checked: they may be NaN.

    Raises:
        DamagedError: A value is no blob, or has another length than 4 * dim bytes.
    """
    try:
        joined = b"".join(blobs)
    except TypeError as error:
        raise DamagedError(None, "a stored vector is not binary data") from error
    # Check each length: a longer blob may make up for a shorter one.
    if not set(map(len, blobs)) <= {4 * dim}:
        raise DamagedError(
            None,
            f"expected {4 * dim} bytes in each of {len(blobs)} stored vectors, got {len(joined)} "
            "in all",
        )
    return np.frombuffer(joined, "<f4").reshape(len(blobs), dim)


def rows_to_labels(rows: Iterable[tuple[int]]) -> Labels:
    """Return rows of one integer each as an array, int64 [n]; all rows are read.

    Raises:
        sqlite3.Error: The rows come from a cursor, and SQLite fails.
        TypeError, ValueError: A row has no number.
    """
    return np.fromiter(chain.from_iterable(rows), np.int64)


def read_all_labels(connection: sqlite3.Connection, table: str) -> Labels:
    """Return every label of a table, int64 [n], increasing.

    SQLite joins many labels into one text. That takes half the time of single rows, and leaves the
    interpreter to other threads. It runs several statements: call it in one snapshot.

    Args:
        connection: The file.
        table: Name of the table. It becomes part of the statement: never take it from a caller.

    Raises:
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    parts, last = [np.empty(0, np.int64)], np.iinfo(np.int64).min
    while True:
        (text,) = connection.execute(
            f"SELECT group_concat(label) FROM (SELECT label FROM {table} WHERE label > ?"
            " ORDER BY label LIMIT ?)",
            (int(last), _LABELS_AT_ONCE),
        ).fetchone()
        if text is None:
            return np.concatenate(parts)
        parts.append(np.fromstring(text, np.int64, sep=","))
        last = parts[-1][-1]


def read_concatenated_embeddings(
    connection: sqlite3.Connection, table: str, condition: str, parameters: tuple[int | str, ...],
    count: int, embedding_bytes: int,
) -> bytes | None:  # fmt: skip
    """Return the embeddings of rows by label, as one blob; takes half the time of single rows.

    Args:
        connection: The file.
        table: Name of the table.
        condition: A condition of `labels_sql_condition`.
        parameters: Its parameters.
        count: Number of the rows that must pass it.
        embedding_bytes: Bytes of each embedding.

    Returns:
        `count` times `embedding_bytes` bytes, by increasing label. None if other rows pass, a row
        has another size or is no blob, `count` is 0, or more than 256 MiB are asked for: read the
        rows one by one.

    Raises:
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    if count * embedding_bytes > _MOST_JOINED_BYTES:
        return None
    number, valid, joined = connection.execute(
        f"SELECT count(*), total(typeof(embedding) = 'blob' AND length(embedding) = "
        f"{embedding_bytes:d}), CAST(group_concat(embedding, '') AS BLOB) FROM (SELECT embedding "
        f"FROM {table} WHERE {condition} ORDER BY label)",
        parameters,
    ).fetchone()
    # The length reveals an SQLite that ends a text at its first zero byte.
    right = (
        number == valid == count and joined is not None and len(joined) == count * embedding_bytes
    )
    return joined if right else None


def labels_sql_condition(labels: Labels) -> tuple[str, tuple[int | str, ...]]:
    """Return an SQL condition that is true for all of `labels`, with its parameters.

    For labels that lie close together it is a range, which is much cheaper. A range may be true for
    other labels, too.

    Args:
        labels: int64 [n], in any order. Without labels, no row passes.

    Returns:
        The condition on the column `label`, and its parameters.
    """
    if len(labels) and (last := int(labels.max())) - (first := int(labels.min())) < 2 * len(labels):
        return "label BETWEEN ? AND ?", (first, last)
    return "label IN (SELECT value FROM json_each(?))", (json.dumps(labels.tolist()),)


def live_labels(
    connection: sqlite3.Connection, table: str, labels: Labels, where: str = "TRUE"
) -> Labels:
    """Return the labels for which a table has a row that passes an SQL condition.

    Args:
        connection: The file.
        table: Name of the table.
        labels: int64 [n], in any order; one may repeat.
        where: The condition. It becomes part of the statement: never build it from a caller's text.

    Returns:
        int64, increasing, each label once.

    Raises:
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    condition, parameters = labels_sql_condition(labels)
    rows = connection.execute(
        f"SELECT label FROM {table} WHERE {condition} AND {where}", parameters
    )
    return np.intersect1d(rows_to_labels(rows), labels)


# application_id of the file: "nobf".
APPLICATION = 0x6E6F6266
# Format of the tables: PRAGMA user_version of every gallery file. schema.py migrates to it.
GALLERY_FORMAT = 1
# A set in the table of migrations. Its names are the versions that created the file or changed its
# format, the latest last.
WRITERS_TABLE = "nobackfill"


def read_format(connection: sqlite3.Connection, path: Path) -> int:
    """Return the format of a file's tables; 0 for a file of this program without tables.

    An older format is returned, not refused: `migrate_file` brings it to GALLERY_FORMAT.

    Raises:
        VerificationError: The file belongs to another program, or has a newer format; the message
            names the version that wrote it.
        sqlite3.DatabaseError: The file cannot be read, or is no database.
    """
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise not_a_gallery_error(path, "a database of another program")
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > GALLERY_FORMAT:
        raise VerificationError(
            f"{path}: expected a gallery of format {GALLERY_FORMAT} or older, got format "
            f"{version}; use {describe_writer(_writer(connection))}"
        )
    return version


def _writer(connection: sqlite3.Connection) -> object:
    """Return the version that wrote the present format; None if it is not recorded."""
    query = "SELECT name FROM _sqlite_migrations WHERE migration_set = ? ORDER BY id DESC LIMIT 1"
    try:
        row = connection.execute(query, [WRITERS_TABLE]).fetchone()
    except sqlite3.DatabaseError:
        return None
    return None if row is None else row[0]


_COLUMNS = {
    "items": ["label", "id", "digest", "metadata"],
    "attributes": ["key", "kind", "value", "label"],
    "spaces": [
        "number", "space", "release", "dim", "metric", "unit", "side_space", "side_dim", "state",
        "activated",
    ],
    "state": ["key", "value"],
    "commits": ["count"],
}  # fmt: skip
_VECTORS = re.compile(r"vectors_\d+")
_VECTOR_COLUMNS = ["label", "origin", "uncertainty", "embedding", "side"]
# The first push of a device creates this table.
_OTHERS = frozenset({"vault"})


def check_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a gallery file whose tables differ from a gallery's.

    A view can be endless, a trigger runs at each write, and a generated column computes anything.

    Other tables and views are ignored, and so are indexes. A table of vectors that is missing is
    not noticed. Columns of `vault` are only checked for generated ones.

    Args:
        connection: The file.
        path: Its path, for the message.

    Raises:
        DamagedError: A trigger; a name that is no text; or a table of a gallery that is missing, a
            view or virtual, or has other or generated columns. Tables of items and vectors need an
            integer as their key.
        sqlite3.Error: SQLite fails.
    """
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    tables = set()
    for kind, name, statement in rows:
        if not isinstance(name, str):
            raise DamagedError(path, "its schema has invalid values")
        ours = name.casefold()
        if kind == "trigger":
            raise DamagedError(path, f"it has a trigger, {name[:64]!r}, and a gallery has none")
        if not (ours in _COLUMNS or ours in _OTHERS or _VECTORS.fullmatch(ours)):
            continue
        if kind != "table" or not str(statement).upper().startswith("CREATE TABLE"):
            raise DamagedError(path, f"{name[:64]!r} is no table, and a gallery needs it as one")
        tables.add(ours)
    for table in sorted(tables | _COLUMNS.keys()):
        expected = _VECTOR_COLUMNS if _VECTORS.fullmatch(table) else _COLUMNS.get(table)
        # `hidden` is not 0 for columns that are generated.
        query = "SELECT name, hidden, type, pk FROM pragma_table_xinfo(?)"
        columns = connection.execute(query, (table,)).fetchall()
        if any(hidden for _, hidden, _, _ in columns) or (
            expected is not None and [name for name, *_ in columns] != expected
        ):
            names = ", ".join(str(name)[:64] for name, *_ in columns) or "none"
            raise DamagedError(path, f"its table {table!r} has other columns: {names}")
        keyed = expected is not None and expected[0] == "label"
        if keyed and tuple(columns[0][2:]) != ("INTEGER", 1):
            raise DamagedError(path, f"its table {table!r} has no number as its key")


def not_a_gallery_error(path: Path, kind: str) -> VerificationError:
    """Return, without raising it, the error for a file that is no gallery."""
    return VerificationError(f"{path}: expected a gallery, got {kind}; name the gallery's file")


# The index of metadata: table `attributes` has a row for each key of the JSON in `items`.
# Statements here maintain it, each in the transaction that changes the items: triggers would make
# every insert of an item five times slower.

# Each key with its value, or with each text of a list, for items that pass `where`.
_OF_ITEMS = """
    SELECT a.key,
           CASE a.type WHEN 'text' THEN 'text' WHEN 'true' THEN 'flag' WHEN 'false' THEN 'flag'
                       ELSE 'number' END,
           a.atom, i.label
    FROM items i, json_each(i.metadata) a
    WHERE {where} AND i.metadata <> '{{}}' AND a.type <> 'array'
    UNION ALL
    SELECT DISTINCT a.key, 'text', e.atom, i.label
    FROM items i, json_each(i.metadata) a,
         json_each(CASE a.type WHEN 'array' THEN a.value ELSE '[]' END) e
    WHERE {where} AND instr(i.metadata, '[')"""

_FORGET = (
    "DELETE FROM attributes WHERE (key, kind, value, label) IN"
    f" ({_OF_ITEMS.format(where='i.label = :label')})"
)


def index_metadata(connection: sqlite3.Connection, first_label: int, last_label: int) -> None:
    """Add items to the index of the metadata, read from their rows.

    A list counts as each of its different texts; an empty one is not indexed.

    Args:
        connection: In a transaction.
        first_label: The first label.
        last_label: The last label, which is included; labels without an item are skipped.

    Raises:
        sqlite3.IntegrityError: An item is in the index already with the same value.
        sqlite3.Error: Another statement failed, such as by metadata that is no JSON.
    """
    connection.execute(
        f"INSERT INTO attributes {_OF_ITEMS.format(where='i.label BETWEEN :first AND :last')}",
        {"first": first_label, "last": last_label},
    )


def unindex_metadata(connection: sqlite3.Connection, labels: Labels) -> None:
    """Remove items from the index of the metadata, before they are deleted or described again.

    Call it while the items still have their old metadata: that names the rows to remove.

    Args:
        connection: In a transaction.
        labels: int64 [n]; labels that are not in the index are ignored.

    Raises:
        sqlite3.Error: A statement failed; the caller rolls back.
    """
    connection.executemany(_FORGET, ({"label": label} for label in labels.tolist()))


def set_metadata(connection: sqlite3.Connection, texts: list[tuple[int, str]]) -> None:
    """Set the metadata of items from JSON texts by label; unchanged texts are not written.

    Each label must exist; one that repeats gets its last text. The index of the metadata is
    updated, too.

    Args:
        connection: In a transaction.
        texts: Label of an existing item, and JSON text as `metadata_json` returns it; not checked
            here.

    Raises:
        sqlite3.Error: A statement failed, such as for a text that is no JSON; the caller rolls
            back.
        TypeError: A label does not exist. The caller rolls back.
    """
    for label, metadata in texts:
        row = connection.execute("SELECT metadata FROM items WHERE label = ?", (label,)).fetchone()
        if row[0] == metadata:
            continue
        connection.execute(_FORGET, {"label": label})
        connection.execute("UPDATE items SET metadata = ? WHERE label = ?", (metadata, label))
        index_metadata(connection, label, label)


@dataclass(frozen=True)
class StoredItem:
    """An item; `origin` and `uncertainty` are those of its vector in the requested space, if
    any."""

    label: int
    id: str
    digest: str | None
    metadata: Metadata
    origin: Origin | None = None
    uncertainty: float | None = None


@dataclass(frozen=True)
class StoredVectors:
    """Rows of a space by increasing label.

    Attributes:
        labels: int64 [n].
        origins: How each vector was made.
        uncertainties: None where a row has no uncertainty.
        embedding: float32 [n, dim].
        side_blobs: Side-information as bytes; None where a row has none.
    """

    labels: Labels
    origins: list[Origin]
    uncertainties: list[float | None]
    embedding: Vectors
    side_blobs: list[bytes | None]

    def writable_groups(self, rows: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
        """Split rows into groups that can be written together.

        The rows of a group have the same origin; all or none have side-information, and all or none
        an uncertainty.

        Args:
            rows: int [m], indices into the n rows.

        Yields:
            Indices int [k] of one group, in the order of `rows`; groups are ordered by origin.
            Without rows, there is no group.

        Raises:
            IndexError: An index is out of range.
        """
        kinds = [
            (self.origins[row], self.side_blobs[row] is None, self.uncertainties[row] is None)
            for row in rows.tolist()
        ]
        for kind in sorted(set(kinds)):
            yield rows[[place for place, one in enumerate(kinds) if one == kind]]

    def comparable_row(self, row: int) -> tuple[object, ...]:
        """Return origin, uncertainty, embedding and side-information of a row, for a comparison bit
        for bit.

        Args:
            row: Index of the row, from 0; a negative one counts from the end.

        Raises:
            IndexError: There is no such row.
        """
        return (
            self.origins[row], self.uncertainties[row], self.embedding[row].tobytes(),
            self.side_blobs[row],
        )  # fmt: skip


@dataclass(frozen=True)
class StoredWindow:
    """Items by increasing label, and for each requested space the rows of the items that have
    one."""

    items: list[StoredItem]
    vectors: list[StoredVectors]


def draw_labels(
    bounds: tuple[int | None, int | None],
    count: int,
    labels_from: Callable[[list[int]], Labels],
    draw_from_all: Callable[[], Labels],
) -> Labels:
    """Draw about `count` labels at random, without reading a whole table.

    Labels after a gap of deleted ones are drawn somewhat more often. The draw is not reproducible.

    Args:
        bounds: The smallest and the largest label; None if there is none, which gives no labels.
        count: The largest number of labels; 0 gives none.
        labels_from: Returns for each number the first label from it on: int64, each label once,
            increasing.
        draw_from_all: Draws `count` labels, int64, by reading all of them; used where gaps would
            bias the draw.

    Returns:
        int64, increasing: at least half of `count`, if there are that many.

    Raises:
        ValueError: `count` is negative.
        Exception: An error of a callback.
    """
    first, last = bounds
    if first is None or last is None:
        return np.empty(0, np.int64)
    dense, generator = last - first < 2 * count, np.random.default_rng()
    numbers = np.arange(first, last + 1) if dense else generator.integers(first, last + 1, count)
    labels = labels_from(numbers.tolist())
    if not dense and len(labels) < count // 2:
        # Most numbers fell into one gap, so that a few labels would stand for all.
        return np.sort(draw_from_all())
    return (
        labels if len(labels) <= count else np.sort(generator.choice(labels, count, replace=False))
    )


_ORIGINS = (None, *get_args(Origin))
# Rows fetched at a time: their Python objects stay small compared with the resulting array.
FETCH_ROWS = 4096


def read_items_by_label(
    connection: sqlite3.Connection, labels: Sequence[int] | Labels, space: str | None = None
) -> list[StoredItem | None]:
    """Return items in the order of `labels`; None where an item does not exist.

    Args:
        connection: The file.
        labels: int64 [n], in any order; a label may repeat. All are read at once.
        space: Id of the space whose origin and uncertainty the items get; None leaves both None.

    Returns:
        n items; an item without a vector in the space has origin and uncertainty None.

    Raises:
        IncompatibleSpaceError: The gallery does not have the space.
        DamagedError: A row is invalid.
        sqlite3.Error: SQLite fails, or a table is missing; `Store.read_snapshot` translates it.
    """
    numbers = [int(label) for label in labels]
    of_vector, join = "NULL, NULL", ""
    if space is not None:
        table = vector_table_name(find_space(connection, space).table_number)
        of_vector, join = "v.origin, v.uncertainty", f"LEFT JOIN {table} v ON v.label = i.label"
    rows = connection.execute(
        f"SELECT i.label, i.id, i.digest, i.metadata, {of_vector} FROM items i {join}"
        " WHERE i.label IN (SELECT value FROM json_each(?))",
        (json.dumps(numbers),),
    )
    by_label = {item.label: item for item in map(item_from_row, rows)}
    return [by_label.get(label) for label in numbers]


def item_from_row(row: tuple[Any, ...]) -> StoredItem:
    """Build an item from a row of a gallery file.

    Args:
        row: Exactly label, id, digest, metadata, origin, uncertainty. The metadata is JSON text.
            Digest, origin and uncertainty may be None. The label and the values of the metadata are
            not checked.

    Raises:
        DamagedError: A value has the wrong type, or the metadata is no JSON object.
    """
    label, item_id, digest, metadata, origin, uncertainty = row
    try:
        fields = json.loads(metadata)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(None, f"item {label} is no valid JSON") from error
    sound = isinstance(item_id, str) and isinstance(digest, str | None) and origin in _ORIGINS
    if not (sound and isinstance(fields, dict) and isinstance(uncertainty, float | None)):
        raise DamagedError(None, f"row {label} of its table 'items' has invalid values")
    return StoredItem(label, item_id, digest, fields, origin, uncertainty)


def read_state_value(connection: sqlite3.Connection, key: str) -> Any:
    """Return a JSON value of the table `state`; None if there is none.

    Raises:
        DamagedError: The value is no valid JSON, or could not be stored again.
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    row = connection.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
    return _state_value(row[0], key) if row else None


def read_state_values(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return every JSON value of the table `state`, by key.

    Without any, the mapping is empty.

    Raises:
        DamagedError: A value is no valid JSON, or could not be stored again.
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    rows = connection.execute("SELECT key, value FROM state").fetchall()
    return {key: _state_value(value, key) for key, value in rows}


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number


# Python's JSON also reads NaN and 1e400, which cannot be stored.
_STATE_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _state_value(text: Any, key: str) -> Any:
    """Parse a value of the state, which `set_state_values` can store again."""
    try:
        value = _STATE_DECODER.decode(text)
        # Only an escape can be half of a character, which cannot be stored either.
        if "\\u" in text:
            _state_json(value).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(None, f"its state has an unusable value of {key!r}") from error
    return value


def _state_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def items_page(
    connection: sqlite3.Connection, start_after: int, limit: int, where: str = "TRUE"
) -> list[StoredItem]:
    """Return items that pass an SQL condition, by increasing label.

    Args:
        connection: The file.
        start_after: Only items with a larger label; 0 for all.
        limit: Largest number of items; 0 gives none, a negative number all.
        where: A condition on `i`, the table of items. It becomes part of the statement: never build
            it from a caller's text.

    Returns:
        The items, without origin and uncertainty; empty at the end.

    Raises:
        DamagedError: A row is invalid.
        sqlite3.Error: SQLite fails, or the condition is wrong; `Store.read_snapshot` translates it.
        OverflowError: `start_after` or `limit` has more than 64 bits.
    """
    rows = connection.execute(
        "SELECT i.label, i.id, i.digest, i.metadata, NULL, NULL FROM items i"
        f" WHERE i.label > ? AND {where} ORDER BY i.label LIMIT ?",
        (start_after, limit),
    )
    return [item_from_row(row) for row in rows]


def count_rows(connection: sqlite3.Connection, space: str | None) -> int:
    """Return the number of items, or of vectors in a space. Counting vectors reads far more pages.

    Args:
        connection: The file.
        space: Id of the space; None counts items.

    Raises:
        IncompatibleSpaceError: The gallery does not have the space.
        DamagedError: A row of the table of spaces is invalid.
        sqlite3.Error: SQLite fails, or a table is missing; `Store.read_snapshot` translates it.
    """
    table = (
        "items" if space is None else vector_table_name(find_space(connection, space).table_number)
    )
    number: int = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    return number


def read_all_vectors(connection: sqlite3.Connection, info: SpaceInfo) -> tuple[Labels, Vectors]:
    """Return all vectors of a space: labels int64 [n], increasing, and vectors float32 [n, dim].

    Without vectors, n is 0. Values are not checked: they may be NaN. The arrays are views of memory
    for as many vectors as the gallery has items.

    Raises:
        DamagedError: A vector has another length, there are more vectors than items, or the labels
            are not in order.
        sqlite3.Error: SQLite fails, or a table is missing; `Store.read_snapshot` translates it.
    """
    # The number of items is an upper bound, and reads far fewer pages than counting vectors.
    most = count_rows(connection, None)
    labels = np.empty(most, np.int64)
    vectors = np.empty((most, info.spec.dim), np.float32)
    end = 0
    for some_labels, some in _chunks(connection, info):
        if end + len(some) > most:
            raise DamagedError(None, f"it has more vectors than its {most} items")
        labels[end : end + len(some)] = some_labels
        vectors[end : end + len(some)] = some
        end += len(some)
    if (np.diff(labels[:end]) <= 0).any():
        raise DamagedError(None, "its rows of vectors are not in the order of their keys")
    return labels[:end], vectors[:end]


def _chunks(connection: sqlite3.Connection, info: SpaceInfo) -> Iterator[tuple[Labels, Vectors]]:
    rows = connection.execute(
        f"SELECT label, embedding FROM {vector_table_name(info.table_number)} ORDER BY label"
    )
    while chunk := rows.fetchmany(FETCH_ROWS):
        labels, blobs = zip(*chunk, strict=True)
        yield np.array(labels, np.int64), vectors_from_blobs(blobs, info.spec.dim)


class VectorsOnDisk:
    """The vectors of a space as an array that is read on access, within one snapshot. All labels
    are in memory; use it before the snapshot of its connection ends. Reading raises DamagedError
    for a vector of another length, and sqlite3.Error where SQLite fails."""

    def __init__(self, connection: sqlite3.Connection, info: SpaceInfo) -> None:
        self._connection = connection
        self._info = info
        self._table = vector_table_name(info.table_number)
        self.labels = read_all_labels(connection, self._table)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Any, /) -> Vectors:
        labels = self.labels[rows]
        vectors = np.empty((len(labels), self._info.spec.dim), np.float32)
        for start in range(0, len(labels), FETCH_ROWS):
            vectors[start : start + FETCH_ROWS] = self._some(labels[start : start + FETCH_ROWS])
        return vectors

    def _some(self, requested: Labels) -> Vectors:
        condition, parameters = labels_sql_condition(requested)
        if (requested[1:] > requested[:-1]).all():
            joined = read_concatenated_embeddings(
                self._connection, self._table, condition, parameters, len(requested),
                4 * self._info.spec.dim,
            )  # fmt: skip
            if joined is not None:
                return np.frombuffer(joined, "<f4").reshape(len(requested), -1)
        pairs = self._connection.execute(
            f"SELECT label, embedding FROM {self._table} WHERE {condition} ORDER BY label",
            parameters,
        ).fetchall()
        labels, blobs = zip(*pairs, strict=True)
        vectors = vectors_from_blobs(blobs, self._info.spec.dim)
        # A range may contain further labels.
        places = np.searchsorted(np.array(labels, np.int64), requested)
        return vectors if np.array_equal(places, np.arange(len(labels))) else vectors[places]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


def read_vector(connection: sqlite3.Connection, label: int, info: SpaceInfo) -> Vectors | None:
    """Return an item's vector in a space, float32 [1, dim]; None if it has none.

    The array is read-only, and its values are not checked: they may be NaN.

    Raises:
        DamagedError: The vector has another length, or is no blob.
        OverflowError: `label` has more than 64 bits.
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    row = connection.execute(
        f"SELECT embedding FROM {vector_table_name(info.table_number)} WHERE label = ?", (label,)
    ).fetchone()
    return vectors_from_blobs([row[0]], info.spec.dim) if row else None


def draw_random_labels(connection: sqlite3.Connection, info: SpaceInfo, count: int) -> Labels:
    """Draw labels of a space at random, without reading a whole table.

    Args:
        connection: The file.
        info: The space.
        count: Largest number of labels; 0 gives none.

    Returns:
        int64, increasing: at least half of `count`, if the space has that many vectors; empty for
        an empty space. Labels after a gap of deleted ones are drawn somewhat more often. The draw
        is not reproducible.

    Raises:
        ValueError: `count` is negative, and the space has vectors.
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    table = vector_table_name(info.table_number)

    def following(numbers: list[int]) -> Labels:
        return rows_to_labels(
            connection.execute(
                f"SELECT DISTINCT (SELECT label FROM {table} WHERE label >= drawn.value"
                " ORDER BY label LIMIT 1) AS label FROM json_each(?) drawn ORDER BY label",
                (json.dumps(numbers),),
            )
        )

    def shuffled() -> Labels:
        query = f"SELECT label FROM {table} ORDER BY random() LIMIT ?"
        return rows_to_labels(connection.execute(query, (count,)))

    bounds = connection.execute(f"SELECT min(label), max(label) FROM {table}").fetchone()
    return draw_labels(bounds, count, following, shuffled)


def read_vectors(connection: sqlite3.Connection, labels: Labels, info: SpaceInfo) -> Vectors:
    """Return the vectors of some labels, float32 [m, dim], by increasing label.

    The array is read-only, and [0, dim] without vectors. Values are not checked: they may be NaN.

    Args:
        connection: The file.
        labels: int64 [n], distinct; labels without a vector in the space are skipped, so m may be
            below n.
        info: The space.

    Raises:
        DamagedError: A vector has another length, or is no blob.
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    rows = connection.execute(
        f"SELECT embedding FROM {vector_table_name(info.table_number)}"
        " WHERE label IN (SELECT value FROM json_each(?)) ORDER BY label",
        (json.dumps(labels.tolist()),),
    )
    return vectors_from_blobs([row[0] for row in rows], info.spec.dim)


def stored_vectors(
    connection: sqlite3.Connection, labels: Labels, info: SpaceInfo
) -> StoredVectors:
    """Return the rows that a space has for some labels, by increasing label.

    Origins, uncertainties and side-information are returned as they are stored, without a check.
    Embeddings are read-only and may be NaN.

    Args:
        connection: The file.
        labels: int64 [n], distinct; labels without a vector in the space are skipped.
        info: The space.

    Raises:
        DamagedError: A vector has another length, or is no blob.
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    rows = connection.execute(
        "SELECT label, origin, uncertainty, embedding, side FROM "
        f"{vector_table_name(info.table_number)}"
        " WHERE label IN (SELECT value FROM json_each(?)) ORDER BY label",
        (json.dumps(labels.tolist()),),
    ).fetchall()
    columns = [[row[place] for row in rows] for place in range(5)]
    return StoredVectors(
        np.array(columns[0], np.int64), columns[1], columns[2],
        vectors_from_blobs(columns[3], info.spec.dim), columns[4],
    )  # fmt: skip


def set_state_values(connection: sqlite3.Connection, values: Mapping[str, Any]) -> None:
    """Store JSON values in the table `state`; None removes a value.

    Args:
        connection: In a transaction.
        values: Values by key.

    Raises:
        TypeError: A value cannot be written as JSON. Earlier values are written; the caller rolls
            back.
        ValueError: A value contains NaN, infinity or half a surrogate pair. The caller rolls back.
        sqlite3.Error: A statement failed; the caller rolls back.
    """
    for key, value in values.items():
        if value is None:
            connection.execute("DELETE FROM state WHERE key = ?", (key,))
        else:
            connection.execute(
                "INSERT OR REPLACE INTO state (key, value) VALUES (?, ?)", (key, _state_json(value))
            )


# Ways to open a gallery file; they are tried without writing.
# shared: read and write along with other processes, through SQLite's shared memory (-shm). sole: no
# space for the shared memory, so only one process with one connection. reading: the file or its
# folder cannot be written.

# SQLite maps 32 KiB next to the gallery before it reads a row. Where blocks are smaller than its
# pages, a lack of space ends the process by SIGBUS. The rest is for the first pages of the log.
LEAST_FREE_BYTES = 256 << 10
# How long a writer waits for another process before BusyError, in milliseconds.
BUSY_TIMEOUT_MS = 5000
_SUFFIXES = ("-wal", "-shm", ".lock")
_EFFECTIVE = os.access in os.supports_effective_ids


@dataclass(frozen=True)
class FileAccess:
    """A way to open a file.

    Attributes:
        uri_query: Query of the URI for SQLite.
        is_exclusive: Whether one connection has the file to itself.
        write_refusal: Why nothing can be written; None if it can.
        unlocked_file_stat: Size and time of a file that no lock protects.
    """

    uri_query: str = ""
    is_exclusive: bool = False
    write_refusal: str | None = None
    unlocked_file_stat: tuple[int, int] | None = None

    def connect(self, path: Path) -> sqlite3.Connection:
        """Open a connection without the settings of `open_connection`; the caller closes it.

        SQLite creates a missing file, unless the way only reads. It reads a file at the first
        statement: one of another kind fails then. Threads may take turns with the connection.

        Args:
            path: The file.

        Raises:
            sqlite3.Error: It cannot be opened.
        """
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{self.uri_query}", uri=True, isolation_level=None,
            check_same_thread=False, cached_statements=256,
        )  # fmt: skip
        if self.is_exclusive:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        return connection

    def check_unchanged(self, path: Path) -> None:
        """Check that a file without a lock did not change while it was read.

        Does nothing where the way to open it has a lock.

        Raises:
            BusyError: Its size or time of modification changed.
            NotFoundError: The file is gone.
        """
        if self.unlocked_file_stat is None:
            return
        try:
            stamp = _stamp(path)
        except OSError as error:
            raise NotFoundError(
                f"{path}: the gallery is gone since it was opened ({error.strerror}); check the "
                "path, and open it again"
            ) from error
        if stamp != self.unlocked_file_stat:
            raise BusyError(f"{path}: the file changed while it was read without a lock; try again")

    def check_writable(self) -> None:
        """Check that the file can be written.

        Raises:
            CannotWriteError: It cannot; the message has the reason.
        """
        if self.write_refusal is not None:
            raise CannotWriteError(self.write_refusal)


SHARED_ACCESS = FileAccess()


def open_connection(path: Path, access: FileAccess = SHARED_ACCESS) -> sqlite3.Connection:
    """Open a connection with the settings of this project: explicit transactions, full durability.

    Foreign keys are enforced, deleted bytes are overwritten, and a locked file is waited for up to
    BUSY_TIMEOUT_MS. The caller closes the connection. Threads may take turns with it.

    Args:
        path: The file; SQLite creates a missing one, unless `access` only reads.
        access: The way to open it.

    Raises:
        sqlite3.Error: It cannot be opened; no connection stays open.
    """
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(contextlib.closing(access.connect(path)))
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        # Sorted rows contain ids, which must not end up in files that outlive them.
        connection.execute("PRAGMA temp_store = MEMORY")
        undo.pop_all()
    return connection


def possible_accesses(path: Path, exclusive: bool) -> Iterator[FileAccess]:
    """Yield the ways to open a gallery file, the best first; take the next one if there is no
    space.

    Args:
        path: The file.
        exclusive: No other process has it open.

    Yields:
        First along with other processes, if at least 256 KiB are free or others have it open. Then
        alone, if `exclusive`. Last for reading only. If the file, its log or its folder cannot be
        written, reading is the only way.

    Raises:
        CannotWriteError: It cannot even be read; raised where the last way is needed.
        OSError: The file or its folder is gone.
    """
    refusal = explain_unwritable(path)
    if refusal is None:
        if not exclusive or has_free_bytes(path.parent):
            yield SHARED_ACCESS
        if exclusive:
            yield FileAccess(is_exclusive=True)
        refusal = f"{path}: cannot be written, the disk is full; free some space"
    yield read_only_access(path, refusal)


def read_only_access(path: Path, refusal: str) -> FileAccess:
    """Return a way to read a file without creating another. Nothing is opened or locked.

    Other processes that write are noticed afterwards, by `FileAccess.check_unchanged`, where no
    lock protects the file.

    Args:
        path: The file.
        refusal: Why it cannot be written.

    Raises:
        CannotWriteError: It is missing or cannot be read, or only after its log was written into
            it.
    """
    if not os.access(path, os.R_OK, effective_ids=_EFFECTIVE):
        raise CannotWriteError(
            f"{path}: this user has no permission to read the gallery; run the command as the "
            "file's owner"
        )
    log, shared = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    if log.exists() and shared.exists():
        return FileAccess("mode=ro&readonly_shm=1", write_refusal=refusal)
    if log.exists() and log.stat().st_size:
        raise CannotWriteError(
            f"{path}: {log.name} holds the gallery's last changes, and reading it needs a writable "
            "folder; copy both files to a folder that you can write to"
        )
    return FileAccess("mode=ro&immutable=1", write_refusal=refusal, unlocked_file_stat=_stamp(path))


def explain_unwritable(path: Path) -> str | None:
    """Explain why a gallery file, its log or its folder cannot be written; None if they can.

    Missing files are skipped. The permissions of the effective user count.

    Raises:
        OSError: This user may not search the folder.
    """
    companions = [path.with_name(path.name + end) for end in _SUFFIXES]
    for name in (path, *(p for p in companions if p.exists()), path.parent):
        mode = os.W_OK | (os.X_OK if name.is_dir() else os.R_OK)
        if os.access(name, mode, effective_ids=_EFFECTIVE):
            continue
        try:
            read_only = os.statvfs(name).f_flag & os.ST_RDONLY
        except FileNotFoundError:
            # Another process closed the gallery and removed the file.
            continue
        if read_only:
            return (
                f"{name}: cannot be written, its file system is read-only; copy the gallery "
                "and the files next to it that begin with its name to a writable one"
            )
        return (
            f"{name}: this user has no permission to write it; run the command as its owner, or "
            "change its permissions"
        )
    return None


def has_free_bytes(folder: Path, least_bytes: int = LEAST_FREE_BYTES) -> bool:
    """Tell whether the file system of a folder has at least `least_bytes` bytes free for this user.

    Blocks that are reserved for root count only for root.

    Raises:
        OSError: The folder is missing.
    """
    return free_bytes(folder) >= least_bytes


def free_bytes(folder: Path) -> int:
    """Return the number of bytes that the file system of a folder has free for this user.

    Blocks that are reserved for root count only for root.

    Raises:
        OSError: The folder is missing.
    """
    status = os.statvfs(folder)
    return (status.f_bavail if os.geteuid() else status.f_bfree) * status.f_frsize


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


# The lock file next to a gallery: shared while the gallery is open, exclusive for a process that
# must be alone.


def lock_path(path: Path) -> Path:
    """Return the path of a gallery's lock file: the gallery's own path with the suffix .lock."""
    return path.with_name(path.name + ".lock")


def open_lock(path: Path, gallery_file: Path) -> int:
    """Open the lock file of a gallery, and create it if this user may write the gallery.

    A lock file of another user would block the gallery's owner. Nothing is locked.

    Args:
        path: The lock file; a new one has mode 0600.
        gallery_file: The gallery's file.

    Returns:
        A file descriptor, which the caller closes; -1 if there is no lock file and none can be
        created, or it cannot be opened.

    Raises:
        OSError: This user may not search the folder.
    """
    ways = (
        [os.O_RDONLY] if explain_unwritable(gallery_file) else [os.O_RDWR | os.O_CREAT, os.O_RDONLY]
    )
    for flags in ways:
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_CLOEXEC, 0o600)
    return -1


def lock_gallery(handle: int, path: Path) -> bool:
    """Lock a gallery exclusively if no other process has it open, otherwise in shared mode.

    Args:
        handle: The lock file, as `open_lock` returned it. Closing it frees the lock.
        path: The gallery, for the message.

    Returns:
        Whether no other process has the gallery open; the lock is then exclusive.

    Raises:
        BusyError: Another process holds it exclusively for 5 seconds.
        CannotWriteError: The file system has no locks (flock).
        ValueError: `handle` is -1.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        for kind, exclusive in ((fcntl.LOCK_EX, True), (fcntl.LOCK_SH, False)):
            try:
                fcntl.flock(handle, kind | fcntl.LOCK_NB)
                return exclusive
            except BlockingIOError:
                continue
            except OSError as error:
                raise durable.lock_refused_error(path, error) from error
        if time.monotonic() >= deadline:
            raise BusyError(
                f"{path}: another process has this gallery open exclusively; try again after it "
                "has ended"
            )
        time.sleep(0.02)


# A bound on open gallery files: each takes about six file descriptors.


class Suspendable(Protocol):
    """Something that can be closed for a while, such as FileConnections."""

    recently_used: bool

    def suspend(self) -> bool:
        """Close the resident until it is needed; return False if it is in use. Never waits."""


class SuspendablePool:
    """Keep about `most_open` residents open, and close those that are unused for longest."""

    def __init__(self, most_open: int) -> None:
        self._most = most_open
        self._lock = threading.Lock()
        self._open: deque[Suspendable] = deque()

    def register(self, resident: Suspendable) -> None:
        """Record that one more resident is open; close others until at most `most_open` are open.

        A resident that was used since the last call is skipped once; one that is in use stays open.
        If all are in use, more stay open. A resident that was closed elsewhere counts
        as open until its turn. Any thread may call it.

        Args:
            resident: One that has just been opened.
        """
        with self._lock:
            self._open.append(resident)
            for _ in range(2 * len(self._open)):
                if len(self._open) <= self._most:
                    return
                oldest = self._open.popleft()
                if oldest.recently_used or not oldest.suspend():
                    oldest.recently_used = False
                    self._open.append(oldest)


# How long closing waits for running statements, in seconds.
_CLOSE_S = 60.0
# Errors of SQLite if the shared memory or the log cannot be created.
_NO_ROOM = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN)


class _NoRoomError(Exception):
    """SQLite could not create its files next to the gallery."""


class FileConnections:
    """Every connection of this process to one gallery file.

    No connection is closed while a thread uses it: SQLite would read freed memory. After `suspend`,
    they are opened again on demand.

    Attributes:
        path: The file.
        recently_used: Set whenever a connection is used.
    """

    def __init__(self, path: Path, pool: SuspendablePool | None = None) -> None:
        """Open the file's connections; after an unclean end, check its pages first.

        A file of an older format is migrated. A lock file is created next to it, and stays. Waits
        up to 5 s for a process that has the gallery to itself.

        Args:
            path: The file.
            pool: May close the connections while no thread uses them; they are opened again on
                demand. None keeps them open.

        Raises:
            NotFoundError: There is no such file.
            VerificationError: The file is damaged, no gallery, or has a newer format.
            BusyError: Another process has it for itself.
            CannotWriteError: It cannot even be read, has an old format and cannot be written, or
                has no room for SQLite's files, or its file system has no locks (flock).
            OSError: This user may not search the folder, or the name is too long.
        """
        self.path = path
        self._writing = threading.RLock()
        self._users = threading.Condition()
        self._using = 0
        self._closed = False
        self.recently_used = True
        self._residents = pool
        self._idle: deque[sqlite3.Connection] = deque()
        self._all: list[sqlite3.Connection] = []
        self._writer: sqlite3.Connection | None = None
        self._lock = -1
        self._access = SHARED_ACCESS
        self._outdated = False
        with self.hold_open():
            pass

    def _open(self) -> None:
        # SQLite would create a missing file.
        if not self.path.is_file():
            raise NotFoundError(
                f"{self.path}: no gallery file there; check the path, or create the gallery first"
            )
        with contextlib.ExitStack() as undo:
            undo.callback(self._shut)
            self._lock = open_lock(lock_path(self.path), self.path)
            exclusive = self._lock >= 0 and lock_gallery(self._lock, self.path)
            wal = self.path.with_name(self.path.name + "-wal")
            unclean = exclusive and wal.exists() and wal.stat().st_size > 0
            for access in possible_accesses(self.path, exclusive):
                self._access = access
                try:
                    self._writer = self._open_writer(unclean)
                    break
                except _NoRoomError:
                    while self._all:
                        self._all.pop().close()
            else:
                raise CannotWriteError(
                    f"{self.path}: the gallery cannot be opened, because SQLite has no room for "
                    "its files; free some space"
                )
            # A sole process locks others out: they would need the shared memory.
            if self._lock >= 0 and not self._access.is_exclusive:
                fcntl.flock(self._lock, fcntl.LOCK_SH)
            undo.pop_all()

    def _open_writer(self, unclean: bool) -> sqlite3.Connection:
        try:
            if unclean and self._access is SHARED_ACCESS:
                # A connection that can write moves the log into a damaged file when it is closed.
                reading = open_connection(self.path, FileAccess("mode=ro"))
                with contextlib.closing(reading):
                    check_pages(reading, self.path)
            connection = self._connect()
            if unclean and self._access is not SHARED_ACCESS:
                check_pages(connection, self.path)
            version = read_format(connection, self.path)
            if version < GALLERY_FORMAT:
                self._access.check_writable()
                migrate_file(connection)
            check_tables(connection, self.path)
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0)
            if code & 0xFF in _NO_ROOM and code != sqlite3.SQLITE_IOERR_SHORT_READ:
                raise _NoRoomError from error
            if code == sqlite3.SQLITE_NOTADB:
                raise not_a_gallery_error(self.path, "a file of another kind") from error
            translation = error_from_sqlite(self.path, error)
            if translation is None:
                raise
            raise translation from error
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = open_connection(self.path, self._access)
        self._all.append(connection)
        return connection

    @contextlib.contextmanager
    def hold_open(self) -> Iterator[None]:
        """Keep the connections open during the block; open and check them if they are closed.

        Opening them may wait up to 5 s for another process, and other threads of this one wait,
        too. Any number of threads may hold them, and blocks may be nested.

        Raises:
            NotFoundError: They were closed for good, or the file is gone.
            VerificationError: The file is damaged, no gallery, or has a newer format, or an SQLite
                error in the block says so. A violated constraint counts as damage.
            BusyError: Another process has the file for itself, or holds the lock.
            CannotWriteError: The file cannot be opened, or the disk fails during the block.
            OSError: This user may not search the folder, or the name is too long.
            sqlite3.ProgrammingError: The block misuses a connection, such as a closed one.
        """
        with self._users:
            if self._closed:
                raise NotFoundError(
                    f"{self.path}: this gallery was closed or deleted meanwhile; open it again"
                )
            if self._outdated and not self._using:
                self._shut()
            opens = self._writer is None
            if opens:
                self._open()
            self._using += 1
        self.recently_used = True
        try:
            if opens and self._residents is not None:
                self._residents.register(self)
            yield
        except sqlite3.DatabaseError as error:
            translation = error_from_sqlite(self.path, error)
            if translation is None:
                raise
            raise translation from error
        except DamagedError as error:
            if error.path is not None:
                raise
            raise DamagedError(self.path, error.damage) from error
        finally:
            with self._users:
                self._using -= 1
                self._users.notify_all()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block in a transaction of the writer.

        It commits at the end of the block, and rolls back on an error, which passes through. Other
        threads wait for the writer without limit. Do not nest it.

        Raises:
            BusyError: Another process still writes the gallery after 5 s.
            CannotWriteError: The file is read-only, or the disk fails or is full.
            NotFoundError: The connections were closed for good, or the file is gone.
            VerificationError: The file is damaged, or a statement fails in another way, such as by
                a constraint.
        """
        with self.writer() as writer:
            self._access.check_writable()
            with durable.transaction(writer) as connection:
                yield connection

    @contextlib.contextmanager
    def writer(self) -> Iterator[sqlite3.Connection]:
        """Provide the connection that writes, without a transaction; other threads wait for it.

        The thread that has it may ask for it again. Other threads wait without limit.

        Raises:
            NotFoundError: The connections were closed for good, or the file is gone.
            VerificationError: The file is damaged, or a statement of the block fails in another
                way.
            BusyError: Another process has the file for itself, or holds the lock.
            CannotWriteError: The file cannot be opened, or the disk fails during the block.
        """
        with self.hold_open(), self._writing:
            assert self._writer is not None, "open while it is used"
            yield self._writer

    @contextlib.contextmanager
    def read_snapshot(self) -> Iterator[sqlite3.Connection]:
        """Provide a connection that reads one snapshot.

        Any number of threads may read at a time. Where only one connection is possible, they take
        turns with the writer. The snapshot begins at the first statement of the block. A statement
        that writes raises CannotWriteError, except where the connection is the only one: there it
        is rolled back. There, a block within this thread's own transaction sees its uncommitted
        changes, and its writes are not rolled back.

        Raises:
            BusyError: Another process has the file for itself, or its owner changed it while it was
                read without a lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            VerificationError: The file is damaged, or an SQLite error in the block says so.
            NotFoundError: The connections were closed for good, or the file is gone.
        """
        with self.hold_open():
            if self._access.is_exclusive:
                # A sole process has no other connection.
                with self.writer() as connection, _snapshot(connection):
                    yield connection
                return
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
                connection.execute("PRAGMA query_only = ON")
            try:
                with _snapshot(connection):
                    yield connection
                try:
                    self._access.check_unchanged(self.path)
                except BusyError:
                    # SQLite was told that the file never changes: only a new connection sees it.
                    self._outdated = True
                    raise
            finally:
                self._idle.append(connection)

    def scrub(self) -> bool:
        """Move the write-ahead log into the file, so that no deleted byte stays in it.

        It waits for no reader and no other process.

        Other threads that write are waited for without limit.

        Returns:
            False if a reader, a lock or the disk prevents it, or this thread is in a transaction.

        Raises:
            CannotWriteError: The file was opened for reading only, or cannot be opened.
            NotFoundError: The connections were closed for good, or the file is gone.
            VerificationError: The file is damaged.
            BusyError: Another process has the file for itself.
        """
        with self.writer() as writer:
            self._access.check_writable()
            writer.execute("PRAGMA busy_timeout = 0")
            try:
                busy = writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            except sqlite3.OperationalError:
                return False
            finally:
                writer.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        return not busy

    def compact(self, page_count: int) -> None:
        """Return free pages to the file system.

        Other threads that write wait until the end. The write-ahead log is emptied last, unless a
        reader prevents it for 5 s. After an error, pages that were returned stay returned.

        Without free pages, only the log is emptied. Do not call it in a transaction, which it may
        commit.

        Args:
            page_count: Pages that one transaction returns, at least 1; other processes may commit
                between two.

        Raises:
            BusyError: Another process still writes the gallery after 5 s.
            CannotWriteError: The file is read-only, or the disk fails or is full.
            NotFoundError: The connections were closed for good, or the file is gone.
            VerificationError: The file is damaged.
            ValueError: `page_count` is 0.
        """
        with self.writer() as writer, translate_sqlite_errors(self.path):
            self._access.check_writable()
            free = writer.execute("PRAGMA freelist_count").fetchone()[0]
            for _ in range(0, free, page_count):
                # executescript runs the statement to its end; execute would free only one page.
                writer.executescript(f"PRAGMA incremental_vacuum({page_count})")
            writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close all connections for good, once no thread uses one. The last process to close leaves
        no log.

        Waits up to 60 seconds. Later calls of other methods raise NotFoundError; a second `close`
        does nothing.

        Raises:
            BusyError: A thread, perhaps this one, still uses a connection after 60 seconds; the
                connections stay open, other methods go on, and `close` may be called again.
        """
        with self._users:
            if not self._users.wait_for(lambda: not self._using, _CLOSE_S):
                raise BusyError(
                    f"{self.path}: the gallery cannot be closed, because a call still uses it "
                    f"after {_CLOSE_S:.0f} s; try again"
                )
            self._closed = True
            self._shut()

    def reopen(self) -> None:
        """Let closed connections be opened again when one is needed. Nothing is opened here."""
        with self._users:
            self._closed = False

    def suspend(self) -> bool:
        """Close the connections and free the lock until one is needed. Never waits.

        Another process may then have the gallery to itself. After `close` it does nothing and
        returns True.

        Returns:
            False if a thread uses, opens or closes one; they stay open.
        """
        if not self._users.acquire(blocking=False):
            return False
        try:
            if not self._using:
                self._shut()
            return not self._using
        finally:
            self._users.release()

    def _shut(self) -> None:
        self._outdated = False
        self._idle.clear()
        self._writer = None
        while self._all:
            self._all.pop().close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def check_pages(connection: sqlite3.Connection, path: Path) -> None:
    """Read every page of a file, which takes as long as reading the file.

    Most damage is found, but not an index that differs from its table.

    Args:
        connection: The file.
        path: Its path, for the message.

    Raises:
        DamagedError: A page is damaged.
        sqlite3.DatabaseError: The damage keeps SQLite from checking the file.
    """
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise DamagedError(path, verdict.splitlines()[-1])


@contextlib.contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    if connection.in_transaction:
        # The thread that holds the sole connection asks for it again.
        yield
        return
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


# Bulk writes are twice as fast as with SQLite's pages of 4 KiB, of which a vector leaves much
# empty.
PAGE_BYTES = 16384


def create_file(path: Path, spec: SpaceSpec) -> None:
    """Create an empty gallery file with one active space; it appears in its place as the last step.

    Missing folders are made with mode 0700, the file has mode 0600. Temporary files of killed
    processes are removed, and a lock file stays next to the gallery.

    After an error, no file is left but the lock file and the folders. If only the folder could not
    be synced, the gallery stays, too.

    Args:
        path: The file; a dangling link is replaced.
        spec: Its active space. Its values are not checked: with an impossible one, such as a
            dimension of 0, later calls raise DamagedError.

    Raises:
        AlreadyExistsError: The file exists, or the log of an earlier gallery of its name does;
            nothing is changed.
        CannotWriteError: The file cannot be written, the disk has less than 256 KiB free, or it
            allows no write-ahead log.
        BusyError: A process, perhaps this one, creates it or has it open; it is not waited for.
        sqlite3.Error: A statement failed.
        OSError: The name is too long; some lengths give CannotWriteError.
    """
    durable.make_dir(path.parent, mode=0o700)
    with durable.lock_file(lock_path(path)):
        if path.exists():
            raise AlreadyExistsError(
                f"{path}: this file exists already; choose another name, or open the gallery"
            )
        refuse_leftover_log(path)
        for stale in path.parent.glob(f"{durable.TEMPORARY_PREFIX}{path.name}-*"):
            durable.remove_tree(stale)
        temporary = path.parent / f"{durable.TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex}"
        try:
            create_in_place(temporary, spec)
            durable.replace_file(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def refuse_leftover_log(path: Path) -> None:
    """Refuse a path for a new gallery if the log of an earlier one of the same name lies there.

    SQLite would write the earlier gallery's last changes into the new file. The log is the path
    with -wal or -journal at its end; an empty one is accepted. The path itself is not checked.

    Raises:
        AlreadyExistsError: There is such a log.
        OSError: This user may not search the folder.
    """
    for end in ("-wal", "-journal"):
        log = path.with_name(path.name + end)
        if log.exists() and log.stat().st_size:
            raise AlreadyExistsError(
                f"{log}: holds the last changes of an earlier gallery named {path.name}; move it "
                "back next to that gallery, remove it, or choose another name"
            )


def migrate_file(connection: sqlite3.Connection) -> None:
    """Migrate a file to GALLERY_FORMAT, and record the version of this program.

    Each step is a transaction of its own; steps before an error stay. A file of GALLERY_FORMAT
    only gets the record.

    Args:
        connection: The file, outside of a transaction.

    Raises:
        sqlite3.DatabaseError: The migrations end in another format.
        sqlite3.Error: A statement failed.
    """
    # Imported here: the import takes a large part of the time of a search on a device.
    from importlib.metadata import version

    from nobackfill.gallery.schema import create_tables

    create_tables(connection)
    # In the table of the steps, where older versions ignore it.
    connection.execute(
        "INSERT OR REPLACE INTO _sqlite_migrations (migration_set, name, applied_at) "
        "VALUES (?, ?, datetime())",
        [WRITERS_TABLE, version("nobackfill")],
    )
    result = connection.execute("PRAGMA user_version").fetchone()[0]
    if result != GALLERY_FORMAT:
        raise sqlite3.DatabaseError(
            f"the conversion of this gallery ended at format {result}, expected {GALLERY_FORMAT}; "
            "report this defect of nobackfill"
        )


def create_in_place(path: Path, spec: SpaceSpec | None) -> None:
    """Create a gallery file in place; after an error, its parts stay.

    Args:
        path: The file, in an existing folder; it gets mode 0600.
        spec: Its active space; None for no space yet.

    Raises:
        CannotWriteError: The file exists or cannot be written, or its disk has no room or allows no
            write-ahead log.
        sqlite3.Error: Another statement failed.
        BusyError: Another process opened the new file and locks it.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise CannotWriteError(
            f"{path}: a gallery file cannot be created there ({error.strerror}); check the folder "
            "and its permissions"
        ) from error
    if not has_free_bytes(path.parent):
        raise CannotWriteError(
            f"{path.parent}: no room for a gallery, which needs {LEAST_FREE_BYTES >> 10} KiB to "
            "begin with; free some space"
        )
    with translate_sqlite_errors(path), contextlib.closing(open_connection(path)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        # So that free pages can be returned a few at a time; VACUUM would copy the file.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise CannotWriteError(
                f"{path}: SQLite cannot use a write-ahead log on this file system; put the gallery "
                "on a local disk"
            )
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        migrate_file(connection)
        if spec is not None:
            with durable.transaction(connection):
                add_space(connection, spec, "active")
