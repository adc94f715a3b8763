"""One gRPC channel to a gateway: addresses, TLS, tokens, deadlines and retries.

Retries live here and not in a service config: each attempt has a deadline of its own, so a call
that stalls is dropped and tried again within the caller's overall deadline.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import grpc
from grpc_status import rpc_status

from release import errors

T = TypeVar("T")

# Answers that may come out otherwise when asked again.
TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}
_CLASSES: dict[grpc.StatusCode, type[errors.NobackfillError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidInputError,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidInputError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExistsError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.PreconditionError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.BusyError,
    grpc.StatusCode.ABORTED: errors.BusyError,
    grpc.StatusCode.UNAUTHENTICATED: errors.NotPermittedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.NotPermittedError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.UnavailableError,
}
_MAX_MESSAGE = 64 * 2**20


def open_channel(address: str, *, tls: bool = False) -> grpc.Channel:
    """A channel to `address` (HOST:PORT). Nothing is sent yet.

    With `tls`, $NOBACKFILL_CA_FILE may name the authority's certificate (PEM, else the system's),
    $NOBACKFILL_CERT_FILE and $NOBACKFILL_KEY_FILE this client's own, and $NOBACKFILL_TOKEN_FILE a
    bearer token, which never travels in the clear. Raises ConfigurationError for files that cannot
    be read, and for a token without TLS.
    """
    options = [
        ("grpc.enable_retries", 0),
        ("grpc.max_receive_message_length", _MAX_MESSAGE),
        ("grpc.max_send_message_length", _MAX_MESSAGE),
    ]
    token = _read("NOBACKFILL_TOKEN_FILE")
    if not tls:
        if token is not None:
            raise errors.ConfigurationError(
                "expected TLS for a bearer token: name the gateway as grpcs://HOST:PORT, "
                "or unset NOBACKFILL_TOKEN_FILE"
            )
        return grpc.insecure_channel(address, options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read("NOBACKFILL_CA_FILE"),
        private_key=_read("NOBACKFILL_KEY_FILE"),
        certificate_chain=_read("NOBACKFILL_CERT_FILE"),
    )
    if token is not None:
        bearer = grpc.access_token_call_credentials(token.decode("ascii").strip())
        credentials = grpc.composite_channel_credentials(credentials, bearer)
    return grpc.secure_channel(address, credentials, options)


def _read(variable: str) -> bytes | None:
    path = os.environ.get(variable)
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise errors.ConfigurationError(f"{variable}: cannot read {path}: {error}") from error


def from_rpc_error(error: grpc.RpcError, asked: str) -> errors.NobackfillError:
    """The error of our taxonomy that a gRPC status stands for; `asked` names the server or call."""
    code, details = error.code(), error.details()
    found = _CLASSES.get(code, errors.NobackfillError)
    if found is errors.PreconditionError:
        reason = _reason(error)
        subclasses = errors.PreconditionError.__subclasses__()
        found = next((c for c in subclasses if c.reason == reason), found)
    return found(f"{asked}: {details or code.name}")


def _reason(error: grpc.RpcError) -> str:
    from google.rpc.error_details_pb2 import ErrorInfo

    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        info = ErrorInfo()
        if detail.Unpack(info):
            return str(info.reason)
    return ""


@contextmanager
def translated(asked: str) -> Iterator[None]:
    """Raise gRPC failures inside as errors of our taxonomy."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, asked) from error


def retried(
    attempt: Callable[[float], T], asked: str, *, seconds: float = 30.0, each: float = 10.0
) -> T:
    """Call `attempt(timeout)` until it answers; for idempotent calls only.

    An attempt gets at most `each` seconds, all of them together `seconds`; pauses grow from 50 ms
    to 2 s with jitter, so that many clients do not come back at once. Raises the taxonomy's error
    of the last attempt: at once where asking again cannot help, else when the time is used up.
    """
    end = time.monotonic() + seconds
    pause = 0.05
    while True:
        try:
            return attempt(min(each, max(0.001, end - time.monotonic())))
        except grpc.RpcError as error:
            wait = pause * random.uniform(0.5, 1.5)  # noqa: S311
            if error.code() not in TRANSIENT or time.monotonic() + wait >= end:
                raise from_rpc_error(error, asked) from error
        time.sleep(wait)
        pause = min(2 * pause, 2.0)
