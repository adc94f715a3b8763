"""The new model's own vectors, as they are made where people look: one SQLite file.

What is acknowledged survives a kill and a power cut. Any number of processes share the file: an
item is claimed before it is embedded, and the day's budget is counted in it.
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
from nobackfill.vectors import Vectors, check_vectors, from_bytes

_ROOM = 1024
# An item's id, and the digest of its old vector: what is claimed, and what a new one is kept of.
ItemVersion = tuple[str, bytes]


def digest(vector: Vectors) -> bytes:
    """Digest an old vector: it tells that an item is still the one that was embedded."""
    return hashlib.blake2b(np.ascontiguousarray(vector, "<f4").tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class Native:
    """A vector of norm 1, or as the model makes it, and the digest of the old one beside it."""

    seen: bytes
    vector: Vectors


class Natives(LedgerFile[ItemVersion]):
    """Vectors of one model, `fingerprint`, of dimension `dim`. Raises IncompatibleSpaceError where
    the file holds another's, DamagedError, CannotWriteError, BusyError."""

    opening = (
        """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS native (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, seen BLOB NOT NULL,
    vector BLOB NOT NULL);
"""
        + LedgerFile.opening
    )

    def __init__(self, path: Path, fingerprint: str, dim: int) -> None:
        super().__init__(path)
        self._dim = dim
        make_dir(path.parent)
        with self._writing() as connection:
            facts = {"model": fingerprint, "dim": str(dim)}
            connection.executemany("INSERT OR IGNORE INTO facts VALUES (?, ?)", facts.items())
            same = dict(connection.execute("SELECT name, value FROM facts")) == facts
        if not same:
            self.close()
            raise IncompatibleSpaceError(
                f"{path}: holds vectors of another model (or of this one, declared otherwise); "
                "give each model a file of its own"
            )
        # For search; the newest number that is in memory.
        self._matrix: Vectors = np.zeros((_ROOM, dim), np.float32)
        self._norms: Vectors = np.zeros(_ROOM, np.float32)
        self._ids: list[str | None] = []
        self._known: dict[str, tuple[int, Native]] = {}
        self._newest = 0
        processes.watch_forks(self)

    def before_fork(self) -> None:
        # SQLite's locks are of a process: a connection that both have would corrupt the file.
        self._lock.acquire()
        self.close()

    def after_fork(self, child: bool) -> None:
        del child  # Either opens the file again when it needs it.
        self._lock.release()

    def __len__(self) -> int:
        with self._reading() as connection:
            return int(connection.execute("SELECT count(*) FROM native").fetchone()[0])

    def get(self, ids: Sequence[str]) -> dict[str, Native]:
        """Return the vectors that are there, by id."""
        with self._lock:
            self._catch_up()
            return {name: self._known[name][1] for name in ids if name in self._known}

    def nearest(self, query: Vectors, count: int, metric: str = "cosine") -> list[str]:
        """Ids of the nearest to a query [1, dim], exactly, nearest first."""
        with self._lock:
            self._catch_up()
            if not self._known:
                return []
            rows = len(self._ids)
            products, norms = self._matrix[:rows] @ query[0], self._norms[:rows]
            if metric == "cosine":
                products /= np.maximum(norms, np.float32(1e-12))
            elif metric == "l2":
                products = 2 * products - norms**2
            # A few more: rows of items that went hold zeros.
            most = min(rows, count + rows - len(self._known))
            best = np.argpartition(-products, most - 1)[:most]
            ordered = best[np.argsort(-products[best], kind="stable")].tolist()
            found = [name for row in ordered if (name := self._ids[row]) is not None]
            return found[:count]

    def keep(self, ids: Sequence[str], seen: Sequence[bytes], vectors: Vectors) -> None:
        """Write vectors [n, dim] and free their claims; on return they are on the disk."""
        checked = check_vectors(vectors, self._dim, what="new vectors")
        blobs = (vector.astype("<f4").tobytes() for vector in checked)
        rows = list(zip(ids, seen, blobs, strict=True))
        with self._writing() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO native (id, seen, vector) VALUES (?, ?, ?)", rows
            )
            self._settle(connection, [row[:2] for row in rows])

    def forget(self, ids: Sequence[str]) -> None:
        """Remove what is known of items that are gone."""
        if not ids:
            return
        names = [(name,) for name in ids]
        with self._lock:
            with self._writing() as connection:
                connection.executemany("DELETE FROM native WHERE id = ?", names)
                connection.executemany("DELETE FROM wanted WHERE id = ?", names)
            for name in ids:
                self._drop(name)

    def outdated(self, seen: Mapping[str, bytes]) -> None:
        """Remove vectors that were made of just this, by id; newer ones stay."""
        if not seen:
            return
        with self._lock:
            with self._writing() as connection:
                connection.executemany("DELETE FROM native WHERE id = ? AND seen = ?", seen.items())
            for name, digest_ in seen.items():
                if name in self._known and self._known[name][1].seen == digest_:
                    self._drop(name)

    def wanted(self, count: int) -> list[str]:
        """Ids that were asked for and are not there, most often first."""
        return self.names_wanted(count, "id NOT IN (SELECT id FROM native)")

    def ids(self, after: str, count: int) -> list[ItemVersion]:
        """Ids and digests in the order of ids, those above `after`."""
        with self._reading() as connection:
            return connection.execute(
                "SELECT id, seen FROM native WHERE id > ? ORDER BY id LIMIT ?", (after, count)
            ).fetchall()

    def _name(self, key: ItemVersion) -> str:
        return key[0]

    def _lacking(
        self, connection: sqlite3.Connection, keys: Sequence[ItemVersion]
    ) -> list[ItemVersion]:
        exists = "SELECT 1 FROM native WHERE id = ? AND seen = ?"
        return [key for key in keys if not connection.execute(exists, key).fetchone()]

    def _catch_up(self) -> None:
        """Take into memory what this process and others have kept since."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT number, id, seen, vector FROM native WHERE number > ? ORDER BY number",
                (self._newest,),
            ).fetchall()
        for number, name, seen, blob in rows:
            try:
                vector = from_bytes(blob, self._dim, what=f"{self._path}: {name!r}")[0]
            except (InvalidInputError, TypeError) as error:
                raise VerificationError(
                    f"{error}; remove {self._path}: it fills again as people search"
                ) from error
            self._drop(name)
            self._add(name, Native(seen, vector))
            self._newest = number
        if len(self._ids) > 2 * len(self._known) + _ROOM:
            known = [(name, native) for name, (_, native) in self._known.items()]
            self._ids, self._known = [], {}
            self._matrix = np.zeros((_ROOM, self._dim), np.float32)
            self._norms = np.zeros(_ROOM, np.float32)
            for name, native in known:
                self._add(name, native)

    def _add(self, name: str, native: Native) -> None:
        row = len(self._ids)
        if row == len(self._matrix):
            self._matrix = np.concatenate([self._matrix, np.zeros_like(self._matrix)])
            self._norms = np.concatenate([self._norms, np.zeros_like(self._norms)])
        self._ids.append(name)
        self._known[name] = (row, native)
        self._matrix[row] = native.vector
        self._norms[row] = np.linalg.norm(native.vector)

    def _drop(self, name: str) -> None:
        if found := self._known.pop(name, None):
            self._ids[found[0]] = None
            self._matrix[found[0]] = self._norms[found[0]] = 0
