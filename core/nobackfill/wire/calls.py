"""Deadlines and retries of calls to a gateway.

Retries live here and not in a service config: each attempt has a deadline of its own, so a call
that stalls is dropped and tried again within the caller's overall deadline.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from nobackfill.wire.statuses import error_of, transient

T = TypeVar("T")


@contextmanager
def translated(asked: str) -> Iterator[None]:
    """Raise gRPC failures inside as errors of our taxonomy."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error, asked) from error


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
            found = error_of(error, asked)
            if not (transient(found) or _cut(error)) or time.monotonic() + wait >= end:
                raise found from error
        time.sleep(wait)
        pause = min(2 * pause, 2.0)


def _cut(error: grpc.RpcError) -> bool:
    """Whether a gateway that ends has cut the call: who cancels one here is told so in words."""
    said = error.details() or ""
    return error.code() is grpc.StatusCode.CANCELLED and said in ("", "CANCELLED")
