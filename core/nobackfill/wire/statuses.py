"""Map each error class to its gRPC status, and back.

The gateway sends statuses by this table, and every client reads them by it. No two rows share code
and reason, so that a client raises the class that the gateway raised.
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
    """A row of the table.

    Attributes:
        error: The class.
        code: Its gRPC code.
        reason: Its reason in ErrorInfo, for programs.
        transient: Whether a retry may succeed.
    """

    error: type[errors.NobackfillError]
    code: StatusCode
    reason: str = ""
    transient: bool = False


STATUS_TABLE = (
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
_BY_ERROR = {row.error: row for row in STATUS_TABLE}
_BY_STATUS = {(row.code, row.reason): row for row in STATUS_TABLE}
# For an unknown or missing reason: the first row of the code.
_BY_CODE = {row.code: row for row in reversed(STATUS_TABLE)}
# Message of grpc's core, at both ends, for a message above the size limit.
_ABOVE_BOUND = "message larger than max"
# Beginnings of its details for a connection that was never made, and what each cause means.
_NEVER_CONNECTED = ("failed to connect", "errors resolving")
# Beginnings of its details for a connection that broke during a call.
_BROKEN = ("Stream removed", "Socket closed", "recvmsg:Connection reset")
_CONNECTING = (
    (
        "certificate has expired",
        "its certificate has expired, or the clock of this machine is wrong; the gateway's "
        "operator must renew it",
    ),
    (
        "certificate is not yet valid",
        "its certificate is not valid yet, or the clock of this machine is wrong; compare the "
        "clocks of both machines",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate comes from an unknown authority; set NOBACKFILL_CA_FILE to the "
        "authority's certificate (PEM)",
    ),
    (
        "Hostname Verification",
        "its certificate does not have this host name; call it by a name that the certificate "
        "has, or let its operator add this one",
    ),
    (
        "handshake failed",
        "the TLS handshake failed; check that the gateway accepts the certificate in "
        "NOBACKFILL_CERT_FILE",
    ),
    ("refused", "nothing listens there; run `gateway serve` there, or check the address"),
    ("resolving", "no host of that name; check the address"),
    (
        "Socket closed",
        "the gateway closed the connection; if it needs TLS, write its address as "
        "grpcs://HOST:PORT; if it demands certificates of clients, set NOBACKFILL_CERT_FILE and "
        "NOBACKFILL_KEY_FILE",
    ),
    ("HTTP/2", "the server there is no gateway; check the address"),
)


def find_status_row(error: type[BaseException]) -> StatusRow | None:
    """Return the row of the nearest ancestor of an error class; None if no ancestor has one.

    Args:
        error: The class; a subclass without a row of its own counts as its ancestor.
    """
    return next((_BY_ERROR[kind] for kind in error.__mro__ if kind in _BY_ERROR), None)


def is_transient(error: errors.NobackfillError) -> bool:
    """Tell whether a retry of the same call may succeed.

    It may after BusyError, OverloadedError, UnavailableError, DeadlineError and CannotWriteError.

    Args:
        error: The error. OverloadedError is a BusyError, and DeadlineError an UnavailableError.
    """
    row = find_status_row(type(error))
    return row is not None and row.transient


def error_from_status(error: grpc.RpcError, error_name: str) -> errors.NobackfillError:
    """Return the error of this project for a gRPC status.

    The message begins with the server and holds what `explain_failure` returns.

    Args:
        error: The error of grpc.
        error_name: The server or call, for the message.

    Returns:
        The error, not raised. A code that the table lacks gives NobackfillError; a connection that
        broke gives UnavailableError. An unknown reason gives the first class of its code, such as
        PreconditionError of FAILED_PRECONDITION.
    """
    code = error.code()
    row = _BY_STATUS.get((code, _reason(error))) or _BY_CODE.get(code)
    if _is_broken(error):
        return errors.UnavailableError(f"{error_name}: {explain_failure(error)}")
    kind = errors.NobackfillError if row is None else row.error
    return kind(f"{error_name}: {explain_failure(error)}")


def _is_broken(error: grpc.RpcError) -> bool:
    """Tell whether the library, not the gateway, ended the call because its connection broke."""
    codes = (StatusCode.UNKNOWN, StatusCode.UNAVAILABLE)
    return error.code() in codes and (error.details() or "").startswith(_BROKEN)


def explain_failure(error: grpc.RpcError) -> str:
    """Explain a failed call to a person.

    Args:
        error: The error of grpc.

    Returns:
        The server's own message, or the name of the code where it has none. For a connection that
        failed, the cause and what to do about it. For UNAUTHENTICATED without
        NOBACKFILL_TOKEN_FILE, also the advice to set it.
    """
    code, details = error.code(), error.details() or error.code().name
    if code is StatusCode.UNAVAILABLE and details.startswith(_NEVER_CONNECTED):
        return next(
            (explanation for sign, explanation in _CONNECTING if sign in details),
            "the gateway cannot be reached; check the address and the network",
        )
    if _is_broken(error):
        return (
            "the connection broke before the answer; the gateway may have stopped. "
            "`gateway status` shows what was done; then try again"
        )
    if code is StatusCode.UNAUTHENTICATED and not os.environ.get("NOBACKFILL_TOKEN_FILE"):
        return f"{details}; set NOBACKFILL_TOKEN_FILE to the file that holds your token"
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
        # A server may send anything as details; the status is valid without them.
        pass
    return "TOO_LARGE" if _ABOVE_BOUND in (error.details() or "") else ""
