"""Convert metadata values and filters of a gallery to gRPC messages, and back."""

import math
from collections.abc import Mapping, Sequence

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
    check_filter,
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


def fill_value(value: MetadataValue, message: types.Value) -> None:
    """Write a metadata value into a message.

    An integer of 64 bits stays exact; a larger one becomes the nearest float.

    Args:
        value: The value. NaN and infinity are written without an error; an empty list stays a list,
            and empty bytes become one.
        message: The message; what it held before is replaced, but a list is appended to a list.

    Raises:
        InvalidInputError: A value of another kind, such as None, a mapping, a set, a date or an
            integer of numpy; a list of anything but texts; an integer beyond the largest float; or
            a text with half a surrogate pair.
    """
    try:
        _fill(value, message)
    except OverflowError as error:
        raise InvalidInputError(
            "metadata: expected an integer of 64 bits, got one beyond the largest float; store it "
            "as a text"
        ) from error
    except ValueError as error:
        raise InvalidInputError(
            f"metadata: expected valid Unicode, got half of a character ({error}); leave it out"
        ) from error


def _fill(value: MetadataValue, into: types.Value) -> None:
    if isinstance(value, bool):
        into.flag = value
    elif isinstance(value, str):
        into.text = value
    elif isinstance(value, int) and LEAST_INTEGER <= value <= LARGEST_INTEGER:
        into.integer = value
    elif isinstance(value, int | float):
        into.number = value
    elif isinstance(value, Sequence) and all(isinstance(text, str) for text in value):
        into.texts.SetInParent()
        into.texts.texts.extend(value)
    else:
        raise InvalidInputError(
            "metadata: expected a text, a number, a flag or a list of texts, got "
            f"{type(value).__name__}; leave it out"
        )


def fill_metadata(metadata: Mapping[str, MetadataValue], message: Values) -> None:
    """Write metadata into a message, each value as `fill_value` does.

    Args:
        metadata: The values by key.
        message: The message; other keys that it holds stay.

    Raises:
        InvalidInputError: A key is no text or has half a surrogate pair, or `fill_value` refuses a
            value. Values before it are in the message.
    """
    for key, value in metadata.items():
        try:
            entry = message[key]
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"metadata: expected keys of valid Unicode text, got {key!r:.64}; leave it out"
            ) from error
        try:
            fill_value(value, entry)
        except InvalidInputError as error:
            why = str(error).removeprefix("metadata: ")
            raise InvalidInputError(f"metadata {key[:64]!r}: {why}") from error


def metadata_value_message(value: MetadataValue) -> types.Value:
    """Return a metadata value as a new message.

    An integer of 64 bits stays exact; a larger one becomes the nearest float.

    Args:
        value: The value. NaN and infinity are written without an error.

    Raises:
        InvalidInputError: A value of another kind, such as None, a mapping, a set, a date or an
            integer of numpy; a list of anything but texts; an integer beyond the largest float; or
            a text with half a surrogate pair.
    """
    message = types.Value()
    fill_value(value, message)
    return message


def read_metadata_value(value: types.Value, key: str) -> MetadataValue:
    """Return a message as a metadata value.

    Args:
        value: The message.
        key: The key, for the error.

    Returns:
        The value; a list of texts is new, and may be empty.

    Raises:
        InvalidInputError: The message is empty, or a number that is not finite.
    """
    return list(value.texts.texts) if value.HasField("texts") else read_scalar(value, key)


def read_scalar(value: types.Value, key: str) -> Scalar:
    """Return a message as a single value, no list.

    Args:
        value: The message.
        key: The key, for the error.

    Raises:
        InvalidInputError: The message is empty, a list, or a number that is not finite.
    """
    kind = value.WhichOneof("kind")
    if kind == "text":
        return value.text
    if kind == "flag":
        return value.flag
    if kind == "integer":
        return value.integer
    if kind == "number" and math.isfinite(value.number):
        return value.number
    raise InvalidInputError(
        f"metadata {key[:64]!r}: expected a text, a finite number or a flag, got "
        f"{kind or 'no value'}; correct the value or leave it out"
    )


def read_metadata(values: Values) -> Metadata:
    """Return metadata from the messages of a gateway.

    Args:
        values: Messages by key; without any, the metadata is empty.

    Raises:
        InvalidInputError: A value is empty, or a number that is not finite.
    """
    return {key: read_metadata_value(value, key) for key, value in values.items()}


