"""Convert between protocol messages and the gateway's types."""

from collections.abc import Collection, Mapping

from google.protobuf.timestamp_pb2 import Timestamp

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filters import (
    All,
    AnyOf,
    Exists,
    Filter,
    KeyTest,
    Not,
    OneOf,
    Range,
    TimeRange,
)
from nobackfill.gallery.spec import Metadata
from nobackfill.v1 import types_pb2 as types
from nobackfill.wire.values import OLD_GATEWAY_KEY, Values, fill_value, read_scalar

# Last second (Unix time) that a Timestamp can hold: the end of the year 9999.
_LAST = 253_402_300_799


def requested_metadata_keys(fields: types.Fields | None) -> Collection[str] | None:
    """Return the metadata keys that an answer includes; None, for a message that is not set, means
    all. Empty means none.
    """
    return None if fields is None else frozenset(fields.keys)


def fill_metadata(metadata: Metadata, keys: Collection[str] | None, into: Values) -> None:
    """Encode an item's metadata.

    Keys that the item does not have are left out. NaN and infinity are written as they are.

    Args:
        metadata: the metadata.
        keys: keys to include; None means all.
        into: the message to fill. Its other keys stay, and a list is appended to a list of the same
            key.

    Raises:
        InvalidInputError: `fill_value` refuses a value. Values before it are in the message.
    """
    for key, value in metadata.items():
        if keys is None or key in keys:
            fill_value(value, into[key])


def parse_filter(message: types.Filter) -> Filter | None:
    """Parse a filter; None if every item passes.

    Clients add a condition with the key OLD_GATEWAY_KEY, by which older gateways refuse; it is
    skipped here. Sizes, and NaN in ranges, are not checked here. The order of the conditions stays.

    Raises:
        InvalidInputError: a condition or an expression has no test, or an invalid value or time, as
            a number of `equals` or `one_of` that is not finite.
    """
    parts = [_condition(one) for one in message.conditions if one.key != OLD_GATEWAY_KEY]
    expression = _expression(message.expression) if message.HasField("expression") else None
    if expression is None:
        return All(tuple(parts)) if parts else None
    return All((*parts, expression)) if parts else expression


def _expression(expression: types.Expression) -> Filter:
    """Parse an expression; protobuf limits its depth to 100 levels."""
    kind = expression.WhichOneof("kind")
    if kind == "condition":
        return _condition(expression.condition)
    if kind == "all":
        return All(tuple(_expression(part) for part in expression.all.of))
    if kind == "any":
        return AnyOf(tuple(_expression(part) for part in expression.any.of))
    if kind == "not":
        # `not` is a keyword of Python, so the attribute needs getattr.
        return Not(_expression(getattr(expression, "not")))
    raise InvalidInputError(
        "filter: expected condition, all, any or not in each expression, got none of them; set one"
    )


def _condition(condition: types.Condition) -> KeyTest | Not:
    key, test = condition.key, condition.WhichOneof("test")
    if test == "equals":
        return OneOf(key, (read_scalar(condition.equals, key),))
    if test == "one_of":
        return OneOf(key, tuple(read_scalar(value, key) for value in condition.one_of.values))
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
        "exists, got none of them; set one"
    )


def _bounds(bounds: types.Condition.Range | types.Condition.IntegerRange) -> dict[str, float]:
    return {field.name: value for field, value in bounds.ListFields()}


def _moments(bounds: types.Condition.TimeRange, key: str) -> dict[str, int]:
    """Convert time bounds to microseconds, rounded so that no moment changes its side."""
    bounds_us = {}
    for field, moment in bounds.ListFields():
        if not 0 <= moment.nanos < 1_000_000_000:
            raise InvalidInputError(
                f"filter on {key[:64]!r}: expected a time with nanos (nanoseconds) from 0 to "
                f"999999999, got {moment.nanos}; correct the time"
            )
        microseconds, nanoseconds = divmod(moment.nanos, 1000)
        rounds_up = nanoseconds and field.name in ("at_least", "less_than")
        bounds_us[field.name] = moment.seconds * 1_000_000 + microseconds + bool(rounds_up)
    return bounds_us


def fill_space_end(space: str, ends: Mapping[str, float], message: Timestamp) -> None:
    """Fill in when queries of a space end; without an announced end the message stays unset.

    Args:
        space: id of the space.
        ends: Unix time by space; times after the year 9999 become its last second.
        message: the timestamp to fill.
    """
    if space in ends:
        message.FromNanoseconds(int(min(ends[space], _LAST) * 1e9))
