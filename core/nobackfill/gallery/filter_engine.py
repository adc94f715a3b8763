"""Answer filters from memory, kept up to date; the same engine on server and device.

The first filter reads the metadata of all items as one large segment. Items that change later are
excluded from it and form a second, small segment. Once that is no longer small, a thread reads the
large segment again while filters are answered.
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

from nobackfill.errors import BusyError, DamagedError, NotFoundError
from nobackfill.gallery.filters import (
    LARGEST_INTEGER,
    LEAST_INTEGER,
    All,
    AnyOf,
    Filter,
    KeyTest,
    Not,
    OneOf,
    Range,
    Scalar,
    TimeRange,
    check_filter,
    date_to_microseconds,
)
from nobackfill.gallery.search.index import Labels, Mask, Rows, find_label_rows
from nobackfill.gallery.spec import Metadata
from nobackfill.gallery.sqlite_file import read_items_by_label
from nobackfill.gallery.store import Change, Store, is_storable_text

# Metadata as columns: for each key the sorted values with the rows that have them, in numpy arrays.

Numbers = NDArray[np.int64] | NDArray[np.float64]
# Rows of items, in the order of a segment's labels.
ColumnRows = NDArray[np.int32]
Bound = int | float


class SortedNumbers(NamedTuple):
    """Numbers in increasing order, each with the row that has it."""

    values: Numbers
    rows: ColumnRows


class SortedTexts(NamedTuple):
    """Texts in increasing order; the rows of text i lie from starts[i] to starts[i + 1]."""

    values: list[str]
    row_starts: NDArray[np.int64]
    rows: ColumnRows


@dataclass
class KeyColumn:
    """The values of one key in a segment; a list counts as each of its elements.

    Attributes:
        texts: The texts.
        integers: Integers of 64 bits.
        floats: Other numbers.
        flag_rows: The rows that have False, and the rows that have True.
    """

    texts: SortedTexts
    integers: SortedNumbers
    floats: SortedNumbers
    flag_rows: tuple[ColumnRows, ColumnRows]

    @cached_property
    def _times(self) -> SortedNumbers:
        """Return the texts that are dates or times, in microseconds."""
        pairs = [
            (time, row)
            for i, time in enumerate(map(date_to_microseconds, self.texts.values))
            if time is not None
            for row in self._with_text(i).tolist()
        ]
        times = np.array([time for time, _ in pairs], np.int64)
        return sort_values(times, np.array([row for _, row in pairs], np.int32))

    @cached_property
    def memory_bytes(self) -> int:
        """Estimate the memory of the column, in bytes. It is computed once."""
        arrays = (*self.texts[1:], *self.integers, *self.floats, *self.flag_rows)
        texts = sum(map(sys.getsizeof, self.texts.values)) + 8 * len(self.texts.values)
        # Includes a time for each text, since it may come to that.
        return texts + 12 * len(self.texts.rows) + sum(array.nbytes for array in arrays)

    def passing_rows(self, test: KeyTest) -> Sequence[ColumnRows]:
        """Return the rows that pass a test, as int32 arrays; a row may occur twice.

        A Range passes only numbers, and a TimeRange only texts that are dates or times. Flags are
        no numbers.

        Args:
            test: A test of this column's key; the key itself is not compared.

        Returns:
            Arrays in no fixed order, some perhaps empty; they are views of the column, so do not
            write into them. The first TimeRange parses every text of the column, once.

        Raises:
            TypeError: A value of a OneOf is None or a list, or a bound is no number.
        """
        if isinstance(test, OneOf):
            return self._one_of(test.values)
        if isinstance(test, Range):
            return [_in_bounds(column, test) for column in (self.integers, self.floats)]
        if isinstance(test, TimeRange):
            return [_in_bounds(self._times, test)]
        return [self.texts.rows, self.integers.rows, self.floats.rows, *self.flag_rows]

    def _one_of(self, values: Sequence[Scalar]) -> list[ColumnRows]:
        pieces = []
        numbers: list[int | float] = []
        for value in values:
            if isinstance(value, bool):
                pieces.append(self.flag_rows[value])
            elif isinstance(value, str):
                i = bisect_left(self.texts.values, value)
                if i < len(self.texts.values) and self.texts.values[i] == value:
                    pieces.append(self._with_text(i))
            else:
                numbers.append(value)
        if numbers:
            integers = [int(n) for n in numbers if math.isfinite(n) and n == int(n)]
            integers = [n for n in integers if LEAST_INTEGER <= n <= LARGEST_INTEGER]
            pieces += _equal(self.integers, np.array(integers, np.int64))
            exact = [float(n) for n in numbers if float(n) == n]
            pieces += _equal(self.floats, np.array(exact, np.float64))
        return pieces

    def _with_text(self, i: int) -> ColumnRows:
        return self.texts.rows[self.texts.row_starts[i] : self.texts.row_starts[i + 1]]


def build_column(values: Iterable[tuple[Scalar, int]]) -> KeyColumn:
    """Build a column from values with their rows, in any order.

    An integer of more than 64 bits counts as a float. Without values, the column is empty. NaN is
    not expected: it would pass every lower bound.

    Args:
        values: Texts, numbers and flags, each with its row from 0. A list is given as each of its
            texts.

    Raises:
        OverflowError: An integer beyond the largest float.
        TypeError: None or a list.
    """
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
            # SQLite also treats a larger integer as a float.
            floats.append((float(value), row))
    texts.sort()
    changes = [i for i in range(1, len(texts)) if texts[i][0] != texts[i - 1][0]]
    starts = np.array([0, *changes, len(texts)] if texts else [0], np.int64)
    return KeyColumn(
        SortedTexts(list(dict(texts)), starts, np.array([row for _, row in texts], np.int32)),
        _sort_pairs(integers, np.dtype(np.int64)),
        _sort_pairs(floats, np.dtype(np.float64)),
        (np.array(flags[0], np.int32), np.array(flags[1], np.int32)),
    )


def _sort_pairs(pairs: Sequence[tuple[float, int]], kind: np.dtype[Any]) -> SortedNumbers:
    values = np.array([value for value, _ in pairs], kind)
    return sort_values(values, np.array([row for _, row in pairs], np.int32))


def sort_values(values: Numbers, rows: ColumnRows) -> SortedNumbers:
    """Sort values together with their rows; equal values keep their order.

    Args:
        values: int64 or float64 [n].
        rows: int32 [n].

    Returns:
        New arrays, by increasing value.
    """
    order = np.argsort(values, kind="stable")
    return SortedNumbers(values[order], rows[order])


def _equal(column: SortedNumbers, keys: Numbers) -> list[ColumnRows]:
    starts = np.searchsorted(column.values, keys, "left").tolist()
    ends = np.searchsorted(column.values, keys, "right").tolist()
    return [column.rows[start:end] for start, end in zip(starts, ends, strict=True) if start < end]


def _in_bounds(column: SortedNumbers, test: Range | TimeRange) -> ColumnRows:
    start, end = 0, len(column.values)
    if test.at_least is not None:
        start = max(start, _position(column.values, test.at_least, inclusive=False))
    if test.greater_than is not None:
        start = max(start, _position(column.values, test.greater_than, inclusive=True))
    if test.less_than is not None:
        end = min(end, _position(column.values, test.less_than, inclusive=False))
    if test.at_most is not None:
        end = min(end, _position(column.values, test.at_most, inclusive=True))
    return column.rows[start : max(start, end)]


def _position(values: Numbers, bound: Bound, *, inclusive: bool) -> int:
    """Return how many values lie before `bound`, or with `inclusive` also those that equal it.

    No rounding decides: between an integer of 64 bits and the nearest float64 there is no third
    number.
    """
    if values.dtype == np.int64:
        if math.isinf(bound):
            return len(values) if bound > 0 else 0
        # The last integer to count.
        last = math.floor(bound) if inclusive else math.ceil(bound) - 1
        if last > LARGEST_INTEGER:
            return len(values)
        if last < LEAST_INTEGER:
            return 0
        return int(np.searchsorted(values, np.int64(last), "right"))
    nearest = float(bound)
    include = nearest <= bound if inclusive else nearest < bound
    return int(np.searchsorted(values, nearest, "right" if include else "left"))


def mask_rows(condition: Filter, column: Callable[[str], KeyColumn], count: int) -> Mask:
    """Return which of `count` rows pass a filter, bool [count].

    Args:
        condition: A filter that `filters.check_filter` has accepted. An empty All passes every row,
            an empty AnyOf none.
        column: Returns the column of a key; empty if no row has the key. Its error passes through.
        count: Number of rows; 0 gives an empty mask.

    Returns:
        A new array.

    Raises:
        TypeError: A value of a OneOf is None or a list, or a bound is no number.
    """
    if isinstance(condition, Not):
        passing = mask_rows(condition.excluded_filter, column, count)
        return np.logical_not(passing, out=passing)
    if isinstance(condition, All):
        passing = np.ones(count, np.bool_)
        for part in condition.filters:
            passing &= mask_rows(part, column, count)
        return passing
    passing = np.zeros(count, np.bool_)
    if isinstance(condition, AnyOf):
        for part in condition.filters:
            passing |= mask_rows(part, column, count)
        return passing
    for rows in column(condition.key).passing_rows(condition):
        passing[rows] = True
    return passing


# Columns of metadata, read from the file in a few statements of one row each: SQLite then works
# without the interpreter's lock. A statement of many rows takes and releases it for each row, while
# searches need it, too.

_FLOATS = np.dtype([("value", np.float64), ("label", np.int64)])


def stored_labels(connection: sqlite3.Connection) -> Labels:
    """Return the labels of all items of a gallery file, int64, increasing.

    Raises:
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    return np.sort(_integers(connection, "SELECT group_concat(label) FROM items")[0])


