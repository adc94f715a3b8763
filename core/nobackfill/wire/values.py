"""Metadata, filters by value and origins as messages, and back."""

import math
from collections.abc import Mapping

from google.protobuf.internal.containers import MessageMap

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filters import LARGEST_INTEGER, LEAST_INTEGER, Scalar
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
