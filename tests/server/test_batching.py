"""Micro-batches: right answers, no wait when idle, batches under load, errors to their askers."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from nobackfill.errors import DeadlineError
from nobackfill.server.embedding.embedding import Batcher
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import LOCAL


def test_every_thread_gets_its_own_answer() -> None:
    sizes: list[float] = []

    def double(numbers: Sequence[int]) -> list[int]:
        time.sleep(0.001)
        return [2 * number for number in numbers]

    batcher = Batcher(double, largest_batch=8, observe_size=sizes.append)
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(batcher, range(400))) == [2 * number for number in range(400)]
    assert sum(sizes) == 400
    assert max(sizes) <= 8
    assert len(sizes) < 300, "nothing was batched"


def test_one_asker_runs_at_once_on_its_own_thread() -> None:
    threads: list[int] = []

    def run(queries: Sequence[str]) -> Sequence[str]:
        threads.append(threading.get_ident())
        return queries

    batcher = Batcher(run, largest_batch=8)
    assert [batcher(query) for query in "abc"] == ["a", "b", "c"]
    assert set(threads) == {threading.get_ident()}


def test_an_error_reaches_everyone_of_its_batch_and_nobody_else() -> None:
    hold = threading.Event()

    def run(queries: Sequence[int]) -> Sequence[int]:
        hold.wait(10)
        if any(query < 0 for query in queries):
            raise ValueError("negative")
        return queries

    batcher = Batcher(run, largest_batch=2)
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(batcher, 1)
        time.sleep(0.05)
        others = []
        for query in (-1, 2, 3, 4):
            others.append(pool.submit(batcher, query))
            time.sleep(0.05)
        hold.set()
        assert first.result(10) == 1
        for future in others[:2]:
            with pytest.raises(ValueError, match="negative"):
                future.result(10)
        assert [future.result(10) for future in others[2:]] == [3, 4]
    assert batcher(5) == 5


def test_a_deadline_ends_the_wait_and_the_queue_goes_on() -> None:
    hold = threading.Event()
    batcher: Batcher[int, int] = Batcher(lambda q: (hold.wait(10), q)[1], largest_batch=1)

    def ask(query: int, seconds: float) -> int:
        context.set_current_call(context.Call(LOCAL, time.monotonic() + seconds))
        return batcher(query)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(ask, 1, 60)
        time.sleep(0.05)
        late = pool.submit(ask, 2, 0.05)
        patient = pool.submit(ask, 3, 60)
        with pytest.raises(DeadlineError):
            late.result(10)
        hold.set()
        assert first.result(10) == 1
        assert patient.result(10) == 3


def test_a_call_whose_time_is_over_never_becomes_the_leader() -> None:
    hold = threading.Event()
    batcher: Batcher[int, int] = Batcher(lambda q: (hold.wait(10), q)[1], largest_batch=1)

    def run(query: int, seconds: float) -> int:
        context.set_current_call(context.Call(LOCAL, time.monotonic() + seconds))
        return batcher(query)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, 1, 60)
        time.sleep(0.05)
        # It decoded its image until after its deadline, and finds a batch running.
        with pytest.raises(DeadlineError):
            pool.submit(run, 2, -1).result(10)
        hold.set()
        assert first.result(10) == 1
        assert pool.submit(run, 3, 10).result(20) == 3


def test_a_call_without_a_deadline_waits_in_the_queue() -> None:
    """Locks refuse the time that gRPC says it has left, some 292 years."""
    hold = threading.Event()
    batcher: Batcher[int, int] = Batcher(lambda q: (hold.wait(10), q)[1], largest_batch=1)

    def ask(query: int) -> int:
        context.set_current_call(context.Call(LOCAL, time.monotonic() + 9.2e18))
        return batcher(query)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, 1)
        time.sleep(0.05)
        second = pool.submit(ask, 2)
        time.sleep(0.05)
        hold.set()
        assert [first.result(10), second.result(10)] == [1, 2]
