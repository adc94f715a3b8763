"""Which items pass a filter, kept up to date in memory: one engine for server and device.

What the file said when a filter was first asked is one segment; items that were changed since are
left out of it and are a second, small one. When that is no longer small, the first is read anew
beside those who ask.
"""

import contextlib
import hashlib
import json
import math
import sqlite3
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import BusyError, NotFoundError
from nobackfill.gallery import reading
from nobackfill.gallery.filters import (
    LARGEST_INTEGER,
    LEAST_INTEGER,
    All,
    AnyOf,
    Filter,
    Not,
    OneOf,
    Range,
    Scalar,
    Test,
    TimeRange,
    check,
    microseconds,
)
from nobackfill.gallery.search.index import Labels, Mask, Rows, rows_of
from nobackfill.gallery.spec import Metadata
from nobackfill.gallery.store import Change, Store, storable

# Metadata as columns: for each key sorted values with the rows that have them, in numpy arrays.

Numbers = NDArray[np.int64] | NDArray[np.float64]
# Of items, in the order of a segment's labels.
ColumnRows = NDArray[np.int32]
Bound = int | float


class Sorted(NamedTuple):
    """`values` increasing, each with the row that has it."""

    values: Numbers
    rows: ColumnRows


class SortedTexts(NamedTuple):
    """`values` increasing; rows of value i lie from starts[i] to starts[i + 1]."""

    values: list[str]
    starts: NDArray[np.int64]
    rows: ColumnRows


@dataclass
class KeyColumn:
    """What a segment's items have under one key; a list counts as each of its elements. Flags are
    the rows that have False, and those that have True."""

    texts: SortedTexts
    integers: Sorted
    floats: Sorted
    flags: tuple[ColumnRows, ColumnRows]

    @cached_property
    def _times(self) -> Sorted:
        """Those of the texts that are dates or times, in microseconds."""
        found = [
            (time, row)
            for i, time in enumerate(map(microseconds, self.texts.values))
            if time is not None
            for row in self._with_text(i).tolist()
        ]
        times = np.array([time for time, _ in found], np.int64)
        return in_order(times, np.array([row for _, row in found], np.int32))

    @cached_property
    def bytes(self) -> int:
        """About how much memory it takes."""
        arrays = (*self.texts[1:], *self.integers, *self.floats, *self.flags)
        texts = sum(map(sys.getsizeof, self.texts.values)) + 8 * len(self.texts.values)
        # A time for each text is reckoned with, for it may come to that.
        return texts + 12 * len(self.texts.rows) + sum(array.nbytes for array in arrays)

    def rows(self, test: Test) -> Sequence[ColumnRows]:
        """The rows for which `test` holds, in pieces; a row may come twice."""
        if isinstance(test, OneOf):
            return self._one_of(test.values)
        if isinstance(test, Range):
            return [_between(column, test) for column in (self.integers, self.floats)]
        if isinstance(test, TimeRange):
            return [_between(self._times, test)]
        return [self.texts.rows, self.integers.rows, self.floats.rows, *self.flags]

    def _one_of(self, values: Sequence[Scalar]) -> list[ColumnRows]:
        found = []
        numbers: list[int | float] = []
        for value in values:
            if isinstance(value, bool):
                found.append(self.flags[value])
            elif isinstance(value, str):
                i = bisect_left(self.texts.values, value)
                if i < len(self.texts.values) and self.texts.values[i] == value:
                    found.append(self._with_text(i))
            else:
                numbers.append(value)
        if numbers:
            integers = [int(n) for n in numbers if math.isfinite(n) and n == int(n)]
            integers = [n for n in integers if LEAST_INTEGER <= n <= LARGEST_INTEGER]
            found += _equal(self.integers, np.array(integers, np.int64))
            exact = [float(n) for n in numbers if float(n) == n]
            found += _equal(self.floats, np.array(exact, np.float64))
        return found

    def _with_text(self, i: int) -> ColumnRows:
        return self.texts.rows[self.texts.starts[i] : self.texts.starts[i + 1]]


