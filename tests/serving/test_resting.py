"""What could not be embedded is left alone, for longer each time."""

import pytest

from nobackfill.serving import Backoff, reembedding

DAY_S = 86_400.0


class Clock:
    """Seconds, as a test has them pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def rest(of: Backoff[str], clock: Clock, key: str) -> float:
    """How long an item rests from now on, to the second."""
    begun = clock.now
    while not of.filter_ready([key]):
        clock.now += 1
    return clock.now - begun


def test_what_fails_again_rests_twice_as_long() -> None:
    clock = Clock()
    found = Backoff[str](60.0, 3600.0, clock)
    lasted = []
    for _ in range(8):
        found.back_off(["bad"])
        assert found.filter_ready(["good", "bad", "other"]) == ["good", "other"]
        lasted.append(rest(found, clock, "bad"))
    assert lasted == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    # Asked for again much later.
    clock.now += 3600
    found.back_off(["bad"])
    assert rest(found, clock, "bad") == 60


def test_what_is_gone_rests_a_day() -> None:
    clock = Clock()
    found = Backoff[str](60.0, 3600.0, clock)
    found.back_off(["gone"])
    found.back_off_a_day(["gone"])
    assert rest(found, clock, "gone") == DAY_S


def test_a_source_that_lacks_everything_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reembedding, "_MOST", 10)
    clock = Clock()
    found = Backoff[int](60.0, 3600.0, clock)
    found.back_off_a_day(range(4))
    for key in range(4, 12):
        clock.now += 1
        found.back_off([key])
    # Those that rest longest are known still.
    assert found.filter_ready(range(12)) == list(range(4, 10))
