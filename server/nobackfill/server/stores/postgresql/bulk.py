"""Vectors in COPY's binary format, a whole array at once: rows of one layout are one structured
array, so that no row passes through Python."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.search.index import Labels
from nobackfill.server.stores.postgresql.database import Connection
from nobackfill.vectors import Vectors

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
    """Add a row for each of `labels` [n]; `embedding` [n, dim], `side` [n, side_dim]."""
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
    """Labels, increasing, and embeddings of the rows for which `where` holds; their
    side-information where `side_dim` is given: all of these rows have some."""
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
    """One vector [dim] as PostgreSQL takes it: its size, then its values."""
    return len(vector).to_bytes(2, "big") + b"\0\0" + vector.astype(">f4").tobytes()


def from_binary(vectors: Sequence[bytes], dim: int) -> Vectors:
    """Vectors [n, dim] of a column that was read: each with its size before it."""
    return np.frombuffer(b"".join(vectors), _sized(dim))["embedding"].astype(np.float32)


@cache
def _sized(dim: int) -> np.dtype[np.void]:
    return np.dtype([("dim", ">i2"), ("unused", ">i2"), ("embedding", ">f4", (dim,))])


def among(labels: Labels) -> str:
    """A condition on `label`: COPY takes no values, and labels are integers of ours."""
    return f"label = ANY('{{{','.join(map(str, labels.tolist()))}}}'::bigint[])"
