"""Which items of a space an upgrade has carried there, kept up to date in memory: a byte a label.

The others' vectors were made of their images, by the space's own model.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.change import Change
from nobackfill.gallery.search.index import Labels, Mask
from nobackfill.gallery.store import Store
from nobackfill.gallery.tables import find_space, label_column, vector_table


class Carried:
    """Follows a store from `load` on. Threads may share it."""

    def __init__(self, store: Store, space: str) -> None:
        self._store, self._space = store, space
        self._lock = threading.Lock()
        self._carried: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._count = 0
        # Labels that came or went while the file was read; None: all is read.
        self._meanwhile: list[Labels] | None = []
        self._masks: list[tuple[Labels, Mask]] = []
        store.subscribe(self._on_change)

    @property
    def loaded(self) -> bool:
        """Whether it knows."""
        return self._meanwhile is None

    def __len__(self) -> int:
        """Carried items, 0 before they are loaded."""
        return self._count

    def load(self) -> None:
        """Read all origins, once. Raises IncompatibleSpaceError, BusyError."""
        with self._store.reading() as connection:
            table = vector_table(find_space(connection, self._space).number)
            rows = connection.execute(f"SELECT label FROM {table} WHERE origin = 'upgraded'")
            labels = label_column(rows)
        with self._lock:
            carried = np.zeros(int(labels.max(initial=-1)) + 1, np.bool_)
            carried[labels] = True
            self._carried, self._count = carried, len(labels)
            meanwhile, self._meanwhile = self._meanwhile or [], None
            for some in meanwhile:
                self._drop(some)

    def native(self, labels: Labels) -> Mask:
        """Which of `labels` (increasing) were not carried; not to be written."""
        with self._lock:
            for known, mask in self._masks:
                if known is labels:
                    return mask
            found = np.ones(len(labels), np.bool_)
            known_here = labels < len(self._carried)
            found[known_here] = ~self._carried[labels[known_here]]
            # Those of the last two indexes that asked: a graph, and what lies beside it.
            self._masks = [*self._masks[-1:], (labels, found)]
            return found

    def close(self) -> None:
        """Follow no longer."""
        self._store.unsubscribe(self._on_change)

    def _on_change(self, change: Change) -> None:
        gone = [change.deleted, *(labels for labels, _ in self._added(change))]
        with self._lock:
            for labels in gone:
                if self._meanwhile is not None:
                    self._meanwhile.append(labels)
                else:
                    self._drop(labels)

    def _added(self, change: Change) -> list[tuple[Labels, object]]:
        # A space that answers is filled no longer: what comes was made of images, nearly always. A
        # vector that a put carried is taken for one: it is a candidate once more, no harm.
        return [change.added[self._space]] if self._space in change.added else []

    def _drop(self, labels: Labels) -> None:
        """Under the lock."""
        known = labels[labels < len(self._carried)]
        self._count -= int(np.count_nonzero(self._carried[known]))
        if len(known):
            self._carried[known] = False
            self._masks = []
