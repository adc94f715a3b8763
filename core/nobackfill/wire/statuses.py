"""What a gRPC status means to whoever called: one table, for all commands and clients.

The class carries the exit code. The gateway's own mapping, server/border/errors.py, goes the other
way and is held to this one by a test.
"""

import os
from collections.abc import Mapping

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from nobackfill import errors

ERRORS: Mapping[grpc.StatusCode, type[errors.NobackfillError]] = {
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
    grpc.StatusCode.CANCELLED: errors.UnavailableError,
}
# How grpc's core begins what it says of a connection that was never made, and what it then means.
_NEVER_CONNECTED = ("failed to connect", "errors resolving")
_CONNECTING = (
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is of no authority that is known here; name the authority's certificate "
        "(PEM) in NOBACKFILL_CA_FILE",
    ),
    (
        "Hostname Verification",
        "its certificate is another host's; use the name that it was made for",
    ),
    ("handshake failed", "TLS fails there; is the certificate in NOBACKFILL_CERT_FILE its own?"),
    ("refused", "nothing listens there; start the gateway, or check the address"),
    ("resolving", "no host of that name is known; check the address"),
    ("Socket closed", "hangs up; does it expect TLS (grpcs://)?"),
    ("HTTP/2", "no gateway listens there; check the address"),
)


def error_of(error: grpc.RpcError, asked: str) -> errors.NobackfillError:
    """The error of our taxonomy that a gRPC status stands for; `asked` names the server or call."""
    code = error.code()
    found = ERRORS.get(code, errors.NobackfillError)
    if found is errors.PreconditionError:
        reason = _reason(error)
        subclasses = errors.PreconditionError.__subclasses__()
        found = next((c for c in subclasses if c.reason == reason), found)
    return found(f"{asked}: {sentence(error)}")


def sentence(error: grpc.RpcError) -> str:
    """What a failed call says to a person: the server's own words, or what to do about a
    connection that was never made, in place of the library's lines."""
    code, details = error.code(), error.details() or error.code().name
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith(_NEVER_CONNECTED):
        return next((said for sign, said in _CONNECTING if sign in details), "cannot be reached")
    if code is grpc.StatusCode.UNAUTHENTICATED and not os.environ.get("NOBACKFILL_TOKEN_FILE"):
        return f"{details}; name the file that holds your token in NOBACKFILL_TOKEN_FILE"
    return details


def _reason(error: grpc.RpcError) -> str:
    from google.rpc.error_details_pb2 import ErrorInfo

    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            info = ErrorInfo()
            if detail.Unpack(info):
                return str(info.reason)
    except (ValueError, DecodeError):
        # A server may send anything as its details; the status stands without them.
        pass
    return ""
