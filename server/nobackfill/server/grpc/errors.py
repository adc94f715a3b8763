"""The gateway's own refusals, and the one mapping from every refusal to a gRPC status."""

import re
import sqlite3

from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    CannotWriteError,
    ConfigurationError,
    GateFailedError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    PreconditionError,
    UnavailableError,
    VerificationError,
)

DOMAIN = "nobackfill.v1"
_FOLDERS = re.compile(r"(?<![\w/])/(?:[^\s/:]+/)+")


class OutOfRangeError(InvalidInputError):
    """An offset past the end of a file."""


class TooLargeError(InvalidInputError):
    """More bytes, queries or items than one call may carry."""


class OverloadedError(BusyError):
    """More work at once than the gateway takes on; trying again with a delay is right."""


class DeadlineError(UnavailableError):
    """The caller's deadline passed before the answer was there."""


class CancelledError(UnavailableError):
    """The caller gave the call up before the answer was there."""


class UnauthenticatedError(NotPermittedError):
    """No token, or one that nobody knows or that has expired."""


CODES: dict[type[Exception], StatusCode] = {
    NotFoundError: StatusCode.NOT_FOUND,
    AlreadyExistsError: StatusCode.ALREADY_EXISTS,
    InvalidInputError: StatusCode.INVALID_ARGUMENT,
    OutOfRangeError: StatusCode.OUT_OF_RANGE,
    TooLargeError: StatusCode.RESOURCE_EXHAUSTED,
    VerificationError: StatusCode.FAILED_PRECONDITION,
    GateFailedError: StatusCode.FAILED_PRECONDITION,
    PreconditionError: StatusCode.FAILED_PRECONDITION,
    ConfigurationError: StatusCode.FAILED_PRECONDITION,
    UnavailableError: StatusCode.UNAVAILABLE,
    DeadlineError: StatusCode.DEADLINE_EXCEEDED,
    CancelledError: StatusCode.CANCELLED,
    CannotWriteError: StatusCode.RESOURCE_EXHAUSTED,
    BusyError: StatusCode.ABORTED,
    OverloadedError: StatusCode.RESOURCE_EXHAUSTED,
    NotPermittedError: StatusCode.PERMISSION_DENIED,
    UnauthenticatedError: StatusCode.UNAUTHENTICATED,
    # A full or failing disk, or a locked file, met below the rooms' own errors.
    OSError: StatusCode.UNAVAILABLE,
    sqlite3.OperationalError: StatusCode.UNAVAILABLE,
}

_REASONS: dict[type[Exception], str] = {
    VerificationError: "VERIFICATION_FAILED",
    GateFailedError: "GATE_FAILED",
    ConfigurationError: "CONFIGURATION",
}


def code_of(error: Exception) -> StatusCode:
    """The status code of the nearest ancestor that has one; INTERNAL for what nobody foresaw."""
    for ancestor in type(error).__mro__:
        if code := CODES.get(ancestor):
            return code
    return StatusCode.INTERNAL


def status_of(error: Exception, request_id: str) -> Status:
    """The whole status: code, sentence, and ErrorInfo with a reason machines can read.

    Only our own errors speak for themselves: they hold no vectors and no tokens. Folders of this
    machine are cut off the paths they name.
    """
    code = code_of(error)
    own = isinstance(error, NobackfillError)
    message = without_folders(str(error)) if own else _unspoken(code, request_id)
    status = Status(code=code.value[0], message=message)
    reason = error.reason if isinstance(error, PreconditionError) else _reason(type(error))
    if reason:
        detail = Any()
        detail.Pack(ErrorInfo(reason=reason, domain=DOMAIN))
        status.details.append(detail)
    return status


def without_folders(sentence: str) -> str:
    """A sentence as clients may read it: files without the folders of this machine."""
    return _FOLDERS.sub("", sentence)


def _reason(kind: type[Exception]) -> str:
    return next((_REASONS[a] for a in kind.__mro__ if a in _REASONS), "")


def _unspoken(code: StatusCode, request_id: str) -> str:
    if code is StatusCode.UNAVAILABLE:
        return f"storage does not answer as it should; the gateway's log knows request {request_id}"
    return f"unexpected failure; the gateway's log knows request {request_id}"
