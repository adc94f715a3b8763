"""Read items and vectors from a gallery file.

Each function reads one snapshot.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import DamagedError
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import Metadata, Origin, SpaceInfo
from nobackfill.gallery.tables import (
    all_labels,
    among,
    find_space,
    from_blobs,
    joined_blobs,
    label_column,
    vector_table,
)
from nobackfill.vectors import Vectors


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
        sides: Side-information as bytes; None where a row has none.
    """

    labels: Labels
    origins: list[Origin]
    uncertainties: list[float | None]
    embedding: Vectors
    sides: list[bytes | None]

    def groups(self, rows: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
        """Split rows into groups that can be written together.

        The rows of a group have the same origin; all or none have side-information, and all or none
        an uncertainty.

        Args:
            rows: int [m], indices into the n rows.
        """
        kinds = [
            (self.origins[row], self.sides[row] is None, self.uncertainties[row] is None)
            for row in rows.tolist()
        ]
        for kind in sorted(set(kinds)):
            yield rows[[place for place, one in enumerate(kinds) if one == kind]]

    def row(self, row: int) -> tuple[object, ...]:
        """Return origin, uncertainty, embedding and side-information of a row, for a comparison bit
        for bit.

        Args:
            row: Index of the row, from 0.
        """
        return (
            self.origins[row], self.uncertainties[row], self.embedding[row].tobytes(),
            self.sides[row],
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
    following: Callable[[list[int]], Labels],
    shuffled: Callable[[], Labels],
) -> Labels:
    """Draw about `count` labels at random, without reading a whole table.

    Labels after a gap of deleted ones are drawn somewhat more often.

    Args:
        bounds: The smallest and the largest label; None if there is none.
        count: The largest number of labels.
        following: Returns for each number the first label from it on: int64, each label once,
            increasing.
        shuffled: Draws `count` labels, int64, by reading all of them; used where gaps would bias
            the draw.

    Returns:
        int64, increasing: at least half of `count`, if there are that many.
    """
    first, last = bounds
    if first is None or last is None:
        return np.empty(0, np.int64)
    dense, generator = last - first < 2 * count, np.random.default_rng()
    numbers = np.arange(first, last + 1) if dense else generator.integers(first, last + 1, count)
    labels = following(numbers.tolist())
    if not dense and len(labels) < count // 2:
        # Most numbers fell into one gap, so that a few labels would stand for all.
        return np.sort(shuffled())
    return (
        labels if len(labels) <= count else np.sort(generator.choice(labels, count, replace=False))
    )


_ORIGINS = (None, *get_args(Origin))
# Rows fetched at a time: their Python objects stay small beside the resulting array.
FETCH_ROWS = 4096


def items(
    connection: sqlite3.Connection, labels: Sequence[int] | Labels, space: str | None = None
) -> list[StoredItem | None]:
    """Return items in the order of `labels`; None where an item does not exist.

    Args:
        connection: The file.
        labels: int64 [n], in any order; a label may repeat.
        space: Id of the space whose origin and uncertainty the items get; None leaves both None.

    Returns:
        n items; an item without a vector in the space has origin and uncertainty None.

    Raises:
        IncompatibleSpaceError: The gallery does not have the space.
        DamagedError: A row is invalid.
    """
    numbers = [int(label) for label in labels]
    of_vector, join = "NULL, NULL", ""
    if space is not None:
        table = vector_table(find_space(connection, space).number)
        of_vector, join = "v.origin, v.uncertainty", f"LEFT JOIN {table} v ON v.label = i.label"
    rows = connection.execute(
        f"SELECT i.label, i.id, i.digest, i.metadata, {of_vector} FROM items i {join}"
        " WHERE i.label IN (SELECT value FROM json_each(?))",
        (json.dumps(numbers),),
    )
    by_label = {item.label: item for item in map(item_of, rows)}
    return [by_label.get(label) for label in numbers]


def item_of(row: tuple[Any, ...]) -> StoredItem:
    """Build an item from a row (label, id, digest, metadata, origin, uncertainty).

    Raises:
        DamagedError: The row is invalid.
    """
    label, item_id, digest, metadata, origin, uncertainty = row
    fields = _json(metadata, f"item {label}")
    sound = isinstance(item_id, str) and isinstance(digest, str | None) and origin in _ORIGINS
    if not (sound and isinstance(fields, dict) and isinstance(uncertainty, float | None)):
        raise DamagedError("the gallery file", f"item {label} has invalid values")
    return StoredItem(label, item_id, digest, fields, origin, uncertainty)


def _json(text: Any, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError("the gallery file", f"{what} is no valid JSON") from error


def state(connection: sqlite3.Connection, key: str) -> Any:
    """Return a JSON value of the table `state`; None if there is none.

    Raises:
        DamagedError: The value is no valid JSON.
    """
    row = connection.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
    return _json(row[0], f"state {key}") if row else None


def states(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return every JSON value of the table `state`, by key.

    Raises:
        DamagedError: A value is no valid JSON.
    """
    rows = connection.execute("SELECT key, value FROM state").fetchall()
    return {key: _json(value, f"state {key}") for key, value in rows}


def page(
    connection: sqlite3.Connection, start_after: int, limit: int, where: str = "TRUE"
) -> list[StoredItem]:
    """Return items that pass an SQL condition, by increasing label.

    Args:
        connection: The file.
        start_after: Only items with a larger label.
        limit: Largest number of items.
        where: A condition on `i`, the table of items. It becomes part of the statement: never build
            it from a caller's text.

    Returns:
        The items, without origin and uncertainty; empty at the end.

    Raises:
        DamagedError: A row is invalid.
    """
    rows = connection.execute(
        "SELECT i.label, i.id, i.digest, i.metadata, NULL, NULL FROM items i"
        f" WHERE i.label > ? AND {where} ORDER BY i.label LIMIT ?",
        (start_after, limit),
    )
    return [item_of(row) for row in rows]


def least_certain(connection: sqlite3.Connection, space: str, limit: int) -> list[StoredItem]:
    """Return items whose vector in a space has an uncertainty, the largest first, then by label.

    Args:
        connection: The file.
        space: Id of the space.
        limit: Largest number of items.

    Raises:
        IncompatibleSpaceError: The gallery does not have the space.
        DamagedError: A row is invalid.
    """
    table = vector_table(find_space(connection, space).number)
    rows = connection.execute(
        "SELECT i.label, i.id, i.digest, i.metadata, v.origin, v.uncertainty"
        f" FROM {table} v JOIN items i ON i.label = v.label WHERE v.uncertainty IS NOT NULL"
        " ORDER BY v.uncertainty DESC, v.label LIMIT ?",
        (limit,),
    )
    return [item_of(row) for row in rows]


def upgraded(connection: sqlite3.Connection, space: str, ids: Sequence[str]) -> list[StoredItem]:
    """Return the items of `ids` whose vector in a space was migrated.

    Args:
        connection: The file.
        space: Id of the space.
        ids: Ids of items; ids that do not exist are skipped.

    Returns:
        Items by falling uncertainty; an unknown uncertainty comes last. Equal ones are by label.

    Raises:
        IncompatibleSpaceError: The gallery does not have the space.
        DamagedError: A row is invalid.
    """
    table = vector_table(find_space(connection, space).number)
    rows = connection.execute(
        "SELECT i.label, i.id, i.digest, i.metadata, v.origin, v.uncertainty"
        f" FROM items i JOIN {table} v ON v.label = i.label"
        " WHERE i.id IN (SELECT value FROM json_each(?)) AND v.origin = 'upgraded'"
        " ORDER BY v.uncertainty IS NULL, v.uncertainty DESC, v.label",
        (json.dumps(list(ids)),),
    )
    return [item_of(row) for row in rows]


def count(connection: sqlite3.Connection, space: str | None) -> int:
    """Return the number of items, or of vectors in a space.

    Args:
        connection: The file.
        space: Id of the space; None counts items.

    Raises:
        IncompatibleSpaceError: The gallery does not have the space.
        DamagedError: A row of the table of spaces is invalid.
    """
    table = "items" if space is None else vector_table(find_space(connection, space).number)
    number: int = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    return number


def load(connection: sqlite3.Connection, info: SpaceInfo) -> tuple[Labels, Vectors]:
    """Return all vectors of a space: labels int64 [n], increasing, and vectors float32 [n, dim].

    Raises:
        DamagedError: A vector has another length, there are more vectors than items, or the labels
            are not in order.
    """
    # The number of items is an upper bound, and reads far fewer pages than counting vectors.
    most = count(connection, None)
    labels = np.empty(most, np.int64)
    vectors = np.empty((most, info.spec.dim), np.float32)
    end = 0
    for some_labels, some in _chunks(connection, info):
        if end + len(some) > most:
            raise DamagedError("the gallery file", f"more vectors than its {most} items")
        labels[end : end + len(some)] = some_labels
        vectors[end : end + len(some)] = some
        end += len(some)
    if (np.diff(labels[:end]) <= 0).any():
        raise DamagedError("the gallery file", "vectors are not in the order of their labels")
    return labels[:end], vectors[:end]


def _chunks(connection: sqlite3.Connection, info: SpaceInfo) -> Iterator[tuple[Labels, Vectors]]:
    rows = connection.execute(
        f"SELECT label, embedding FROM {vector_table(info.number)} ORDER BY label"
    )
    while chunk := rows.fetchmany(FETCH_ROWS):
        labels, blobs = zip(*chunk, strict=True)
        yield np.array(labels, np.int64), from_blobs(blobs, info.spec.dim)


class VectorsOnDisk:
    """The vectors of a space as an array that is read on access, within one snapshot."""

    def __init__(self, connection: sqlite3.Connection, info: SpaceInfo) -> None:
        self._connection = connection
        self._info = info
        self._table = vector_table(info.number)
        self.labels = all_labels(connection, self._table)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Any, /) -> Vectors:
        labels = self.labels[rows]
        vectors = np.empty((len(labels), self._info.spec.dim), np.float32)
        for start in range(0, len(labels), FETCH_ROWS):
            vectors[start : start + FETCH_ROWS] = self._some(labels[start : start + FETCH_ROWS])
        return vectors

    def _some(self, requested: Labels) -> Vectors:
        condition, parameters = among(requested)
        if (requested[1:] > requested[:-1]).all():
            joined = joined_blobs(
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
        vectors = from_blobs(blobs, self._info.spec.dim)
        # A range may contain further labels.
        places = np.searchsorted(np.array(labels, np.int64), requested)
        return vectors if np.array_equal(places, np.arange(len(labels))) else vectors[places]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


def vector(connection: sqlite3.Connection, label: int, info: SpaceInfo) -> Vectors | None:
    """Return an item's vector in a space, float32 [1, dim]; None if it has none.

    Raises:
        DamagedError: The vector has another length.
    """
    row = connection.execute(
        f"SELECT embedding FROM {vector_table(info.number)} WHERE label = ?", (label,)
    ).fetchone()
    return from_blobs([row[0]], info.spec.dim) if row else None


def random_labels(connection: sqlite3.Connection, info: SpaceInfo, count: int) -> Labels:
    """Draw labels of a space at random, without reading a whole table.

    Args:
        connection: The file.
        info: The space.
        count: Largest number of labels.

    Returns:
        int64, increasing: at least half of `count`, if the space has that many vectors. Labels
        after a gap of deleted ones are drawn somewhat more often.
    """
    table = vector_table(info.number)

    def following(numbers: list[int]) -> Labels:
        return label_column(
            connection.execute(
                f"SELECT DISTINCT (SELECT label FROM {table} WHERE label >= drawn.value"
                " ORDER BY label LIMIT 1) AS label FROM json_each(?) drawn ORDER BY label",
                (json.dumps(numbers),),
            )
        )

    def shuffled() -> Labels:
        query = f"SELECT label FROM {table} ORDER BY random() LIMIT ?"
        return label_column(connection.execute(query, (count,)))

    bounds = connection.execute(f"SELECT min(label), max(label) FROM {table}").fetchone()
    return draw_labels(bounds, count, following, shuffled)


def vectors_of(connection: sqlite3.Connection, labels: Labels, info: SpaceInfo) -> Vectors:
    """Return the vectors of some labels, float32 [n, dim], by increasing label.

    Args:
        connection: The file.
        labels: int64 [n], distinct; labels without a vector in the space are skipped.
        info: The space.

    Raises:
        DamagedError: A vector has another length.
    """
    rows = connection.execute(
        f"SELECT embedding FROM {vector_table(info.number)}"
        " WHERE label IN (SELECT value FROM json_each(?)) ORDER BY label",
        (json.dumps(labels.tolist()),),
    )
    return from_blobs([row[0] for row in rows], info.spec.dim)


def stored_vectors(
    connection: sqlite3.Connection, labels: Labels, info: SpaceInfo
) -> StoredVectors:
    """Return the rows that a space has for some labels, by increasing label.

    Args:
        connection: The file.
        labels: int64 [n], distinct; labels without a vector in the space are skipped.
        info: The space.

    Raises:
        DamagedError: A vector has another length.
    """
    rows = connection.execute(
        f"SELECT label, origin, uncertainty, embedding, side FROM {vector_table(info.number)}"
        " WHERE label IN (SELECT value FROM json_each(?)) ORDER BY label",
        (json.dumps(labels.tolist()),),
    ).fetchall()
    columns = [[row[place] for row in rows] for place in range(5)]
    return StoredVectors(
        np.array(columns[0], np.int64), columns[1], columns[2],
        from_blobs(columns[3], info.spec.dim), columns[4],
    )  # fmt: skip


def set_state(connection: sqlite3.Connection, values: Mapping[str, Any]) -> None:
    """Store JSON values in the table `state`; None removes a value.

    Args:
        connection: In a transaction.
        values: Values by key.

    Raises:
        TypeError: A value cannot be written as JSON.
        ValueError: A value contains NaN or infinity.
    """
    for key, value in values.items():
        if value is None:
            connection.execute("DELETE FROM state WHERE key = ?", (key,))
        else:
            connection.execute(
                "INSERT OR REPLACE INTO state (key, value) VALUES (?, ?)",
                (key, json.dumps(value, ensure_ascii=False, allow_nan=False)),
            )
