"""Read and write rows of a gallery's tables, each function within one transaction."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import NotFoundError
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec, select_space
from nobackfill.gallery.sqlite_file import StoredItem, StoredVectors, draw_labels, item_from_row
from nobackfill.server.stores.postgresql.database import Connection, execute
from nobackfill.server.stores.postgresql.schema import table_name
from nobackfill.vectors import Vectors

# Vectors use COPY's binary format: rows of one layout are one structured array, so no row passes
# through Python.

_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_COLUMNS = "label, origin, uncertainty, embedding, side"


def copy_in(
    connection: Connection,
    table: str,
    labels: Labels,
    origin: str,
    uncertainty: NDArray[np.float32] | None,
    embedding: Vectors,
    side: Vectors | None,
) -> None:
    """Add a row to a space's table for each item, by COPY; add nothing without items.

    Args:
        connection: a connection inside a transaction.
        table: the table's name, quoted.
        labels: int64 [n].
        origin: how the vectors were made, the same for all.
        uncertainty: float32 [n], or None.
        embedding: float32 [n, dim].
        side: side-information, float32 [n, side_dim], or None.

    Raises:
        psycopg.Error: the statement fails, as for a label that the table has; the transaction must
            end.
        ValueError: the numbers of rows differ, and nothing was sent. A single row stands for all
            labels instead.
    """
    if not len(labels):
        return
    dim, name = embedding.shape[1], origin.encode()
    fields: list[Any] = [
        ("fields", ">i2"), ("label_size", ">i4"), ("label", ">i8"),
        ("origin_size", ">i4"), ("origin", f"S{len(name)}"), ("uncertainty_size", ">i4"),
    ]  # fmt: skip
    if uncertainty is not None:
        fields.append(("uncertainty", ">f8"))
    fields += [
        ("embedding_size", ">i4"), ("dim", ">i2"), ("unused", ">i2"), ("embedding", ">f4", (dim,)),
        ("side_size", ">i4"),
    ]  # fmt: skip
    if side is not None:
        fields.append(("side", "<f4", (side.shape[1],)))
    rows = np.zeros(len(labels), np.dtype(fields))
    rows["fields"], rows["label_size"], rows["label"] = 5, 8, labels
    rows["origin_size"], rows["origin"] = len(name), name
    rows["embedding_size"], rows["dim"], rows["embedding"] = 4 * dim + 4, dim, embedding
    rows["uncertainty_size"] = rows["side_size"] = -1
    if uncertainty is not None:
        rows["uncertainty_size"], rows["uncertainty"] = 8, uncertainty
    if side is not None:
        rows["side_size"], rows["side"] = 4 * side.shape[1], side
    statement = f"COPY {table} ({_COLUMNS}) FROM STDIN (FORMAT binary)"
    with connection.cursor().copy(statement.encode()) as copy:
        copy.write(_HEADER + rows.tobytes() + _TRAILER)


def copy_out(
    connection: Connection, table: str, where: str, dim: int, side_dim: int = 0
) -> tuple[Labels, Vectors, Vectors | None]:
    """Read labels, increasing, and embeddings of the rows that fulfil a condition.

    Side-information is read if `side_dim` is not 0; all these rows must have some.

    Args:
        connection: the connection.
        table: the table's name, quoted.
        where: SQL on the table's columns, without placeholders.
        dim: dimension of the embeddings.
        side_dim: dimension of the side-information; 0 reads none.

    Returns:
        Labels int64 [n], embeddings float32 [n, dim], and side-information float32 [n, side_dim] or
        None; n may be 0. All rows are in memory at once.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
        ValueError: a row has no side-information, or vectors of another dimension.
    """
    fields: list[Any] = [
        ("fields", ">i2"), ("label_size", ">i4"), ("label", ">i8"),
        ("embedding_size", ">i4"), ("dim", ">i2"), ("unused", ">i2"), ("embedding", ">f4", (dim,)),
    ]  # fmt: skip
    columns = "label, embedding"
    if side_dim:
        columns += ", side"
        fields += [("side_size", ">i4"), ("side", "<f4", (side_dim,))]
    statement = (
        f"COPY (SELECT {columns} FROM {table} WHERE {where} ORDER BY label) TO STDOUT"
        " (FORMAT binary)"
    )
    with connection.cursor().copy(statement.encode()) as copy:
        data = b"".join(bytes(piece) for piece in copy)
    rows = np.frombuffer(data[len(_HEADER) : -len(_TRAILER)], np.dtype(fields))
    side = rows["side"].astype(np.float32) if side_dim else None
    return rows["label"].astype(np.int64), rows["embedding"].astype(np.float32), side


def to_binary(vector: Vectors) -> bytes:
    """Encode a vector [dim] for PostgreSQL: its size, then its values.

    Returns:
        Two bytes of size, two zero bytes, then big-endian float32 values.

    Raises:
        OverflowError: it has more than 65,535 values.
    """
    return len(vector).to_bytes(2, "big") + b"\0\0" + vector.astype(">f4").tobytes()


def from_binary(vectors: Sequence[bytes], dim: int) -> Vectors:
    """Decode vectors of a column as float32 [n, dim]; each has its size before it.

    Args:
        vectors: binary values of a column, as `to_binary` makes them; may be empty.
        dim: dimension of each.

    Raises:
        ValueError: the bytes are no multiple of a vector's size.
    """
    return np.frombuffer(b"".join(vectors), _sized(dim))["embedding"].astype(np.float32)


@cache
def _sized(dim: int) -> np.dtype[np.void]:
    return np.dtype([("dim", ">i2"), ("unused", ">i2"), ("embedding", ">f4", (dim,))])


def labels_condition(labels: Labels) -> str:
    """Make a condition on `label`; COPY takes no values, and labels are our own integers.

    Args:
        labels: int64 [n]; without labels the condition is false for every row.
    """
    return f"label = ANY('{{{','.join(map(str, labels.tolist()))}}}'::bigint[])"


_ITEM = "i.label, i.id, i.digest, i.metadata"


def label_column(rows: Any) -> Labels:
    """Convert rows of one integer to an array.

    Args:
        rows: an iterable of tuples whose first value is the integer.

    Returns:
        int64 [n], in the order of the rows; empty without rows.
    """
    return np.fromiter((row[0] for row in rows), np.int64)


def read_spaces(connection: Connection, schema: str) -> list[SpaceInfo]:
    """Return all spaces, oldest first.

    The order is that of creation.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    query = (
        "SELECT space, release, dim, metric, unit, side_space, side_dim, state, number, activated"
        f" FROM {schema}.spaces ORDER BY number"
    )
    return [SpaceInfo(SpaceSpec(*row[:7]), *row[7:]) for row in execute(connection, query)]


