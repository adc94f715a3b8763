"""One table of statuses: a client raises what the gateway raised, and exits with its code."""

import re
from pathlib import Path

import grpc
import pytest
from grpc_status import rpc_status

from nobackfill import errors
from nobackfill.server.grpc.context import grpc_status_of
from nobackfill.v1.search_pb2 import SearchRequest
from nobackfill.v1.search_pb2_grpc import SearchServiceStub
from nobackfill.wire.connection import open_channel
from nobackfill.wire.limits import LARGEST_REQUEST
from nobackfill.wire.statuses import STATUS_TABLE, error_from_status, find_status_row, is_transient
from tests.wire.scripted import serving

DOCS = Path(__file__).parents[2] / "docs"
# Their messages are made of several parts.
_ARGUMENTS: dict[type[errors.NobackfillError], tuple[object, ...]] = {
    errors.UnusableRowsError: ("no", [1]),
    errors.UnusableOutputError: ("no", [1]),
    errors.DamagedError: ("file", "no"),
}


def kinds(root: type[errors.NobackfillError]) -> set[type[errors.NobackfillError]]:
    known = {kind for kind in root.__subclasses__() if kind.__module__ == errors.__name__}
    return known.union(*(kinds(kind) for kind in known))


def test_every_error_arrives_as_it_was_raised() -> None:
    """Over the wire: the class, or its nearest ancestor in the table, and the same exit code."""
    raised = [kind(*_ARGUMENTS.get(kind, ("no",))) for kind in kinds(errors.NobackfillError)]
    assert {type(error) for error in raised} >= {row.error for row in STATUS_TABLE}

    def behave(call: int, context: grpc.ServicerContext) -> None:
        context.abort_with_status(rpc_status.to_status(grpc_status_of(raised[call - 1], "r")))

    with serving() as (scripted, address), open_channel(address) as channel:
        scripted.behave = behave
        for error in raised:
            with pytest.raises(grpc.RpcError) as refused:
                SearchServiceStub(channel).Search(SearchRequest(), timeout=30)
            row, found = find_status_row(type(error)), error_from_status(refused.value, "here")
            assert row is not None and type(found) is row.error
            assert is_transient(found) is row.transient
            assert found.exit_code == error.exit_code
            assert str(found).startswith(f"here: {error}")


def test_rows_are_told_apart() -> None:
    assert len({(row.code, row.reason) for row in STATUS_TABLE}) == len(STATUS_TABLE)
    assert len({row.error for row in STATUS_TABLE}) == len(STATUS_TABLE)


def test_a_reason_that_nobody_knows_leaves_the_code() -> None:
    def behave(call: int, context: grpc.ServicerContext) -> None:
        context.abort(list(grpc.StatusCode)[call], "no")

    expected = {
        grpc.StatusCode.FAILED_PRECONDITION: errors.PreconditionError,
        grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
        grpc.StatusCode.INTERNAL: errors.NobackfillError,
    }
    with serving() as (scripted, address), open_channel(address) as channel:
        scripted.behave = behave
        for code in list(grpc.StatusCode)[1:]:
            with pytest.raises(grpc.RpcError) as refused:
                SearchServiceStub(channel).Search(SearchRequest(), timeout=30)
            assert refused.value.code() is code
            if code in expected:
                assert type(error_from_status(refused.value, "here")) is expected[code]


def test_a_message_above_the_bound_is_too_large_and_not_tried_again() -> None:
    """grpc's core refuses it, at the sender or at the receiver; no reason comes with that."""
    request = SearchRequest(gallery="g" * LARGEST_REQUEST)
    unbounded = [("grpc.max_send_message_length", -1)]
    with (
        serving() as (_, address),
        open_channel(address) as bounded,
        grpc.insecure_channel(address, unbounded) as channel,
    ):
        for one in (bounded, channel):
            with pytest.raises(grpc.RpcError) as refused:
                SearchServiceStub(one).Search(request, timeout=30)
            found = error_from_status(refused.value, "here")
            assert type(found) is errors.TooLargeError and not is_transient(found)


@pytest.mark.parametrize("page", ["architecture.md", "operations/troubleshoot.md"])
def test_the_docs_have_the_table(page: str) -> None:
    """Every status is there with the exit codes of its classes, and every reason is named."""
    text = (DOCS / page).read_text("utf-8")
    told: dict[str, set[int]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3:
            numbers, names = (cells[0], cells[2]) if cells[0].isdigit() else (cells[2], cells[0])
            for name in re.findall(r"\b[A-Z_]{5,}\b", names):
                told.setdefault(name, set()).update(map(int, re.findall(r"\b\d+\b", numbers)))
    for row in STATUS_TABLE:
        assert row.error.exit_code in told.get(row.code.name, ()), row
        assert row.reason in ("PRECONDITION", "") or row.reason in text, row.reason
