"""Encode and decode rows with vectors in the binary form of PostgreSQL's COPY."""

import struct
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.sources.source import Rows
from nobackfill.errors import InvalidInputError
from nobackfill.vectors import Vectors

# Passes over the rows of a page. The new versions of the first pass go to other pages and leave
# room, in which the other passes write: those are HOT updates, which change no index.
UPDATE_PASSES = 8

# A row's place (tid), its writer (xid), and its table or partition (oid). An equal value means an
# unchanged row.
_PARTS = slice(0, 6), slice(6, 10), slice(10, 14)
# The values of a field in all rows, as bytes; None is NULL.
Fields = NDArray[np.void] | list[bytes | None]
# Vectors [n, dim] that become `vector` or `halfvec`.
FloatRows = NDArray[np.float32] | NDArray[np.float16]
_COUNT = struct.Struct(">h")
_LENGTH = struct.Struct(">i")


def decode_copy_rows(data: bytes) -> list[Fields]:
    """Decode rows in COPY's binary form without its header and trailer.

    The data must end with a whole row; this is not checked, so a last value that is cut short is
    returned short.

    Returns:
        For each field, its values in all rows; empty without rows. An array of bytes if each field
        has one length above 0 in all rows; else lists, in which None is NULL.

    Raises:
        struct.error: A row is cut short elsewhere.
    """
    if not data:
        return []
    return _alike(data) or _one_by_one(data)


def _alike(data: bytes) -> list[Fields] | None:
    """Decode rows whose fields have the same lengths in all rows; None for other rows.

    This takes a fifth of the time of decoding row by row.
    """
    lengths = [len(value or b"") for (value,) in _one_by_one(data, rows=1)]
    if 0 in lengths:
        return None
    form = _form(lengths)
    if len(data) % form.itemsize:
        return None
    rows = np.frombuffer(data, form)
    expected = [("count", len(lengths)), *((f"length{n}", size) for n, size in enumerate(lengths))]
    if any((rows[name] != value).any() for name, value in expected):
        return None
    return [rows[f"value{number}"] for number in range(len(lengths))]


def _form(lengths: Sequence[int]) -> np.dtype[np.void]:
    parts: list[tuple[str, str]] = [("count", ">i2")]
    for number, length in enumerate(lengths):
        parts += [(f"length{number}", ">i4"), (f"value{number}", f"V{length}")]
    return np.dtype(parts)


