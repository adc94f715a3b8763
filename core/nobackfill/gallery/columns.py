"""Metadata as columns: for each key sorted values with the rows that have them, in numpy arrays."""

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    microseconds,
)
from nobackfill.gallery.search.index import Mask

Numbers = NDArray[np.int64] | NDArray[np.float64]
# Of items, in the order of a segment's labels.
Rows = NDArray[np.int32]
Bound = int | float


class Sorted(NamedTuple):
    """`values` increasing, each with the row that has it."""

    values: Numbers
    rows: Rows


class Texts(NamedTuple):
    """`values` increasing; rows of value i lie from starts[i] to starts[i + 1]."""

    values: list[str]
    starts: NDArray[np.int64]
    rows: Rows


@dataclass
class Column:
    """What a segment's items have under one key; a list counts as each of its elements. Flags are
    the rows that have False, and those that have True."""

    texts: Texts
    integers: Sorted
    floats: Sorted
    flags: tuple[Rows, Rows]

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

    def rows(self, test: Test) -> Sequence[Rows]:
        """The rows for which `test` holds, in pieces; a row may come twice."""
        if isinstance(test, OneOf):
            return self._one_of(test.values)
        if isinstance(test, Range):
            return [_between(column, test) for column in (self.integers, self.floats)]
        if isinstance(test, TimeRange):
            return [_between(self._times, test)]
        return [self.texts.rows, self.integers.rows, self.floats.rows, *self.flags]

    def _one_of(self, values: Sequence[Scalar]) -> list[Rows]:
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

    def _with_text(self, i: int) -> Rows:
        return self.texts.rows[self.texts.starts[i] : self.texts.starts[i + 1]]


def column_of(values: Iterable[tuple[Scalar, int]]) -> Column:
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
    return Column(
        Texts(list(dict(texts)), starts, np.array([row for _, row in texts], np.int32)),
        _in_order(integers, np.dtype(np.int64)),
        _in_order(floats, np.dtype(np.float64)),
        (np.array(flags[0], np.int32), np.array(flags[1], np.int32)),
    )


def _in_order(pairs: Sequence[tuple[float, int]], kind: np.dtype[Any]) -> Sorted:
    values = np.array([value for value, _ in pairs], kind)
    return in_order(values, np.array([row for _, row in pairs], np.int32))


def in_order(values: Numbers, rows: Rows) -> Sorted:
    """Sorted by value."""
    order = np.argsort(values, kind="stable")
    return Sorted(values[order], rows[order])


def _equal(column: Sorted, wanted: Numbers) -> list[Rows]:
    starts = np.searchsorted(column.values, wanted, "left").tolist()
    ends = np.searchsorted(column.values, wanted, "right").tolist()
    return [column.rows[start:end] for start, end in zip(starts, ends, strict=True) if start < end]


def _between(column: Sorted, test: Range | TimeRange) -> Rows:
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


def mask(filtered: Filter, column: Callable[[str], Column], count: int) -> Mask:
    """Which of `count` rows pass, bool [count]; `column` gives that of a key."""
    if isinstance(filtered, Not):
        passing = mask(filtered.of, column, count)
        return np.logical_not(passing, out=passing)
    if isinstance(filtered, All):
        passing = np.ones(count, np.bool_)
        for part in filtered.of:
            passing &= mask(part, column, count)
        return passing
    passing = np.zeros(count, np.bool_)
    if isinstance(filtered, AnyOf):
        for part in filtered.of:
            passing |= mask(part, column, count)
        return passing
    for rows in column(filtered.key).rows(filtered):
        passing[rows] = True
    return passing