def read_column(connection: sqlite3.Connection, key: str, labels: Labels) -> KeyColumn:
    """Read the values of a metadata key for some items. Several statements run: use one snapshot.

    Args:
        connection: The gallery's file.
        key: The key, of storable text (`is_storable_text`).
        labels: int64 [n], increasing. Values of items that are not in it are ignored.

    Returns:
        The column. Each of its row numbers is an index into `labels`; items without the key have no
        row.

    Raises:
        DamagedError: A value or a label of the key has the wrong type.
        sqlite3.Error: SQLite fails, or the table is missing; `Store.read_snapshot` translates it.
    """
    try:
        column = KeyColumn(
            _read_texts(connection, key, labels),
            _read_integers(connection, key, labels),
            _read_floats(connection, key, labels),
            (_read_flag(connection, key, 0, labels), _read_flag(connection, key, 1, labels)),
        )
        if not all(isinstance(text, str) for text in column.texts.values):
            raise TypeError("a text of another type")
    except (IndexError, TypeError, ValueError) as error:
        raise DamagedError(None, "its table 'attributes' has invalid values") from error
    return column


def find_rows(labels: Labels, targets: Labels) -> tuple[NDArray[np.intp], Mask]:
    """Find the row of each target in a column of labels.

    Args:
        labels: int64 [n], increasing; n may be 0.
        targets: int64 [m], in any order.

    Returns:
        The rows, int [m], and a mask bool [m] of the targets that exist. The row of a missing
        target means nothing: it is 0, or that of another label.
    """
    rows = np.searchsorted(labels, targets)
    exists = rows < len(labels)
    rows[~exists] = 0
    exists[exists] = labels[rows[exists]] == targets[exists]
    return rows, exists


