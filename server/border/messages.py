"""Reading a request's bytes: bounded before anything is made of them."""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from release.errors import InvalidInputError
from server.border.errors import TooLargeError

# Items, ids or queries of one message. Each costs many times its bytes once it is read.
LARGEST_COUNT = 10_000
# Fields beside them.
_OTHERS = 100
# Messages above this are read on the thread that works for them, not where all calls arrive.
LARGE = 64 * 1024


def reader(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """`parse` that refuses what is no message, or one of too many parts.

    What it returns raises InvalidInputError, TooLargeError.
    """

    def read(data: bytes) -> Any:
        _check_count(data)
        try:
            return parse(data) if parse is not None else data
        except DecodeError:
            raise InvalidInputError(
                "the request is not the protocol's message; use the .proto files"
            ) from None

    return read


def _check_count(data: bytes) -> None:
    """Walk over the outermost fields, without making anything of them."""
    most = LARGEST_COUNT + _OTHERS
    # No field takes less than two bytes.
    if len(data) <= 2 * most:
        return
    start, count = 0, 0
    while start < len(data):
        start = _end_of_field(data, start)
        count += 1
        if count > most:
            raise TooLargeError(
                f"expected at most {LARGEST_COUNT} items, ids or queries in a message, got more; "
                "send several messages"
            )


def _end_of_field(data: bytes, start: int) -> int:
    tag, start = _varint(data, start)
    kind = tag & 7
    if kind == 2:
        length, start = _varint(data, start)
        return start + length
    if kind == 0:
        return _varint(data, start)[1]
    # Fixed width; groups are none of this protocol's, so parsing will refuse the message.
    return start + {1: 8, 5: 4}.get(kind, len(data))


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """A value and where it ends; past the end for one that is cut off, which parsing refuses."""
    value = shift = 0
    while start < len(data):
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, start
