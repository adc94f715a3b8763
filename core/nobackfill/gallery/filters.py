"""Define the filter language for the metadata of items (docs/operations/filters.md).

A test passes for an item that has the key with a passing value, or a list with a passing element.
An item without the key passes no test, so `Not` of a test accepts it. An empty list counts as no
key. Values of different kinds never equal one another: True is not 1, and "1" is not 1. Numbers
compare exactly by value, so that 1 equals 1.0. Times are texts in RFC 3339, since metadata is JSON.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Protocol

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.search.index import Labels, Mask

Scalar = str | int | float | bool

# Bounds of integers, which have 64 bits.
LEAST_INTEGER, LARGEST_INTEGER = -(2**63), 2**63 - 1
# Limits of a filter: tests, values of all OneOf together, nesting of All, AnyOf and Not.
MOST_TESTS = 500
MOST_VALUES = 10_000
MOST_DEPTH = 32

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:[Tt ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:[Zz]|[+-]\d\d:\d\d)?)?", re.ASCII
)


@dataclass(frozen=True)
class OneOf:
    """Pass items whose `key` has one of `values`; one value means equality. Without values, no item
    passes."""

    key: str
    values: tuple[Scalar, ...]


@dataclass(frozen=True)
class Range:
    """Pass items whose `key` is a number within the bounds; None leaves a side open.

    Without bounds, every number passes. Flags are no numbers.
    """

    key: str
    at_least: int | float | None = None
    less_than: int | float | None = None
    greater_than: int | float | None = None
    at_most: int | float | None = None


@dataclass(frozen=True)
class TimeRange:
    """Pass items whose `key` is a text of a date or time within the bounds, in microseconds since
    1970, UTC.

    None leaves a side open. Numbers, and texts that `date_to_microseconds` cannot parse, never
    pass.
    """

    key: str
    at_least: int | None = None
    less_than: int | None = None
    greater_than: int | None = None
    at_most: int | None = None


@dataclass(frozen=True)
class Exists:
    """Pass items that have `key`, with any value."""

    key: str


@dataclass(frozen=True)
class All:
    """Pass items that pass every part; without parts, all items pass."""

    filters: tuple["Filter", ...]


@dataclass(frozen=True)
class AnyOf:
    """Pass items that pass at least one part; without parts, no item passes."""

    filters: tuple["Filter", ...]


@dataclass(frozen=True)
class Not:
    """Pass items that do not pass `excluded_filter`."""

    excluded_filter: "Filter"


KeyTest = OneOf | Range | TimeRange | Exists
Filter = KeyTest | All | AnyOf | Not


def as_filter(where: Mapping[str, Scalar] | Filter) -> Filter | None:
    """Return a filter for a mapping of keys to required values, all of which must match. Return a
    filter as it is.

    The filter is not checked; `check_filter` does that.

    Args:
        where: A mapping, or a filter. Values of other kinds than the item's never match: 1 is not
            True.

    Returns:
        None for an empty mapping: every item passes.
    """
    if not isinstance(where, Mapping):
        return where
    return All(tuple(OneOf(key, (value,)) for key, value in where.items())) if where else None


def check_filter(condition: Filter) -> frozenset[str]:
    """Check a filter against the limits, and return the keys that it reads.

    Keys and texts are not checked.

    Args:
        condition: The filter; None and a mapping are refused, see `as_filter`.

    Returns:
        The keys; empty for a filter without tests.

    Raises:
        InvalidInputError: More than MOST_TESTS tests, MOST_VALUES values of all OneOf together, or
            MOST_DEPTH levels; NaN; an integer of more than 64 bits.
        TypeError: A part of it is no filter, such as None or a mapping.
    """
    tests = list(_tests(condition, 0))
    if len(tests) > MOST_TESTS:
        raise InvalidInputError(
            f"filter: expected at most {MOST_TESTS} conditions, got {len(tests)}; join values of "
            "one key with one_of, or store the result of several conditions under a metadata key "
            "of its own"
        )
    values = sum(len(test.values) for test in tests if isinstance(test, OneOf))
    if values > MOST_VALUES:
        raise InvalidInputError(
            f"filter: expected at most {MOST_VALUES} values, got {values}; store under one "
            "metadata key what these items have in common, and filter on that key"
        )
    for test in tests:
        _check_numbers(test)
    return frozenset(test.key for test in tests)


def _check_numbers(test: KeyTest) -> None:
    bounds = (getattr(test, field.name) for field in fields(test) if field.name != "key")
    for number in test.values if isinstance(test, OneOf) else bounds:
        if isinstance(number, float) and math.isnan(number):
            raise InvalidInputError(
                f"filter on {test.key[:64]!r}: expected a number, got NaN; give a number, or leave "
                "this condition out"
            )
        if isinstance(number, int) and not LEAST_INTEGER <= number <= LARGEST_INTEGER:
            raise InvalidInputError(
                f"filter on {test.key[:64]!r}: expected an integer of 64 bits, got a larger one; "
                "use a smaller number, or store the values of this key as texts"
            )


def _tests(condition: Filter, depth: int) -> Iterator[KeyTest]:
    if depth > MOST_DEPTH:
        raise InvalidInputError(
            f"filter: expected at most {MOST_DEPTH} levels of nested conditions, got more; use "
            "fewer levels"
        )
    if isinstance(condition, Not):
        yield from _tests(condition.excluded_filter, depth + 1)
    elif isinstance(condition, All | AnyOf):
        for part in condition.filters:
            yield from _tests(part, depth + 1)
    else:
        yield condition


def date_to_microseconds(text: str) -> int | None:
    """Parse a date (at midnight), or a date and time; UTC without an offset.

    The date and the time are separated by T or a space. Digits beyond microseconds are cut off.

    A time needs seconds, with at most 9 digits after the point. T and Z may be lower-case. Only a
    time may have an offset, Z or +HH:MM.

    Args:
        text: Such as 2026-11-27, or 2026-11-27T09:30:00.5+01:00, in ASCII.

    Returns:
        Microseconds since 1970, UTC, negative before it; None for any other text, such as an
        impossible date.
    """
    if _TIME.fullmatch(text) is None:
        return None
    try:
        time = datetime.fromisoformat(text.upper())
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        return (time - _EPOCH) // timedelta(microseconds=1)
    except (ValueError, OverflowError):
        # Such as the 30th of February, the year 0, or an offset of a hundred hours.
        return None


class Matches(Protocol):
    """The items that passed a filter."""

    def labels(self) -> Labels:
        """Return the labels of all matches, int64, increasing; empty if no item passed."""

    def __len__(self) -> int: ...

    def mask(self, labels: Labels) -> Mask:
        """Return which of some labels match.

        Args:
            labels: int64 [n], increasing; an unknown label does not match. Do not change the array
                later: it may be cached.

        Returns:
            bool [n]; do not write to it, since it may be cached.
        """


class StoreFilter(Protocol):
    """A filter engine for one store."""

    def find_matches(self, condition: Filter) -> Matches:
        """Return the items that pass now.

        Returns:
            The items; changes after the call do not alter them.

        Raises:
            InvalidInputError: The filter has too many tests, values or levels, a NaN, or an integer
                of more than 64 bits.
            TypeError: The condition is no filter, such as None.
            BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The
                store is locked, cannot be opened, does not answer, is damaged, or was closed.
        """

    def close(self) -> None:
        """Stop following the store, if the engine does.

        Later answers may be outdated; a second `close` does nothing.
        """
