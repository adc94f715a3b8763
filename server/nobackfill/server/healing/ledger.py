"""The ledger of a gallery that heals, and which of its vectors are native.

Labels are never used twice, so what is noted of an item that went says nothing of the next.
"""

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from nobackfill.errors import DamagedError, NotFoundError
from nobackfill.gallery.filters import Matches
from nobackfill.gallery.listing import CarriedLabels
from nobackfill.gallery.search.index import Labels, Mask
from nobackfill.gallery.store import Store
from nobackfill.serving.ledger import CLAIM_SECONDS, Ledger, LedgerFile

FILE = "healing.sqlite"


class HealingLedger(Ledger[int], Protocol):
    """Of one space of one gallery, by label. All raise NotFoundError once it is closed."""

    def load(self) -> None:
        """Read what `carried` and `native` need, where that is due, however long it takes."""
        ...

    def carried(self) -> int | None:
        """Count the items that an upgrade has carried and nobody has embedded since; None: that is
        not known yet."""
        ...

    def native(self, allowed: Matches | None) -> Matches | None:
        """Return those of the others that are `allowed`; None where nobody can tell."""
        ...

    def wanted(self, count: int) -> Sequence[int]:
        """Return labels that were asked for in vain, most often first."""
        ...

    def close(self) -> None:
        """Let go of what is open; may be called twice."""
        ...


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


class FileLedger(LedgerFile[int]):
    """A HealingLedger in a file beside the gallery. The file is not the gallery's truth: lost or
    damaged, it begins anew."""

    # Claims of an earlier life end: this process alone has the folder.
    opening = f"{LedgerFile.opening}DELETE FROM claim WHERE until < {time.time() + CLAIM_SECONDS};"  # noqa: S608
    synchronous = "NORMAL"

    def __init__(self, folder: Path, store: Store, space: str) -> None:
        super().__init__(folder / FILE)
        self._closed = False
        try:
            self._opened = self._open()
        except DamagedError:
            for suffix in ("", "-wal", "-shm"):
                self._path.with_name(FILE + suffix).unlink(missing_ok=True)
            self._opened = self._open()
        self._carried = CarriedLabels(store, space)

    def load(self) -> None:
        if not self._carried.loaded:
            self._carried.load()

    def carried(self) -> int | None:
        return len(self._carried) if self._carried.loaded else None

    def native(self, allowed: Matches | None) -> Matches | None:
        return _Native(self._carried, allowed) if self._carried.loaded else None

    def wanted(self, count: int) -> list[int]:
        return [int(name) for name in self.names_wanted(count)]

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return  # at a stop two threads may end it
            self._closed = True
            super().close()
        self._carried.close()

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._closed:
            raise NotFoundError(f"{self._path}: its gallery heals otherwise by now")
        return super()._connection
