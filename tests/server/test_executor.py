"""A call that is ended while its message arrives is answered once, whoever comes first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import _server

from nobackfill.release.manifest import Manifest
from nobackfill.server.grpc.loop import Arrival, QuickCall
from nobackfill.server.grpc.rpc import Interceptor
from tests.server.support import TIMEOUT_S, Client, images, running
from tests.server.test_immediate_answers import asking
from tests.support.blocks import png

Received = Callable[[bytes | None], None]
# Answered where it arrives, and on a thread.
FEW, MANY = 3, 100


def end(arrival: Arrival | QuickCall) -> None:
    arrival.end_unread(grpc.StatusCode.UNAVAILABLE, "too late")


@pytest.mark.hot_path
def test_a_call_ended_as_its_message_comes_is_answered_once(
    stages: dict[int, Path], tmp_path: Path, one: Manifest
) -> None:
    receive, receiving = Arrival.receive, _server._receive_message

    def ended_before(arrival: Arrival, received: Received) -> None:
        def patched(*given: Any) -> Callable[[Any], Any]:
            take = receiving(*given)

            def taken(event: Any) -> Any:
                end(arrival)
                return take(event)

            return taken

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_server, "_receive_message", patched)
            receive(arrival, received)

    def ended_after(arrival: Arrival, received: Received) -> None:
        def come(message: bytes | None) -> None:
            end(arrival)
            received(message)

        receive(arrival, come)

    taking, serialized = QuickCall.receive, _server._serialized_request

    def quickly_ended_before(call: QuickCall, received: Received) -> None:
        def taken(event: Any) -> Any:
            patch.undo()
            end(call)
            return serialized(event)

        patch = pytest.MonkeyPatch()
        patch.setattr(_server, "_serialized_request", taken)
        taking(call, received)

    def quickly_ended_after(call: QuickCall, received: Received) -> None:
        def come(message: bytes | None) -> None:
            end(call)
            received(message)

        taking(call, come)

    ways: list[tuple[Any, Any, bool]] = [
        (QuickCall, quickly_ended_before, False), (QuickCall, quickly_ended_after, True),
        (Arrival, ended_before, False), (Arrival, ended_after, True),
    ]  # fmt: skip
    # That it ends is half of the test: a call with two statuses never does.
    with running(stages[1], tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        assert not client.put("g", {str(i): png(image) for i, image in enumerate(images(12))})
        for k in (FEW, MANY):
            request = asking(one, 1, k)
            expected = client.raw.searches.Search(request, timeout=TIMEOUT_S)
            for kind, how, answered in ways:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(kind, "receive", how)
                    if kind is Arrival:
                        patch.setattr(Interceptor, "immediate_handler", lambda *_: None)
                    if answered:
                        assert client.raw.searches.Search(request, timeout=TIMEOUT_S) == expected
                    else:
                        with pytest.raises(grpc.RpcError, match="too late"):
                            client.raw.searches.Search(request, timeout=TIMEOUT_S)
                assert client.raw.searches.Search(request, timeout=TIMEOUT_S) == expected
