"""Pictures of every odd kind as queries: answered, or INVALID_ARGUMENT, and the gateway goes on."""

import grpc

from nobackfill.v1 import search_pb2
from tests.server.support import Client, ids, images
from tests.support.odd_pictures import ODD


def test_each_is_answered_or_refused(shared: Client, gallery: str) -> None:
    shared.put_images(images(3), gallery)
    answered = 0
    for name, data in ODD.items():
        try:
            answered += len(shared.ask(search_pb2.Query(image=data), gallery).hits) == 3
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert error.details(), name
    assert 8 < answered < len(ODD) - 8
    assert ids(shared.search(images(3)[1], gallery))[0] == "i1"
