"""What hangs is told from what is only busy, by the processor time of real processes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.triton.client import TritonClient
from nobackfill.server.triton.misses import Misses, group_processor_s
from nobackfill.server.triton.models import TritonModels
from nobackfill.server.triton.process import TritonProcess
from tests.server.conftest import Stages
from tests.server.process import triton_venv
from tests.support.processes import alive, children
from tests.support.waiting import wait_until

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
    misses.add()
    for _ in range(4):
        time.sleep(0.6)
        misses.add()


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
    misses.add()
    assert not misses.unready
    misses.add()
    assert misses.unready
    assert not misses.hangs
    misses.add()
    misses.add()
    assert misses.hangs


def test_who_is_busy_without_any_answer_is_not_waited_for_for_ever(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nobackfill.server.triton.misses._LONGEST_S", 1.0)
    misses = Misses(lambda: group_processor_s(group))
    miss_often(misses)
    assert misses.unready


@pytest.mark.skipif(triton_venv() is None, reason="no Triton here: run make setup")
def test_one_late_answer_long_after_the_start_ends_nothing(
    stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stages[1], tmp_path / "repo")
    venv = triton_venv()
    assert venv is not None
    process = TritonProcess(venv, tmp_path / "repo", tmp_path / "triton")
    models = TritonModels(tmp_path / "repo", TritonClient(process.address), process, Metrics())
    before = children(os.getpid())
    models.start()
    try:
        assert models.ready()
        monkeypatch.setattr("nobackfill.server.triton.models._START_S", 0.0)
        ours = children(os.getpid()) - before
        (triton,) = [
            pid for pid in ours if Path(f"/proc/{pid}/exe").readlink().name == "tritonserver"
        ]
        os.kill(triton, signal.SIGSTOP)
        # One probe waits .6 s.
        time.sleep(0.9)
        os.kill(triton, signal.SIGCONT)
        wait_until(models.ready, "Triton is not ready again")
        time.sleep(0.5)
        assert alive(triton)
    finally:
        models.close()