def find_space(connection: Connection, schema: str, space: str) -> SpaceInfo:
    """Return a space of the gallery.

    Raises:
        IncompatibleSpaceError: the gallery does not have it.
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    return select_space(read_spaces(connection, schema), space)


def read_items(
    connection: Connection, schema: str, labels: Sequence[int] | Labels, space: str | None
) -> list[StoredItem | None]:
    """Return items in the order of `labels`; None for missing ones.

    A repeated label gives the same item again. An item without a vector in the space has neither
    origin nor uncertainty.

    Args:
        connection: the connection.
        schema: schema of the gallery.
        labels: labels of the items.
        space: id of the space whose origin and uncertainty the items get; None leaves both empty.

    Raises:
        IncompatibleSpaceError: the gallery does not have the space.
        psycopg.Error: the statement fails, as without the table; the caller translates it.
        DamagedError: an item's id, digest or metadata is not valid.
    """
    wanted = [int(label) for label in labels]
    of_vector, join = "NULL, NULL", ""
    if space is not None:
        table = table_name(schema, find_space(connection, schema, space).table_number)
        of_vector, join = "v.origin, v.uncertainty", f"LEFT JOIN {table} v USING (label)"
    query = f"SELECT {_ITEM}, {of_vector} FROM {schema}.items i {join} WHERE i.label = ANY(%s)"
    items = map(item_from_row, execute(connection, query, [wanted]))
    found = {item.label: item for item in items}
    return [found.get(label) for label in wanted]


def read_items_where(
    connection: Connection, schema: str, where: str, values: Sequence[Any], limit: int
) -> list[StoredItem]:
    """Return the items `i` that fulfil a condition, by label.

    Args:
        connection: the connection.
        schema: schema of the gallery.
        where: SQL on the row `i`, with a placeholder for each value.
        values: the values.
        limit: most items; 0 gives none.

    Returns:
        The items by increasing label, without origin and uncertainty.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
        DamagedError: an item's id, digest or metadata is not valid.
    """
    source = f"{schema}.items i WHERE {where} ORDER BY i.label LIMIT %s"
    query = f"SELECT {_ITEM}, NULL, NULL FROM {source}"
    return [item_from_row(row) for row in execute(connection, query, [*values, limit])]


def read_facets(connection: Connection, schema: str, labels: Labels) -> Mapping[int, Any]:
    """Return the filter data (conditions.py) of items, by label; missing ones are left out.

    Returns:
        The parsed JSON of the column `facets`.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    query = f"SELECT label, facets FROM {schema}.items WHERE label = ANY(%s)"
    return dict(execute(connection, query, [labels.tolist()]).fetchall())


