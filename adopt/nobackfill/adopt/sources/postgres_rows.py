"""Rows with vectors in the binary form of PostgreSQL's COPY, read and written in one piece."""

import struct
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.sources.source import Rows
from nobackfill.errors import InvalidInputError
from nobackfill.vectors import Vectors

# Rows of a page that are written at a time. What is written elsewhere leaves room on its page, in
# which the others find place, so that no index learns of them: an eighth pays for the rest.
PASSES = 8

# Where a row is, who wrote it last, and the table or partition: while these stay, it is as it was.
_PARTS = slice(0, 6), slice(6, 10), slice(10, 14)
# A field of a row: its bytes, None where it is empty.
Fields = NDArray[np.void] | list[bytes | None]
# Of a vector, or of a halfvec.
Packable = NDArray[np.float32] | NDArray[np.float16]
_COUNT = struct.Struct(">h")
_LENGTH = struct.Struct(">i")


def split(data: bytes) -> list[Fields]:
    """Every field of all rows in COPY's binary form, without its head and end, field by field."""
    if not data:
        return []
    return _alike(data) or _one_by_one(data)


def _alike(data: bytes) -> list[Fields] | None:
    """The fields where all rows are laid out as the first one: a fifth of the time of reading them
    one by one. None for other rows."""
    lengths = [len(value or b"") for (value,) in _one_by_one(data, rows=1)]
    if 0 in lengths:
        return None
    form = _form(lengths)
    if len(data) % form.itemsize:
        return None
    rows = np.frombuffer(data, form)
    told = [("count", len(lengths)), *((f"length{n}", size) for n, size in enumerate(lengths))]
    if any((rows[name] != value).any() for name, value in told):
        return None
    return [rows[f"value{number}"] for number in range(len(lengths))]


def _form(lengths: Sequence[int]) -> np.dtype[np.void]:
    parts: list[tuple[str, str]] = [("count", ">i2")]
    for number, length in enumerate(lengths):
        parts += [(f"length{number}", ">i4"), (f"value{number}", f"V{length}")]
    return np.dtype(parts)


def _one_by_one(data: bytes, rows: int | None = None) -> list[Fields]:
    (count,) = _COUNT.unpack_from(data)
    found: list[list[bytes | None]] = [[] for _ in range(count)]
    at = 0
    while at < len(data) and len(found[0]) != rows:
        at += _COUNT.size
        for column in found:
            (size,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            column.append(None if size < 0 else data[at : at + size])
            at += max(size, 0)
    return list(found)


def _listed(column: Fields) -> list[bytes | None]:
    found: list[bytes | None] = column if isinstance(column, list) else column.tolist()
    return found


def vectors(column: Fields, ids: Sequence[str], where: str) -> Vectors:
    """float32 [n, dim], none of them empty. Raises InvalidInputError where dims differ."""
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
            f"{where}: expected one dimension in all rows, got {here} in {ids[0]!r} and {there} in "
            f"{ids[other]!r}; are these two models' vectors?"
        )
    return np.frombuffer(b"".join(values), ">f4").reshape(len(ids), -1)[:, 1:].astype(np.float32)


def parsed(data: bytes, where: str) -> Rows:
    """Rows of the key as text, a vector, and what else was asked for: the bytes of that, one after
    the other, are what was seen; a field that may be empty comes last. Raises as `vectors`."""
    if not data:
        return Rows([], np.empty((0, 0), np.float32))
    keys, values, *rest = split(data)
    ids = [(key or b"").decode() for key in _listed(keys)]
    others = zip(*map(_listed, rest), strict=True)
    seen = [b"".join(part or b"" for part in row) for row in others]
    return Rows(ids, vectors(values, ids, where), (), seen)


def products_of(data: bytes) -> tuple[list[str], Vectors]:
    """Rows of the key as text and what pgvector's <#> gave, which is negative: keys, and inner
    products float32 [n]."""
    if not data:
        return [], np.empty(0, np.float32)
    keys, values = map(_listed, split(data))
    negative = np.frombuffer(b"".join(value or b"" for value in values), ">f8")
    return [(key or b"").decode() for key in keys], -negative.astype(np.float32)


def packed(*fields: Sequence[bytes] | Packable) -> bytes:
    """Rows in COPY's binary form, of fields that are not empty; of vectors [n, dim] one a row, of
    float16 as halfvec."""
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
    """As an array where all are of one length, which is not 0."""
    lengths = {len(value) for value in values}
    if len(lengths) != 1 or 0 in lengths:
        return list(values)
    return np.frombuffer(b"".join(values), f"V{lengths.pop()}")


def _vectors(vectors: Packable) -> NDArray[np.void]:
    dim, kind = vectors.shape[1], vectors.dtype.newbyteorder(">")
    made = np.empty(len(vectors), [("dim", ">i2"), ("unused", ">i2"), ("values", kind, (dim,))])
    made["dim"], made["unused"], made["values"] = dim, 0, vectors
    return made.view(f"V{made.dtype.itemsize}")


def written(seen: Sequence[object], vectors: Vectors) -> Iterator[bytes]:
    """For each pass, its rows of what was seen and a vector [n, dim], as (place tid, writer xid,
    relation oid, new vector)."""
    told = [one for one in seen if isinstance(one, bytes)]
    passes = _passes([one[_PARTS[0]] for one in told])
    for number in range(int(passes.max(initial=-1)) + 1):
        some = np.flatnonzero(passes == number)
        parts = ([told[row][part] for row in some] for part in _PARTS)
        yield packed(*parts, vectors[some])


def _passes(places: Sequence[bytes]) -> NDArray[np.int64]:
    """Which of the rows on its page each is, modulo PASSES."""
    blocks = np.frombuffer(b"".join(places), np.dtype([("block", ">u4"), ("line", ">u2")]))["block"]
    order = np.argsort(blocks, kind="stable")
    ordered = blocks[order]
    begins = np.r_[True, ordered[1:] != ordered[:-1]]
    first = np.maximum.accumulate(np.where(begins, np.arange(len(ordered)), 0))
    found = np.empty(len(blocks), np.int64)
    found[order] = (np.arange(len(ordered)) - first) % PASSES
    return found
