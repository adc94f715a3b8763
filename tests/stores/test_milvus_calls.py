"""What a Milvus that hangs or refuses does to who asks: a gRPC server that is none."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from nobackfill.errors import ConfigurationError, UnavailableError
from tests.gallery.making import spec, vectors

pytest.importorskip("pymilvus", reason="Milvus' client is not installed")

from nobackfill.plugins.milvus import collections
from nobackfill.plugins.milvus.collections import Collections

pytestmark = pytest.mark.scale

LABELS = np.array([1], np.int64)
CALLS: dict[str, Callable[[Collections], object]] = {
    "names": lambda one: one.names(),
    "exists": lambda one: one.exists("c"),
    "loaded": lambda one: one.is_loaded("c"),
    "make": lambda one: one.make("c", spec()),
    "drop": lambda one: one.drop("c"),
    "upsert": lambda one: one.upsert("c", LABELS, vectors(1, 1), [{}]),
    "delete": lambda one: one.delete("c", LABELS),
    "has_graph": lambda one: one.has_graph("c"),
    "count": lambda one: one.count("c"),
    "matching": lambda one: one.matching_labels("c", "id == 1", 5),
    "search": lambda one: one.search("c", spec(), vectors(1, 1)[0], 5, 10),
}


class Handler(grpc.GenericRpcHandler):
    """Takes the connection; then every call hangs, or is refused."""

    def __init__(self) -> None:
        self.refuses: grpc.StatusCode | None = None
        self.ended = threading.Event()

    def service(self, details: Any) -> Any:
        def answer(_: bytes, context: Any) -> bytes:
            if details.method.endswith("/Connect"):
                return b""
            if self.refuses is not None:
                context.abort(self.refuses, "no")
            self.ended.wait(30)
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Handler, Collections]]:
    monkeypatch.setattr(collections, "_TIMEOUT_S", 0.3)
    made, server = Handler(), grpc.server(ThreadPoolExecutor(64))
    server.add_generic_rpc_handlers((made,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    opened = Collections(f"milvus+http://127.0.0.1:{port}")
    yield made, opened
    opened.close()
    made.ended.set()
    server.stop(None)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("refuses", [None, grpc.StatusCode.UNAUTHENTICATED])
@pytest.mark.parametrize("call", CALLS)
def test_every_call_ends_and_says_that_milvus_does_not_answer(
    handler: tuple[Handler, Collections], call: str, refuses: grpc.StatusCode | None
) -> None:
    handler[0].refuses = refuses
    with pytest.raises(UnavailableError, match="UNAUTHENTICATED" if refuses else "Milvus"):
        CALLS[call](handler[1])


def test_no_piece_of_a_password_is_told() -> None:
    with pytest.raises(ConfigurationError) as raised:
        Collections("milvus+https://u:p/secret@far.example:19530")
    assert raised.value.__cause__ is None
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_users_are_decoded_and_hosts_are_whole(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(collections, "MilvusClient", lambda **told: given.update(told))
    Collections(f"milvus+http://u%40x:p%2Fw%26@{host}:1")
    assert (given["uri"], given["token"]) == (f"http://{host}:1", "u@x:p/w&")
