"""Writing items: the transaction bodies of Store.put and Store.delete."""

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill.errors import InvalidInputError
from nobackfill.gallery import attributes
from nobackfill.gallery.change import Change
from nobackfill.gallery.filters import LARGEST_INTEGER, LEAST_INTEGER
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import Metadata, MetadataValue, Origin, SpaceInfo
from nobackfill.gallery.tables import label_column, live_labels, to_blobs, vector_table
from nobackfill.vectors import Vectors, check_vectors

MAX_ID_CHARACTERS = 256

# Which rows of a vector table a native vector does not replace.
_NATIVE = "origin IN ('native', 're-embedded')"

# Of one item's metadata, as JSON in UTF-8: what a page of items or an answer can bring many times.
MOST_METADATA_BYTES = 64 << 10


@dataclass(frozen=True)
class NewVectors:
    """Vectors of one space for all items of a put: `embedding` [n, dim], `side` [n, side_dim]."""

    space: str
    embedding: ArrayLike
    side: ArrayLike | None = None
    origin: Origin = "native"


@dataclass(frozen=True)
class PutResult:
    """`labels` int64 [n] of the items; `changed` bool [n]: False where the content was there."""

    labels: Labels
    changed: NDArray[np.bool_]


@dataclass(frozen=True)
class Batch:
    """A checked put: `metadata` as JSON texts, None where that of a kept item stays as it is."""

    ids: Sequence[str]
    digests: Sequence[str | None]
    metadata: Sequence[str | None]


def check_batch(
    ids: Sequence[str],
    digests: Sequence[str | None] | None,
    metadata: Sequence[Metadata | None] | None,
) -> Batch:
    """Raises InvalidInputError for bad ids or metadata, an id twice, or lists of other lengths."""
    for name, given in (("digests", digests), ("metadata", metadata)):
        if given is not None and len(given) != len(ids):
            raise InvalidInputError(f"expected {name} for {len(ids)} ids, got {len(given)}")
    lengths = [len(item_id) for item_id in ids]
    if ids and not (
        1 <= min(lengths) <= max(lengths) <= MAX_ID_CHARACTERS and storable("".join(ids))
    ):
        raise InvalidInputError(
            f"expected ids of 1 to {MAX_ID_CHARACTERS} characters of valid text, got "
            f"lengths from {min(lengths)} to {max(lengths)}"
        )
    if len(set(ids)) != len(ids):
        raise InvalidInputError("expected each id once in a batch; put the second one afterwards")
    return Batch(
        ids,
        digests or [None] * len(ids),
        [None if m is None else metadata_text(m) for m in metadata or [None] * len(ids)],
    )


def storable(text: str) -> bool:
    # What SQLite's JSON functions and its command line read back as it was.
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def metadata_text(metadata: Metadata) -> str:
    """Metadata as it is stored: JSON, keys in order. Raises InvalidInputError for what is no
    metadata, or too large."""
    for key, value in metadata.items():
        if not (storable(key) and _allowed(value)):
            raise InvalidInputError(
                f"metadata {key[:64]!r}: expected text, a finite number (an integer of 64 bits), a "
                "flag or a list of texts; leave it out"
            )
    text = json.dumps(metadata, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    if len(text) * 4 > MOST_METADATA_BYTES and (size := len(text.encode())) > MOST_METADATA_BYTES:
        raise InvalidInputError(
            f"metadata: expected at most {MOST_METADATA_BYTES} bytes an item, as JSON, got {size}; "
            "keep large values elsewhere, under the item's id"
        )
    return text


def _allowed(value: MetadataValue) -> bool:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, int):
        return LEAST_INTEGER <= value <= LARGEST_INTEGER
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, list | tuple) and all(
        isinstance(text, str) and storable(text) for text in value
    )


@dataclass(frozen=True)
class Checked:
    """Vectors of one space that passed every check."""

    info: SpaceInfo
    embedding: Vectors
    side: Vectors | None
    origin: Origin

    @property
    def kept_where(self) -> str:
        """SQL of a row of unchanged content that these vectors do not replace: one made from the
        content is better than one that an upgrade carried."""
        return _NATIVE if self.origin == "native" else "TRUE"

    def some(self, rows: NDArray[Any]) -> "Checked":
        """Those rows of it."""
        side = None if self.side is None else self.side[rows]
        return Checked(self.info, self.embedding[rows], side, self.origin)


def check(info: SpaceInfo, new: NewVectors, rows: int) -> Checked:
    """Raises InvalidInputError unless there are `rows` good vectors for the space."""
    spec = info.spec
    what = f"embeddings of release {spec.release}"
    embedding = check_vectors(new.embedding, spec.dim, what=what, unit=spec.unit)
    side = None
    if new.side is not None:
        what = f"side-information of release {spec.release}"
        if spec.side_space is None:
            raise InvalidInputError(f"{what}: the release has none; leave it out")
        side = check_vectors(new.side, spec.side_dim, what=what)
    for array in (embedding, side):
        if array is not None and len(array) != rows:
            raise InvalidInputError(f"{what}: expected {rows} rows, got {len(array)}")
    return Checked(info, embedding, side, new.origin)


