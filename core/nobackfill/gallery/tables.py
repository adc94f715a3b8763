"""Read and write the tables of a gallery in SQLite: file marks, spaces, vectors, attributes."""

import json
import re
import sqlite3
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import numpy as np

from nobackfill.errors import DamagedError, VerificationError, writer_of
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec, State, space_of
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


def vector_table(number: int) -> str:
    """Return the name of a space's table."""
    return f"vectors_{number:d}"


def add_space(connection: sqlite3.Connection, spec: SpaceSpec, state: State) -> None:
    """Record a space and create its table.

    Args:
        connection: In a transaction.
        spec: The space.
        state: An active space counts as activated once.
    """
    number = connection.execute(
        "INSERT INTO spaces (space, release, dim, metric, unit, side_space, side_dim, state,"
        " activated) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            spec.space, spec.release, spec.dim, spec.metric, spec.unit, spec.side_space,
            spec.side_dim, state, int(state == "active"),
        ),
    ).lastrowid  # fmt: skip
    assert number is not None
    connection.execute(VECTOR_TABLE.format(name=vector_table(number)))


def read_spaces(connection: sqlite3.Connection) -> list[SpaceInfo]:
    """Return all spaces, oldest table first.

    Raises:
        DamagedError: A row is invalid.
    """
    rows = connection.execute(f"SELECT {_SPACE_COLUMNS} FROM spaces ORDER BY number").fetchall()
    for row in rows:
        # In the order of _SPACE_COLUMNS.
        kinds = tuple(map(type, row))
        sound = kinds in (_SPACE_KINDS, _SPACE_KINDS_WITHOUT_SIDE) and row[7] in get_args(State)
        if not sound or not _is_possible(row):
            raise DamagedError("the gallery file", "a space has invalid values")
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
        IncompatibleSpaceError: The gallery does not have it.
        DamagedError: A row of the table of spaces is invalid.
    """
    return space_of(read_spaces(connection), space)


def to_blobs(vectors: Vectors | None, rows: int) -> Sequence[bytes | None]:
    """Return each row as bytes of little-endian float32.

    Args:
        vectors: float32 [rows, dim]; None returns `rows` times None.
        rows: Number of rows.
    """
    if vectors is None:
        return [None] * rows
    packed = np.ascontiguousarray(vectors, "<f4")
    # As one opaque value for each row, the array becomes bytes objects in one call.
    blobs: list[bytes] = packed.view(f"V{4 * packed.shape[1]}").ravel().tolist()
    return blobs


def from_blobs(blobs: Sequence[bytes], dim: int) -> Vectors:
    """Return n blobs of little-endian float32 as rows [n, dim], read-only.

    Raises:
        DamagedError: A value is no blob, or has another length than 4 * dim bytes.
    """
    try:
        joined = b"".join(blobs)
    except TypeError as error:
        raise DamagedError("the gallery file", "a vector that is no blob") from error
    # Check each length: a longer blob may stand beside a shorter one.
    if not set(map(len, blobs)) <= {4 * dim}:
        raise DamagedError(
            "the gallery file",
            f"expected {4 * dim} bytes in each of {len(blobs)} stored vectors, got {len(joined)} "
            "in all",
        )
    return np.frombuffer(joined, "<f4").reshape(len(blobs), dim)


def label_column(rows: Iterable[tuple[int]]) -> Labels:
    """Return rows of one integer each as an array, int64 [n]."""
    return np.fromiter(chain.from_iterable(rows), np.int64)


def all_labels(connection: sqlite3.Connection, table: str) -> Labels:
    """Return every label of a table, int64 [n], increasing.

    SQLite joins many labels into one text. That takes half the time of single rows, and leaves the
    interpreter to other threads.
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


