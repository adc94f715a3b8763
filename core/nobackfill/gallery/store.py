"""A gallery: one SQLite file with items, metadata, and one table of vectors a space.

The same on a server and on a phone. Items have an integer `label`, never used twice: putting an id
again with other content deletes the old label and makes a new one.

Threads: one writer connection under a lock, each reader with a connection of its own from a pool;
all methods may be called from any thread. Processes: several may have the file open; writers wait
for one another up to the busy timeout, then BusyError. Files are 0600, on a local disk.
"""

import contextlib
import json
import math
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import compress, repeat
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill.errors import DamagedError, InvalidInputError
from nobackfill.gallery import reading, tables
from nobackfill.gallery.connections import FileConnections, Residents, check_pages, create_file
from nobackfill.gallery.filters import LARGEST_INTEGER, LEAST_INTEGER
from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import Metadata, MetadataValue, Origin, SpaceInfo, SpaceSpec
from nobackfill.gallery.tables import (
    find_space,
    label_column,
    live_labels,
    read_spaces,
    to_blobs,
    vector_table,
)
from nobackfill.vectors import Vectors, check_vectors


@dataclass(frozen=True)
class Change:
    """What one committed transaction did.

    `added`: vectors that came or were replaced, by space id. `deleted`: labels that are gone from
    every space; they go before the others come. `spaces`: a space came, went or changed its state.
    `described`: labels that are new, or whose metadata may be another. `carried`: those of the
    spaces in `added` whose vectors an upgrade has made.
    """

    added: Mapping[str, tuple[Labels, Vectors]]
    deleted: Labels
    spaces: bool = False
    described: Labels = field(default_factory=lambda: np.empty(0, np.int64))
    carried: Collection[str] = ()


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


def check_new(info: SpaceInfo, new: NewVectors, rows: int) -> Checked:
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


