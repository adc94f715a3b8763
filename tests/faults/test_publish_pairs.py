"""Two publishers at once, and one that is killed while it holds the lock."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nobackfill.errors import AlreadyExistsError, BusyError, NobackfillError
from nobackfill.release.publishing.publish import publish
from tests.support.publication import Workshop, seen, workshop

PAIRS = [3, pytest.param(20, marks=pytest.mark.faults)]

pytestmark = pytest.mark.usefixtures("near_gate")


@pytest.mark.parametrize("pairs", PAIRS)
def test_of_two_publishers_one_wins_and_the_other_is_told(pairs: int, fast_tmp: Path) -> None:
    shop, _, second = workshop(fast_tmp)
    told = set()
    for _ in range(pairs):
        shop.restore()
        children = [start(lambda: publish(shop.repo, second)) for _ in range(2)]
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
        assert codes[0] == 0
        assert codes[1] in (BusyError.exit_code, AlreadyExistsError.exit_code)
        told.add(codes[1])
        assert_whole(shop, fast_tmp)
    print(f"{pairs} pairs, the loser exits with {sorted(told)}")


@pytest.mark.parametrize("pairs", PAIRS)
def test_the_lock_of_a_killed_publisher_is_free_at_once(pairs: int, fast_tmp: Path) -> None:
    shop, _, second = workshop(fast_tmp)
    for number in range(pairs):
        shop.restore()
        child = start(lambda: publish(shop.repo, second))
        time.sleep(0.02 * number / pairs)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if 2 not in seen(shop.repo, fast_tmp / "state"):
            publish(shop.repo, second)
        assert_whole(shop, fast_tmp)


def start(action: Callable[[], object]) -> int:
    """A forked child that exits with the code of our errors."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except NobackfillError as error:
            os._exit(error.exit_code)
        os._exit(0)
    return child


def assert_whole(shop: Workshop, folder: Path) -> None:
    assert seen(shop.repo, folder / "state") == {1: None, 2: None}
    assert shop.stale() == []
