"""Every refusal as a gRPC status: the table of nobackfill.wire.statuses, read by the gateway."""

import re
import sqlite3

from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from nobackfill.errors import NobackfillError
from nobackfill.wire.statuses import row_of

DOMAIN = "nobackfill.v1"
_FOLDERS = re.compile(r"(?<![\w/])/(?:[^\s/:]+/)+")


def code_of(error: Exception) -> StatusCode:
    """The table's status code; INTERNAL for what nobody foresaw."""
    row = row_of(type(error))
    if row is not None:
        return row.code
    # A full or failing disk, or a locked file, met below the rooms' own errors.
    storage = isinstance(error, OSError | sqlite3.OperationalError)
    return StatusCode.UNAVAILABLE if storage else StatusCode.INTERNAL


def status_of(error: Exception, request_id: str) -> Status:
    """The whole status: code, sentence, and ErrorInfo with a reason machines can read.

    Only our own errors speak for themselves: they hold no vectors and no tokens. Folders of this
    machine are cut off the paths they name.
    """
    code = code_of(error)
    own = isinstance(error, NobackfillError)
    message = without_folders(str(error)) if own else _unspoken(code, request_id)
    status = Status(code=code.value[0], message=message)
    row = row_of(type(error))
    if row is not None and row.reason:
        detail = Any()
        detail.Pack(ErrorInfo(reason=row.reason, domain=DOMAIN))
        status.details.append(detail)
    return status


def without_folders(sentence: str) -> str:
    """A sentence as clients may read it: files without the folders of this machine."""
    return _FOLDERS.sub("", sentence)


def _unspoken(code: StatusCode, request_id: str) -> str:
    if code is StatusCode.UNAVAILABLE:
        return f"storage does not answer as it should; the gateway's log knows request {request_id}"
    return f"unexpected failure; the gateway's log knows request {request_id}"
