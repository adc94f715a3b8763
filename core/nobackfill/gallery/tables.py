"""Rows and blobs: how spaces and their vectors lie in SQLite."""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import get_args

import numpy as np

from nobackfill.errors import DamagedError
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec, State, space_of
from nobackfill.vectors import Vectors

VECTOR_TABLE = (
    "CREATE TABLE {name} (label INTEGER PRIMARY KEY REFERENCES items (label) ON DELETE CASCADE,"
    " origin TEXT NOT NULL, uncertainty REAL, embedding BLOB NOT NULL, side BLOB)"
)

_SPACE_COLUMNS = "space, release, dim, metric, unit, side_space, side_dim, state, number, activated"

_SPACE_KINDS = (str, int, int, str, int, str, int, str, int, int)
# Of a release without side-information.
_SPACE_KINDS_ALONE = (str, int, int, str, int, type(None), int, str, int, int)


def vector_table(number: int) -> str:
    """Name of a space's table."""
    return f"vectors_{number:d}"


def add_space(connection: sqlite3.Connection, spec: SpaceSpec, state: State) -> None:
    """Record a space and make its table. A first active space counts as activated once."""
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
    """All spaces, oldest table first."""
    rows = connection.execute(f"SELECT {_SPACE_COLUMNS} FROM spaces ORDER BY number").fetchall()
    for row in rows:
        # In the order of _SPACE_COLUMNS.
        kinds = tuple(map(type, row))
        if kinds not in (_SPACE_KINDS, _SPACE_KINDS_ALONE) or row[7] not in get_args(State):
            raise DamagedError("the gallery file", "a space is not as it was written")
    return [
        SpaceInfo(SpaceSpec(space, release, dim, metric, bool(unit), side_space, side_dim), *rest)
        for space, release, dim, metric, unit, side_space, side_dim, *rest in rows
    ]


def find_space(connection: sqlite3.Connection, space: str) -> SpaceInfo:
    """One space by its id. Raises IncompatibleSpaceError if the gallery does not have it."""
    return space_of(read_spaces(connection), space)


def to_blobs(vectors: Vectors | None, rows: int) -> Sequence[bytes | None]:
    """One blob of little-endian float32 values for each row; `rows` times None for no vectors."""
    if vectors is None:
        return [None] * rows
    packed = np.ascontiguousarray(vectors, "<f4")
    # Viewed as one opaque value a row, the array becomes bytes objects in one call.
    blobs: list[bytes] = packed.view(f"V{4 * packed.shape[1]}").ravel().tolist()
    return blobs


def from_blobs(blobs: Sequence[bytes], dim: int) -> Vectors:
    """The rows [n, dim] of n blobs; read-only. Raises DamagedError for another length."""
    try:
        joined = b"".join(blobs)
    except TypeError as error:
        raise DamagedError("the gallery file", "a vector that is none") from error
    if len(joined) != 4 * dim * len(blobs):
        raise DamagedError(
            "the gallery file",
            f"expected {4 * dim} bytes in each stored vector, got {len(joined)} in {len(blobs)}",
        )
    return np.frombuffer(joined, "<f4").reshape(len(blobs), dim)


def label_column(rows: Iterable[tuple[int]]) -> Labels:
    """Rows of one integer each as an array."""
    return np.fromiter(chain.from_iterable(rows), np.int64)


def among(labels: Labels) -> tuple[str, tuple[int | str, ...]]:
    """A condition on `label` that holds for all of `labels`, with its parameters.

    Where they lie close together it is a range, many times cheaper, that can hold for others, too.
    """
    if len(labels) and (last := int(labels.max())) - (first := int(labels.min())) < 2 * len(labels):
        return "label BETWEEN ? AND ?", (first, last)
    return "label IN (SELECT value FROM json_each(?))", (json.dumps(labels.tolist()),)


def live_labels(
    connection: sqlite3.Connection, table: str, labels: Labels, where: str = "TRUE"
) -> Labels:
    """Those of `labels` that `table` has in a row for which `where` holds, increasing."""
    condition, parameters = among(labels)
    found = connection.execute(
        f"SELECT label FROM {table} WHERE {condition} AND {where}", parameters
    )
    return np.intersect1d(label_column(found), labels)
