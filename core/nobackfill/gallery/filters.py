"""The filter language: what must hold for an item's metadata (docs/operations/filters.md).

A test holds for an item that has the key with a value, or a list with an element, that passes: an
item without the key passes no test, and `Not` of a test lets it through. An empty list is as no
key. Kinds never equal one another: True is not 1, "1" is not 1; numbers compare by value, exactly,
so that 1 is 1.0. Times are texts in RFC 3339, for metadata is JSON.
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

# Integers have 64 bits.
LEAST_INTEGER, LARGEST_INTEGER = -(2**63), 2**63 - 1
# Of a filter: tests, values of all OneOf together, and how deep All, AnyOf and Not may nest.
MOST_TESTS = 500
MOST_VALUES = 10_000
MOST_DEPTH = 32

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:[Tt ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:[Zz]|[+-]\d\d:\d\d)?)?", re.ASCII
)


@dataclass(frozen=True)
class OneOf:
    """The item has `key` with one of `values` (one value: equality)."""

    key: str
    values: tuple[Scalar, ...]


@dataclass(frozen=True)
class Range:
    """The item's `key` is a number within the bounds; None leaves a side open."""

    key: str
    at_least: int | float | None = None
    less_than: int | float | None = None
    greater_than: int | float | None = None
    at_most: int | float | None = None


@dataclass(frozen=True)
class TimeRange:
    """The item's `key` is a date or a time within the bounds: microseconds since 1970, UTC."""

    key: str
    at_least: int | None = None
    less_than: int | None = None
    greater_than: int | None = None
    at_most: int | None = None


@dataclass(frozen=True)
class Exists:
    """The item has `key`, with any value."""

    key: str


@dataclass(frozen=True)
class All:
    """Every one of `of` holds; of none: everything passes."""

    of: tuple["Filter", ...]


@dataclass(frozen=True)
class AnyOf:
    """At least one of `of` holds; of none: nothing passes."""

    of: tuple["Filter", ...]


@dataclass(frozen=True)
class Not:
    """`of` does not hold."""

    of: "Filter"


Test = OneOf | Range | TimeRange | Exists
Filter = Test | All | AnyOf | Not


def every(where: Mapping[str, Scalar] | Filter) -> Filter | None:
    """A filter, or that each of these keys has its value; None: everything passes."""
    if not isinstance(where, Mapping):
        return where
    return All(tuple(OneOf(key, (value,)) for key, value in where.items())) if where else None


def check(filtered: Filter) -> frozenset[str]:
    """The keys that a filter asks for.

    Raises InvalidInputError for more than MOST_TESTS tests, MOST_VALUES values, MOST_DEPTH levels,
    or a bound that is NaN.
    """
    tests = list(_tests(filtered, 0))
    if len(tests) > MOST_TESTS:
        raise InvalidInputError(
            f"filter: expected at most {MOST_TESTS} conditions, got {len(tests)}; ask with one_of, "
            "or keep in the metadata what the filter puts together"
        )
    values = sum(len(test.values) for test in tests if isinstance(test, OneOf))
    if values > MOST_VALUES:
        raise InvalidInputError(
            f"filter: expected at most {MOST_VALUES} values, got {values}; keep in the metadata "
            "what these items have in common"
        )
    for test in tests:
        _check_numbers(test)
    return frozenset(test.key for test in tests)


def _check_numbers(test: Test) -> None:
    given = (getattr(test, field.name) for field in fields(test) if field.name != "key")
    for number in test.values if isinstance(test, OneOf) else given:
        if isinstance(number, float) and math.isnan(number):
            raise InvalidInputError(f"filter on {test.key[:64]!r}: expected a number, got NaN")
        if isinstance(number, int) and not LEAST_INTEGER <= number <= LARGEST_INTEGER:
            raise InvalidInputError(
                f"filter on {test.key[:64]!r}: expected an integer of 64 bits, got a larger one"
            )


def _tests(filtered: Filter, depth: int) -> Iterator[Test]:
    if depth > MOST_DEPTH:
        raise InvalidInputError(f"filter: expected at most {MOST_DEPTH} levels, got more")
    if isinstance(filtered, Not):
        yield from _tests(filtered.of, depth + 1)
    elif isinstance(filtered, All | AnyOf):
        for part in filtered.of:
            yield from _tests(part, depth + 1)
    else:
        yield filtered


def microseconds(text: str) -> int | None:
    """A date (midnight), or a date and time, without an offset UTC; None for any other text."""
    if _TIME.fullmatch(text) is None:
        return None
    try:
        found = datetime.fromisoformat(text.upper())
        if found.tzinfo is None:
            found = found.replace(tzinfo=UTC)
        return (found - _EPOCH) // timedelta(microseconds=1)
    except (ValueError, OverflowError):
        # The 30th of February, the year 0, an offset of a hundred hours.
        return None


class Matches(Protocol):
    """The items that passed a filter."""

    def labels(self) -> Labels:
        """All of them, increasing."""
        ...

    def __len__(self) -> int: ...

    def mask(self, labels: Labels) -> Mask:
        """Which of `labels` (increasing) passed."""
        ...


class Filtering(Protocol):
    """Answers filters on one store."""

    def passing(self, filtered: Filter) -> Matches:
        """Items that pass now. Raises InvalidInputError for what filters.check refuses."""
        ...

    def close(self) -> None: ...
