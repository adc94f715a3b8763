"""The operator's side of the gRPC calls: a channel, and statuses as our errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from nobackfill.errors import UnavailableError
from nobackfill.wire.channel import open_channel
from nobackfill.wire.statuses import error_of


@contextmanager
def connected(server: str) -> Iterator[grpc.Channel]:
    """A channel to `server`, see release/channel.py. Calls that fail inside raise our errors."""
    with open_channel(server) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            found = error_of(error, server)
            if isinstance(found, UnavailableError):
                found = UnavailableError(f"{found}; is `gateway serve` running there?")
            raise found from error
