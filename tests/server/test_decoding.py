"""Decoding in turns: given up when nobody waits, the cheap first, never too much at once."""

import threading
import time
from collections.abc import Iterator

import pytest

from nobackfill.errors import (
    CancelledError,
    DeadlineError,
    InvalidInputError,
    OverloadedError,
    TooLargeError,
)
from nobackfill.framing import Frame
from nobackfill.server.embedding import embedding
from nobackfill.server.embedding.embedding import ImageDecoder
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import LOCAL
from tests.support import pictures

SIZE, OTHER = Frame(8, 8), Frame(4, 4)
LARGE = pictures.blank_png(3000, 3000)
SMALL = pictures.blank_png(8, 8)


@pytest.fixture(autouse=True)
def a_call() -> Iterator[None]:
    with context.work_until(time.monotonic() + 60):
        yield


def test_each_is_decoded_or_refused_by_itself() -> None:
    found = ImageDecoder(1).decode_each([SMALL, b"no image", SMALL], [SIZE, OTHER])
    assert isinstance(found[1], InvalidInputError)
    for one in (found[0], found[2]):
        assert not isinstance(one, InvalidInputError)
        assert {size: pixels.shape for size, pixels in one.items()} == {
            SIZE: (8, 8, 3), OTHER: (4, 4, 3),
        }  # fmt: skip


def test_what_nobody_waits_for_is_not_decoded() -> None:
    """A hundred pictures take seconds; the call ends after the one at hand."""
    with context.work_until(time.monotonic() + 0.2):
        began = time.thread_time()
        with pytest.raises(DeadlineError):
            ImageDecoder(1).decode_each([LARGE] * 100, [SIZE])
        spent = time.thread_time() - began
    began = time.thread_time()
    ImageDecoder(1).decode_each([LARGE] * 10, [SIZE])
    assert spent < time.thread_time() - began + 0.5


def test_a_call_that_was_given_up_is_not_decoded() -> None:
    looked = iter([True, True, True])
    context.set_current_call(
        context.Call(LOCAL, time.monotonic() + 60, lambda: next(looked, False))
    )
    with pytest.raises(CancelledError):
        ImageDecoder(1).decode_each([SMALL] * 100, [SIZE])


def test_one_that_waits_for_its_turn_is_given_up_too() -> None:
    shared = ImageDecoder(1)
    with (
        shared._turns.turn(0.0, 1),
        context.work_until(time.monotonic() + 0.1),
        pytest.raises(DeadlineError),
    ):
        shared.decode_each([SMALL], [SIZE])
    context.set_current_call(context.Call(LOCAL, time.monotonic() + 60))
    assert len(shared.decode_each([SMALL], [SIZE])) == 1


def test_a_cheap_picture_goes_before_the_rest_of_a_dear_batch() -> None:
    shared, order = ImageDecoder(1), list[str]()
    started = threading.Event()

    def dear() -> None:
        for _ in range(3):
            shared.decode_each([LARGE] * 4, [SIZE])
            started.set()
        order.append("dear")

    batch = threading.Thread(target=dear)
    batch.start()
    started.wait(60)
    shared.decode_each([SMALL], [SIZE])
    order.append("cheap")
    batch.join()
    assert order == ["cheap", "dear"]


def test_no_more_than_so_much_is_decoded_at_once() -> None:
    turns = embedding._DecodingTurns(at_once=4, max_cost=10)
    now, highest, guard = [0, 0], [0, 0], threading.Lock()

    def work(cost: int) -> None:
        with turns.turn(time.monotonic(), cost):
            with guard:
                now[0], now[1] = now[0] + 1, now[1] + min(cost, 10)
                highest[:] = [max(pair) for pair in zip(now, highest, strict=True)]
            time.sleep(0.002)
            with guard:
                now[0], now[1] = now[0] - 1, now[1] - min(cost, 10)

    workers = [threading.Thread(target=work, args=(1 + i % 12,)) for i in range(100)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert highest[0] > 1
    assert highest[0] <= 4
    assert highest[1] <= 10
    assert not turns._waiting


def test_a_batch_that_costs_too_much_is_refused_before_it_is_decoded() -> None:
    shared = ImageDecoder(1)
    bomb = pictures.blank_png(5000, 5000)
    began = time.thread_time()
    with pytest.raises(TooLargeError, match="smaller copies"), shared.admit_batch([bomb] * 256):
        pytest.fail("admitted")
    assert time.thread_time() - began < 1
    errors = embedding.decode_budget_errors([bomb] * 256)
    allowed = [error is None for error in errors]
    assert "19200 million pixels at once, expected at most 2000 million" in str(errors[-1])
    assert allowed == [True] * allowed.count(True) + [False] * allowed.count(False)
    assert 5 < allowed.count(True) < 100
    dear = [bomb] * 20
    with shared.admit_batch(dear), shared.admit_batch(dear), shared.admit_batch(dear):
        with pytest.raises(OverloadedError), shared.admit_batch(dear):
            pytest.fail("admitted")
        with shared.admit_batch([SMALL] * 256):
            pass
    with shared.admit_batch(dear):
        pass
