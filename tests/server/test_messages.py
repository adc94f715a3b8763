"""Counting a message's parts refuses nothing that parsing would take, whatever the bytes: groups
excepted, which parsing takes from anybody and no client sends."""

import pytest
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st

from nobackfill.errors import InvalidInputError, TooLargeError
from nobackfill.server.grpc import rpc
from nobackfill.v1 import gallery_pb2, search_pb2, types_pb2
from tests.server.test_limits import field

READ = rpc.checked_parser(gallery_pb2.PutItemsRequest.FromString)
# Tags of an unknown field 15.
BEGIN, END, TEXT = b"\x7b", b"\x7c", b"\x7a"


def request(items: int) -> gallery_pb2.PutItemsRequest:
    vectors = gallery_pb2.Vectors(embedding=types_pb2.Embedding(space="s", values=bytes(300)))
    metadata = {"n": types_pb2.Value(number=1), "t": types_pb2.Value(text="x" * 200)}
    made = [
        gallery_pb2.PutItem(id=f"i{i}", vectors=vectors, metadata=metadata) for i in range(items)
    ]
    return gallery_pb2.PutItemsRequest(gallery="g", items=made)


def test_as_many_items_as_are_allowed_are_read() -> None:
    whole = request(rpc.MAX_ITEMS_PER_MESSAGE)
    assert len(whole.SerializeToString()) > 2 * 2**20
    assert READ(whole.SerializeToString()) == whole
    with pytest.raises(TooLargeError):
        READ(request(rpc.MAX_ITEMS_PER_MESSAGE + 200).SerializeToString())


@pytest.mark.parametrize(
    "group", [BEGIN + END, BEGIN + b"\x12\x00" + END, BEGIN * 50 + END * 50, b"\x13\x14"]
)
def test_no_parts_hide_behind_a_group(group: bytes) -> None:
    """Of an unknown field, empty or not, in itself, or of a known field: 4,000,000 parts each."""
    with pytest.raises(InvalidInputError, match="got a group"):
        READ(group + b"\x12\x00" * 4_000_000)
    search = rpc.checked_parser(search_pb2.SearchRequest.FromString)
    embeddings = group + b"\x0a\x00" * 4_000_000
    with pytest.raises(InvalidInputError, match="got a group"):
        search(field(2, field(2, embeddings)))


def test_what_looks_like_a_group_inside_bytes_is_none() -> None:
    unknown = TEXT + b"\x04" + BEGIN + END + BEGIN + END
    sent = unknown + LARGE
    assert READ(sent).items == READ(LARGE).items
    assert READ(request(1).SerializeToString() + unknown).gallery == "g"


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_messages_end_like_parsing_ends(data: st.DataObject) -> None:
    """Any byte of a large message changed, or its end cut off: no other error, no endless walk."""
    whole = bytearray(LARGE)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    sent = bytes(whole[: data.draw(st.integers(rpc.LARGE_MESSAGE_BYTES, len(whole)))])
    try:
        expected = gallery_pb2.PutItemsRequest.FromString(sent)
    except DecodeError:
        with pytest.raises(InvalidInputError):
            READ(sent)
        return
    try:
        found = READ(sent)
    except InvalidInputError as error:
        assert "got a group" in str(error)
    else:
        assert found.SerializeToString() == expected.SerializeToString()
        unknown = UnknownFieldSet(expected)
        assert all(unknown[i].wire_type != 3 for i in range(len(unknown)))


LARGE = request(5_000).SerializeToString()
