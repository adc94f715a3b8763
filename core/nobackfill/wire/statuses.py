"""The one table of statuses: our error class, its gRPC code, and the reason machines can read.

The gateway sends by it, every client understands by it, and the class carries the exit code. No
two rows share code and reason, so that a client raises the class that the gateway raised.
"""

import os
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from grpc import StatusCode
from grpc_status import rpc_status

from nobackfill import errors


@dataclass(frozen=True)
class StatusRow:
    """`error` travels as `code` with `reason` in its ErrorInfo; `transient`: asked again, the
    answer may be another."""

    error: type[errors.NobackfillError]
    code: StatusCode
    reason: str = ""
    transient: bool = False


TABLE = (
    StatusRow(errors.InvalidInputError, StatusCode.INVALID_ARGUMENT),
    StatusRow(errors.OutOfRangeError, StatusCode.OUT_OF_RANGE),
    StatusRow(errors.NotFoundError, StatusCode.NOT_FOUND),
    StatusRow(errors.AlreadyExistsError, StatusCode.ALREADY_EXISTS),
    *(
        StatusRow(error, StatusCode.FAILED_PRECONDITION, error.reason)
        for error in (
            errors.PreconditionError,
            errors.IncompatibleSpaceError,
            errors.NeedsImageError,
            errors.NoEncoderError,
            errors.ReleaseRetiredError,
            errors.QuotaExceededError,
        )
    ),
    StatusRow(errors.VerificationError, StatusCode.FAILED_PRECONDITION, "VERIFICATION_FAILED"),
    StatusRow(errors.GateFailedError, StatusCode.FAILED_PRECONDITION, "GATE_FAILED"),
    StatusRow(errors.ConfigurationError, StatusCode.FAILED_PRECONDITION, "CONFIGURATION"),
    StatusRow(errors.BusyError, StatusCode.ABORTED, transient=True),
    StatusRow(errors.OverloadedError, StatusCode.RESOURCE_EXHAUSTED, transient=True),
    StatusRow(
        errors.CannotWriteError, StatusCode.RESOURCE_EXHAUSTED, "CANNOT_WRITE", transient=True
    ),
    StatusRow(errors.TooLargeError, StatusCode.RESOURCE_EXHAUSTED, "TOO_LARGE"),
    StatusRow(errors.ItemQuotaError, StatusCode.RESOURCE_EXHAUSTED, errors.ItemQuotaError.reason),
    StatusRow(errors.NotPermittedError, StatusCode.PERMISSION_DENIED),
    StatusRow(errors.UnauthenticatedError, StatusCode.UNAUTHENTICATED),
    StatusRow(errors.UnavailableError, StatusCode.UNAVAILABLE, transient=True),
    StatusRow(errors.DeadlineError, StatusCode.DEADLINE_EXCEEDED, transient=True),
    StatusRow(errors.CancelledError, StatusCode.CANCELLED),
)
_BY_ERROR = {row.error: row for row in TABLE}
_BY_STATUS = {(row.code, row.reason): row for row in TABLE}
# A status with a reason that nobody here knows, or none: the first row of its code.
_BY_CODE = {row.code: row for row in reversed(TABLE)}
# What grpc's core says, at either end, of a message above the bound on its bytes.
_ABOVE_BOUND = "message larger than max"
# How it begins what it says of a connection that was never made, and what it then means.
_NEVER_CONNECTED = ("failed to connect", "errors resolving")
# Beginnings of its details for a connection that broke while a call was answered.
_BROKEN = ("Stream removed", "Socket closed", "recvmsg:Connection reset")
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
    ("refused", "nothing listens there; start it with `gateway serve`, or check the address"),
    ("resolving", "no host of that name is known; check the address"),
    ("Socket closed", "hangs up; does it expect TLS (grpcs://)?"),
    ("HTTP/2", "no gateway listens there; check the address"),
)


def row_of(error: type[BaseException]) -> StatusRow | None:
    """The row of the nearest ancestor that has one; None for what is no refusal of ours."""
    return next((_BY_ERROR[kind] for kind in error.__mro__ if kind in _BY_ERROR), None)


def transient(error: errors.NobackfillError) -> bool:
    """Whether the same call may be answered when it is made again."""
    row = row_of(type(error))
    return row is not None and row.transient


def error_of(error: grpc.RpcError, asked: str) -> errors.NobackfillError:
    """The error of our taxonomy that a gRPC status stands for; `asked` names the server or call."""
    code = error.code()
    row = _BY_STATUS.get((code, _reason(error))) or _BY_CODE.get(code)
    if _is_broken(error):
        return errors.UnavailableError(f"{asked}: {sentence(error)}")
    kind = errors.NobackfillError if row is None else row.error
    return kind(f"{asked}: {sentence(error)}")


def _is_broken(error: grpc.RpcError) -> bool:
    """Whether the library, not the gateway, ended a call whose connection broke."""
    codes = (StatusCode.UNKNOWN, StatusCode.UNAVAILABLE)
    return error.code() in codes and (error.details() or "").startswith(_BROKEN)


def sentence(error: grpc.RpcError) -> str:
    """What a failed call says to a person: the server's own words, or what to do about a
    connection that was never made, in place of the library's lines."""
    code, details = error.code(), error.details() or error.code().name
    if code is StatusCode.UNAVAILABLE and details.startswith(_NEVER_CONNECTED):
        return next((said for sign, said in _CONNECTING if sign in details), "cannot be reached")
    if _is_broken(error):
        return (
            "the connection broke before the call was answered; the gateway may have ended. "
            "`gateway status` tells what was done; then try again"
        )
    if code is StatusCode.UNAUTHENTICATED and not os.environ.get("NOBACKFILL_TOKEN_FILE"):
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
    return "TOO_LARGE" if _ABOVE_BOUND in (error.details() or "") else ""