def stored_rows(
    connection: Connection, schema: str, labels: Labels, info: SpaceInfo
) -> StoredVectors:
    """Return the rows of a space for some labels, by label; missing ones are left out.

    Returns:
        The rows by increasing label; a missing side-information is None. Vectors are not checked.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
        ValueError: the bytes of the vectors do not fit the dimension of `info`.
    """
    query = (
        "SELECT label, origin, uncertainty, embedding, side"
        f" FROM {table_name(schema, info.table_number)} WHERE label = ANY(%s) ORDER BY label"
    )
    found = execute(connection, query, [labels.tolist()]).fetchall()
    columns = [[row[place] for row in found] for place in range(5)]
    return StoredVectors(
        np.array(columns[0], np.int64), columns[1], columns[2],
        from_binary(columns[3], info.spec.dim), columns[4],
    )  # fmt: skip


def random_labels(connection: Connection, table: str, count: int) -> Labels:
    """Draw random labels of a table of vectors, not reproducibly.

    Labels after a gap of deleted ones are drawn somewhat more often. If gaps would bias the draw
    too much, the whole table is read.

    Args:
        connection: the connection.
        table: the table's name, quoted.
        count: most labels to draw, at least 1.

    Returns:
        Different labels, int64, increasing: at least half of `count`, or all if the table has
        fewer; none of an empty table.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """

    def following(candidates: list[int]) -> Labels:
        query = (
            "SELECT DISTINCT near.label FROM unnest(%s::bigint[]) AS drawn, LATERAL (SELECT label"
            f" FROM {table} WHERE label >= drawn ORDER BY label LIMIT 1) near ORDER BY near.label"
        )
        return label_column(execute(connection, query, [candidates]))

    def shuffled() -> Labels:
        query = f"SELECT label FROM {table} ORDER BY random() LIMIT %s"
        return label_column(execute(connection, query, [count]))

    bounds = execute(connection, f"SELECT min(label), max(label) FROM {table}").fetchone()
    return draw_labels(bounds, count, following, shuffled)


def read_epoch(connection: Connection, gallery_number: int) -> int:
    """Return the epoch of a gallery's spaces and state.

    Raises:
        NotFoundError: the gallery was deleted.
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    query = "SELECT epoch FROM nobackfill.galleries WHERE number = %s"
    row = execute(connection, query, [gallery_number]).fetchone()
    if row is None:
        raise NotFoundError(
            "the gallery was deleted by another gateway; `gateway gallery list` shows the others"
        )
    return int(row[0])


def read_state_values(connection: Connection, schema: str) -> dict[str, Any]:
    """Return all values of the state.

    Returns:
        The parsed value of each key; empty without any.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
        ValueError: a stored value is not JSON.
    """
    return {key: json.loads(value) for key, value in execute(connection, _STATES.format(schema))}


def set_state(connection: Connection, schema: str, values: Mapping[str, Any]) -> None:
    """Store JSON values of the state; None deletes one.

    Other keys stay. Readers are not notified, and the gallery's epoch stays.
    After an error, roll the transaction back: earlier keys are changed, and the key's old value is
    gone.

    Raises:
        TypeError: a value cannot be written as JSON.
        ValueError: a value contains NaN or infinity.
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    for key, value in values.items():
        execute(connection, f"DELETE FROM {schema}.state WHERE key = %s", [key])
        if value is not None:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            execute(connection, f"INSERT INTO {schema}.state VALUES (%s, %s)", [key, text])


_STATES = "SELECT key, value FROM {}.state"