def _read_texts(connection: sqlite3.Connection, key: str, labels: Labels) -> SortedTexts:
    values, counts = connection.execute(
        "SELECT json_group_array(value), group_concat(times) FROM (SELECT value, count(*) AS times"
        " FROM attributes WHERE key = ? AND kind = 'text' GROUP BY value ORDER BY value)",
        (key,),
    ).fetchone()
    (stored,) = _integers(
        connection,
        "SELECT group_concat(label) FROM (SELECT label FROM attributes"
        " WHERE key = ? AND kind = 'text' ORDER BY value, label)",
        key,
    )
    texts: list[str] = json.loads(values)
    rows, exists = find_rows(labels, stored)
    of_text = np.repeat(np.arange(len(texts)), _numbers(counts))[exists]
    starts = np.searchsorted(of_text, np.arange(len(texts) + 1)).astype(np.int64)
    return SortedTexts(texts, starts, rows[exists].astype(np.int32))


def _read_integers(connection: sqlite3.Connection, key: str, labels: Labels) -> SortedNumbers:
    values, stored = _integers(
        connection,
        "SELECT group_concat(value), group_concat(label) FROM attributes"
        " WHERE key = ? AND kind = 'number' AND typeof(value) = 'integer'",
        key,
    )
    rows, exists = find_rows(labels, stored)
    return sort_values(values[exists], rows[exists].astype(np.int32))