def joined_blobs(
    connection: sqlite3.Connection, table: str, condition: str, parameters: tuple[int | str, ...],
    count: int, size: int,
) -> bytes | None:  # fmt: skip
    """Return the embeddings of rows by label, as one blob; takes half the time of single rows.

    Args:
        connection: The file.
        table: Name of the table.
        condition: A condition of `among`.
        parameters: Its parameters.
        count: Number of the rows that must pass it.
        size: Bytes of each embedding.

    Returns:
        `count` times `size` bytes. None if other rows pass or a row has another size: read the rows
        one by one.
    """
    if count * size > _MOST_JOINED_BYTES:
        return None
    number, valid, joined = connection.execute(
        f"SELECT count(*), total(typeof(embedding) = 'blob' AND length(embedding) = {size:d}),"
        f" CAST(group_concat(embedding, '') AS BLOB) FROM (SELECT embedding FROM {table}"
        f" WHERE {condition} ORDER BY label)",
        parameters,
    ).fetchone()
    # The length reveals an SQLite that ends a text at its first zero byte.
    right = number == valid == count and joined is not None and len(joined) == count * size
    return joined if right else None


def among(labels: Labels) -> tuple[str, tuple[int | str, ...]]:
    """Return an SQL condition that is true for all of `labels`, with its parameters.

    For labels that lie close together it is a range, which is much cheaper. A range may be true for
    other labels, too.

    Args:
        labels: int64 [n], in any order. Without labels, no row passes.
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
        labels: int64 [n].
        where: The condition. It becomes part of the statement: never build it from a caller's text.

    Returns:
        int64, increasing, each label once.
    """
    condition, parameters = among(labels)
    rows = connection.execute(
        f"SELECT label FROM {table} WHERE {condition} AND {where}", parameters
    )
    return np.intersect1d(label_column(rows), labels)


# application_id of the file: "nobf".
APPLICATION = 0x6E6F6266
# Format of the tables: PRAGMA user_version of every gallery file. schema.py migrates to it.
FORMAT = 1
# A set in the table of migrations. Its names are the versions that created the file or changed its
# format, the latest last.
WRITERS = "nobackfill"


def format_of(connection: sqlite3.Connection, path: Path) -> int:
    """Return the format of a file's tables.

    Raises:
        VerificationError: The file belongs to another program, or has a newer format.
    """
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise not_a_gallery(path, "a database of another program")
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > FORMAT:
        raise VerificationError(
            f"{path}: expected a gallery of format {FORMAT} or older, got format {version}; use "
            f"{writer_of(_writer(connection))}"
        )
    return version


def _writer(connection: sqlite3.Connection) -> object:
    """Return the version that wrote the present format; None if it is not recorded."""
    query = "SELECT name FROM _sqlite_migrations WHERE migration_set = ? ORDER BY id DESC LIMIT 1"
    try:
        row = connection.execute(query, [WRITERS]).fetchone()
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
    """Refuse a file that has something else in place of a gallery's tables.

    A view can be endless, a trigger runs at each write, and a generated column computes anything.

    Raises:
        DamagedError: A trigger, a view, or other columns.
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


def not_a_gallery(path: Path, kind: str) -> VerificationError:
    """Return the error for a file that is no gallery."""
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


def add(connection: sqlite3.Connection, first: int, last: int) -> None:
    """Index the items with labels from `first` to `last`."""
    connection.execute(
        f"INSERT INTO attributes {_OF_ITEMS.format(where='i.label BETWEEN :first AND :last')}",
        {"first": first, "last": last},
    )


def remove(connection: sqlite3.Connection, labels: Labels) -> None:
    """Remove items from the index of the metadata, before they are deleted or described again.

    Args:
        connection: In a transaction.
        labels: int64 [n]; labels that are not in the index are ignored.
    """
    connection.executemany(_FORGET, ({"label": label} for label in labels.tolist()))


def describe(connection: sqlite3.Connection, texts: list[tuple[int, str]]) -> None:
    """Set the metadata of items from JSON texts by label; unchanged texts are not written.

    Each label must exist. The index of the metadata is updated, too.
    """
    for label, metadata in texts:
        row = connection.execute("SELECT metadata FROM items WHERE label = ?", (label,)).fetchone()
        if row[0] == metadata:
            continue
        connection.execute(_FORGET, {"label": label})
        connection.execute("UPDATE items SET metadata = ? WHERE label = ?", (metadata, label))
        add(connection, label, label)
