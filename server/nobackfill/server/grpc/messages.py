"""Reading a request's bytes: its parts are counted before anything is made of them.

A part takes two bytes on the wire, and fifty times as much once it is read: 32 MiB of empty parts
would take a gigabyte, and half a second in which nobody else gets the interpreter.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from nobackfill.errors import InvalidInputError, TooLargeError

# Items, ids or queries of one message.
LARGEST_COUNT = 10_000
# Fields beside them.
_OTHERS = 100
# Fields at any depth: fifty for each item.
_PARTS = 500_000
# Up to here a message can do no harm with what lies deeper than its items, and walking costs a
# fifth of putting them.
_SHALLOW = 2 * 2**20
# Messages above this are read on the thread that works for them, not where all calls arrive.
LARGE = 64 * 1024


def reader(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A message class's FromString that refuses what is no message, or one of too many parts.

    What it returns raises InvalidInputError, TooLargeError.
    """
    descriptor: Descriptor = parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]

    def read(data: bytes) -> Any:
        # No part takes less than two bytes.
        if len(data) > 2 * (LARGEST_COUNT + _OTHERS):
            _check_count(data, descriptor)
        try:
            return parse(data)
        except DecodeError:
            raise InvalidInputError(
                "the request is not the protocol's message; use the .proto files"
            ) from None

    return read


def _check_count(data: bytes, descriptor: Descriptor) -> None:
    """Raises TooLargeError, early, and InvalidInputError for a group, which no field of the
    protocol is. What is cut off or garbled is left to parsing to refuse."""
    parts = 0
    most = LARGEST_COUNT + _OTHERS
    todo = [(0, len(data), descriptor)]
    while todo:
        start, end, of = todo.pop()
        nested = _nested(of)
        while start < end:
            tag, start = _varint(data, start)
            kind = tag & 7
            length = _WIDTHS.get(kind, end)
            if kind == 2:
                length, start = _varint(data, start)
                inner = nested.get(tag >> 3)
                if inner is not None and length:
                    todo.append((start, min(start + length, end), inner))
            elif kind == 0:
                start = _varint(data, start)[1]
            elif kind in _GROUP:
                raise InvalidInputError(
                    f"expected fields of the protocol, got a group (field {tag >> 3}), which it "
                    "has none of; use the .proto files"
                )
            start += length
            parts += 1
            if parts > most:
                raise TooLargeError(
                    f"expected at most {LARGEST_COUNT} items, ids or queries in a message, and "
                    f"{_PARTS} values in them, got more; send several messages"
                )
        if len(data) <= _SHALLOW:
            return
        most = _PARTS


# Bytes of a value by its wire type; parsing ends at what is none.
_WIDTHS: Mapping[int, int] = {0: 0, 1: 8, 5: 4}
# Wire types of a group's begin and end. Parsing takes one of any number as an unknown field, and
# reads on behind it.
_GROUP = (3, 4)


@cache
def _nested(descriptor: Descriptor) -> Mapping[int, Descriptor]:
    """The fields that are messages, by number."""
    fields = descriptor.fields_by_number.items()
    return {number: f.message_type for number, f in fields if f.message_type is not None}


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """A value and where it ends."""
    value = shift = 0
    while start < len(data):
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            break
        shift += 7
    return value, start
