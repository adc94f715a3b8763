"""The operator's side of the gRPC calls: a channel, and statuses as exit codes.

The address is HOST:PORT or grpcs://HOST:PORT. With TLS, $NOBACKFILL_CA_FILE may name the
authority's certificate, $NOBACKFILL_CERT_FILE and $NOBACKFILL_KEY_FILE our own,
$NOBACKFILL_TOKEN_FILE a token.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from release.errors import ConfigurationError, NobackfillError

EXIT_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: 65,
    grpc.StatusCode.FAILED_PRECONDITION: 65,
    grpc.StatusCode.UNAVAILABLE: 69,
    grpc.StatusCode.DEADLINE_EXCEEDED: 69,
    grpc.StatusCode.ALREADY_EXISTS: 73,
    grpc.StatusCode.ABORTED: 75,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 75,
    grpc.StatusCode.UNAUTHENTICATED: 77,
    grpc.StatusCode.PERMISSION_DENIED: 77,
}


class RemoteError(NobackfillError):
    """What the gateway refused, with the exit code of its status."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def connected(server: str) -> Iterator[grpc.Channel]:
    """A channel to `server`. Calls that fail inside raise RemoteError, files ConfigurationError."""
    address = server.partition("://")[2] or server
    options = [("grpc.enable_retries", 0), ("grpc.max_receive_message_length", -1)]
    if server.startswith("grpcs://"):
        channel = grpc.secure_channel(address, _credentials(), options)
    else:
        channel = grpc.insecure_channel(address, options)
    with channel:
        try:
            yield channel
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code is grpc.StatusCode.UNAVAILABLE:
                details = f"no gateway answers at {server} ({details}); is `gateway serve` running?"
            raise RemoteError(str(details), EXIT_CODES.get(code, 1)) from error


def _credentials() -> grpc.ChannelCredentials:
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_file("NOBACKFILL_CA_FILE"),
        private_key=_file("NOBACKFILL_KEY_FILE"),
        certificate_chain=_file("NOBACKFILL_CERT_FILE"),
    )
    token = _file("NOBACKFILL_TOKEN_FILE")
    if token is None:
        return credentials
    bearer = grpc.access_token_call_credentials(token.decode().strip())
    return grpc.composite_channel_credentials(credentials, bearer)


def _file(variable: str) -> bytes | None:
    path = os.environ.get(variable)
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise ConfigurationError(f"{variable}: cannot read {path} ({error.strerror})") from error
