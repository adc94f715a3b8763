"""What becomes of items that one query asks for, and of what they cost the day."""

import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from nobackfill.durable import transaction
from nobackfill.items import (
    FunctionItems,
    Limits,
    Reembedding,
    Resting,
    claims,
    reembedding,
)
from nobackfill.items.reembedding import today
from tests.support.waiting import wait_until

SIZE = 5


class Kept:
    """Keeps what it is given; claims in a file. See Work."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.executescript(claims.SCHEMA)
        self._lock = threading.Lock()
        self.kept: set[str] = set()

    def claim(self, keys: Sequence[str], budget: int) -> Sequence[str]:
        with self._lock, transaction(self._connection) as connection:
            return claims.claim(connection, keys, today(), budget)

    def keep(self, found: Mapping[str, str | bytes], gone: Sequence[str]) -> Collection[str]:
        with self._lock, transaction(self._connection) as connection:
            claims.settle(connection, list(found))
        self.kept |= set(found)
        return list(found)

    def release(self, keys: Collection[str]) -> None:
        with self._lock, transaction(self._connection) as connection:
            claims.release(connection, keys)

    @property
    def spent(self) -> int:
        with self._lock:
            return claims.spent(self._connection, today())

    @property
    def wanted(self) -> set[str]:
        """Those that were asked for in vain and have not failed since."""
        with self._lock:
            return set(claims.wanted(self._connection, 1000, "times > 0"))

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Kept]:
    with closing(Kept(tmp_path / "claims.sqlite")) as work:
        yield work


def named(numbers: range) -> dict[str, str]:
    return {f"i{number}": f"i{number}" for number in numbers}


def text(name: str) -> str:
    return name.ljust(SIZE)


def test_what_the_bytes_do_not_reach_is_not_begun(work: Kept) -> None:
    """A query's bytes hold 12 items and a half."""
    limits = Limits(concurrency=1, bytes_a_query=12 * SIZE + 2, bytes_an_item=10 * SIZE)
    with closing(Reembedding[str](FunctionItems(text, "text"), limits)) as again:
        for first in (0, 100, 200):
            again.finish(named(range(first, first + 100)), work)
        assert len(work.kept) == work.spent == 3 * 12
        assert (again.cost.embedded, again.cost.failed, again.cost.last_failure) == (36, 0, "")
        assert work.wanted == set(named(range(300))) - work.kept
        # And so it is embedded in the end.
        for _ in range(300 // 12):
            again.finish(dict.fromkeys(work.wanted, "again"), work)
        assert len(work.kept) == work.spent == 300
        assert work.wanted == set()


def test_what_fits_in_no_query_fails(work: Kept) -> None:
    limits = Limits(bytes_a_query=3 * SIZE)
    large = FunctionItems(lambda name: "x" * 4 * SIZE, "text")
    with closing(Reembedding[str](large, limits)) as again:
        again.finish(named(range(1)), work)
        assert (again.cost.failed, work.spent, work.wanted) == (1, 0, set())
        assert "expected at most" in again.cost.last_failure


def test_what_was_not_embedded_costs_the_day_nothing(work: Kept) -> None:
    asked = list[str]()

    def source(name: str) -> str | None:
        asked.append(name)
        if name == "i1":
            raise OSError("broken")
        return None if name == "i2" else text(name)

    resting = Resting[str](60.0, 3600.0)
    with closing(Reembedding[str](FunctionItems(source, "text"), Limits(), resting)) as again:
        for times in (1, 2, 3):
            # What is kept is embedded again, as this work knows no better; the others rest.
            again.finish(named(range(3)), work)
            assert (work.spent, work.kept) == (times, {"i0"})
        assert sorted(asked) == ["i0", "i0", "i0", "i1", "i2"]


def test_what_waits_at_the_end_stays_wanted(work: Kept) -> None:
    begun, go = threading.Event(), threading.Event()

    def source(name: str) -> str:
        begun.set()
        assert go.wait(60)
        return text(name)

    again = Reembedding[str](FunctionItems(source, "text"), Limits(concurrency=1, batch=2))
    again.ask(named(range(6)), work, seconds=0)
    assert begun.wait(60)
    with ThreadPoolExecutor(1) as other:
        ended = other.submit(again.close)
        try:
            # Four are cancelled; of those that have begun one is read, and kept.
            wait_until(lambda: len(work.wanted) == 4, "what waited is not wanted", seconds=30)
        finally:
            go.set()
        ended.result()
    assert len(work.kept) == work.spent == 1
    assert work.wanted == set(named(range(6))) - work.kept
    again.ask(named(range(6)), work)
    assert work.spent == 1


def test_a_crowd_claims_no_more_than_there_is_room_for(
    work: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reembedding, "_MOST_WAITING", 10)
    go = threading.Event()

    def source(name: str) -> str:
        assert go.wait(60)
        return text(name)

    with closing(Reembedding[str](FunctionItems(source, "text"), Limits())) as again:
        again.ask(named(range(8)), work, seconds=0)
        again.ask(named(range(25)), work, seconds=0)
        assert (work.spent, len(work.wanted)) == (10, 15)
        assert again.busy(["i9"]) and not again.busy(["i10"])
        go.set()
        again.finish(named(range(10)), work)
        assert not again.busy(named(range(25)))


def test_who_claims_holds_nobody_else_up(work: Kept) -> None:
    """As where another gateway has the row that claims are counted in."""
    claiming, go = threading.Event(), threading.Event()

    class Waits(Kept):
        def claim(self, keys: Sequence[str], budget: int) -> Sequence[str]:
            claiming.set()
            assert go.wait(60)
            return work.claim(keys, budget)

    with (
        closing(Reembedding[str](FunctionItems(text, "text"), Limits())) as again,
        closing(Waits(Path(":memory:"))) as waits,
        ThreadPoolExecutor(2) as people,
    ):
        first = people.submit(again.finish, named(range(5)), waits)
        assert claiming.wait(60)
        others = people.submit(again.finish, named(range(5, 10)), work)
        try:
            others.result(timeout=30)
        finally:
            go.set()
        assert work.kept == set(named(range(5, 10)))
        first.result()
        assert waits.kept == set(named(range(5)))


def test_a_claim_that_fails_leaves_nothing_under_way(work: Kept) -> None:
    class Fails(Kept):
        def claim(self, keys: Sequence[str], budget: int) -> Sequence[str]:
            raise RuntimeError("nobody foresaw it")

    with (
        closing(Reembedding[str](FunctionItems(text, "text"), Limits())) as again,
        closing(Fails(Path(":memory:"))) as fails,
    ):
        with pytest.raises(RuntimeError):
            again.finish(named(range(5)), fails)
        again.finish(named(range(5)), work)
        assert len(work.kept) == 5