def insert_batch(
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
        tables.add(connection, first, first + count - 1)
    described = compress(zip(labels.tolist(), batch.metadata, strict=True), kept.tolist())
    tables.describe(connection, [(label, text) for label, text in described if text])
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
    tables.remove(connection, labels)
    connection.executemany("DELETE FROM items WHERE label = ?", zip(labels.tolist()))


def labels_of(connection: sqlite3.Connection, ids: Sequence[str]) -> Labels:
    """Labels of those ids that exist, increasing."""
    found = connection.execute(
        "SELECT label FROM items WHERE id IN (SELECT value FROM json_each(?)) ORDER BY label",
        (json.dumps(list(ids)),),
    )
    return label_column(found)


class Store:
    """Items and vectors of a gallery file, and the transactions that change them; SqliteGallery
    is the class to use. Made by `create` or `open`; `close` it, or use it in a `with` statement.
    """

    def __init__(self, path: Path, residents: Residents | None = None) -> None:
        """See `open`."""
        self.path = path
        self._connections = FileConnections(path, residents)
        self._listeners: list[Callable[[Change], None]] = []
        # Held from before a commit until its listeners know, so that they hear commits in order.
        self._reporting = threading.RLock()
        self._unscrubbed = False

    @classmethod
    def create(cls, path: Path, spec: SpaceSpec) -> Self:
        """Make an empty gallery whose active space is `spec`.

        Raises AlreadyExistsError, CannotWriteError, BusyError.
        """
        create_file(path, spec)
        return cls(path)

    @classmethod
    def open(cls, path: Path, residents: Residents | None = None) -> Self:
        """Open a gallery; after an unclean end its pages are checked first. Where `residents` are
        given, they may close its files while nobody uses it.

        Raises NotFoundError, VerificationError for a damaged file or none of ours, BusyError.
        """
        return cls(path, residents)

    def close(self) -> None:
        """Close every connection, once nobody reads or writes. Twice is harmless. Raises BusyError
        when a statement does not end."""
        self._connections.close()

    def rest(self) -> bool:
        """Close every connection until one is needed; False if one is in use just now."""
        return self._connections.rest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def reading(self) -> AbstractContextManager[Connection]:
        """A connection that sees one snapshot of the file, for reading only."""
        return self._connections.reading()

    def writing(self) -> AbstractContextManager[Connection]:
        """A transaction of the one writer, for tables of one's own: committed at the end, rolled
        back on an error. Not to be nested. Raises BusyError, CannotWriteError.
        """
        return self._connections.writing()

    @contextlib.contextmanager
    def changing(self) -> Iterator[tuple[Connection, list[Change]]]:
        """A transaction that changes vectors or spaces, for this room: the changes appended to the
        list are reported to the listeners once it is durable.
        """
        with self._connections.using(), self._reporting:
            changes: list[Change] = []
            before = after = -1
            try:
                with self._connections.writing() as connection:
                    before = _commits(connection)
                    connection.execute("UPDATE commits SET count = count + 1")
                    yield connection, changes
            finally:
                # An error can come after the commit, too: what is durable is reported.
                with self._connections.writer() as connection:
                    after = _commits(connection) if before >= 0 else before
                if after > before:
                    for change in changes:
                        for listener in list(self._listeners):
                            listener(change)
            if self._unscrubbed:
                self.scrub()

    def scrub(self) -> bool:
        """Empty the write-ahead log, so that no deleted byte stays in it.

        False, and tried again after the next change, if a reader prevents it just now.
        """
        self._unscrubbed = not self._connections.scrub()
        return not self._unscrubbed

    def compact(self, pages: int) -> None:
        """Give free pages back to the file system, so many a transaction. Raises BusyError."""
        self._connections.compact(pages)

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` after each commit of this process, in order, in the writer's thread."""
        with self._reporting:
            self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[Change], None]) -> None:
        """End what `subscribe` began. Raises ValueError if it did not begin."""
        self._listeners.remove(listener)

    def spaces(self) -> list[SpaceInfo]:
        """All spaces, oldest table first; exactly one is active."""
        with self.reading() as connection:
            return read_spaces(connection)

    def active(self) -> SpaceInfo:
        """The space that queries are answered in."""
        active = [info for info in self.spaces() if info.state == "active"]
        if len(active) != 1:
            raise DamagedError(self.path, f"{len(active)} active spaces, expected one")
        return active[0]

    def space(self, space: str) -> SpaceInfo:
        """One space. Raises IncompatibleSpaceError if the gallery does not have it."""
        with self.reading() as connection:
            return find_space(connection, space)

    def put(
        self,
        ids: Sequence[str],
        vectors: Sequence[NewVectors],
        *,
        digests: Sequence[str | None] | None = None,
        metadata: Sequence[Metadata | None] | None = None,
    ) -> PutResult:
        """Store items, all or none, durably. Each space's vectors are for all `ids`, in order.

        An item whose digest (of its content: of the image's bytes, say) is the one stored keeps its
        label and vectors; only vectors of spaces it lacks are added, native ones take the place of
        carried ones, and metadata is set where some is given: {} removes it, None leaves it. Any
        other item that exists is replaced: its old label is gone from every space. Without a digest
        an item is always replaced.

        Raises InvalidInputError (vectors, ids not of 1 to 256 characters, an id twice, metadata
        that is not text, a finite number or a flag), IncompatibleSpaceError, BusyError,
        CannotWriteError.
        """
        batch = check_batch(ids, digests, metadata)
        checked = [check_new(self.space(new.space), new, len(ids)) for new in vectors]
        with self.changing() as (connection, changes):
            for new in vectors:
                find_space(connection, new.space)
            result, replaced, written = insert_batch(connection, batch, checked)
            with_metadata = metadata is not None
            changes.append(
                put_change(checked, result, replaced, written, with_metadata=with_metadata)
            )
        return result

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items from every space, and their bytes from file and log. Returns how many.

        Raises BusyError, CannotWriteError.
        """
        return self.delete_chosen(lambda connection: labels_of(connection, ids))

    def delete_chosen(self, choose: Callable[[Connection], Labels]) -> int:
        """Like `delete`, for the labels that `choose` finds in the same transaction."""
        with self.changing() as (connection, changes):
            labels = choose(connection)
            delete_labels(connection, labels)
            changes.append(Change({}, labels))
            self._unscrubbed |= len(labels) > 0
        return len(labels)

    def get(self, item_id: str) -> StoredItem | None:
        """One item by its id."""
        with self.reading() as connection:
            labels = labels_of(connection, [item_id])
            return reading.items(connection, labels)[0] if len(labels) else None

    def items(
        self, labels: Sequence[int] | Labels, space: str | None = None
    ) -> list[StoredItem | None]:
        """Items in the order of `labels`; None where there is none (any more)."""
        with self.reading() as connection:
            return reading.items(connection, labels, space)

    def listing(self, after: int = 0, limit: int = 1000) -> list[StoredItem]:
        """Items by increasing label, those after label `after`: a page."""
        with self.reading() as connection:
            return reading.page(connection, after, limit)

    def count(self, space: str | None = None) -> int:
        """Number of items, or of vectors in a space."""
        with self.reading() as connection:
            return reading.count(connection, space)

    def load(self, space: str) -> tuple[Labels, Vectors]:
        """All vectors of a space in one snapshot: labels int64 [n] increasing, float32 [n, dim]."""
        with self.reading() as connection:
            return reading.load(connection, find_space(connection, space))

    def vector(self, label: int, space: str) -> Vectors | None:
        """One item's vector in a space, [1, dim]; None if it has none there."""
        with self.reading() as connection:
            return reading.vector(connection, label, find_space(connection, space))

    def check_pages(self) -> None:
        """Read every page, for rows that are not found are missed by nobody. Raises DamagedError.

        A part would not do: only among all can a page be seen that no table has any more.
        """
        with self.reading() as connection:
            check_pages(connection, self.path)

    def state_get(self, key: str) -> Any:
        """A small JSON value kept with the gallery; None if there is none."""
        with self.reading() as connection:
            return reading.state(connection, key)

    def state(self) -> dict[str, Any]:
        """All the small JSON values kept with the gallery."""
        with self.reading() as connection:
            return reading.states(connection)

    def state_set(self, values: Mapping[str, Any]) -> None:
        """Keep small JSON values, all in one transaction; None removes."""
        with self.writing() as connection:
            reading.set_state(connection, values)


def _commits(connection: Connection) -> int:
    rows = connection.execute("SELECT count FROM commits").fetchall()
    if len(rows) != 1 or not isinstance(rows[0][0], int):
        raise DamagedError("the gallery file", "it does not count its commits any more")
    return int(rows[0][0])
