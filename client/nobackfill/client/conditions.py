"""Parse filters as people type them: KEY=VALUE, KEY!=VALUE, KEY>VALUE, KEY exists."""

import math
import re
from collections.abc import Sequence

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filters import (
    LARGEST_INTEGER,
    LEAST_INTEGER,
    All,
    Exists,
    Filter,
    Not,
    OneOf,
    Range,
    Scalar,
    TimeRange,
    date_to_microseconds,
)

_CONDITION = re.compile(r"(.+?)(!=|>=|<=|=|>|<)(.*)", re.DOTALL)
_BOUNDS = {">": "greater_than", ">=": "at_least", "<": "less_than", "<=": "at_most"}
_EXISTS = " exists"
# Numbers as in JSON: text with a leading zero or plus is a postcode or a telephone number.
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# At most the digits of 64 bits: Python refuses to parse thousands.
_INTEGER = re.compile(r"-?[0-9]{1,19}")


def parse_conditions(conditions: Sequence[str]) -> All:
    """Parse conditions into a filter; an item must pass every condition.

    The key of a condition is all before its first sign; it may contain spaces. An empty value is an
    empty text. Dates and times without an offset are UTC.

    Args:
        conditions: each KEY=VALUE, KEY!=VALUE, KEY>VALUE (or <, >=, <=) or 'KEY exists'. Values are
            parsed as `parse_value` does; after an inequality also as dates and times.

    Returns:
        The filter; without any condition, one that every item passes.

    Raises:
        InvalidInputError: a condition has another form, or a value that has no order.
    """
    return All(tuple(map(_read, conditions)))


def _read(text: str) -> Filter:
    parts = _CONDITION.fullmatch(text)
    if parts is None:
        if text.endswith(_EXISTS) and text != _EXISTS:
            return Exists(text.removesuffix(_EXISTS))
        raise InvalidInputError(
            "condition: expected KEY=VALUE, KEY!=VALUE, KEY>VALUE (or <, >=, <=) or 'KEY "
            f"exists', got {text!r}; correct the condition"
        )
    key, sign, text = parts.groups()
    value = parse_value(text)
    if sign in ("=", "!="):
        equal = OneOf(key, (value,))
        return equal if sign == "=" else Not(equal)
    bound = _number(text)
    if bound is not None:
        return Range(key, **{_BOUNDS[sign]: bound})
    if isinstance(value, str):
        moment = date_to_microseconds(value)
        if moment is None:
            raise InvalidInputError(
                f"condition on {key[:64]!r}: expected a number, a date or a time after {sign}, got "
                f"{value[:80]!r}; write a date as 2026-01-31, or compare texts with = or !="
            )
        return TimeRange(key, **{_BOUNDS[sign]: moment})
    raise InvalidInputError(
        f"condition on {key[:64]!r}: {text} has no order; expected = or != before true and false, "
        f"got {sign}"
    )


def parse_value(text: str) -> Scalar:
    """Convert the text of a value: numbers, true and false as in JSON, all else to text.

    Integers beyond 64 bits and numbers that are not finite stay text, because they would lose
    digits. So do numbers with a leading zero or plus, such as a postcode. Never raises.

    Returns:
        A flag, an integer of 64 bits, a finite float, or the unchanged text.
    """
    if text in ("true", "false"):
        return text == "true"
    number = _number(text)
    if number is None or (isinstance(number, float) and text.lstrip("-").isdigit()):
        return text
    return number


def _number(text: str) -> int | float | None:
    if not _NUMBER.fullmatch(text):
        return None
    if _INTEGER.fullmatch(text) and LEAST_INTEGER <= int(text) <= LARGEST_INTEGER:
        return int(text)
    number = float(text)
    return number if math.isfinite(number) else None