def _read_floats(connection: sqlite3.Connection, key: str, labels: Labels) -> SortedNumbers:
    # Row by row: SQLite's texts of floats are not exact.
    stored = connection.execute(
        "SELECT value, label FROM attributes"
        " WHERE key = ? AND kind = 'number' AND typeof(value) = 'real'",
        (key,),
    )
    pairs = np.fromiter(stored, _FLOATS)
    rows, exists = find_rows(labels, pairs["label"])
    return sort_values(pairs["value"][exists], rows[exists].astype(np.int32))


def _read_flag(connection: sqlite3.Connection, key: str, flag: int, labels: Labels) -> ColumnRows:
    (stored,) = _integers(
        connection,
        "SELECT group_concat(label) FROM attributes WHERE key = ? AND kind = 'flag' AND value = ?",
        key,
        flag,
    )
    rows, exists = find_rows(labels, stored)
    return rows[exists].astype(np.int32)


def _integers(
    connection: sqlite3.Connection, statement: str, *parameters: str | int
) -> list[NDArray[np.int64]]:
    return [_numbers(text) for text in connection.execute(statement, parameters).fetchone()]


def _numbers(text: str | None) -> NDArray[np.int64]:
    """Parse the result of group_concat; None means no rows."""
    return np.fromstring(text or "", np.int64, sep=",")


class Segment:
    """The metadata of some items, in memory.

    Attributes:
        labels: int64 [n], increasing.
    """

    def __init__(self, labels: Labels, metadata: Sequence[Metadata]) -> None:
        self.labels = labels
        self._metadata = metadata
        self._columns: dict[str, KeyColumn] = {}

    def passing_mask(self, condition: Filter) -> Mask:
        """Return which of the items pass a filter, bool [n] in the order of `labels`.

        The column of each key is built at its first use.

        Args:
            condition: A filter that `filters.check_filter` has accepted.

        Raises:
            TypeError: A value of a OneOf is None or a list, or a bound is no number.
        """
        return mask_rows(condition, self._column, len(self.labels))

    def _column(self, key: str) -> KeyColumn:
        if key not in self._columns:
            self._columns[key] = build_column(self._values(key))
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


def build_segment(items: Mapping[int, Metadata]) -> Segment:
    """Build a segment of the items' metadata, by label; an empty mapping gives an empty segment.

    Args:
        items: Metadata by label; it is not copied.
    """
    labels = sorted(items)
    return Segment(np.array(labels, np.int64), [items[label] for label in labels])


def read_metadata(store: Store, labels: Sequence[int]) -> dict[int, Metadata]:
    """Read the metadata of the items that exist, by label; other labels are skipped.

    Empty without such items; a label that repeats counts once. The order is that of `labels`.

    Args:
        labels: Labels, in any order.

    Raises:
        VerificationError: The gallery's file is damaged.
        BusyError: Another process has the file to itself, or changed it during a read without a
            lock.
        CannotWriteError: The file cannot be opened, or the disk fails.
        NotFoundError: The gallery was closed, or its file is gone.
    """
    with store.read_snapshot() as connection:
        items = read_items_by_label(connection, labels)
    return {item.label: item.metadata for item in items if item is not None}


