"""Store a gallery in one SQLite file: items, metadata, and a table of vectors for each space.

It is the same on a server and on a phone. Each item has an integer `label` that is never reused:
storing other content under an id deletes the old label and creates a new one.

Threads: one writer connection under a lock, and a pool of reader connections; any thread may call
any method. Processes: several may have the file open. A writer waits for others up to the busy
timeout, then raises BusyError. Files have mode 0600 and must be on a local disk.
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
from nobackfill.gallery.filters import LARGEST_INTEGER, LEAST_INTEGER
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import Metadata, MetadataValue, Origin, SpaceInfo, SpaceSpec
from nobackfill.gallery.sqlite_file import (
    FileConnections,
    StoredItem,
    SuspendablePool,
    check_pages,
    count_rows,
    create_file,
    find_space,
    index_metadata,
    items_page,
    live_labels,
    read_all_vectors,
    read_commit_count,
    read_items_by_label,
    read_spaces,
    read_state_value,
    read_state_values,
    read_vector,
    rows_to_labels,
    set_metadata,
    set_state_values,
    unindex_metadata,
    vector_table_name,
    vectors_to_blobs,
)
from nobackfill.vectors import Vectors, check_vectors


@dataclass(frozen=True)
class Change:
    """The effect of one committed transaction.

    Attributes:
        added_vectors: New or replaced vectors: labels and embeddings by space id.
        deleted_labels: Labels that were removed from every space, before the others were added.
        spaces_changed: Whether a space was added or removed, or changed its state.
        metadata_labels: Labels that are new, or whose metadata may have changed.
        migrated_spaces: The spaces of `added_vectors` whose vectors were migrated.
    """

    added_vectors: Mapping[str, tuple[Labels, Vectors]]
    deleted_labels: Labels
    spaces_changed: bool = False
    metadata_labels: Labels = field(default_factory=lambda: np.empty(0, np.int64))
    migrated_spaces: Collection[str] = ()


MAX_ID_CHARACTERS = 256

# Rows of a vector table that a native vector does not replace.
_NATIVE = "origin IN ('native', 're-embedded')"

# Bytes of an item's metadata as JSON in UTF-8; a page or an answer may contain it many times.
MOST_METADATA_BYTES = 64 << 10


@dataclass(frozen=True)
class NewVectors:
    """Vectors of one space for all items of a put.

    Attributes:
        space: Id of the space.
        embedding: float32 [n, dim].
        side_information: Side-information, float32 [n, side_dim], or None.
        origin: How the vectors were made.
    """

    space: str
    embedding: ArrayLike
    side_information: ArrayLike | None = None
    origin: Origin = "native"


@dataclass(frozen=True)
class PutResult:
    """The result of a put.

    Attributes:
        labels: int64 [n], label of each item.
        changed_mask: bool [n], False where the same content was stored already.
    """

    labels: Labels
    changed_mask: NDArray[np.bool_]


@dataclass(frozen=True)
class Batch:
    """A checked put.

    Attributes:
        ids: Ids of the items.
        digests: Digest of each item's content, or None.
        metadata: JSON text of each item; None leaves that of an unchanged item as it is.
    """

    ids: Sequence[str]
    digests: Sequence[str | None]
    metadata: Sequence[str | None]


def check_batch(
    ids: Sequence[str],
    digests: Sequence[str | None] | None,
    metadata: Sequence[Metadata | None] | None,
) -> Batch:
    """Check the ids, digests and metadata of a put.

    Args:
        ids: n ids; n may be 0.
        digests: n digests, each may be None; None for none. An empty list counts as none where
            `ids` is empty. Their text is not checked; "" is a digest like others.
        metadata: n mappings, each may be None; None for none.

    Returns:
        The checked put; an item without metadata has None, and {} becomes "{}". It refers to the
        lists of the caller.

    Raises:
        InvalidInputError: An invalid or repeated id, such as "" or one with a zero byte, invalid
            metadata, or lists of another length.
        TypeError, AttributeError: An id or a key of metadata is no text, or metadata is no dict.
    """
    for name, values in (("digests", digests), ("metadata", metadata)):
        if values is not None and len(values) != len(ids):
            raise InvalidInputError(
                f"{name} of a put: expected one for each of {len(ids)} items, got {len(values)}; "
                "pass a list as long as that of the ids"
            )
    lengths = [len(item_id) for item_id in ids]
    if ids and not (
        1 <= min(lengths) <= max(lengths) <= MAX_ID_CHARACTERS and is_storable_text("".join(ids))
    ):
        raise InvalidInputError(
            f"item ids: expected 1 to {MAX_ID_CHARACTERS} characters of valid Unicode without zero "
            f"bytes in each, got lengths from {min(lengths)} to {max(lengths)}; correct the ids"
        )
    if len(set(ids)) != len(ids):
        raise InvalidInputError(
            "item ids: expected each id once in a put, got one twice; put the second one in "
            "another call"
        )
    return Batch(
        ids,
        digests or [None] * len(ids),
        [None if m is None else metadata_json(m) for m in metadata or [None] * len(ids)],
    )


def is_storable_text(text: str) -> bool:
    """Tell whether SQLite stores a text and its JSON functions read it back unchanged.

    Returns:
        False for a text with a zero byte or half a surrogate pair; True for an empty text.
    """
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def metadata_json(metadata: Metadata) -> str:
    """Return an item's metadata as it is stored: JSON with sorted keys; {} for none.

    Keys, texts and lists may be empty.

    Raises:
        InvalidInputError: A key or text has a zero byte or half a surrogate pair. A value is None,
            a mapping, a list of anything but texts, or no finite number. An integer has more than
            64 bits, or the text more than MOST_METADATA_BYTES.
        AttributeError: A key is no text.
        TypeError: `metadata` is a mapping but no dict.
    """
    for key, value in metadata.items():
        if not (is_storable_text(key) and _is_value(value)):
            raise InvalidInputError(
                f"metadata {key[:64]!r}: expected text, a finite number (an integer of 64 bits), a "
                "flag or a list of texts, got something else; leave it out"
            )
    text = json.dumps(metadata, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    if len(text) * 4 > MOST_METADATA_BYTES and (size := len(text.encode())) > MOST_METADATA_BYTES:
        raise InvalidInputError(
            f"metadata: expected at most {MOST_METADATA_BYTES} bytes for an item, as JSON, got "
            f"{size}; store large values elsewhere, under the item's id"
        )
    return text


def _is_value(value: MetadataValue) -> bool:
    if isinstance(value, str):
        return is_storable_text(value)
    if isinstance(value, int):
        return LEAST_INTEGER <= value <= LARGEST_INTEGER
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, list | tuple) and all(
        isinstance(text, str) and is_storable_text(text) for text in value
    )


@dataclass(frozen=True)
class CheckedVectors:
    """Vectors of one space that passed every check."""

    space_info: SpaceInfo
    embedding: Vectors
    side_information: Vectors | None
    origin: Origin

    @property
    def unchanged_sql_condition(self) -> str:
        """Return an SQL condition for rows of unchanged content that these vectors do not replace.

        A vector that a model made from the content is better than a migrated one.

        Native vectors replace rows of every origin but native and re-embedded. Other vectors
        replace no row.
        """
        return _NATIVE if self.origin == "native" else "TRUE"

    def select(self, rows: NDArray[Any]) -> "CheckedVectors":
        """Return the vectors of some rows.

        Args:
            rows: Indices int [m], which may repeat, or a mask bool [n], of the n rows.

        Returns:
            New vectors in the order of `rows`; a mask gives copies.

        Raises:
            IndexError: An index is out of range, or the mask has another length.
        """
        side = None if self.side_information is None else self.side_information[rows]
        return CheckedVectors(self.space_info, self.embedding[rows], side, self.origin)


def check_new_vectors(info: SpaceInfo, new: NewVectors, item_count: int) -> CheckedVectors:
    """Check vectors of a space.

    Args:
        info: The space.
        new: The vectors.
        item_count: The expected number of rows.

    Returns:
        The vectors as float32, not copied where they are that already. Side-information may be
        missing, also where the space has it.

    Raises:
        InvalidInputError: Another shape, dtype or number of rows, or side-information that the
            space does not have.
        UnusableRowsError: Rows that are not finite or too large, or in a space of unit vectors not
            of norm 1.
        ValueError: Nested lists of unequal lengths.
    """
    spec = info.spec
    what = f"embeddings of release {spec.release}"
    embedding = check_vectors(new.embedding, spec.dim, error_name=what, unit_norm=spec.unit_norm)
    side = None
    if new.side_information is not None:
        what = f"side-information of release {spec.release}"
        if spec.side_space is None:
            raise InvalidInputError(
                f"{what}: the release computes no side-information, so its gallery stores none; "
                "leave it out"
            )
        side = check_vectors(new.side_information, spec.side_dim, error_name=what)
    for array in (embedding, side):
        if array is not None and len(array) != item_count:
            raise InvalidInputError(
                f"{what}: expected {item_count} vectors, one for each item, got {len(array)}; "
                "pass as many as items"
            )
    return CheckedVectors(info, embedding, side, new.origin)


def insert_vectors(
    connection: sqlite3.Connection,
    checked: CheckedVectors,
    labels: Labels,
    uncertainty: Vectors | None = None,
    *,
    replace: bool = False,
) -> None:
    """Insert a row into the space's table for each label.

    Args:
        connection: In a transaction.
        checked: The vectors.
        labels: int64 [n] of existing items, in the order of the vectors; that there are n vectors
            is not checked.
        uncertainty: float32 [n], or None.
        replace: Replace existing rows; otherwise there must be none.

    Raises:
        sqlite3.IntegrityError: A label has no item, or without `replace` a row already.
        sqlite3.Error: Another statement failed; the caller rolls back.
    """
    rows = len(labels)
    verb = "INSERT OR REPLACE" if replace else "INSERT"
    connection.executemany(
        f"{verb} INTO {vector_table_name(checked.space_info.table_number)}"
        " (label, origin, uncertainty, embedding, side) VALUES (?, ?, ?, ?, ?)",
        zip(
            labels.tolist(),
            repeat(checked.origin),
            repeat(None) if uncertainty is None else uncertainty.tolist(),
            vectors_to_blobs(checked.embedding, rows),
            vectors_to_blobs(checked.side_information, rows),
            strict=False,
        ),
    )


def insert_batch(
    connection: sqlite3.Connection, batch: Batch, vectors: Sequence[CheckedVectors]
) -> tuple[PutResult, Labels, list[NDArray[np.bool_]]]:
    """Store a batch.

    An item with the digest of the stored one keeps its label; its metadata is set unless it is
    None. Any other existing item is deleted, and stored again under a new label. An unchanged item
    gets vectors that it lacks, and native vectors replace its migrated ones. New labels increase in
    the order of the items.

    Args:
        connection: In a transaction.
        batch: The items.
        vectors: Vectors of each space for all items; each space at most once. Without any, only
            items are stored.

    Returns:
        The result, the labels that were deleted (int64, increasing), and for each of `vectors` a
        mask bool [n] of the rows written.

    Raises:
        sqlite3.Error: A statement failed; the caller rolls back.
    """
    labels, unchanged, replaced = _match_stored(connection, batch)
    delete_labels(connection, replaced)
    new = ~unchanged
    count = int(new.sum())
    last = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'items'").fetchone()
    first = last[0] + 1 if last else 1
    labels[new] = np.arange(first, first + count)
    metadata = [text or "{}" for text in batch.metadata]
    rows = zip(labels.tolist(), batch.ids, batch.digests, metadata, strict=True)
    connection.executemany(
        "INSERT INTO items (label, id, digest, metadata) VALUES (?, ?, ?, ?)",
        compress(rows, new.tolist()),
    )
    if any(batch.metadata):
        index_metadata(connection, first, first + count - 1)
    texts = compress(zip(labels.tolist(), batch.metadata, strict=True), unchanged.tolist())
    set_metadata(connection, [(label, text) for label, text in texts if text])
    rows_written = []
    for checked in vectors:
        table = vector_table_name(checked.space_info.table_number)
        missing = np.ones(len(labels), np.bool_)
        selected = checked
        if unchanged.any():
            existing = live_labels(
                connection, table, labels[unchanged], checked.unchanged_sql_condition
            )
            missing = ~np.isin(labels, existing)
            selected = checked.select(missing)
        insert_vectors(connection, selected, labels[missing], replace=True)
        rows_written.append(missing)
    return PutResult(labels, new), replaced, rows_written


def change_after_put(
    vectors: Sequence[CheckedVectors],
    result: PutResult,
    replaced: Labels,
    rows_written: Sequence[NDArray[np.bool_]],
    *,
    with_metadata: bool,
) -> Change:
    """Return the change that listeners get after a batch was stored.

    Args:
        vectors: Vectors of each space for all items.
        result: The result of the put.
        replaced: int64, labels that were deleted.
        rows_written: For each of `vectors` a mask bool [n] of the rows written.
        with_metadata: Whether the put had metadata.

    Returns:
        The change. A space without a new row is not in `added_vectors`; a repeated space would
        lose rows.

    Raises:
        ValueError: There are not as many masks as `vectors`.
    """
    added = {
        one.space_info.spec.space: (result.labels[rows], one.embedding[rows])
        for one, rows in zip(vectors, rows_written, strict=True)
        if rows.any()
    }
    described = result.labels if with_metadata else result.labels[result.changed_mask]
    migrated_spaces = tuple(
        one.space_info.spec.space for one in vectors if one.origin == "upgraded"
    )
    return Change(added, replaced, metadata_labels=described, migrated_spaces=migrated_spaces)


def _match_stored(
    connection: sqlite3.Connection, batch: Batch
) -> tuple[Labels, NDArray[np.bool_], Labels]:
    rows = connection.execute(
        "SELECT id, label, digest FROM items WHERE id IN (SELECT value FROM json_each(?))",
        (json.dumps(list(batch.ids)),),
    )
    return compare_with_stored(batch, {item_id: stored for item_id, *stored in rows})


def compare_with_stored(
    batch: Batch, existing: Mapping[str, Sequence[Any]]
) -> tuple[Labels, NDArray[np.bool_], Labels]:
    """Find the items of a batch that are unchanged, and those to replace.

    Args:
        batch: The items. One without a digest is never unchanged.
        existing: Label and digest of those ids that exist.

    Returns:
        Labels [n] of unchanged items (-1 elsewhere), a mask bool [n] of the unchanged items, and
        the labels to replace, int64, increasing.
    """
    labels = np.full(len(batch.ids), -1, np.int64)
    replaced = []
    if existing:
        for row, (item_id, digest) in enumerate(zip(batch.ids, batch.digests, strict=True)):
            label, old = existing.get(item_id, (-1, None))
            if digest is not None and digest == old:
                labels[row] = label
            elif label >= 0:
                replaced.append(label)
    return labels, labels >= 0, np.array(sorted(replaced), np.int64)


def delete_labels(connection: sqlite3.Connection, labels: Labels) -> None:
    """Delete items, and their vectors in every space.

    The index of the metadata is updated, too. Vectors go by the foreign keys of the file, which
    `open_connection` enforces.

    Args:
        connection: In a transaction.
        labels: int64 [n]; labels that do not exist are ignored.

    Raises:
        sqlite3.Error: A statement failed; the caller rolls back.
    """
    unindex_metadata(connection, labels)
    connection.executemany("DELETE FROM items WHERE label = ?", zip(labels.tolist()))


def storable_ids(ids: Sequence[str]) -> list[str]:
    """Return the ids that an item can have, before a database looks for them.

    SQLite's json_each would cut an id at a zero byte, and find the item of the shorter id.
    PostgreSQL refuses such ids. Order and repeats stay.
    """
    return [item_id for item_id in ids if is_storable_text(item_id)]


def labels_of(connection: sqlite3.Connection, ids: Sequence[str]) -> Labels:
    """Return the labels of the ids that exist, int64, increasing; unknown ids are skipped, and an
    id that is given twice counts once.

    Raises:
        sqlite3.Error: The query failed; the context of `Store.read_snapshot` translates it.
    """
    rows = connection.execute(
        "SELECT label FROM items WHERE id IN (SELECT value FROM json_each(?)) ORDER BY label",
        (json.dumps(storable_ids(ids)),),
    )
    return rows_to_labels(rows)


class Store:
    """Items and vectors of a gallery file, and the transactions that change them.

    Use its subclass SqliteGallery. `create` or `open` a store, and `close` it or use it in a `with`
    statement.
    """

    def __init__(self, path: Path, pool: SuspendablePool | None = None) -> None:
        """Open a gallery; migrate a file of an older format, and after an unclean end, check its
        pages first.

        A lock file is created next to it, and stays. Waits up to 5 s for a process that has the
        gallery to itself.

        Args:
            path: The file.
            pool: May close the file's connections while no thread uses them; they are opened
                again on demand. None keeps them open.

        Raises:
            NotFoundError: There is no such file.
            VerificationError: The file is damaged, no gallery, or has a newer format.
            BusyError: Another process has the file to itself.
            CannotWriteError: The file cannot be read, has an old format and cannot be written, or
                has no room for SQLite's files, or its file system has no locks (flock).
            OSError: This user may not search the folder, or the name is too long.
        """
        self.path = path
        self._connections = FileConnections(path, pool)
        self._listeners: list[Callable[[Change], None]] = []
        # Held from before a commit until its listeners have run, so that they see commits in order.
        self._reporting = threading.RLock()
        self._unscrubbed = False

    @classmethod
    def create(cls, path: Path, spec: SpaceSpec) -> Self:
        """Create an empty gallery with one active space, and open it.

        Args:
            path: The file, with mode 0600; missing folders are created with mode 0700. Temporary
                files of killed processes are removed, and a dangling link is replaced.
            spec: The active space. Its values are not checked: with an impossible one, such as a
                dimension of 0, later calls raise DamagedError.

        Returns:
            The open gallery; the caller closes it.

        Raises:
            AlreadyExistsError: The file exists, or a log of an earlier gallery is in the same
                folder.
            CannotWriteError: The file cannot be written, the disk has less than 256 KiB free, or it
                allows no write-ahead log.
            BusyError: A process, perhaps this one, creates it or has it open.
            OSError: The name is too long; some lengths give CannotWriteError.
        """
        create_file(path, spec)
        return cls(path)

    @classmethod
    def open(cls, path: Path, pool: SuspendablePool | None = None) -> Self:
        """Open a gallery; the same as the constructor.

        Args:
            path: The file.
            pool: May close the file's connections while no thread uses them; they are opened
                again on demand. None keeps them open.

        Returns:
            The open gallery; the caller closes it.

        Raises:
            NotFoundError: There is no such file.
            VerificationError: The file is damaged, no gallery, or has a newer format.
            BusyError: Another process has the file to itself.
            CannotWriteError: The file cannot be read, has an old format and cannot be written, or
                has no room for SQLite's files, or its file system has no locks (flock).
            OSError: This user may not search the folder, or the name is too long.
        """
        return cls(path, pool)

    def close(self) -> None:
        """Close every connection, once no thread reads or writes; a second call does nothing.

        Waits up to 60 s. Every later call raises NotFoundError. Listeners stay subscribed.

        Raises:
            BusyError: A call, perhaps of this thread, still uses the file after 60 s; the gallery
                stays open.
        """
        self._connections.close()

    def reopen(self) -> None:
        """Let a closed gallery be used again; the next call opens its connections.

        That call may raise each error of the constructor. An open gallery stays as it is.
        """
        self._connections.reopen()

    def suspend(self) -> bool:
        """Close every connection, and free the lock, until one is needed. Never waits.

        The next call opens them again, and may raise each error of the constructor. Another process
        may have the gallery to itself meanwhile. A closed gallery stays closed.

        Returns:
            False if a thread uses, opens or closes one; they stay open.
        """
        return self._connections.suspend()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read_snapshot(self) -> AbstractContextManager[Connection]:
        """Return a context with a connection that reads one snapshot of the file.

        Entering the context opens the file's connections if they are closed.

        A transaction that is open in another context is not seen. On a full disk there may be only
        one connection: a read then waits for writers, and sees this thread's own transaction.
        Errors of SQLite in the block are translated, too: a damaged row raises VerificationError.

        Raises:
            NotFoundError: The gallery was closed for good, or its file is gone.
            VerificationError: The file is damaged.
            BusyError: Another process has the file to itself, or changed it during the read without
                a lock.
            CannotWriteError: The file cannot be read, or the disk fails.
        """
        return self._connections.read_snapshot()

    def transaction(self) -> AbstractContextManager[Connection]:
        """Return a context with a transaction of the one writer, for tables of the caller.

        It commits at the end of the block. On an error it rolls back, and the error passes through.
        Do not nest it. Listeners are not called. Other threads that write wait; another process is
        waited for up to 5 s. Errors of SQLite in the block are translated.

        Raises:
            BusyError: Another process still writes the gallery after 5 s; nothing is changed.
            CannotWriteError: The file is read-only, or the disk fails or is full.
            NotFoundError: The gallery was closed for good, or its file is gone.
            VerificationError: The file is damaged, or a statement of the block fails in another
                way, such as by a constraint.
        """
        return self._connections.transaction()

    @contextlib.contextmanager
    def change_transaction(self) -> Iterator[tuple[Connection, list[Change]]]:
        """Run a transaction that changes vectors or spaces; for this package only.

        Append each change to the yielded list: listeners get it once it is durable.

        An error in the block rolls back, and nothing is reported. Other threads that write wait. Do
        not nest it. After a deletion, the log is emptied, unless a reader prevents it.

        Yields:
            A connection in the transaction, and the list.

        Raises:
            BusyError: Another process still writes the gallery after 5 s; nothing is changed.
            CannotWriteError: The file is read-only, or the disk fails or is full.
            NotFoundError: The gallery was closed for good, or its file is gone.
            VerificationError: The file is damaged, or a statement of the block fails in another
                way, such as by a constraint.
            Exception: An error of a listener; the transaction stays committed, and later listeners
                are not called.
        """
        with self._connections.hold_open(), self._reporting:
            changes: list[Change] = []
            old_count = new_count = -1
            try:
                with self._connections.transaction() as connection:
                    old_count = read_commit_count(connection)
                    connection.execute("UPDATE commits SET count = count + 1")
                    yield connection, changes
            finally:
                # An error may follow the commit: report what is durable.
                with self._connections.writer() as connection:
                    new_count = read_commit_count(connection) if old_count >= 0 else old_count
                if new_count > old_count:
                    for change in changes:
                        for listener in list(self._listeners):
                            listener(change)
            if self._unscrubbed:
                self.scrub()

    def scrub(self) -> bool:
        """Empty the write-ahead log, so that no deleted byte stays in it.

        Other threads of this process that write are waited for without limit.

        Returns:
            False if a reader, a lock, the disk or this thread's own transaction prevents it; the
            next change tries again. Readers are not waited for.

        Raises:
            BusyError: Another process has the file to itself.
            CannotWriteError: The file was opened for reading only.
            NotFoundError: The gallery was closed for good, or its file is gone.
            VerificationError: The file is damaged.
        """
        self._unscrubbed = not self._connections.scrub()
        return not self._unscrubbed

    def compact(self, page_count: int) -> None:
        """Return free pages to the file system.

        Other threads that write wait until the end. The write-ahead log is emptied last, unless a
        reader prevents it for 5 s. After an error, pages that were returned stay returned. Do not
        call it in a transaction.

        Args:
            page_count: Pages that one transaction returns, at least 1; other processes may commit
                between two.

        Raises:
            BusyError: Another process still writes the gallery after 5 s.
            CannotWriteError: The file is read-only, or the disk fails or is full.
            NotFoundError: The gallery was closed for good, or its file is gone.
            VerificationError: The file is damaged.
            ValueError: `page_count` is 0.
        """
        self._connections.compact(page_count)

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` after each commit of this process, in order, in the writer's thread.

        Commits of other processes are not reported. A listener that is subscribed twice is called
        twice. The call waits for a change of another thread to end.

        Args:
            listener: Gets the change, once it is durable. It runs under a lock: other threads of
                this process wait to change the gallery. Its error reaches the writer, and later
                listeners are not called.
        """
        with self._reporting:
            self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[Change], None]) -> None:
        """Stop calling a listener.

        A listener that is subscribed twice is called once from then on. A commit in progress may
        still call it.

        Raises:
            ValueError: It is not subscribed.
        """
        self._listeners.remove(listener)

    def spaces(self) -> list[SpaceInfo]:
        """Return all spaces, oldest table first; exactly one is active.

        Raises:
            VerificationError: The file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed for good, or its file is gone.
        """
        with self.read_snapshot() as connection:
            return read_spaces(connection)

    def active(self) -> SpaceInfo:
        """Return the space that answers queries.

        Each call reads the file, so it follows other processes.

        Raises:
            DamagedError: The file is damaged, or does not have exactly one.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed for good, or its file is gone.
            VerificationError: The file is no gallery, or has a newer format.
        """
        active = [info for info in self.spaces() if info.state == "active"]
        if len(active) != 1:
            raise DamagedError(
                self.path,
                f"{len(active)} of its spaces are marked as the one that answers searches, "
                "expected one",
            )
        return active[0]

    def space(self, space: str) -> SpaceInfo:
        """Return a space of the gallery by its id.

        Raises:
            IncompatibleSpaceError: The gallery does not have it.
            VerificationError: The file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed for good, or its file is gone.
        """
        with self.read_snapshot() as connection:
            return find_space(connection, space)

    def put(
        self,
        ids: Sequence[str],
        vectors: Sequence[NewVectors],
        *,
        digests: Sequence[str | None] | None = None,
        metadata: Sequence[Metadata | None] | None = None,
    ) -> PutResult:
        """Store items durably, all or none.

        An item with the same digest as the stored one keeps its label and vectors: only vectors of
        spaces that it lacks are added, and native vectors replace all but native and re-embedded
        ones. Any other existing item is replaced: its old label disappears from every space.
        Without a digest, an item is always replaced.

        Listeners are called after the commit. Other threads that write are waited for without
        limit.

        Args:
            ids: n different ids of 1 to 256 characters; n may be 0.
            vectors: For each space, at most once, vectors of all items, in order. Without any,
                items are stored without vectors; spaces that are not listed get none.
            digests: n digests of each item's content, such as the bytes of its image; None for
                none.
            metadata: For each item, texts, finite numbers, flags or lists of texts by key. {}
                removes an unchanged item's metadata, None leaves it. A replaced item has only the
                new metadata.

        Returns:
            The label of each item, and whether its content is new or was replaced.

        Raises:
            InvalidInputError: Invalid vectors, ids or metadata, lists of another length, or an id
                twice.
            IncompatibleSpaceError: The gallery lacks a space.
            BusyError: Another process still writes the gallery after 5 s; nothing is changed.
            CannotWriteError: The file is read-only, or the disk fails or is full.
            VerificationError: The file is damaged.
            NotFoundError: The gallery was closed for good, or its file is gone.
            UnusableRowsError: Rows that are not finite or too large, or not of norm 1 where the
                space demands it.
            ValueError: Nested lists of unequal lengths, or a digest with half a surrogate pair.
            TypeError, AttributeError: An id or a key of metadata is no text, or metadata is no
                dict.
            Exception: An error of a listener; the change stays committed, and later listeners are
                not called.
        """
        batch = check_batch(ids, digests, metadata)
        checked = [check_new_vectors(self.space(new.space), new, len(ids)) for new in vectors]
        with self.change_transaction() as (connection, changes):
            for new in vectors:
                find_space(connection, new.space)
            result, replaced, written = insert_batch(connection, batch, checked)
            with_metadata = metadata is not None
            changes.append(
                change_after_put(checked, result, replaced, written, with_metadata=with_metadata)
            )
        return result

    def delete(self, ids: Sequence[str]) -> int:
        """Delete items from every space, and their bytes from file and log; unknown ids are
        skipped.

        Listeners are called in this thread after the commit, also if no id exists; an error of one
        reaches the caller, and the items stay deleted. Other threads that write are waited for
        without limit. If a reader prevents emptying the log, the next change tries again.

        Returns:
            Number of items that existed.

        Raises:
            BusyError: Another process still writes the gallery after 5 s; nothing is changed.
            CannotWriteError: The file is read-only, or the disk fails or is full.
            VerificationError: The file is damaged.
            NotFoundError: The gallery was closed for good, or its file is gone.
        """
        return self.delete_chosen(lambda connection: labels_of(connection, ids))

    def delete_chosen(self, choose_labels: Callable[[Connection], Labels]) -> int:
        """Delete items that are chosen in the same transaction, and their bytes from file and log.

        Listeners are called, also where n is 0. If a reader prevents emptying the log, the next
        change tries again. Other threads that write are waited for without limit.

        Args:
            choose_labels: Returns the labels of existing items, int64 [n], distinct, from the
                transaction's connection. Its error rolls back.

        Returns:
            Number n of labels that `choose_labels` returned.

        Raises:
            BusyError: Another process still writes the gallery after 5 s; nothing is changed.
            CannotWriteError: The file is read-only, or the disk fails or is full.
            VerificationError: The file is damaged.
            NotFoundError: The gallery was closed for good, or its file is gone.
            Exception: An error of a listener; the items stay deleted, and later listeners are not
                called.
        """
        with self.change_transaction() as (connection, changes):
            labels = choose_labels(connection)
            delete_labels(connection, labels)
            changes.append(Change({}, labels))
            self._unscrubbed |= len(labels) > 0
        return len(labels)

    def get(self, item_id: str) -> StoredItem | None:
        """Return an item by its id, without origin and uncertainty; None if it does not exist.

        Raises:
            VerificationError: The file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed for good, or its file is gone.
        """
        with self.read_snapshot() as connection:
            labels = labels_of(connection, [item_id])
            return read_items_by_label(connection, labels)[0] if len(labels) else None

    def items(
        self, labels: Sequence[int] | Labels, space: str | None = None
    ) -> list[StoredItem | None]:
        """Return items in the order of `labels`; None where an item does not exist (any more).

        Args:
            labels: int64 [n], in any order; a label may repeat.
            space: Id of the space whose origin and uncertainty the items get; None leaves both
                None.

        Returns:
            n items; one without a vector in the space has origin and uncertainty None.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            VerificationError: The file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed for good, or its file is gone.
        """
        with self.read_snapshot() as connection:
            return read_items_by_label(connection, labels, space)

    def list_items(self, start_after: int = 0, limit: int = 1000) -> list[StoredItem]:
        """Return a page of items by increasing label, without origin and uncertainty.

        Args:
            start_after: The last label of the previous page; 0 for the first page.
            limit: Largest number of items; 0 gives none, a negative number all.

        Returns:
            The items; empty at the end.

        Raises:
            VerificationError: The file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed for good, or its file is gone.
            OverflowError: `start_after` or `limit` has more than 64 bits.
        """
        with self.read_snapshot() as connection:
            return items_page(connection, start_after, limit)

    def count(self, space: str | None = None) -> int:
        """Return the number of items, or of vectors in a space.

        Args:
            space: Id of the space; None counts items.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            VerificationError: The file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed for good, or its file is gone.
        """
        with self.read_snapshot() as connection:
            return count_rows(connection, space)

    def load_vectors(self, space: str) -> tuple[Labels, Vectors]:
        """Return all vectors of a space in one snapshot.

        All vectors are in memory at once. Their values are not checked: they may be NaN.

        Returns:
            Labels int64 [n], increasing, and vectors float32 [n, dim]; n may be 0.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            VerificationError: The file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed for good, or its file is gone.
        """
        with self.read_snapshot() as connection:
            return read_all_vectors(connection, find_space(connection, space))

    def vector(self, label: int, space: str) -> Vectors | None:
        """Return an item's vector in a space, float32 [1, dim]; None if it has none there, or does
        not exist.

        The array is read-only, and its values are not checked: they may be NaN.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            VerificationError: The file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed for good, or its file is gone.
            OverflowError: `label` has more than 64 bits.
        """
        with self.read_snapshot() as connection:
            return read_vector(connection, label, find_space(connection, space))

    def check_pages(self) -> None:
        """Read every page and check it, which takes as long as reading the file.

        The gallery stays usable for other threads. A damaged index that still fits its pages may
        pass.

        Raises:
            DamagedError: A page is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed for good, or its file is gone.
            VerificationError: The file is no gallery, or has a newer format.
        """
        with self.read_snapshot() as connection:
            check_pages(connection, self.path)

    def read_state_value(self, key: str) -> Any:
        """Return a JSON value that is stored with the gallery; None if there is none.

        Raises:
            VerificationError: The file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed for good, or its file is gone.
        """
        with self.read_snapshot() as connection:
            return read_state_value(connection, key)

    def state(self) -> dict[str, Any]:
        """Return all JSON values that are stored with the gallery, by key.

        Without any, the mapping is empty.

        Raises:
            VerificationError: The file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed for good, or its file is gone.
        """
        with self.read_snapshot() as connection:
            return read_state_values(connection)

    def update_state(self, values: Mapping[str, Any]) -> None:
        """Store JSON values with the gallery in one transaction; None removes a value.

        Other keys stay. Listeners are not called. An error changes nothing.

        Raises:
            TypeError: A value cannot be written as JSON.
            ValueError: A value contains NaN, infinity or half a surrogate pair.
            BusyError: Another process still writes the gallery after 5 s; nothing is changed.
            CannotWriteError: The file is read-only, or the disk fails or is full.
            VerificationError: The file is damaged.
            NotFoundError: The gallery was closed for good, or its file is gone.
        """
        with self.transaction() as connection:
            set_state_values(connection, values)
