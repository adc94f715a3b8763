"""What becomes of items that one query asks for, and of what they cost the day."""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from nobackfill.serving import (
    Backoff,
    FunctionItems,
    ItemSource,
    LedgerFile,
    ReembeddingLimits,
    reembedding,
)
from nobackfill.serving.ledger import today_utc
from nobackfill.serving.reembedding import Reembedding
from tests.support.waiting import wait_until

SIZE = 5


class Keeping(Reembedding[str]):
    """Keeps the names of what it is given."""

    def __init__(
        self, items: ItemSource, limits: ReembeddingLimits, ledger: LedgerFile[str],
        backoff: Backoff[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(items, limits, ledger, backoff)
        self.kept: set[str] = set()

    def embed_and_store(
        self, found: Mapping[str, str | bytes], gone: Sequence[str]
    ) -> Collection[str]:
        self.ledger.finish_claims(list(found))
        self.kept |= set(found)
        return list(found)

    @property
    def spent(self) -> int:
        return self.ledger.count_claimed(today_utc())

    @property
    def wanted(self) -> set[str]:
        """Those that were asked for in vain and have not failed since."""
        assert isinstance(self.ledger, LedgerFile)
        return set(self.ledger.requested_keys(1000))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[LedgerFile[str]]:
    with closing(LedgerFile[str](tmp_path / "ledger.sqlite")) as ledger:
        yield ledger


def named(numbers: range) -> dict[str, str]:
    return {f"i{number}": f"i{number}" for number in numbers}


def text(name: str) -> str:
    return name.ljust(SIZE)


@pytest.mark.slow
def test_what_the_bytes_do_not_reach_is_not_begun(ledger: LedgerFile[str]) -> None:
    """A query's bytes hold 12 items and a half."""
    limits = ReembeddingLimits(
        concurrent_batches=1, bytes_per_query=12 * SIZE + 2, bytes_per_item=10 * SIZE
    )
    with closing(Keeping(FunctionItems(text, "text"), limits, ledger)) as again:
        for first in (0, 100, 200):
            again.reembed(named(range(first, first + 100)))
        assert len(again.kept) == again.spent == 3 * 12
        assert (again.cost.embedded_count, again.cost.failed_count, again.cost.last_failure) == (
            36,
            0,
            "",
        )
        assert again.wanted == set(named(range(300))) - again.kept
        # And so it is embedded in the end.
        for _ in range(300 // 12):
            again.reembed(dict.fromkeys(again.wanted, "again"))
        assert len(again.kept) == again.spent == 300
        assert again.wanted == set()


def test_what_fits_in_no_query_fails(ledger: LedgerFile[str]) -> None:
    limits = ReembeddingLimits(bytes_per_query=3 * SIZE)
    large = FunctionItems(lambda name: "x" * 4 * SIZE, "text")
    with closing(Keeping(large, limits, ledger)) as again:
        again.reembed(named(range(1)))
        assert (again.cost.failed_count, again.spent, again.wanted) == (1, 0, set())
        assert "expected at most" in again.cost.last_failure


def test_what_was_not_embedded_costs_the_day_nothing(ledger: LedgerFile[str]) -> None:
    asked = list[str]()

    def source(name: str) -> str | None:
        asked.append(name)
        if name == "i1":
            raise OSError("broken")
        return None if name == "i2" else text(name)

    backoff = Backoff[str](60.0, 3600.0)
    with closing(
        Keeping(FunctionItems(source, "text"), ReembeddingLimits(), ledger, backoff)
    ) as again:
        for times in (1, 2, 3):
            # What is kept is embedded again, as this one knows no better; the others rest.
            again.reembed(named(range(3)))
            assert (again.spent, again.kept) == (times, {"i0"})
        assert sorted(asked) == ["i0", "i0", "i0", "i1", "i2"]


def test_what_waits_at_the_end_stays_wanted(ledger: LedgerFile[str]) -> None:
    begun, go = threading.Event(), threading.Event()

    def source(name: str) -> str:
        begun.set()
        assert go.wait(60)
        return text(name)

    again = Keeping(
        FunctionItems(source, "text"), ReembeddingLimits(concurrent_batches=1, batch_size=2), ledger
    )
    again.reembed_within_limit(named(range(6)), seconds=0)
    assert begun.wait(60)
    with ThreadPoolExecutor(1) as other:
        ended = other.submit(again.close)
        try:
            # Four are cancelled; of those that have begun one is read, and kept.
            wait_until(lambda: len(again.wanted) == 4, "what waited is not wanted", seconds=30)
        finally:
            go.set()
        ended.result()
    assert len(again.kept) == again.spent == 1
    assert again.wanted == set(named(range(6))) - again.kept
    again.reembed_within_limit(named(range(6)))
    assert again.spent == 1


def test_a_crowd_claims_no_more_than_there_is_room_for(
    ledger: LedgerFile[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reembedding, "_MOST_WAITING", 10)
    go = threading.Event()

    def source(name: str) -> str:
        assert go.wait(60)
        return text(name)

    with closing(Keeping(FunctionItems(source, "text"), ReembeddingLimits(), ledger)) as again:
        again.reembed_within_limit(named(range(8)), seconds=0)
        again.reembed_within_limit(named(range(25)), seconds=0)
        assert (again.spent, len(again.wanted)) == (10, 15)
        assert again.is_embedding(["i9"]) and not again.is_embedding(["i10"])
        go.set()
        again.reembed(named(range(10)))
        assert not again.is_embedding(named(range(25)))


def test_who_claims_holds_nobody_else_up(ledger: LedgerFile[str]) -> None:
    """As where another gateway has the row that claims are counted in."""
    claiming, go = threading.Event(), threading.Event()

    class Waits(Keeping):
        def claim(self, keys: Sequence[str], budget: int) -> Sequence[str]:
            if "i0" in keys:
                claiming.set()
                assert go.wait(60)
            return super().claim(keys, budget)

    with (
        closing(Waits(FunctionItems(text, "text"), ReembeddingLimits(), ledger)) as again,
        ThreadPoolExecutor(2) as people,
    ):
        first = people.submit(again.reembed, named(range(5)))
        assert claiming.wait(60)
        others = people.submit(again.reembed, named(range(5, 10)))
        try:
            others.result(timeout=30)
            assert again.kept == set(named(range(5, 10)))
        finally:
            go.set()
        first.result()
        assert again.kept == set(named(range(10)))


def test_items_that_no_thread_can_take_are_free_again(
    ledger: LedgerFile[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were claimed and under way for ever, and the pool had lost its only thread."""

    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    limits = ReembeddingLimits(concurrent_batches=1, batch_size=2)
    with closing(Keeping(FunctionItems(text, "text"), limits, ledger)) as again:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            again.reembed(named(range(5)), seconds=30)
        assert not again.is_embedding(named(range(5)))
        assert (again.spent, again.wanted) == (0, set(named(range(5))))
        assert "can't start new thread" in again.cost.last_failure
        again.reembed(named(range(5)), seconds=30)
        assert len(again.kept) == again.spent == 5


def test_a_claim_that_fails_leaves_nothing_under_way(ledger: LedgerFile[str]) -> None:
    class Fails(Keeping):
        fails = True

        def claim(self, keys: Sequence[str], budget: int) -> Sequence[str]:
            if self.fails:
                raise RuntimeError("nobody foresaw it")
            return super().claim(keys, budget)

    with closing(Fails(FunctionItems(text, "text"), ReembeddingLimits(), ledger)) as again:
        with pytest.raises(RuntimeError):
            again.reembed(named(range(5)))
        again.fails = False
        again.reembed(named(range(5)))
        assert len(again.kept) == 5