class StoredSegment:
    """The metadata of every item at one moment, usable from several threads.

    Columns are read from the file on demand; above `most_bytes`, the longest unused ones are
    dropped. A thread that needs a column that another thread reads waits only for that column. An
    item that changed since may have its old or its new values. The constructor reads all labels,
    and may raise each error of `load_column`.
    """

    def __init__(self, store: Store, most_bytes: int) -> None:
        self._store = store
        self._most = most_bytes
        # For _columns. Nothing is read while it is held.
        self._lock = threading.Lock()
        # In order of use; the last was used last.
        self._columns: dict[str, Future[KeyColumn]] = {}
        with store.read_snapshot() as connection:
            self.labels = stored_labels(connection)

    def passing_mask(self, condition: Filter, keys: Iterable[str]) -> Mask:
        """Return which of the labels pass a checked filter, bool [n].

        Args:
            condition: The filter.
            keys: The keys that it reads, as `check_filter` returns them.

        Raises:
            VerificationError: The gallery's file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed, or its file is gone.
            KeyError: `keys` lacks a key of the filter.
            TypeError: A value of a OneOf is None or a list, or a bound is no number.
        """
        columns = {key: self.load_column(key) for key in sorted(keys)}
        return mask_rows(condition, columns.__getitem__, len(self.labels))

    def cached_keys(self) -> list[str]:
        """Return the keys whose columns are in memory, the last used last."""
        with self._lock:
            return [*self._columns]

    def load_column(self, key: str) -> KeyColumn:
        """Return the column of a key; read it from the file if it is not in memory.

        If another thread reads it, this one waits for it, and gets its error, too. Other columns
        are dropped from memory if they have more than `most_bytes` together. Later changes of the
        gallery do not reach a column that is in memory.

        Returns:
            The column; empty if no item has the key.

        Raises:
            VerificationError: The gallery's file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed, or its file is gone.
        """
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
            with self._store.read_snapshot() as connection:
                # No item can have a key that cannot be stored, and no statement can contain it.
                content = (
                    read_column(connection, key, self.labels)
                    if is_storable_text(key)
                    else build_column(())
                )
        except BaseException as error:
            with self._lock:
                if self._columns.get(key) is column:
                    del self._columns[key]
            # All threads that wait for it get the error; the next one tries again.
            column.set_exception(error)
            raise
        column.set_result(content)
        with self._lock:
            sizes = {
                key: one.result().memory_bytes for key, one in self._columns.items() if one.done()
            }
            total = sum(sizes.values())
            for oldest, size in sizes.items():
                if total <= self._most:
                    break
                del self._columns[oldest]
                total -= size


# Memory of the columns of one gallery.
COLUMN_CACHE_BYTES = 128 << 20
# The large segment is read again after this many changed items, or this share of all items.
LEAST_CHANGED_ITEMS = 2000
CHANGED_SHARE = 20
# Changed items that are remembered by label; beyond this many, everything is read again.
MOST_CHANGED_ITEMS = 20_000
# Memory of cached answers, which are reused while nothing changes.
MATCH_CACHE_BYTES = 16 << 20
# Number of indexes whose positions in the large segment are cached.
CACHED_INDEXES = 4


@dataclass(frozen=True)
class _Base:
    """The labels of the large segment, and the cached positions of indexes' labels in it.

    A position of len(labels) means that the label is missing.
    """

    labels: Labels
    positions: list[tuple[Labels, NDArray[np.int32] | None]]

    def places(self, labels: Labels) -> NDArray[np.int32] | None:
        """Return the row of each of `labels`, int32; None if they equal the segment's.

        A label that the segment lacks gets the row after the last. Do not change `labels` later:
        the answer is cached by the array.
        """
        for cached, places in tuple(self.positions):
            if cached is labels:
                return places
        if np.array_equal(labels, self.labels):
            rows_in_base = None
        else:
            rows, exists = find_rows(self.labels, labels)
            rows_in_base = np.where(exists, rows, len(self.labels)).astype(np.int32)
        self.positions.append((labels, rows_in_base))
        del self.positions[:-CACHED_INDEXES]
        return rows_in_base


