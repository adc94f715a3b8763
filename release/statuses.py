"""What a gRPC status means to whoever called: one table, for all commands and clients.

The class carries the exit code. The gateway's own mapping, server/border/errors.py, goes the other
way and is held to this one by a test.
"""

from collections.abc import Mapping

import grpc
from grpc_status import rpc_status

from release import errors

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


def error_of(error: grpc.RpcError, asked: str) -> errors.NobackfillError:
    """The error of our taxonomy that a gRPC status stands for; `asked` names the server or call."""
    code, details = error.code(), error.details()
    found = ERRORS.get(code, errors.NobackfillError)
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
