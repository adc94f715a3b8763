"""Values and filters of a gallery as the messages of gRPC carry them, and back."""

import math
from collections.abc import Mapping

from google.protobuf.internal.containers import MessageMap

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filters import (
    LARGEST_INTEGER,
    LEAST_INTEGER,
    All,
    AnyOf,
    Exists,
    Filter,
    Not,
    OneOf,
    Range,
    Scalar,
    TimeRange,
    check,
)
from nobackfill.gallery.spec import Metadata, MetadataValue
from nobackfill.v1 import types_pb2 as types
from nobackfill.vectors import Origin

ORIGINS: Mapping[Origin, types.Origin] = {
    "native": types.ORIGIN_NATIVE,
    "direct": types.ORIGIN_DIRECT,
    "upgraded": types.ORIGIN_UPGRADED,
    "re-embedded": types.ORIGIN_RE_EMBEDDED,
    "old-model": types.ORIGIN_OLD_MODEL,
}
_NAMES = {origin: name for name, origin in ORIGINS.items()}

Values = MessageMap[str, types.Value]


def fill_value(value: MetadataValue, into: types.Value) -> None:
    """An integer of 64 bits stays exact; a larger one is the float nearest to it."""
    if isinstance(value, bool):
        into.flag = value
    elif isinstance(value, str):
        into.text = value
    elif isinstance(value, int) and LEAST_INTEGER <= value <= LARGEST_INTEGER:
        into.integer = value
    elif isinstance(value, int | float):
        into.number = value
    else:
        into.texts.SetInParent()
        into.texts.texts.extend(value)


def to_value(value: MetadataValue) -> types.Value:
    """Like `fill_value`, as a message of its own."""
    made = types.Value()
    fill_value(value, made)
    return made


def from_value(value: types.Value, key: str) -> MetadataValue:
    """Raises InvalidInputError for an empty value or a number that is not finite."""
    return list(value.texts.texts) if value.HasField("texts") else from_scalar(value, key)


def from_scalar(value: types.Value, key: str) -> Scalar:
    """Like `from_value`; a list of texts is refused, too."""
    kind = value.WhichOneof("kind")
    if kind == "text":
        return value.text
    if kind == "flag":
        return value.flag
    if kind == "integer":
        return value.integer
    if kind == "number" and math.isfinite(value.number):
        return value.number
    raise InvalidInputError(f"{key[:64]!r}: expected text, a finite number or a flag")


def from_metadata(values: Values) -> Metadata:
    """Metadata as a gateway answers it. Raises InvalidInputError."""
    return {key: from_value(value, key) for key, value in values.items()}


def origin_name(origin: types.Origin) -> Origin | None:
    """None for one that is not set, or that this version does not know."""
    return _NAMES.get(origin)


# No item has this key, so that it lacks it holds of all. A gateway that does not know expressions
# does not know such a test either, and refuses it rather than answer without a filter.
NEWER = "\0 this gateway is older than filter expressions: update it"
_BOUNDS = ("at_least", "less_than", "greater_than", "at_most")


def to_filter(where: Mapping[str, Scalar] | Filter | None) -> types.Filter:
    """Metadata that equals the given values, or a filter. Raises InvalidInputError."""
    made = types.Filter()
    if isinstance(where, Mapping):
        # Gateways before expressions answer these, too; an expression they would not see.
        for key, value in where.items():
            made.conditions.add(key=key, equals=to_value(value))
    elif where is not None:
        check(where)
        made.expression.CopyFrom(to_expression(where))
        made.conditions.add(key=NEWER, exists=False)
    return made


def to_expression(filtered: Filter) -> types.Expression:
    """The same filter as a message. Raises ValueError for an integer of more than 64 bits."""
    made = types.Expression()
    if isinstance(filtered, All | AnyOf):
        group = made.all if isinstance(filtered, All) else made.any
        group.SetInParent()
        group.of.extend(map(to_expression, filtered.of))
    elif isinstance(filtered, Not):
        # A word of the language: it cannot be an attribute's name in the source.
        getattr(made, "not").CopyFrom(to_expression(filtered.of))
    elif isinstance(filtered, Range):
        made.all.CopyFrom(_ranges(filtered))
    else:
        made.condition.key = filtered.key
        if isinstance(filtered, OneOf):
            made.condition.one_of.SetInParent()
            made.condition.one_of.values.extend(map(to_value, filtered.values))
        elif isinstance(filtered, Exists):
            made.condition.exists = True
        else:
            _times(filtered, made.condition.time_range)
    return made


def _ranges(filtered: Range) -> types.Expression.Expressions:
    """One condition for bounds that are integers, one for others: either way no bound is rounded.
    A range without any asks for a number."""
    whole, others = types.Condition(key=filtered.key), types.Condition(key=filtered.key)
    others.range.SetInParent()
    for name in _BOUNDS:
        bound = getattr(filtered, name)
        if bound is not None:
            into = whole.integer_range if isinstance(bound, int) else others.range
            setattr(into, name, bound)
    asked = [one for one in (whole, others) if one.WhichOneof("test")]
    return types.Expression.Expressions(of=[types.Expression(condition=one) for one in asked])


def _times(filtered: TimeRange, into: types.Condition.TimeRange) -> None:
    into.SetInParent()
    for name in _BOUNDS:
        bound = getattr(filtered, name)
        if bound is not None:
            getattr(into, name).FromMicroseconds(bound)
