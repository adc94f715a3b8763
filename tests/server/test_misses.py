"""What hangs is told from what is only busy, by the processor time of real processes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nobackfill.release.manifest import Manifest, embedder_model_name
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.triton.client import TritonClient
from nobackfill.server.triton.models import TritonModels
from nobackfill.server.triton.process import MissedProbes, TritonProcess, group_processor_s
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


def miss_often(misses: MissedProbes) -> None:
    """As many as make a hang, far enough apart to see work."""
    misses.add()
    for _ in range(4):
        time.sleep(0.6)
        misses.add()


@pytest.mark.long
def test_who_is_busy_is_waited_for_and_who_hangs_is_not(group: int) -> None:
    misses = MissedProbes(lambda: group_processor_s(group))
    miss_often(misses)
    assert not misses.is_unready
    os.killpg(group, signal.SIGSTOP)
    miss_often(misses)
    assert misses.is_unready
    assert misses.is_hung
    misses.clear()
    assert not misses.is_unready


def test_a_child_that_waits_for_a_processor_is_busy(group: int) -> None:
    # Of the lowest priority, on one core with a process of ours that leaves it almost nothing.
    core = {min(os.sched_getaffinity(0))}
    members = [
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/stat")
        if int(stat.read_text().rpartition(")")[2].split()[2]) == group
    ]
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as rival:
        try:
            for pid in [rival.pid, *members]:
                os.sched_setaffinity(pid, core)
            for pid in members:
                os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
            before = group_processor_s(group)
            # The kernel adds a wait when it ends, which may be a second later. In 30 s such a
            # process runs for .1 s, so what is counted above that is waiting.
            wait_until(lambda: group_processor_s(group) - before > 0.5, "waiting is counted", 30)
        finally:
            rival.kill()


def test_a_miss_that_was_noticed_late_does_not_count() -> None:
    misses = MissedProbes(None)
    misses.add(is_late=True)
    misses.add(is_late=True)
    assert not misses.is_unready


def test_without_a_child_of_ours_every_miss_counts() -> None:
    misses = MissedProbes(None)
    misses.add()
    assert not misses.is_unready
    misses.add()
    assert misses.is_unready
    assert not misses.is_hung
    misses.add()
    misses.add()
    assert misses.is_hung


def test_who_is_busy_without_any_answer_is_not_waited_for_for_ever(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nobackfill.server.triton.process._LOOP_SECONDS", 1.0)
    misses = MissedProbes(lambda: group_processor_s(group))
    miss_often(misses)
    assert misses.is_unready


@pytest.fixture
def triton(stages: Stages, tmp_path: Path) -> Iterator[tuple[TritonModels, TritonClient, int]]:
    """The models of a Triton of releases 1 and 2, another client of it, and its process."""
    venv = triton_venv()
    if venv is None:
        pytest.skip("no Triton here: run make setup")
    shutil.copytree(stages[2], tmp_path / "repo")
    process = TritonProcess(venv, tmp_path / "repo", tmp_path / "triton")
    models = TritonModels(tmp_path / "repo", TritonClient(process.address), process, Metrics())
    before = children(os.getpid())
    models.start()
    with closing(models), closing(TritonClient(process.address)) as client:
        assert models.is_ready()
        (pid,) = [
            pid
            for pid in children(os.getpid()) - before
            if Path(f"/proc/{pid}/exe").readlink().name == "tritonserver"
        ]
        yield models, client, pid


def test_one_late_answer_long_after_the_start_ends_nothing(
    triton: tuple[TritonModels, TritonClient, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    models, _, pid = triton
    monkeypatch.setattr("nobackfill.server.triton.models._START_S", 0.0)
    os.kill(pid, signal.SIGSTOP)
    # One probe waits .6 s.
    time.sleep(0.9)
    os.kill(pid, signal.SIGCONT)
    wait_until(models.is_ready, "Triton is not ready again")
    time.sleep(0.5)
    assert alive(pid)


def test_what_triton_does_not_unload_in_time_is_unloaded_later(
    triton: tuple[TritonModels, TritonClient, int], one: Manifest, two: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    models, client, pid = triton
    monkeypatch.setattr("nobackfill.server.triton.models._UNLOAD_EVERY_S", 0.2)
    for manifest in (one, two):
        models.load(manifest)
    assert client.model_ready(embedder_model_name(2), 10)
    os.kill(pid, signal.SIGSTOP)
    models.unload(2)
    os.kill(pid, signal.SIGCONT)
    wait_until(
        lambda: not client.model_ready(embedder_model_name(2), 10), "release 2 is still loaded"
    )
    wait_until(models.is_ready, "Triton is not ready again")
    assert client.model_ready(embedder_model_name(1), 10)
    # One that is gone already, or that was never there, is no error.
    client.unload(embedder_model_name(2), 10)
    client.unload(embedder_model_name(7), 10)
