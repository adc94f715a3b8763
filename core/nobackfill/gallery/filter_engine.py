"""Which items pass a filter, kept up to date in memory: one engine for server and device.

What the file said when a filter was first asked is one segment; items that were changed since are
left out of it and are a second, small one. When that is no longer small, the first is read anew
beside those who ask.
"""

import contextlib
import hashlib
import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import BusyError, NotFoundError
from nobackfill.gallery.filters import Filter, check
from nobackfill.gallery.search.index import Labels, Mask, Rows, rows_of
from nobackfill.gallery.segment import Segment, StoredSegment, read_metadata, segment_of
from nobackfill.gallery.spec import Metadata
from nobackfill.gallery.store import Change, Store
from nobackfill.gallery.stored_columns import find

# Of the columns of one gallery.
MOST_BYTES = 128 << 20
# Changed items after which everything is read anew: this many, or this share of all.
LEAST_CHANGED = 2000
CHANGED_SHARE = 20
# Changed items that are remembered by label while nobody asks; more are not read one by one.
MOST_STALE = 20_000
# Of the answers to filters that are kept for the next who asks the same, while nothing changes.
MOST_ANSWER_BYTES = 16 << 20
# Label arrays of indexes whose places in the large segment are remembered.
KNOWN_INDEXES = 4


@dataclass(frozen=True)
class _Base:
    """The large segment's labels, and where labels of indexes lie in it: len(labels) for none."""

    labels: Labels
    known: list[tuple[Labels, NDArray[np.int32] | None]]

    def places(self, labels: Labels) -> NDArray[np.int32] | None:
        """The row of each of `labels`; None: they are the same."""
        for known, places in tuple(self.known):
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


@dataclass
class Matches:
    """The items that passed at one moment."""

    _base: _Base
    _mask: Mask
    # Of those that were changed since, increasing.
    _changed: Labels
    # The masks of the last indexes that asked.
    _masks: list[tuple[Labels, Mask]] = field(default_factory=list)

    def labels(self) -> Labels:
        """All of them, increasing."""
        old = self._base.labels[self._mask]
        return np.sort(np.concatenate([old, self._changed])) if len(self._changed) else old

    def __len__(self) -> int:
        return int(np.count_nonzero(self._mask)) + len(self._changed)

    def mask(self, labels: Labels) -> Mask:
        """Which of an index's `labels` (increasing) passed, as Index.search takes it; not to be
        written."""
        for known, mask in tuple(self._masks):
            if known is labels:
                return mask
        places = self._base.places(labels)
        found = self._mask.copy() if places is None else np.append(self._mask, False)[places]
        found[rows_of(labels, self._changed)] = True
        found.flags.writeable = False
        self._masks = [*self._masks, (labels, found)][-KNOWN_INDEXES:]
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
    # By a digest of the filter; the last was used last.
    answers: dict[bytes, Matches] = field(default_factory=dict)

    def passing(self, filtered: Filter, keys: frozenset[str]) -> Matches:
        mask = self.stored.passing(filtered, keys)
        mask[self.gone] = False
        return Matches(self.base, mask, self.recent.labels[self.recent.passing(filtered)])

    def most(self) -> int:
        """Changed items that are kept beside it."""
        return max(LEAST_CHANGED, len(self.base.labels) // CHANGED_SHARE)


class FilterEngine:
    """Answers filters on one store, from any thread. Nothing is held until the first."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Taken before _lock, for labels and for what changed: one thread reads for all. Columns are
        # read without it. A listener takes only _lock.
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._state: _State | None = None
        # Labels that the file has to be asked about again, since somebody has asked for anything.
        self._stale: set[int] = set()
        self._following = False
        # Labels that changed since the large segment began to be read anew; None: it is not.
        self._renewal: set[int] | None = None
        store.subscribe(self._on_change)

    def close(self) -> None:
        """Stop following the store."""
        self._store.unsubscribe(self._on_change)

    def passing(self, filtered: Filter) -> Matches:
        """Items that pass now: every change that was acknowledged before the call is in it.

        Raises InvalidInputError for a filter that `filters.check` refuses.
        """
        keys = check(filtered)
        # Not the filter itself: to Python True equals 1, and 10,000 long values would be kept.
        name = hashlib.blake2b(repr(filtered).encode("utf-8", "surrogatepass")).digest()
        with self._reading:
            state = self._refreshed()
        with self._lock:
            known = state.answers.pop(name, None)
            if known is not None:
                state.answers[name] = known
                return known
        found = state.passing(filtered, keys)
        with self._lock:
            state.answers[name] = found
            # Each is a byte an item, and as much again for each index that has asked for it.
            size = (1 + KNOWN_INDEXES) * len(state.base.labels)
            while len(state.answers) * size > MOST_ANSWER_BYTES:
                del state.answers[next(iter(state.answers))]
        return found

    def _refreshed(self) -> _State:
        with self._lock:
            stale, self._stale = self._stale, set()
            # None until all is read: an error on the way leaves nothing half old.
            state, self._state = self._state, None
            self._following = True
        if state is None:
            state = _beginning(self._store)
        elif stale:
            found = read_metadata(self._store, list(stale))
            changed = state.changed | {label: found.get(label) for label in stale}
            recent = {label: what for label, what in changed.items() if what is not None}
            gone = rows_of(state.base.labels, np.array(sorted(changed), np.int64))
            state = _State(state.stored, state.base, changed, segment_of(recent), gone)
        with self._lock:
            if self._following:
                self._state = state
                if len(state.changed) > state.most() and self._renewal is None:
                    self._renewal = set()
                    work = threading.Thread(
                        target=self._renew,
                        args=(state.stored.held(), self._renewal),
                        name="filters",
                        daemon=True,
                    )
                    work.start()
        return state

    def _renew(self, keys: list[str], since: set[int]) -> None:
        """Read everything anew, `keys` first, while what is there answers."""
        try:
            # Busy, or closed: who asks next begins again.
            with contextlib.suppress(BusyError, NotFoundError):
                state = _beginning(self._store)
                for key in keys:
                    state.stored.column(key)
                with self._reading, self._lock:
                    if self._renewal is since:
                        self._state = state
                        self._stale |= since
        finally:
            with self._lock:
                if self._renewal is since:
                    self._renewal = None

    def _on_change(self, change: Change) -> None:
        with self._lock:
            if not self._following:
                return
            labels = [*change.deleted.tolist(), *change.described.tolist()]
            self._stale.update(labels)
            if self._renewal is not None:
                self._renewal.update(labels)
            if len(self._stale) > MOST_STALE:
                # More than a search would want to read: it will read everything.
                self._state, self._following = None, False
                self._stale, self._renewal = set(), None


def _beginning(store: Store) -> _State:
    stored = StoredSegment(store, MOST_BYTES)
    nothing = np.empty(0, np.intp)
    return _State(stored, _Base(stored.labels, []), {}, segment_of({}), nothing)


def passing_labels(store: Store, filtered: Filter) -> Labels:
    """Labels of the items that pass, int64, increasing; asked once. Raises like `FilterEngine`."""
    keys = check(filtered)
    stored = StoredSegment(store, MOST_BYTES)
    return stored.labels[stored.passing(filtered, keys)]