def column_of(values: Iterable[tuple[Scalar, int]]) -> KeyColumn:
    """Of values with their rows, in any order."""
    texts: list[tuple[str, int]] = []
    integers: list[tuple[int, int]] = []
    floats: list[tuple[float, int]] = []
    flags: tuple[list[int], list[int]] = ([], [])
    for value, row in values:
        if isinstance(value, bool):
            flags[value].append(row)
        elif isinstance(value, str):
            texts.append((value, row))
        elif isinstance(value, int) and LEAST_INTEGER <= value <= LARGEST_INTEGER:
            integers.append((value, row))
        else:
            # A larger integer is to SQLite what it is here.
            floats.append((float(value), row))
    texts.sort()
    changes = [i for i in range(1, len(texts)) if texts[i][0] != texts[i - 1][0]]
    starts = np.array([0, *changes, len(texts)] if texts else [0], np.int64)
    return KeyColumn(
        SortedTexts(list(dict(texts)), starts, np.array([row for _, row in texts], np.int32)),
        _in_order(integers, np.dtype(np.int64)),
        _in_order(floats, np.dtype(np.float64)),
        (np.array(flags[0], np.int32), np.array(flags[1], np.int32)),
    )


def _in_order(pairs: Sequence[tuple[float, int]], kind: np.dtype[Any]) -> Sorted:
    values = np.array([value for value, _ in pairs], kind)
    return in_order(values, np.array([row for _, row in pairs], np.int32))


def in_order(values: Numbers, rows: ColumnRows) -> Sorted:
    """Sorted by value."""
    order = np.argsort(values, kind="stable")
    return Sorted(values[order], rows[order])


def _equal(column: Sorted, wanted: Numbers) -> list[ColumnRows]:
    starts = np.searchsorted(column.values, wanted, "left").tolist()
    ends = np.searchsorted(column.values, wanted, "right").tolist()
    return [column.rows[start:end] for start, end in zip(starts, ends, strict=True) if start < end]


def _between(column: Sorted, test: Range | TimeRange) -> ColumnRows:
    start, end = 0, len(column.values)
    if test.at_least is not None:
        start = max(start, _position(column.values, test.at_least, after=False))
    if test.greater_than is not None:
        start = max(start, _position(column.values, test.greater_than, after=True))
    if test.less_than is not None:
        end = min(end, _position(column.values, test.less_than, after=False))
    if test.at_most is not None:
        end = min(end, _position(column.values, test.at_most, after=True))
    return column.rows[start : max(start, end)]


def _position(values: Numbers, bound: Bound, *, after: bool) -> int:
    """How many of `values` lie before `bound`; `after`: or equal it. No rounding decides: between
    an integer of 64 bits and a float64 beside it there is no third number."""
    if values.dtype == np.int64:
        if math.isinf(bound):
            return len(values) if bound > 0 else 0
        # The last integer that counts.
        last = math.floor(bound) if after else math.ceil(bound) - 1
        if last > LARGEST_INTEGER:
            return len(values)
        if last < LEAST_INTEGER:
            return 0
        return int(np.searchsorted(values, np.int64(last), "right"))
    near = float(bound)
    include = near <= bound if after else near < bound
    return int(np.searchsorted(values, near, "right" if include else "left"))


def mask_rows(filtered: Filter, column: Callable[[str], KeyColumn], count: int) -> Mask:
    """Which of `count` rows pass, bool [count]; `column` gives that of a key."""
    if isinstance(filtered, Not):
        passing = mask_rows(filtered.of, column, count)
        return np.logical_not(passing, out=passing)
    if isinstance(filtered, All):
        passing = np.ones(count, np.bool_)
        for part in filtered.of:
            passing &= mask_rows(part, column, count)
        return passing
    passing = np.zeros(count, np.bool_)
    if isinstance(filtered, AnyOf):
        for part in filtered.of:
            passing |= mask_rows(part, column, count)
        return passing
    for rows in column(filtered.key).rows(filtered):
        passing[rows] = True
    return passing


