"""compare.py as a process among processes, one of which is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nobackfill.errors import BusyError
from nobackfill.research.compare import app, compare
from nobackfill.research.images import write_digits
from nobackfill.research.presets import folder_preset
from tests.support.commands import run_here
from tests.support.processes import alive, children, wait_until_gone
from tests.support.waiting import wait_until

# Two trainings start for each test.
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.fixture
def comparison(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """With two trainings under way."""
    write_digits(tmp_path / "digits")
    asked = (
        f"--data {tmp_path / 'digits'} --out {tmp_path / 'out'} --jobs 2 --seeds 1 --methods bct"
    )
    process = subprocess.Popen(
        [sys.executable, "training/compare.py", *asked.split()],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: _two_train(process, tmp_path), "two trainings are under way", 120)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_its_processes_end_with_it(comparison: subprocess.Popen[str], tmp_path: Path) -> None:
    """Or they would train on, into the folders of the one that is started next, as nobody may who
    is started while it runs.
    """
    with pytest.raises(BusyError, match="another --out"):
        compare(folder_preset(10), tmp_path / "digits", tmp_path / "out", [0], ("bct",), 1)
    below = children(comparison.pid)
    assert len(below) >= 2
    comparison.kill()
    assert wait_until_gone(below) == set()


def test_a_process_that_is_ended_is_a_sentence(comparison: subprocess.Popen[str]) -> None:
    trains = [pid for pid in children(comparison.pid) if _spawned(pid)]
    assert len(trains) == 2
    os.kill(trains[0], signal.SIGKILL)
    _, told = comparison.communicate(timeout=240)
    assert "trainings and measurements to do" in told
    assert comparison.returncode == 1
    assert "a process of compare.py was killed" in told
    assert "--jobs" in told
    assert "Traceback" not in told
    assert not any(map(alive, trains))


def _two_train(process: "subprocess.Popen[str]", folder: Path) -> bool:
    assert process.poll() is None, "it ended"
    # Not all folders: some are renamed while they are made.
    return len(list(folder.glob("out/*/seed-*/*/*/stats.jsonl"))) >= 2


def _spawned(pid: int) -> bool:
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_no_argument_begins_no_comparison(tmp_path: Path) -> None:
    done = run_here(app, "compare.py", "--out", tmp_path / "out")
    assert done.returncode == 78
    assert "python training/compare.py --data digits --seeds 1" in done.stderr
    assert not (tmp_path / "out").exists()
