"""What hangs is told from what is only busy, by the processor time of real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from nobackfill.server.triton.misses import Misses, group_processor_s

# A child that works through a process below it, as Triton does.
WORKS = "import os\nif os.fork(): os.wait()\nwhile True: pass"


@pytest.fixture
def group() -> Iterator[int]:
    """A process group that uses all the processor time it gets."""
    with subprocess.Popen([sys.executable, "-c", WORKS], start_new_session=True) as process:
        try:
            while group_processor_s(process.pid) < 0.2:
                time.sleep(0.02)
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def miss_often(misses: Misses) -> None:
    """As many as make a hang, far enough apart to see work."""
    misses.add(0)
    for _ in range(4):
        time.sleep(0.3)
        misses.add(1)


def test_who_is_busy_is_waited_for_and_who_hangs_is_not(group: int) -> None:
    misses = Misses(lambda: group_processor_s(group))
    miss_often(misses)
    assert not misses.unready
    os.killpg(group, signal.SIGSTOP)
    miss_often(misses)
    assert misses.unready
    assert misses.hangs
    misses.clear()
    assert not misses.unready


def test_without_a_child_of_ours_every_miss_counts() -> None:
    misses = Misses(None)
    misses.add(1)
    assert not misses.unready
    misses.add(1)
    assert misses.unready
    assert not misses.hangs
    misses.add(2)
    assert misses.hangs


def test_who_is_busy_without_any_answer_is_not_waited_for_for_ever(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nobackfill.server.triton.misses._LONGEST_S", 0.5)
    misses = Misses(lambda: group_processor_s(group))
    miss_often(misses)
    assert misses.unready