# Columns of metadata as the file has them.
#
# Read in a few statements of one row each: SQLite works without the interpreter's lock, which a
# statement of many rows takes and gives back for each of them, beside searches that want it too.

_FLOATS = np.dtype([("value", np.float64), ("label", np.int64)])


def stored_labels(connection: sqlite3.Connection) -> Labels:
    """Of all items, increasing."""
    return np.sort(_integers(connection, "SELECT group_concat(label) FROM items")[0])


def read_column(connection: sqlite3.Connection, key: str, labels: Labels) -> KeyColumn:
    """What items of `labels` (increasing) have under `key`, as rows of these; others count not."""
    return KeyColumn(
        _texts(connection, key, labels),
        _whole(connection, key, labels),
        _floats(connection, key, labels),
        (_flag(connection, key, 0, labels), _flag(connection, key, 1, labels)),
    )


def find(labels: Labels, wanted: Labels) -> tuple[NDArray[np.intp], Mask]:
    """For each of `wanted` its row in `labels` (increasing), and whether it is there at all."""
    rows = np.searchsorted(labels, wanted)
    there = rows < len(labels)
    rows[~there] = 0
    there[there] = labels[rows[there]] == wanted[there]
    return rows, there


def _texts(connection: sqlite3.Connection, key: str, labels: Labels) -> SortedTexts:
    values, counts = connection.execute(
        "SELECT json_group_array(value), group_concat(times) FROM (SELECT value, count(*) AS times"
        " FROM attributes WHERE key = ? AND kind = 'text' GROUP BY value ORDER BY value)",
        (key,),
    ).fetchone()
    (found,) = _integers(
        connection,
        "SELECT group_concat(label) FROM (SELECT label FROM attributes"
        " WHERE key = ? AND kind = 'text' ORDER BY value, label)",
        key,
    )
    texts: list[str] = json.loads(values)
    rows, there = find(labels, found)
    of_text = np.repeat(np.arange(len(texts)), _numbers(counts))[there]
    starts = np.searchsorted(of_text, np.arange(len(texts) + 1)).astype(np.int64)
    return SortedTexts(texts, starts, rows[there].astype(np.int32))


def _whole(connection: sqlite3.Connection, key: str, labels: Labels) -> Sorted:
    values, found = _integers(
        connection,
        "SELECT group_concat(value), group_concat(label) FROM attributes"
        " WHERE key = ? AND kind = 'number' AND typeof(value) = 'integer'",
        key,
    )
    rows, there = find(labels, found)
    return in_order(values[there], rows[there].astype(np.int32))


def _floats(connection: sqlite3.Connection, key: str, labels: Labels) -> Sorted:
    # Row by row: SQLite's texts of them are not exact.
    found = connection.execute(
        "SELECT value, label FROM attributes"
        " WHERE key = ? AND kind = 'number' AND typeof(value) = 'real'",
        (key,),
    )
    pairs = np.fromiter(found, _FLOATS)
    rows, there = find(labels, pairs["label"])
    return in_order(pairs["value"][there], rows[there].astype(np.int32))


def _flag(connection: sqlite3.Connection, key: str, flag: int, labels: Labels) -> ColumnRows:
    (found,) = _integers(
        connection,
        "SELECT group_concat(label) FROM attributes WHERE key = ? AND kind = 'flag' AND value = ?",
        key,
        flag,
    )
    rows, there = find(labels, found)
    return rows[there].astype(np.int32)


def _integers(
    connection: sqlite3.Connection, statement: str, *parameters: str | int
) -> list[NDArray[np.int64]]:
    return [_numbers(text) for text in connection.execute(statement, parameters).fetchone()]


def _numbers(text: str | None) -> NDArray[np.int64]:
    """What group_concat gives: None for no rows."""
    return np.fromstring(text or "", np.int64, sep=",")