def _one_by_one(data: bytes, rows: int | None = None) -> list[Fields]:
    (count,) = _COUNT.unpack_from(data)
    columns: list[list[bytes | None]] = [[] for _ in range(count)]
    at = 0
    while at < len(data) and len(columns[0]) != rows:
        at += _COUNT.size
        for column in columns:
            (size,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            column.append(None if size < 0 else data[at : at + size])
            at += max(size, 0)
    return list(columns)


def _listed(column: Fields) -> list[bytes | None]:
    values: list[bytes | None] = column if isinstance(column, list) else column.tolist()
    return values


def decode_vectors(column: Fields, ids: Sequence[str], error_name: str) -> Vectors:
    """Decode a field of vectors, without NULLs.

    Args:
        column: The field, in the binary form of pgvector's `vector`.
        ids: Keys of the rows, for the error.
        error_name: Name of the table in the error.

    Returns:
        float32 [n, dim]. Copies of the data; [0, m] for an array without rows. NaN passes.

    Raises:
        InvalidInputError: Their dimensions differ.
        ValueError: `column` is a list that is empty or has another length than `ids`.
    """
    # pgvector's own form: int16 dimension, int16 unused, then big-endian float32.
    if isinstance(column, np.ndarray):
        size = column.dtype.itemsize
        form = np.dtype([("head", "V4"), ("values", ">f4", (size // 4 - 1,))])
        return column.view(form)["values"].astype(np.float32)
    values = [value or b"" for value in column]
    other = next((row for row, value in enumerate(values) if len(value) != len(values[0])), None)
    if other is not None:
        here, there = (len(values[row]) // 4 - 1 for row in (0, other))
        raise InvalidInputError(
            f"{error_name}: expected one dimension in all rows, got {here} in {ids[0]!r} and "
            f"{there} in {ids[other]!r}; select the rows of one model with --where"
        )
    return np.frombuffer(b"".join(values), ">f4").reshape(len(ids), -1)[:, 1:].astype(np.float32)


def decode_vector_rows(data: bytes, error_name: str) -> Rows:
    """Decode rows of a key as text, a vector, and other fields.

    The other fields of a row, joined, become its value in `Rows.versions`. A field that may be NULL
    must be last. No data gives no rows, of dimension 0. `Rows.keys` is empty. No key and no vector
    may be NULL.

    Raises:
        InvalidInputError: The vectors have several dimensions.
        UnicodeDecodeError: A key is no UTF-8.
        struct.error: A row is cut short.
        ValueError: There are fewer than two fields.
    """
    if not data:
        return Rows([], np.empty((0, 0), np.float32))
    keys, values, *rest = decode_copy_rows(data)
    ids = [(key or b"").decode() for key in _listed(keys)]
    others = zip(*map(_listed, rest), strict=True)
    versions = [b"".join(part or b"" for part in row) for row in others]
    return Rows(ids, decode_vectors(values, ids, error_name), (), versions)


def decode_product_rows(data: bytes) -> tuple[list[str], Vectors]:
    """Decode rows of a key as text and a result of pgvector's <#>, the negative inner product.

    Returns:
        The keys, and the inner products, float32 [n]. Both are empty without data. No product may
        be NULL.

    Raises:
        UnicodeDecodeError: A key is no UTF-8.
        struct.error: A row is cut short.
        ValueError: There are not two fields.
    """
    if not data:
        return [], np.empty(0, np.float32)
    keys, values = map(_listed, decode_copy_rows(data))
    negative = np.frombuffer(b"".join(value or b"" for value in values), ">f8")
    return [(key or b"").decode() for key in keys], -negative.astype(np.float32)


def encode_copy_rows(*fields: Sequence[bytes] | FloatRows) -> bytes:
    """Encode rows in COPY's binary form, without its header and trailer.

    Vectors of float32 become `vector`, those of float16 `halfvec`.

    Args:
        fields: For each field, its values in all rows, without NULLs; at least one row. An array
            [n, dim] becomes one vector a row, or a halfvec if it is float16. A single value or row
            may be repeated for all rows instead of an error.

    Raises:
        ValueError: The fields have different numbers of rows.
        IndexError: There are no fields, or an array has one dimension.
    """
    values = [_vectors(one) if isinstance(one, np.ndarray) else _values(one) for one in fields]
    if not all(isinstance(one, np.ndarray) for one in values):
        rows = zip(*(one if isinstance(one, list) else one.tolist() for one in values), strict=True)
        return b"".join(
            _COUNT.pack(len(row)) + b"".join(_LENGTH.pack(len(value)) + value for value in row)
            for row in rows
        )
    sizes = [one.dtype.itemsize for one in values if isinstance(one, np.ndarray)]
    made = np.empty(len(values[0]), _form(sizes))
    made["count"] = len(sizes)
    for number, (size, value) in enumerate(zip(sizes, values, strict=True)):
        made[f"length{number}"], made[f"value{number}"] = size, value
    return made.tobytes()


def _values(values: Sequence[bytes]) -> Fields:
    """Return values as an array if they all have one length above 0, else as a list."""
    lengths = {len(value) for value in values}
    if len(lengths) != 1 or 0 in lengths:
        return list(values)
    return np.frombuffer(b"".join(values), f"V{lengths.pop()}")


def _vectors(vectors: FloatRows) -> NDArray[np.void]:
    dim, kind = vectors.shape[1], vectors.dtype.newbyteorder(">")
    made = np.empty(len(vectors), [("dim", ">i2"), ("unused", ">i2"), ("values", kind, (dim,))])
    made["dim"], made["unused"], made["values"] = dim, 0, vectors
    return made.view(f"V{made.dtype.itemsize}")


def encode_update_passes(versions: Sequence[object], vectors: Vectors) -> Iterator[bytes]:
    """Encode the rows of an UPDATE in passes (see UPDATE_PASSES).

    The vectors are encoded as float32, whatever the type of the column is. A pass has at most one
    row in UPDATE_PASSES of each page.

    Args:
        versions: For each row, 14 bytes: place (tid), writer (xid) and relation (oid). All are
            bytes; see `Rows.versions`.
        vectors: Their new vectors, float32 [n, dim].

    Yields:
        For each pass, rows of (place tid, writer xid, relation oid, new vector) in COPY's binary
        form, without header and trailer. Nothing without rows.

    Raises:
        ValueError: A version has fewer than 6 bytes; other lengths are not checked.
        IndexError: There are fewer vectors than versions.
    """
    known = [one for one in versions if isinstance(one, bytes)]
    passes = _passes([one[_PARTS[0]] for one in known])
    for number in range(int(passes.max(initial=-1)) + 1):
        some = np.flatnonzero(passes == number)
        parts = ([known[row][part] for row in some] for part in _PARTS)
        yield encode_copy_rows(*parts, vectors[some])


def _passes(places: Sequence[bytes]) -> NDArray[np.int64]:
    """Return the pass of each row, int64 [n]: its number among the rows of its page, modulo
    UPDATE_PASSES."""
    blocks = np.frombuffer(b"".join(places), np.dtype([("block", ">u4"), ("line", ">u2")]))["block"]
    order = np.argsort(blocks, kind="stable")
    ordered = blocks[order]
    begins = np.r_[True, ordered[1:] != ordered[:-1]]
    first = np.maximum.accumulate(np.where(begins, np.arange(len(ordered)), 0))
    found = np.empty(len(blocks), np.int64)
    found[order] = (np.arange(len(ordered)) - first) % UPDATE_PASSES
    return found
