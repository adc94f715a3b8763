"""Between protocol messages and what the gateway works on."""

from collections.abc import Collection, Mapping

from google.protobuf.timestamp_pb2 import Timestamp

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filters import (
    All,
    AnyOf,
    Exists,
    Filter,
    Not,
    OneOf,
    Range,
    Test,
    TimeRange,
)
from nobackfill.gallery.spec import Metadata
from nobackfill.v1 import types_pb2 as types
from nobackfill.wire.values import NEWER, Values, fill_value, from_scalar

# The last second that a Timestamp can hold: the end of the year 9999, in Unix time.
_LAST = 253_402_300_799


def keys_of(fields: types.Fields | None) -> Collection[str] | None:
    """The keys that an answer shall bring; None: all."""
    return None if fields is None else frozenset(fields.keys)


def to_metadata(metadata: Metadata, keys: Collection[str] | None, into: Values) -> None:
    """Fill what an answer brings of an item."""
    for key, value in metadata.items():
        if keys is None or key in keys:
            fill_value(value, into[key])


def from_filter(filtered: types.Filter) -> Filter | None:
    """None: everything passes. Raises InvalidInputError for a condition without a test."""
    parts = [_condition(one) for one in filtered.conditions if one.key != NEWER]
    expression = _expression(filtered.expression) if filtered.HasField("expression") else None
    if expression is None:
        return All(tuple(parts)) if parts else None
    return All((*parts, expression)) if parts else expression


def _expression(expression: types.Expression) -> Filter:
    """Goes no deeper than protobuf lets a message be, 100 levels."""
    kind = expression.WhichOneof("kind")
    if kind == "condition":
        return _condition(expression.condition)
    if kind == "all":
        return All(tuple(_expression(part) for part in expression.all.of))
    if kind == "any":
        return AnyOf(tuple(_expression(part) for part in expression.any.of))
    if kind == "not":
        # A word of the language: it cannot be an attribute's name in the source.
        return Not(_expression(getattr(expression, "not")))
    raise InvalidInputError(
        "filter: expected condition, all, any or not in an expression, got none"
    )


def _condition(condition: types.Condition) -> Test | Not:
    key, test = condition.key, condition.WhichOneof("test")
    if test == "equals":
        return OneOf(key, (from_scalar(condition.equals, key),))
    if test == "one_of":
        return OneOf(key, tuple(from_scalar(value, key) for value in condition.one_of.values))
    if test == "range":
        return Range(key, **_bounds(condition.range))
    if test == "integer_range":
        return Range(key, **_bounds(condition.integer_range))
    if test == "time_range":
        return TimeRange(key, **_moments(condition.time_range, key))
    if test == "exists":
        return Exists(key) if condition.exists else Not(Exists(key))
    raise InvalidInputError(
        f"filter on {key[:64]!r}: expected equals, one_of, range, integer_range, time_range or "
        "exists"
    )


def _bounds(bounds: types.Condition.Range | types.Condition.IntegerRange) -> dict[str, float]:
    return {field.name: value for field, value in bounds.ListFields()}


def _moments(bounds: types.Condition.TimeRange, key: str) -> dict[str, int]:
    """Bounds in microseconds; what lies between two of them is on the right side of each."""
    found = {}
    for field, moment in bounds.ListFields():
        if not 0 <= moment.nanos < 1_000_000_000:
            raise InvalidInputError(f"filter on {key[:64]!r}: expected nanos from 0 to 999999999")
        whole, rest = divmod(moment.nanos, 1000)
        after = rest and field.name in ("at_least", "less_than")
        found[field.name] = moment.seconds * 1_000_000 + whole + bool(after)
    return found


def to_end(space: str, ends: Mapping[str, float], message: Timestamp) -> None:
    """Set when a space ends, where that is announced; `ends` in Unix time, by space."""
    if space in ends:
        message.FromNanoseconds(int(min(ends[space], _LAST) * 1e9))