class Segment:
    """Metadata of `labels` (int64 [n], increasing), at hand."""

    def __init__(self, labels: Labels, metadata: Sequence[Metadata]) -> None:
        self.labels = labels
        self._metadata = metadata
        self._columns: dict[str, KeyColumn] = {}

    def passing(self, filtered: Filter) -> Mask:
        """Which of the labels pass, bool [n]; the filter is a checked one."""
        return mask_rows(filtered, self._column, len(self.labels))

    def _column(self, key: str) -> KeyColumn:
        if key not in self._columns:
            self._columns[key] = column_of(self._values(key))
        return self._columns[key]

    def _values(self, key: str) -> Iterator[tuple[Scalar, int]]:
        for row, metadata in enumerate(self._metadata):
            if key not in metadata:
                continue
            value = metadata[key]
            if isinstance(value, str | int | float):
                yield value, row
            else:
                yield from ((text, row) for text in value)


def segment_of(items: Mapping[int, Metadata]) -> Segment:
    """Of metadata by label."""
    labels = sorted(items)
    return Segment(np.array(labels, np.int64), [items[label] for label in labels])


def read_metadata(store: Store, labels: Sequence[int]) -> dict[int, Metadata]:
    """What the file says of those items that exist."""
    with store.reading() as connection:
        found = reading.items(connection, labels)
    return {item.label: item.metadata for item in found if item is not None}


class StoredSegment:
    """Every item of a gallery at one moment, from any thread; columns are read from the file, and
    forgotten, the longest unused first, beyond `most_bytes`.

    Who asks for a column that another thread reads waits for that one alone. An item that was
    changed since is as it was, or as it is now.
    """

    def __init__(self, store: Store, most_bytes: int) -> None:
        self._store = store
        self._most = most_bytes
        # Of _columns. Nothing is read while it is held.
        self._lock = threading.Lock()
        # The last was used last.
        self._columns: dict[str, Future[KeyColumn]] = {}
        with store.reading() as connection:
            self.labels = stored_labels(connection)

    def passing(self, filtered: Filter, keys: Iterable[str]) -> Mask:
        """Which of the labels pass, bool [n]; `keys` are those that the checked filter asks for."""
        found = {key: self.column(key) for key in sorted(keys)}
        return mask_rows(filtered, found.__getitem__, len(self.labels))

    def held(self) -> list[str]:
        """Keys whose columns are in memory."""
        with self._lock:
            return [*self._columns]

    def column(self, key: str) -> KeyColumn:
        """That of one key."""
        with self._lock:
            column = self._columns.pop(key, None)
            first = column is None
            if column is None:
                column = Future()
            self._columns[key] = column
        if first:
            self._read(key, column)
        return column.result()

    def _read(self, key: str, column: "Future[KeyColumn]") -> None:
        try:
            with self._store.reading() as connection:
                # No item has a key that cannot be stored, and no statement can ask for it.
                found = (
                    read_column(connection, key, self.labels) if storable(key) else column_of(())
                )
        except BaseException as error:
            with self._lock:
                if self._columns.get(key) is column:
                    del self._columns[key]
            # Told to all who wait for it; the next one tries again.
            column.set_exception(error)
            raise
        column.set_result(found)
        with self._lock:
            done = {key: one.result().bytes for key, one in self._columns.items() if one.done()}
            held = sum(done.values())
            for oldest, size in done.items():
                if held <= self._most:
                    break
                del self._columns[oldest]
                held -= size


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
class MatchesInFile:
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
    answers: dict[bytes, MatchesInFile] = field(default_factory=dict)

    def passing(self, filtered: Filter, keys: frozenset[str]) -> MatchesInFile:
        mask = self.stored.passing(filtered, keys)
        mask[self.gone] = False
        return MatchesInFile(self.base, mask, self.recent.labels[self.recent.passing(filtered)])

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

    def passing(self, filtered: Filter) -> MatchesInFile:
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
