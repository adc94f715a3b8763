"""Whether anybody still waits for the answer: asked between the parts of work that takes long."""

import time

import pytest

from nobackfill.errors import CancelledError, DeadlineError
from nobackfill.server.grpc.context import LOCAL, Call
from nobackfill.server.grpc.logs import LogLimit


def test_a_call_is_wanted_until_its_deadline_or_its_caller_has_gone() -> None:
    waits = [True]
    call = Call(LOCAL, time.monotonic() + 60, lambda: waits[0])
    call.check()
    waits[0] = False
    with pytest.raises(CancelledError):
        call.check()
    with pytest.raises(DeadlineError):
        Call(LOCAL, time.monotonic() - 1).check()


def test_a_flood_of_refusals_writes_few_lines() -> None:
    sparing = LogLimit(10)
    began = time.monotonic()
    written = sum(sparing.allows() for _ in range(10_000))
    # The flood may begin and end within other seconds.
    assert 10 <= written <= 10 * (time.monotonic() - began + 2)