@dataclass
class MatchesInFile:
    """The items that passed at one moment."""

    _base: _Base
    _mask: Mask
    # Matching items among the changed ones, increasing.
    _changed: Labels
    # Masks of the last indexes that asked.
    _masks: list[tuple[Labels, Mask]] = field(default_factory=list)

    def labels(self) -> Labels:
        """Return the labels of all matches, int64, increasing; empty if no item passed."""
        old = self._base.labels[self._mask]
        return np.sort(np.concatenate([old, self._changed])) if len(self._changed) else old

    def __len__(self) -> int:
        return int(np.count_nonzero(self._mask)) + len(self._changed)

    def mask(self, labels: Labels) -> Mask:
        """Return which labels of an index match, for Index.search. Do not write to the mask: it is
        cached.

        Args:
            labels: int64 [n], increasing; n may be 0. An unknown or later label does not match. Do
                not change the array later: it is cached.

        Returns:
            bool [n], read-only.
        """
        for cached, mask in tuple(self._masks):
            if cached is labels:
                return mask
        places = self._base.places(labels)
        matches = self._mask.copy() if places is None else np.append(self._mask, False)[places]
        matches[find_label_rows(labels, self._changed)] = True
        matches.flags.writeable = False
        self._masks = [*self._masks, (labels, matches)][-CACHED_INDEXES:]
        return matches


