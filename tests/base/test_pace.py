"""How long a source may take: whoever reads gets pieces, an error, or an end, in bounded time."""

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuf.api.exceptions import DownloadError

from nobackfill import pace
from nobackfill.pace import read_paced
from tests.support.waiting import wait_until


def readers() -> int:
    return sum(thread.name == "fetch" for thread in threading.enumerate())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=20), max_size=30))
def test_pieces_come_whole_and_in_order(pieces: list[bytes]) -> None:
    assert list(read_paced(lambda: iter(pieces))) == [piece for piece in pieces if piece]


def test_an_error_comes_after_what_came_before_it() -> None:
    def breaking() -> Iterator[bytes]:
        yield b"one"
        raise DownloadError("gone")

    pieces = read_paced(breaking)
    assert next(pieces) == b"one"
    with pytest.raises(DownloadError, match="gone"):
        next(pieces)


def test_a_source_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "STALL_SECONDS", 0.2)
    wake = threading.Event()

    def silent() -> Iterator[bytes]:
        wake.wait(60)
        yield b""

    with pytest.raises(TimeoutError):
        list(read_paced(silent))
    wake.set()
    wait_until(lambda: readers() == 0, "a fetch thread is left")


def test_the_end_counts_for_a_source_that_is_fast_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(pace, "SLOWEST_BYTES_A_SECOND", 1)

    def steady() -> Iterator[bytes]:
        for _ in range(200):
            time.sleep(0.05)
            yield b"x" * 100

    with pytest.raises(TimeoutError):
        list(read_paced(steady, time.monotonic() + 0.5))


def test_who_reads_no_more_leaves_no_thread() -> None:
    closed = threading.Event()

    def endless() -> Iterator[bytes]:
        try:
            while True:
                yield b"x"
        finally:
            closed.set()

    pieces = read_paced(endless)
    assert next(pieces) == b"x"
    pieces.close()
    wait_until(lambda: readers() == 0, "a fetch thread is left")
    assert closed.wait(10)
