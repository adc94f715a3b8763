"""Between protocol messages and what the gateway works on."""

import math
from collections.abc import Iterable, Mapping

from gallery.filters import Condition, OneOf, Range
from gallery.put import MetadataValue
from gallery.spec import Origin
from nobackfill.v1 import types_pb2 as types
from release.errors import InvalidInputError

ORIGINS: Mapping[Origin, types.Origin] = {
    "native": types.ORIGIN_NATIVE,
    "direct": types.ORIGIN_DIRECT,
    "upgraded": types.ORIGIN_UPGRADED,
    "re-embedded": types.ORIGIN_RE_EMBEDDED,
    "old-model": types.ORIGIN_OLD_MODEL,
}


def from_value(value: types.Value, key: str) -> MetadataValue:
    """Raises InvalidInputError for an empty value or a number that is not finite."""
    kind = value.WhichOneof("kind")
    if kind == "text":
        return value.text
    if kind == "flag":
        return value.flag
    if kind == "number" and math.isfinite(value.number):
        return value.number
    raise InvalidInputError(f"{key[:64]!r}: expected text, a finite number or a flag")


def to_value(value: MetadataValue, into: types.Value) -> None:
    """Fill a metadata value."""
    if isinstance(value, bool):
        into.flag = value
    elif isinstance(value, str):
        into.text = value
    else:
        into.number = value


def from_filter(filtered: types.Filter) -> list[Condition]:
    """Raises InvalidInputError for a condition without a test."""
    return [_condition(condition) for condition in filtered.conditions]


def _condition(condition: types.Condition) -> Condition:
    key, test = condition.key, condition.WhichOneof("test")
    if test == "equals":
        return OneOf(key, (from_value(condition.equals, key),))
    if test == "one_of":
        return OneOf(key, tuple(_values(condition.one_of.values, key)))
    if test == "range":
        bounds = condition.range
        return Range(
            key,
            bounds.at_least if bounds.HasField("at_least") else None,
            bounds.less_than if bounds.HasField("less_than") else None,
        )
    raise InvalidInputError(f"filter on {key[:64]!r}: expected equals, one_of or range")


def _values(values: Iterable[types.Value], key: str) -> Iterable[MetadataValue]:
    return [from_value(value, key) for value in values]
