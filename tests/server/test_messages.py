"""Counting a message's parts refuses nothing that parsing would take, whatever the bytes."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from nobackfill.errors import InvalidInputError, TooLargeError
from nobackfill.server.grpc import messages
from nobackfill.v1 import gallery_pb2, types_pb2

READ = messages.reader(gallery_pb2.PutItemsRequest.FromString)


def request(items: int) -> gallery_pb2.PutItemsRequest:
    vectors = gallery_pb2.Vectors(embedding=types_pb2.Embedding(space="s", values=bytes(300)))
    metadata = {"n": types_pb2.Value(number=1), "t": types_pb2.Value(text="x" * 200)}
    made = [
        gallery_pb2.PutItem(id=f"i{i}", vectors=vectors, metadata=metadata) for i in range(items)
    ]
    return gallery_pb2.PutItemsRequest(gallery="g", items=made)


def test_as_many_items_as_are_allowed_are_read() -> None:
    whole = request(messages.LARGEST_COUNT)
    assert len(whole.SerializeToString()) > 2 * 2**20
    assert READ(whole.SerializeToString()) == whole
    with pytest.raises(TooLargeError):
        READ(request(messages.LARGEST_COUNT + 200).SerializeToString())


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_messages_end_like_parsing_ends(data: st.DataObject) -> None:
    """Any byte of a large message changed, or its end cut off: no other error, no endless walk."""
    whole = bytearray(LARGE)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    sent = bytes(whole[: data.draw(st.integers(messages.LARGE, len(whole)))])
    try:
        expected = gallery_pb2.PutItemsRequest.FromString(sent)
    except DecodeError:
        with pytest.raises(InvalidInputError):
            READ(sent)
    else:
        assert READ(sent).SerializeToString() == expected.SerializeToString()


LARGE = request(5_000).SerializeToString()
