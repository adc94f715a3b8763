"""A lane's calls are done by some thread, also where the system gives no further one."""

import threading

import pytest

from nobackfill.server.grpc.rpc import Lane, LaneSize


def test_work_goes_on_where_no_further_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane("calls", LaneSize(thread_count=4, capacity=8), limits_callers=False)
    first, second = threading.Event(), threading.Event()

    def wait() -> None:
        second.wait(30)
        first.set()

    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            # gRPC's own thread calls it, and would end with the error: nobody was served any more.
            lane.run(wait)
            lane.run(lambda: None)
        lane.run(second.set)
        assert first.wait(30)
    finally:
        lane.close()
