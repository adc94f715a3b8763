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


def carried_labels(store: Store, space: str) -> Labels:
    """Labels of the vectors that an upgrade has carried into a space, increasing. Raises
    IncompatibleSpaceError, BusyError."""
    with store.reading() as connection:
        table = vector_table(find_space(connection, space).number)
        rows = connection.execute(
            f"SELECT label FROM {table} WHERE origin = 'upgraded' ORDER BY label"
        )
        return label_column(rows)


class Carried:
    """Follows a store from `load` on. Threads may share it."""

    def __init__(self, store: Store, space: str) -> None:
        self._store, self._space = store, space
        self._lock = threading.Lock()
        self._carried: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._count = 0
        # What came or went while the file was read, and whether carried; None: all is read.
        self._meanwhile: list[tuple[Labels, bool]] | None = []
        self._masks: list[tuple[Labels, tuple[Mask, Mask]]] = []
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
        labels = carried_labels(self._store, self._space)
        with self._lock:
            carried = np.zeros(int(labels.max(initial=-1)) + 1, np.bool_)
            carried[labels] = True
            self._carried, self._count = carried, len(labels)
            meanwhile, self._meanwhile = self._meanwhile or [], None
            for some, kept in meanwhile:
                self._mark(some, carried=kept)

    def native(self, labels: Labels) -> Mask:
        """Which of `labels` (increasing) were not carried; not to be written."""
        return self.origins(labels)[1]

    def origins(self, labels: Labels) -> tuple[Mask, Mask]:
        """Which of `labels` (increasing) were carried, and which were not; not to be written."""
        with self._lock:
            for known, masks in self._masks:
                if known is labels:
                    return masks
            carried = np.zeros(len(labels), np.bool_)
            known_here = labels < len(self._carried)
            carried[known_here] = self._carried[labels[known_here]]
            found = carried, ~carried
            # Those of the last two indexes that asked: a graph, and what lies beside it.
            self._masks = [*self._masks[-1:], (labels, found)]
            return found

    def close(self) -> None:
        """Follow no longer."""
        self._store.unsubscribe(self._on_change)

    def _on_change(self, change: Change) -> None:
        told = [(change.deleted, False)]
        if self._space in change.added:
            told.append((change.added[self._space][0], self._space in change.carried))
        with self._lock:
            for labels, carried in told:
                if self._meanwhile is not None:
                    self._meanwhile.append((labels, carried))
                else:
                    self._mark(labels, carried=carried)

    def _mark(self, labels: Labels, *, carried: bool) -> None:
        """Under the lock."""
        last = int(labels.max(initial=-1))
        if carried and last >= len(self._carried):
            room = np.zeros(2 * (last + 1), np.bool_)
            room[: len(self._carried)] = self._carried
            self._carried = room
        known = labels[labels < len(self._carried)]
        other = known[self._carried[known] != carried]
        if len(other):
            self._carried[other] = carried
            self._count += len(other) if carried else -len(other)
            self._masks = []
