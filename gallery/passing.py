"""Which items pass a filter, kept up to date in memory: one engine for server and device.

What the file said when a filter was first asked is one segment; items that were changed since are
left out of it and are a second, small one.
"""

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gallery.filters import Filter, check
from gallery.index import Labels, Mask, Rows, rows_of
from gallery.put import Metadata
from gallery.segment import Segment, StoredSegment, find, read_metadata, segment_of
from gallery.store import Change, Store

# Of the columns of one gallery.
MOST_BYTES = 128 << 20
# Changed items after which everything is read anew: this many, or this share of all.
LEAST_CHANGED = 2000
CHANGED_SHARE = 20
# Changed items that are remembered by label while nobody asks.
MOST_STALE = 100_000
# Label arrays of indexes whose places in the large segment are remembered.
KNOWN_INDEXES = 4


@dataclass(frozen=True)
class _Base:
    """The large segment's labels, and where labels of indexes lie in it: len(labels) for none."""

    labels: Labels
    known: list[tuple[Labels, NDArray[np.int32] | None]]

    def places(self, labels: Labels) -> NDArray[np.int32] | None:
        """The row of each of `labels`; None: they are the same."""
        for known, places in self.known:
            if known is labels:
                return places
        if np.array_equal(labels, self.labels):
            made = None
        else:
            rows, there = find(self.labels, labels)
            made = np.where(there, rows, len(self.labels)).astype(np.int32)
        self.known.append((labels, made))
        del self.known[:-KNOWN_INDEXES]
        return made


@dataclass(frozen=True)
class Passing:
    """The items that passed at one moment."""

    _base: _Base
    _mask: Mask
    # Of those that were changed since, increasing.
    _changed: Labels

    def labels(self) -> Labels:
        """All of them, increasing."""
        old = self._base.labels[self._mask]
        return np.sort(np.concatenate([old, self._changed])) if len(self._changed) else old

    def __len__(self) -> int:
        return int(np.count_nonzero(self._mask)) + len(self._changed)

    def mask(self, labels: Labels) -> Mask:
        """Which of an index's `labels` (increasing) passed, as Index.search takes it."""
        places = self._base.places(labels)
        found = self._mask.copy() if places is None else np.append(self._mask, False)[places]
        found[rows_of(labels, self._changed)] = True
        return found


@dataclass(frozen=True)
class _State:
    """What was read: `changed` since (None: deleted), of which `recent` are there, and `gone` are
    the rows of the large segment that count no more."""

    stored: StoredSegment
    base: _Base
    changed: dict[int, Metadata | None]
    recent: Segment
    gone: Rows

    def most(self) -> int:
        """Changed items that are kept beside it."""
        return max(LEAST_CHANGED, len(self.base.labels) // CHANGED_SHARE)


class Filtering:
    """Answers filters on one store, from any thread. Nothing is held until the first."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Taken before _lock: one thread reads for all. A listener takes only _lock.
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._state: _State | None = None
        # Labels that the file has to be asked about again, since somebody has asked for anything.
        self._stale: set[int] = set()
        self._following = False
        store.subscribe(self._on_change)

    def close(self) -> None:
        """Stop following the store."""
        self._store.unsubscribe(self._on_change)

    def passing(self, filtered: Filter) -> Passing:
        """Items that pass now: every change that was acknowledged before the call is in it.

        Raises InvalidInputError for a filter that `filters.check` refuses.
        """
        keys = check(filtered)
        with self._reading:
            state = self._refreshed()
            mask = state.stored.passing(filtered, keys)
            mask[state.gone] = False
            recent = state.recent.labels[state.recent.passing(filtered)]
            return Passing(state.base, mask, recent)

    def _refreshed(self) -> _State:
        with self._lock:
            stale, self._stale = self._stale, set()
            # None until all is read: an error on the way leaves nothing half old.
            state, self._state = self._state, None
            self._following = True
        if state is None or len(state.changed) + len(stale) > state.most():
            stored = StoredSegment(self._store, MOST_BYTES)
            nothing = np.empty(0, np.intp)
            state = _State(stored, _Base(stored.labels, []), {}, segment_of({}), nothing)
        elif stale:
            found = read_metadata(self._store, list(stale))
            changed = state.changed | {label: found.get(label) for label in stale}
            recent = {label: what for label, what in changed.items() if what is not None}
            gone = rows_of(state.base.labels, np.array(sorted(changed), np.int64))
            state = _State(state.stored, state.base, changed, segment_of(recent), gone)
        with self._lock:
            if self._following:
                self._state = state
        return state

    def _on_change(self, change: Change) -> None:
        with self._lock:
            if not self._following:
                return
            self._stale.update(change.deleted.tolist(), change.described.tolist())
            if len(self._stale) > MOST_STALE:
                # More than a search would want to read: it will read everything.
                self._state, self._following = None, False
                self._stale = set()


def passing_labels(store: Store, filtered: Filter) -> Labels:
    """Labels of the items that pass, int64, increasing; asked once. Raises like `Filtering`."""
    keys = check(filtered)
    stored = StoredSegment(store, MOST_BYTES)
    return stored.labels[stored.passing(filtered, keys)]
