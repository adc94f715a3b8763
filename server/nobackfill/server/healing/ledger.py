"""Who embeds which item of a gallery, what was asked for in vain, and what a day has cost.

Labels are never used twice, so what is noted of an item that went says nothing of the next.
"""

import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from nobackfill.durable import refusal, refusing_sqlite, transaction
from nobackfill.errors import DamagedError, NotFoundError
from nobackfill.gallery.filters import Matches
from nobackfill.gallery.listing import CarriedLabels
from nobackfill.gallery.search.index import Labels, Mask
from nobackfill.gallery.store import Store
from nobackfill.items import claims

FILE = "healing.sqlite"
_BEGUN = time.time()


class HealingLedger(Protocol):
    """Of one space of one gallery. Each change is durable; all raise BusyError, CannotWriteError,
    UnavailableError, NotFoundError once it is closed."""

    def load(self) -> None:
        """Read what `carried` and `native` need, where that is due, however long it takes."""
        ...

    def carried(self) -> int | None:
        """Items that an upgrade has carried and nobody has embedded since; None: not known yet."""
        ...

    def native(self, allowed: Matches | None) -> Matches | None:
        """Those of the others that are `allowed`; None where nobody can tell."""
        ...

    def claim(self, labels: Sequence[int], day: str, budget: int) -> list[int]:
        """Those that nobody embeds at present and that the day's budget has room for; the others
        are noted as wanted."""
        ...

    def settle(self, labels: Collection[int]) -> None:
        """They are embedded, or gone."""
        ...

    def release(self, labels: Collection[int]) -> None:
        """They could not be embedded: what they cost their day is given back, and they are wanted
        no more until they are asked for again."""
        ...

    def wanted(self, count: int) -> list[int]:
        """Those that were asked for in vain, most often first."""
        ...

    def spent(self, day: str) -> int:
        """Items that were claimed on a day, by whichever gateway, without those that were given
        up."""
        ...

    def close(self) -> None: ...


class _Native:
    """The native ones among `allowed`, or among all; see Matches."""

    def __init__(self, carried: CarriedLabels, allowed: Matches | None) -> None:
        self._carried, self._allowed = carried, allowed

    def labels(self) -> Labels:
        raise NotImplementedError("searches ask for masks")

    def __len__(self) -> int:
        raise NotImplementedError("searches ask for masks")

    def mask(self, labels: Labels) -> Mask:
        native = self._carried.native(labels)
        return native if self._allowed is None else native & self._allowed.mask(labels)


class FileLedger:
    """What is said of each method: Ledger. In a file beside the gallery, which is not its truth:
    lost or damaged, it begins anew."""

    def __init__(self, folder: Path, store: Store, space: str) -> None:
        self._path = folder / FILE
        self._lock = threading.Lock()
        self._closed = False
        self._carried = CarriedLabels(store, space)
        try:
            self._connection = _open(self._path)
        except BaseException:
            self._carried.close()
            raise

    def load(self) -> None:
        if not self._carried.loaded:
            self._carried.load()

    def carried(self) -> int | None:
        return len(self._carried) if self._carried.loaded else None

    def native(self, allowed: Matches | None) -> Matches | None:
        return _Native(self._carried, allowed) if self._carried.loaded else None

    def claim(self, labels: Sequence[int], day: str, budget: int) -> list[int]:
        with self._writing() as connection:
            return [int(n) for n in claims.claim(connection, _names(labels), day, budget)]

    def settle(self, labels: Collection[int]) -> None:
        with self._writing() as connection:
            claims.settle(connection, _names(labels))

    def release(self, labels: Collection[int]) -> None:
        with self._writing() as connection:
            claims.release(connection, _names(labels))

    def wanted(self, count: int) -> list[int]:
        with self._using() as connection, refusing_sqlite(self._path):
            return [int(name) for name in claims.wanted(connection, count, "times > 0")]

    def spent(self, day: str) -> int:
        with self._using() as connection, refusing_sqlite(self._path):
            return claims.spent(connection, day)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return  # at a stop two threads may end it
            self._closed = True
            self._connection.close()
        self._carried.close()

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._closed:
                raise NotFoundError(f"{self._path}: its gallery heals otherwise by now")
            yield self._connection

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._using() as connection, transaction(connection):
            yield connection


def _names(labels: Collection[int]) -> list[str]:
    return [str(label) for label in labels]


def _open(path: Path, *, again: bool = True) -> sqlite3.Connection:
    path.touch(0o600)
    connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        for statement in claims.SCHEMA.split(";")[:-1]:
            connection.execute(statement)
        # Claims of an earlier life: this process alone has the folder.
        connection.execute("DELETE FROM claim WHERE until < ?", (_BEGUN + claims.CLAIM_SECONDS,))
        return connection
    except sqlite3.Error as error:
        connection.close()
        found = refusal(path, error)
        if not isinstance(found, DamagedError) or not again:
            raise found or error from error
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return _open(path, again=False)
