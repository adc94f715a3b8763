"""Record re-embedding in a gallery, and know which of its vectors are native.

Labels are never reused, so entries of a deleted item say nothing about another one.
"""

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from nobackfill.errors import DamagedError, NotFoundError
from nobackfill.gallery.filters import Matches
from nobackfill.gallery.listing import MigratedItems
from nobackfill.gallery.search.index import Labels, Mask
from nobackfill.gallery.store import Store
from nobackfill.serving.ledger import CLAIM_SECONDS, Ledger, LedgerFile

FILE = "healing.sqlite"


class HealingLedger(Ledger[int], Protocol):
    """Record the work on one space of one gallery, by label.

    Once a ledger in a file is closed, methods that use the file raise NotFoundError. One in a
    database stays usable.
    """

    def load_origins(self) -> None:
        """Read what `count_migrated` and `native_matches` need, if it is due.

        It may take long.

        Raises:
            NotFoundError: the ledger or the gallery is closed.
            IncompatibleSpaceError: the gallery does not have the space.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
        """

    def count_migrated(self) -> int | None:
        """Return the number of migrated items that were not re-embedded; None if it is not known
        yet.

        It reads memory only, as of the last `load_origins` or later.
        """

    def native_matches(self, matches: Matches | None) -> Matches | None:
        """Return the native items among some, for masks of a search; None if they are not known.

        It reads memory only. A database never knows them.

        Args:
            matches: the items; None means all.
        """

    def requested_labels(self, count: int) -> Sequence[int]:
        """Return labels that queries requested in vain, most often first.

        A label may be claimed, re-embedded or deleted by now.

        Args:
            count: most labels; 0 gives none.

        Raises:
            NotFoundError: the ledger is closed.
            BusyError, UnavailableError: the ledger is locked, or does not answer.
            CannotWriteError: the ledger cannot be written.
            VerificationError: the ledger is damaged.
        """

    def close(self) -> None:
        """Close the ledger; a second call does nothing.

        Claims that are open end with the process.
        """


class _Native:
    """Match the native items among some, or among all."""

    def __init__(self, carried: MigratedItems, matches: Matches | None) -> None:
        self._carried, self._matches = carried, matches

    def labels(self) -> Labels:
        raise NotImplementedError("native items cannot be listed; use mask(labels)")

    def __len__(self) -> int:
        raise NotImplementedError("native items cannot be counted; use mask(labels)")

    def mask(self, labels: Labels) -> Mask:
        native = self._carried.native_mask(labels)
        return native if self._matches is None else native & self._matches.mask(labels)


class FileLedger(LedgerFile[int]):
    """Keep the ledger in a file next to the gallery; a lost or damaged file begins empty."""

    # Claims of an earlier process end: only this process uses the folder.
    _end_claims = f"DELETE FROM claim WHERE until < {time.time() + CLAIM_SECONDS};"  # noqa: S608
    schema_statements = LedgerFile.schema_statements + _end_claims
    synchronous = "NORMAL"

    def __init__(self, folder: Path, store: Store, space: str) -> None:
        """Open the file, or make it; end claims of an earlier process, and delete a damaged file.

        The space is not checked here. It follows the store's commits until `close`.

        Args:
            folder: the gallery's folder.
            store: the gallery's store.
            space: the space to re-embed.

        Raises:
            BusyError: the file is locked for 30 seconds.
            CannotWriteError: the file cannot be made or written.
            OSError: a damaged file cannot be deleted.
        """
        super().__init__(folder / FILE)
        self._is_closed = False
        try:
            self._check_opens()
        except DamagedError:
            for suffix in ("", "-wal", "-shm"):
                self._path.with_name(FILE + suffix).unlink(missing_ok=True)
            self._check_opens()
        self._carried = MigratedItems(store, space)

    def _check_opens(self) -> None:
        with self._reading():
            pass

    def load_origins(self) -> None:
        """Read what `count_migrated` and `native_matches` need, if it is due; see
        HealingLedger.load_origins.

        It reads all origins of the space once, and follows commits from then on.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            BusyError: the gallery's file is locked.
            VerificationError: the gallery's file is damaged.
            NotFoundError: the gallery was closed.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
        """
        if not self._carried.is_loaded:
            self._carried.load()

    def count_migrated(self) -> int | None:
        """Return the number of migrated items that were not re-embedded; None if it is not known
        yet; see HealingLedger.count_migrated.

        After `load_origins` it follows every commit of this process.
        """
        return len(self._carried) if self._carried.is_loaded else None

    def native_matches(self, matches: Matches | None) -> Matches | None:
        """Return the native items among some; None if they are not known.

        See HealingLedger.native_matches.

        They are not known before `load_origins`. The result has only masks: asking for its labels
        or length raises NotImplementedError.

        Args:
            matches: the items; None means all.
        """
        return _Native(self._carried, matches) if self._carried.is_loaded else None

    def requested_labels(self, count: int) -> list[int]:
        """Return labels that queries requested in vain, most often first; see
        HealingLedger.requested_labels.

        Args:
            count: most labels; 0 gives none, and a negative number all.

        Raises:
            NotFoundError: the ledger is closed.
            BusyError: the file is locked for 30 seconds.
            CannotWriteError: the file cannot be written.
            DamagedError: the file is damaged.
        """
        return [int(name) for name in self.requested_keys(count)]

    def close(self) -> None:
        """Close the ledger; a second call does nothing; see HealingLedger.close.

        It waits for a transaction of another thread. Other methods then raise NotFoundError, except
        `count_migrated` and `native_matches`.
        """
        with self._lock:
            if self._is_closed:
                return  # two threads may close it when the gateway stops
            self._is_closed = True
            super().close()
        self._carried.close()

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._is_closed:
            raise NotFoundError(
                f"{self._path}: the record of re-embedding is closed, because the gallery's source "
                "or space has changed; the next query opens another"
            )
        return super()._connection
