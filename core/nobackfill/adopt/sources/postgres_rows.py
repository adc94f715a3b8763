"""Rows with vectors in the binary form of PostgreSQL's COPY, read and written in one piece."""

import struct
from collections.abc import Sequence

import numpy as np

from nobackfill.adopt.sources.source import Rows
from nobackfill.errors import InvalidInputError
from nobackfill.vectors import Vectors

# Rows of a page that are written at a time. What is written elsewhere leaves room on its page, in
# which the others find place, so that no index learns of them: an eighth pays for the rest.
PASSES = 8

# Where a row is, who wrote it last, and the table or partition: while these stay, it is as it was.
_SEEN = np.dtype([("place", "V6"), ("writer", "V4"), ("relation", "V4")])
# The number of fields, and each field after its length: what was seen, the length of the key.
_FIRST = struct.Struct(">hi6si4si4si")
_LENGTH = struct.Struct(">i")


def parsed(data: bytes, where: str) -> Rows:
    """Rows of ctid, xmin, tableoid, the key as text and a vector. Raises InvalidInputError where
    dims differ."""
    ids: list[str] = []
    seen: list[bytes] = []
    values: list[bytes] = []
    at, size = 0, 0
    while at < len(data):
        _, _, place, _, writer, _, relation, length = _FIRST.unpack_from(data, at)
        at += _FIRST.size
        ids.append(data[at : at + length].decode())
        at += length
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        values.append(data[at : at + size])
        at += size
        seen.append(place + writer + relation)
    if not ids:
        return Rows([], np.empty((0, 0), np.float32))
    other = next((row for row, value in enumerate(values) if len(value) != len(values[0])), None)
    if other is not None:
        # pgvector's own form: int16 dimension, int16 unused, then big-endian float32.
        here, there = (len(values[row]) // 4 - 1 for row in (0, other))
        raise InvalidInputError(
            f"{where}: expected one dimension in all rows, got {here} in {ids[0]!r} and {there} in "
            f"{ids[other]!r}; are these two models' vectors?"
        )
    vectors = np.frombuffer(b"".join(values), ">f4").reshape(len(ids), -1)[:, 1:]
    return Rows(ids, vectors.astype(np.float32), (), seen)


def written(seen: Sequence[object], vectors: Vectors) -> tuple[bytes, int]:
    """Rows of what was seen, the pass, and a vector [n, dim], as (place tid, writer xid, relation
    oid, pass int2, new vector); and how many passes there are."""
    dim = vectors.shape[1]
    form = np.dtype([
        ("fields", ">i2"), ("place_length", ">i4"), ("place", "V6"),
        ("writer_length", ">i4"), ("writer", "V4"), ("relation_length", ">i4"), ("relation", "V4"),
        ("pass_length", ">i4"), ("pass", ">i2"),
        ("length", ">i4"), ("dim", ">i2"), ("unused", ">i2"), ("vector", ">f4", dim),
    ])  # fmt: skip
    rows = np.zeros(len(vectors), form)
    told = np.frombuffer(b"".join(bytes(one) for one in seen), _SEEN)  # type: ignore[call-overload]
    rows["fields"], rows["place_length"], rows["pass_length"] = 5, 6, 2
    rows["writer_length"], rows["relation_length"] = 4, 4
    for name in ("place", "writer", "relation"):
        rows[name] = told[name]
    rows["length"], rows["dim"], rows["vector"] = 4 + 4 * dim, dim, vectors
    rows["pass"] = _passes(told["place"])
    return rows.tobytes(), int(rows["pass"].max(initial=-1)) + 1


def _passes(
    places: np.ndarray[tuple[int], np.dtype[np.void]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Which of the rows on its page each is, modulo PASSES."""
    blocks = np.frombuffer(places.tobytes(), np.dtype([("block", ">u4"), ("line", ">u2")]))["block"]
    order = np.argsort(blocks, kind="stable")
    ordered = blocks[order]
    begins = np.r_[True, ordered[1:] != ordered[:-1]]
    first = np.maximum.accumulate(np.where(begins, np.arange(len(ordered)), 0))
    found = np.empty(len(blocks), np.int64)
    found[order] = (np.arange(len(ordered)) - first) % PASSES
    return found
