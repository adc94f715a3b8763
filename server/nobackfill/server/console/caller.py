"""The gateway's public calls, made for whoever looks at a page, with that person's token.

So the console decides nothing about rights: what a token may not call, its page may not show.
"""

from collections.abc import Callable
from typing import Any

import grpc

from nobackfill.wire import Gateway
from nobackfill.wire.limits import LARGEST_ANSWER, LARGEST_REQUEST

# For one call of a page: an estimate tries the release's models first.
_SECONDS = 60.0


class Caller(Gateway):
    """Calls through the gateway's socket file, which no other user of this machine can open."""

    def __init__(self, socket: str, token: str | None) -> None:
        """`socket`: as gRPC names one, unix:PATH. `token` None: a gateway without tokens."""
        # Not Connection's own: that one reads tokens and authorities from the environment, which
        # is the gateway's here.
        self.address = "the gateway"
        self.seconds = _SECONDS
        self._retries = False
        channel = grpc.insecure_channel(
            socket,
            [
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", LARGEST_ANSWER),
                ("grpc.max_send_message_length", LARGEST_REQUEST),
            ],
        )
        self._channel = channel if token is None else _bearing(channel, token)


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends a token with each call: gRPC's own credentials demand TLS, also in a socket file."""

    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def _send(self, call: Callable[..., Any], details: Any, request: Any) -> Any:
        return call(details._replace(metadata=self._metadata), request)

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return self._send(continuation, client_call_details, request)

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return self._send(continuation, client_call_details, request)


def _bearing(channel: grpc.Channel, token: str) -> grpc.Channel:
    return grpc.intercept_channel(channel, _Bearer(token))
