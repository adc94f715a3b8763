import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from demo.children import Children
from nobackfill.errors import NobackfillError
from tests.support.processes import alive, wait_until_gone

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_run_gives_what_the_command_printed(tmp_path: Path) -> None:
    with Children(tmp_path / "logs") as children:
        assert children.run("hello", [sys.executable, "-c", "print('hello')"]) == "hello\n"


def test_a_failure_quotes_the_last_words_and_names_the_log(tmp_path: Path) -> None:
    script = "import sys; print('port 1 is busy', file=sys.stderr); sys.exit(69)"
    with (
        Children(tmp_path) as children,
        pytest.raises(NobackfillError, match=r"(?s)code 69:.*port 1 is busy.*gateway\.log"),
    ):
        children.run("gateway", [sys.executable, "-c", script])


def test_leaving_ends_what_still_runs(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        pid = children.start("sleeper", SLEEP).process.pid
        assert alive(pid)
    assert wait_until_gone({pid}, 30) == set()


@pytest.mark.skipif(sys.platform != "linux", reason="the leash is Linux's")
def test_children_end_when_the_demo_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from demo.children import Children\n"
        f"with Children(Path({str(tmp_path)!r})) as children:\n"
        f"    print(children.start('sleeper', {SLEEP!r}).process.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    # Until the leash has become the command it would end by itself: wait for the real one.
    while b"leash" in Path(f"/proc/{child}/cmdline").read_bytes():
        time.sleep(0.02)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert wait_until_gone({child}, 30) == set()
