"""Store native vectors: the new model's own vectors of items, in one SQLite file.

Writes are durable when they return. Any number of processes share the file: items are claimed in it
before they are embedded, and it counts the daily budget.
"""

import hashlib
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nobackfill import processes
from nobackfill.durable import make_dir
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError, VerificationError
from nobackfill.serving.ledger import LedgerFile
from nobackfill.vectors import Vectors, check_vectors, vector_from_bytes

_ROOM = 1024
# An item's id and the digest of its old vector: the key of a claim and of a native vector.
ItemVersion = tuple[str, bytes]


def digest_old_vector(vector: Vectors) -> bytes:
    """Return the digest of an old vector; another digest later means that the item has changed.

    Args:
        vector: any shape; its values count as little-endian float32, in C order.

    Returns:
        BLAKE2b, 16 bytes.
    """
    return hashlib.blake2b(np.ascontiguousarray(vector, "<f4").tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class NativeVector:
    """A native vector, float32 [dim], and the digest of the old vector that the item had then."""

    old_digest: bytes
    vector: Vectors


class NativeVectorFile(LedgerFile[ItemVersion]):
    """The native vectors of one model, in an SQLite file; threads may share it.

    A copy of the vectors in memory, made at the first search, follows what other processes store
    and delete. Every method may raise DamagedError, CannotWriteError and BusyError.

    Args:
        path: the file; it and its folder are made if they are missing.
        fingerprint: identifies the model and its options.
        dim: the dimension of its vectors.

    Raises:
        IncompatibleSpaceError: the file holds vectors of another model or another dimension.
        DamagedError, CannotWriteError, BusyError: the file cannot be used.
    """

    schema_statements = (
        """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS native (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, seen BLOB NOT NULL,
    vector BLOB NOT NULL);
"""
        + LedgerFile.schema_statements
    )

    def __init__(self, path: Path, fingerprint: str, dim: int) -> None:
        super().__init__(path)
        self._dim = dim
        make_dir(path.parent)
        with self._transaction() as connection:
            facts = {"model": fingerprint, "dim": str(dim)}
            connection.executemany("INSERT OR IGNORE INTO facts VALUES (?, ?)", facts.items())
            same = dict(connection.execute("SELECT name, value FROM facts")) == facts
        if not same:
            self.close()
            raise IncompatibleSpaceError(
                f"{path}: this file of native vectors belongs to another model, or to this model "
                "with other options; use one file per model"
            )
        # A copy in memory for search; `_newest` is the last number that was read.
        self._matrix: Vectors = np.zeros((_ROOM, dim), np.float32)
        self._norms: Vectors = np.zeros(_ROOM, np.float32)
        self._ids: list[str | None] = []
        self._rows_by_id: dict[str, tuple[int, NativeVector]] = {}
        self._newest = 0
        # The connection and its PRAGMA data_version when the copy last had what the file has.
        self._state: tuple[sqlite3.Connection, int] | None = None
        processes.register_for_forks(self)

    def before_fork(self) -> None:
        """Lock the object and close the file before this process is forked.

        It waits until no other thread uses the object. Call `after_fork` in the same thread.
        """
        # SQLite locks belong to a process: a connection shared with a child would corrupt the file.
        self._lock.acquire()
        self.close()

    def after_fork(self, child: bool) -> None:
        """Unlock the object, in the parent and in the child; each opens the file again when needed.

        Args:
            child: whether this process is the new one; ignored.
        """
        del child  # Parent and child each reopen the file when they need it.
        self._lock.release()

    def __len__(self) -> int:
        with self._reading() as connection:
            return int(connection.execute("SELECT count(*) FROM native").fetchone()[0])

    def read_vectors(self, ids: Sequence[str]) -> dict[str, NativeVector]:
        """Return the native vectors of items, by id; items without one are absent.

        Whether an item has changed since is not checked; compare `old_digest`.

        Args:
            ids: ids; repeated ones count once.

        Raises:
            VerificationError: the file, or a row of it, is damaged.
            BusyError, CannotWriteError: the file cannot be read or made.
        """
        with self._lock:
            self._catch_up()
            return {name: self._rows_by_id[name][1] for name in ids if name in self._rows_by_id}

    def nearest_ids(self, query: Vectors, count: int, metric: str = "cosine") -> list[str]:
        """Return the ids of the native vectors nearest to a query, nearest first, by exact search.

        Args:
            query: float32 [1, dim]; its values are not checked, and of more rows the first counts.
            count: the most ids to return, which may be more than there are; 0 or less gives none.
            metric: cosine, l2 or inner_product, for which any other text counts.

        Returns:
            At most `count` ids; empty if the file has no vector. Equal distances come in any order.

        Raises:
            ValueError: the query has another dimension.
            VerificationError: the file, or a row of it, is damaged.
            BusyError, CannotWriteError: the file cannot be read or made.
            IndexError: the query has no row.
        """
        with self._lock:
            self._catch_up()
            if not self._rows_by_id or count < 1:
                return []
            rows = len(self._ids)
            products, norms = self._matrix[:rows] @ query[0], self._norms[:rows]
            if metric == "cosine":
                products /= np.maximum(norms, np.float32(1e-12))
            elif metric == "l2":
                products = 2 * products - norms**2
            # Rows of deleted items hold zeros, so take as many more.
            most = min(rows, count + rows - len(self._rows_by_id))
            best = np.argpartition(-products, most - 1)[:most]
            ordered = best[np.argsort(-products[best], kind="stable")].tolist()
            listing = [name for row in ordered if (name := self._ids[row]) is not None]
            return listing[:count]

    def store_vectors(
        self, ids: Sequence[str], old_digests: Sequence[bytes], vectors: Vectors
    ) -> None:
        """Store native vectors durably, and settle the claims and requests of their items.

        It waits up to 30 s for another process that writes, then raises BusyError.

        Args:
            ids: n ids; existing vectors are replaced. If an id occurs twice, its last vector stays.
            old_digests: the n digests of the old vectors, as `digest_old_vector` returns them.
            vectors: float32 [n, dim]; n may be 0.

        Raises:
            InvalidInputError: the vectors have another dimension or dtype.
            ValueError: the three have different lengths.
            BusyError, CannotWriteError, DamagedError: nothing was stored.
            UnusableRowsError: a vector is not finite, or its norm is above 1e15.
        """
        checked = check_vectors(vectors, self._dim, error_name="new vectors")
        blobs = (vector.astype("<f4").tobytes() for vector in checked)
        rows = list(zip(ids, old_digests, blobs, strict=True))
        with self._transaction() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO native (id, seen, vector) VALUES (?, ?, ?)", rows
            )
            self._settle(connection, [row[:2] for row in rows])

    def delete_vectors(self, ids: Sequence[str]) -> None:
        """Delete the vectors and requests of items, by id; unknown ids are ignored.

        It waits up to 30 s for another process that writes, then raises BusyError. After `close` it
        opens the file again.

        Args:
            ids: the ids; without any, the file is not opened.

        Raises:
            BusyError, CannotWriteError, DamagedError: nothing was deleted.
        """
        if not ids:
            return
        names = [(name,) for name in ids]
        with self._lock:
            with self._transaction() as connection:
                connection.executemany("DELETE FROM native WHERE id = ?", names)
                connection.executemany("DELETE FROM wanted WHERE id = ?", names)
            for name in ids:
                self._drop(name)

    def delete_outdated(self, old_digests: Mapping[str, bytes]) -> None:
        """Delete the native vectors of items that have changed.

        It waits up to 30 s for another process that writes, then raises BusyError.

        Args:
            old_digests: by id, the digest of the old vector that the native vector to delete
                belongs to. A vector with another digest stays, because it belongs to newer
                content. Unknown ids are ignored; without any, the file is not opened.

        Raises:
            BusyError, CannotWriteError, DamagedError: nothing was deleted.
        """
        if not old_digests:
            return
        with self._lock:
            with self._transaction() as connection:
                connection.executemany(
                    "DELETE FROM native WHERE id = ? AND seen = ?", old_digests.items()
                )
            for name, digest_ in old_digests.items():
                if name in self._rows_by_id and self._rows_by_id[name][1].old_digest == digest_:
                    self._drop(name)

    def requested_ids(self, count: int) -> list[str]:
        """Return ids that queries requested or that failed, and that have no native vector, most
        requested first.

        Args:
            count: the most ids to return; 0 gives none, a negative number all.

        Raises:
            BusyError, CannotWriteError, DamagedError: the file cannot be read or made.
        """
        return self.requested_keys(count, "id NOT IN (SELECT id FROM native)")

    def list_ids(self, last_id: str, count: int) -> list[ItemVersion]:
        """Return a page of ids with native vectors, each with its digest, ordered by id.

        Args:
            last_id: the last id of the page before; empty for the first page.
            count: the most ids to return, at least 1; a negative number gives all.

        Returns:
            Ids and digests; empty at the end.

        Raises:
            BusyError, CannotWriteError, DamagedError: the file cannot be read or made.
        """
        with self._reading() as connection:
            return connection.execute(
                "SELECT id, seen FROM native WHERE id > ? ORDER BY id LIMIT ?", (last_id, count)
            ).fetchall()

    def _name(self, key: ItemVersion) -> str:
        return key[0]

    def _lacking(
        self, connection: sqlite3.Connection, keys: Sequence[ItemVersion]
    ) -> list[ItemVersion]:
        exists = "SELECT 1 FROM native WHERE id = ? AND seen = ?"
        return [key for key in keys if not connection.execute(exists, key).fetchone()]

    def _catch_up(self) -> None:
        """Follow what this and other processes have stored and deleted since the last call."""
        with self._reading() as connection:
            # Read before the snapshot: a commit in between is noticed at the next call.
            state = connection, connection.execute("PRAGMA data_version").fetchone()[0]
            connection.execute("BEGIN")
            try:
                self._read_new(connection)
                if state != self._state:
                    self._drop_deleted(connection)
                    self._state = state
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        self._pack()

    def _read_new(self, connection: sqlite3.Connection) -> None:
        query = "SELECT number, id, seen, vector FROM native WHERE number > ? ORDER BY number"
        rows = connection.execute(query, (self._newest,)).fetchall()
        for number, name, old_digest, blob in rows:
            try:
                vector = vector_from_bytes(blob, self._dim, error_name=f"{self._path}: {name!r}")[0]
            except (InvalidInputError, TypeError) as error:
                raise VerificationError(
                    f"{error}; the file of native vectors is damaged: delete {self._path}, and "
                    "re-embedding fills it again"
                ) from error
            self._drop(name)
            self._add(name, NativeVector(old_digest, vector))
            self._newest = number

    def _drop_deleted(self, connection: sqlite3.Connection) -> None:
        """Drop what other connections have deleted, once all that they stored was read."""
        (count,) = connection.execute("SELECT count(*) FROM native").fetchone()
        if count < len(self._rows_by_id):
            ids = {name for (name,) in connection.execute("SELECT id FROM native")}
            for name in self._rows_by_id.keys() - ids:
                self._drop(name)

    def _pack(self) -> None:
        """Free the rows of deleted vectors once they are more than those of the others."""
        if len(self._ids) > 2 * len(self._rows_by_id) + _ROOM:
            natives = [(name, native) for name, (_, native) in self._rows_by_id.items()]
            self._ids, self._rows_by_id = [], {}
            self._matrix = np.zeros((_ROOM, self._dim), np.float32)
            self._norms = np.zeros(_ROOM, np.float32)
            for name, native in natives:
                self._add(name, native)

    def _add(self, name: str, native: NativeVector) -> None:
        row = len(self._ids)
        if row == len(self._matrix):
            self._matrix = np.concatenate([self._matrix, np.zeros_like(self._matrix)])
            self._norms = np.concatenate([self._norms, np.zeros_like(self._norms)])
        self._ids.append(name)
        self._rows_by_id[name] = (row, native)
        self._matrix[row] = native.vector
        self._norms[row] = np.linalg.norm(native.vector)

    def _drop(self, name: str) -> None:
        if listing := self._rows_by_id.pop(name, None):
            self._ids[listing[0]] = None
            self._matrix[listing[0]] = self._norms[listing[0]] = 0