@dataclass(frozen=True)
class _State:
    """The metadata that was read.

    Attributes:
        segment: The large segment.
        base: Its labels.
        changed: Metadata of the items that changed since, by label; None for deleted ones.
        recent: A segment of the changed items that exist.
        stale_rows: Rows of the large segment that are outdated.
        answers: Cached answers by digest of the filter, the last used last.
    """

    segment: StoredSegment
    base: _Base
    changed: dict[int, Metadata | None]
    recent: Segment
    stale_rows: Rows
    answers: dict[bytes, MatchesInFile] = field(default_factory=dict)

    def passing(self, condition: Filter, keys: frozenset[str]) -> MatchesInFile:
        mask = self.segment.passing_mask(condition, keys)
        mask[self.stale_rows] = False
        return MatchesInFile(
            self.base, mask, self.recent.labels[self.recent.passing_mask(condition)]
        )

    def most(self) -> int:
        """Return how many changed items are tolerated."""
        return max(LEAST_CHANGED_ITEMS, len(self.base.labels) // CHANGED_SHARE)


class FilterEngine:
    """Answer filters on one store, from any thread; nothing is read before the first filter."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Taken before _lock, to read labels and changes: one thread reads for all. Columns are read
        # without it. A listener takes only _lock.
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._state: _State | None = None
        # Labels that must be read again, since the first filter.
        self._stale: set[int] = set()
        self._following = False
        # A gallery that is never filtered costs no call at each commit.
        self._subscribed = False
        # Labels that changed while the large segment is being read again; None: it is not.
        self._renewal: set[int] | None = None

    def close(self) -> None:
        """Stop following the store; later answers may be outdated. A second `close` does nothing.

        A later `find_matches` follows the store again, but misses the changes in between. A thread
        that reads is not waited for. Do not call it during `find_matches`.
        """
        if self._subscribed:
            self._subscribed = False
            self._store.unsubscribe(self._on_change)

    def find_matches(self, condition: Filter) -> MatchesInFile:
        """Return the items that pass now, including every change acknowledged before the call.

        The first call reads the labels of all items, and starts to follow the store. A key is read
        at its first use. Once many items have changed, a daemon thread reads all again. One thread
        reads labels and changes while others wait. If that fails, the next call reads everything
        again.

        Args:
            condition: The filter; `check_filter` is called here.

        Returns:
            The items; they are shared with later calls of an equal filter.

        Raises:
            InvalidInputError: The filter has too many tests, values or levels, a NaN, or an integer
                of more than 64 bits.
            TypeError: The condition is no filter, a value of a OneOf is None or a list, or a bound
                of a Range is no number.
            AttributeError: A key is no text.
            VerificationError: The gallery's file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed, or its file is gone.
        """
        keys = check_filter(condition)
        # Not the filter itself: in Python True equals 1, and 10,000 long values would be kept.
        name = hashlib.blake2b(repr(condition).encode("utf-8", "surrogatepass")).digest()
        with self._reading:
            state = self._refresh()
        with self._lock:
            cached = state.answers.pop(name, None)
            if cached is not None:
                state.answers[name] = cached
                return cached
        matches = state.passing(condition, keys)
        with self._lock:
            state.answers[name] = matches
            # An answer takes a byte for each item, and as much again for each index that used it.
            size = (1 + CACHED_INDEXES) * len(state.base.labels)
            while len(state.answers) * size > MATCH_CACHE_BYTES:
                del state.answers[next(iter(state.answers))]
        return matches

    def _refresh(self) -> _State:
        if not self._subscribed:
            self._store.subscribe(self._on_change)
            self._subscribed = True
        with self._lock:
            stale, self._stale = self._stale, set()
            # None until everything is read: an error leaves no half-updated state.
            state, self._state = self._state, None
            self._following = True
        if state is None:
            state = _read_state(self._store)
        elif stale:
            metadata = read_metadata(self._store, list(stale))
            changed = state.changed | {label: metadata.get(label) for label in stale}
            recent = {label: what for label, what in changed.items() if what is not None}
            stale_rows = find_label_rows(state.base.labels, np.array(sorted(changed), np.int64))
            state = _State(state.segment, state.base, changed, build_segment(recent), stale_rows)
        with self._lock:
            if self._following:
                self._state = state
                if len(state.changed) > state.most() and self._renewal is None:
                    since = set[int]()
                    work = threading.Thread(
                        target=self._renew,
                        args=(state.segment.cached_keys(), since),
                        name="filters",
                        daemon=True,
                    )
                    # If the system has no thread left, the next filter tries again.
                    with contextlib.suppress(RuntimeError):
                        work.start()
                        self._renewal = since
        return state

    def _renew(self, keys: list[str], since: set[int]) -> None:
        """Read everything again, `keys` first, while the present state answers."""
        try:
            # Busy or closed: the next filter starts again.
            with contextlib.suppress(BusyError, NotFoundError):
                state = _read_state(self._store)
                for key in keys:
                    state.segment.load_column(key)
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
            labels = [*change.deleted_labels.tolist(), *change.metadata_labels.tolist()]
            self._stale.update(labels)
            if self._renewal is not None:
                self._renewal.update(labels)
            if len(self._stale) > MOST_CHANGED_ITEMS:
                # Too many to read one by one: the next filter reads everything.
                self._state, self._following = None, False
                self._stale, self._renewal = set(), None


def _read_state(store: Store) -> _State:
    stored = StoredSegment(store, COLUMN_CACHE_BYTES)
    nothing = np.empty(0, np.intp)
    return _State(stored, _Base(stored.labels, []), {}, build_segment({}), nothing)


def passing_labels(store: Store, condition: Filter) -> Labels:
    """Return the labels of the items that pass a filter, int64, increasing; for a single use.

    Args:
        store: The gallery.
        condition: The filter. Every key that it reads is read from the file.

    Raises:
        InvalidInputError: The filter has too many tests, values or levels, a NaN, or an integer of
            more than 64 bits.
        TypeError: The condition is no filter, a value of a OneOf is None or a list, or a bound of a
            Range is no number.
        AttributeError: A key is no text.
        VerificationError: The gallery's file is damaged.
        BusyError: Another process has the file to itself, or changed it during a read without a
            lock.
        CannotWriteError: The file cannot be opened, or the disk fails.
        NotFoundError: The gallery was closed, or its file is gone.
    """
    keys = check_filter(condition)
    stored = StoredSegment(store, COLUMN_CACHE_BYTES)
    return stored.labels[stored.passing_mask(condition, keys)]