def origin_name(origin: types.Origin) -> Origin | None:
    """Return the name of an origin; None for one that is unset, or unknown to this version."""
    return _NAMES.get(origin)


# No item has this key, so that its absence is true for all. A gateway that does not know
# expressions does not know this test either, and refuses the call instead of ignoring the filter.
OLD_GATEWAY_KEY = "\0 this gateway is older than filter expressions: update it"
_BOUNDS = ("at_least", "less_than", "greater_than", "at_most")


def filter_message(where: Mapping[str, Scalar] | Filter | None) -> types.Filter:
    """Return values that metadata must equal, or a filter, as a message; None gives an empty one.

    An empty message passes every item, and so does an empty mapping. A gateway that is older than
    filters refuses one, but accepts a mapping. A mapping is not checked: a
    gateway refuses its lists and NaN.

    Args:
        where: Values by key, all of which must match; or a filter.

    Raises:
        InvalidInputError: The filter has too many tests, values or levels, a NaN, an integer of
            more than 64 bits, a time outside of the years 1 to 9999, or a text with half a
            surrogate pair. A value of a mapping or a OneOf is None, a mapping, or a list of
            anything but texts. A value of a mapping is an integer beyond the largest float.
        TypeError: `where` is neither a mapping nor a filter, a key is no text, or a bound of a
            Range is no number.
    """
    message = types.Filter()
    try:
        if isinstance(where, Mapping):
            # Gateways before expressions understand conditions, but would ignore an expression.
            for key, value in where.items():
                message.conditions.add(key=key, equals=metadata_value_message(value))
        elif where is not None:
            check_filter(where)
            message.expression.CopyFrom(expression_message(where))
            message.conditions.add(key=OLD_GATEWAY_KEY, exists=False)
    except ValueError as error:
        raise InvalidInputError(
            "filter: expected texts of valid Unicode, and times of the years 1 to 9999, got "
            f"another value ({error}); correct the filter"
        ) from error
    return message


def expression_message(condition: Filter) -> types.Expression:
    """Return a filter as a message; the filter is not checked against the limits.

    Args:
        condition: The filter. A Range without bounds becomes a test for a number.

    Raises:
        ValueError: A bound has more than 64 bits, a time is outside of the years 1 to 9999, or a
            key has half a surrogate pair.
        InvalidInputError: `fill_value` refuses a value of a OneOf.
        TypeError: A bound of a Range is no number, or a key is no text.
        google.protobuf.message.DecodeError: All and AnyOf are nested in about 50 levels or more.
    """
    message = types.Expression()
    if isinstance(condition, All | AnyOf):
        group = message.all if isinstance(condition, All) else message.any
        group.SetInParent()
        group.of.extend(map(expression_message, condition.filters))
    elif isinstance(condition, Not):
        # `not` is a keyword of Python.
        getattr(message, "not").CopyFrom(expression_message(condition.excluded_filter))
    elif isinstance(condition, Range):
        message.all.CopyFrom(_ranges(condition))
    else:
        message.condition.key = condition.key
        if isinstance(condition, OneOf):
            message.condition.one_of.SetInParent()
            message.condition.one_of.values.extend(map(metadata_value_message, condition.values))
        elif isinstance(condition, Exists):
            message.condition.exists = True
        else:
            _times(condition, message.condition.time_range)
    return message


def _ranges(condition: Range) -> types.Expression.Expressions:
    """Return one condition for integer bounds and one for others, so that no bound is rounded.

    A range without bounds requires a number.
    """
    integers, others = types.Condition(key=condition.key), types.Condition(key=condition.key)
    others.range.SetInParent()
    for name in _BOUNDS:
        bound = getattr(condition, name)
        if bound is not None:
            into = integers.integer_range if isinstance(bound, int) else others.range
            setattr(into, name, bound)
    conditions = [one for one in (integers, others) if one.WhichOneof("test")]
    return types.Expression.Expressions(of=[types.Expression(condition=one) for one in conditions])


def _times(condition: TimeRange, into: types.Condition.TimeRange) -> None:
    into.SetInParent()
    for name in _BOUNDS:
        bound = getattr(condition, name)
        if bound is not None:
            getattr(into, name).FromMicroseconds(bound)