def insert_vectors(
    connection: sqlite3.Connection,
    checked: Checked,
    labels: Labels,
    uncertainty: Vectors | None = None,
    *,
    replace: bool = False,
) -> None:
    """Add a row to the space's table for each label; with `replace` there may be one already."""
    rows = len(labels)
    verb = "INSERT OR REPLACE" if replace else "INSERT"
    connection.executemany(
        f"{verb} INTO {vector_table(checked.info.number)}"
        " (label, origin, uncertainty, embedding, side) VALUES (?, ?, ?, ?, ?)",
        zip(
            labels.tolist(),
            repeat(checked.origin),
            repeat(None) if uncertainty is None else uncertainty.tolist(),
            to_blobs(checked.embedding, rows),
            to_blobs(checked.side, rows),
            strict=False,
        ),
    )


def insert(
    connection: sqlite3.Connection, batch: Batch, vectors: Sequence[Checked]
) -> tuple[PutResult, Labels, list[NDArray[np.bool_]]]:
    """Store a batch.

    Returns the result, the labels that are gone, and for each of `vectors` the rows written.
    """
    labels, kept, replaced = _existing(connection, batch)
    delete_labels(connection, replaced)
    fresh = ~kept
    count = int(fresh.sum())
    last = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'items'").fetchone()
    first = last[0] + 1 if last else 1
    labels[fresh] = np.arange(first, first + count)
    metadata = [text or "{}" for text in batch.metadata]
    rows = zip(labels.tolist(), batch.ids, batch.digests, metadata, strict=True)
    connection.executemany(
        "INSERT INTO items (label, id, digest, metadata) VALUES (?, ?, ?, ?)",
        compress(rows, fresh.tolist()),
    )
    if any(batch.metadata):
        attributes.add(connection, first, first + count - 1)
    described = compress(zip(labels.tolist(), batch.metadata, strict=True), kept.tolist())
    attributes.describe(connection, [(label, text) for label, text in described if text])
    written = []
    for checked in vectors:
        table = vector_table(checked.info.number)
        wanted = np.ones(len(labels), np.bool_)
        rest = checked
        if kept.any():
            there = live_labels(connection, table, labels[kept], checked.kept_where)
            wanted = ~np.isin(labels, there)
            rest = checked.some(wanted)
        insert_vectors(connection, rest, labels[wanted], replace=True)
        written.append(wanted)
    return PutResult(labels, fresh), replaced, written


def put_change(
    vectors: Sequence[Checked],
    result: PutResult,
    replaced: Labels,
    written: Sequence[NDArray[np.bool_]],
    *,
    with_metadata: bool,
) -> Change:
    """What listeners hear of a batch that was stored, see `insert`; `with_metadata`: it was put
    with some."""
    added = {
        one.info.spec.space: (result.labels[rows], one.embedding[rows])
        for one, rows in zip(vectors, written, strict=True)
        if rows.any()
    }
    described = result.labels if with_metadata else result.labels[result.changed]
    carried = tuple(one.info.spec.space for one in vectors if one.origin == "upgraded")
    return Change(added, replaced, described=described, carried=carried)


def _existing(
    connection: sqlite3.Connection, batch: Batch
) -> tuple[Labels, NDArray[np.bool_], Labels]:
    rows = connection.execute(
        "SELECT id, label, digest FROM items WHERE id IN (SELECT value FROM json_each(?))",
        (json.dumps(list(batch.ids)),),
    )
    return kept_and_replaced(batch, {item_id: rest for item_id, *rest in rows})


def kept_and_replaced(
    batch: Batch, found: Mapping[str, Sequence[Any]]
) -> tuple[Labels, NDArray[np.bool_], Labels]:
    """Labels [n] of kept items (-1 elsewhere), which are kept, and the labels to be replaced.

    `found`: label and digest of those ids that exist.
    """
    labels = np.full(len(batch.ids), -1, np.int64)
    replaced = []
    if found:
        for row, (item_id, digest) in enumerate(zip(batch.ids, batch.digests, strict=True)):
            label, old = found.get(item_id, (-1, None))
            if digest is not None and digest == old:
                labels[row] = label
            elif label >= 0:
                replaced.append(label)
    return labels, labels >= 0, np.array(sorted(replaced), np.int64)


def delete_labels(connection: sqlite3.Connection, labels: Labels) -> None:
    """Remove items; their vectors go with them, in every space."""
    attributes.remove(connection, labels)
    connection.executemany("DELETE FROM items WHERE label = ?", zip(labels.tolist()))


def labels_of(connection: sqlite3.Connection, ids: Sequence[str]) -> Labels:
    """Labels of those ids that exist, increasing."""
    found = connection.execute(
        "SELECT label FROM items WHERE id IN (SELECT value FROM json_each(?)) ORDER BY label",
        (json.dumps(list(ids)),),
    )
    return label_column(found)
