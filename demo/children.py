"""The commands that the demo runs, as child processes that never outlive it."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from nobackfill.errors import NobackfillError, UnavailableError

LEASH = Path(__file__).with_name("leash.py")
ROOT = Path(__file__).parent.parent
# What a child may need to end by itself after it was asked to, in seconds.
GRACE = 20
# Lines of a failed command's log that are shown; the gate's verdict takes a dozen.
LAST_WORDS = 14


@dataclass(frozen=True)
class Child:
    """A running command; its standard output and error are files."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    log: Path

    def failure(self) -> NobackfillError:
        """What to say when it ended badly: its last words, and where all of them are."""
        words = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = "\n  ".join(words[-LAST_WORDS:]) or "(it said nothing)"
        return NobackfillError(
            f"{self.name} ended with exit code {self.process.returncode}:\n  {last}\n"
            f"Its whole log: {self.log}"
        )


class Children:
    """Starts, runs and, when left, ends child processes. Call from the main thread only: Linux ties
    a child to the thread that started it."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: list[Child] = []
        self._folders = ExitStack()
        # Of those that are started from now on, beside our own.
        self.environment: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in reversed(self._running):
            self.stop(child)
        self._folders.close()

    def make_folder(self, prefix: str) -> Path:
        """A new folder with a short path, removed when they are left: a socket's may have 107
        bytes."""
        made = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        return Path(self._folders.enter_context(made))

    def start(self, name: str, command: Sequence[str | Path]) -> Child:
        """Start a command in the project's folder; it writes NAME.out and NAME.log."""
        leashed = [sys.executable, str(LEASH), str(os.getpid()), *map(str, command)]
        output, log = self._logs / f"{name}.out", self._logs / f"{name}.log"
        with output.open("wb") as out, log.open("wb") as err:
            process = subprocess.Popen(
                leashed, cwd=ROOT, env=os.environ | self.environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=err,
            )  # fmt: skip
        child = Child(name, process, output, log)
        self._running.append(child)
        return child

    def wait(self, child: Child) -> str:
        """Wait for its end; its standard output. Raises NobackfillError where it failed."""
        if child.process.wait() != 0:
            raise child.failure()
        return child.output.read_text(encoding="utf-8")

    def run(self, name: str, command: Sequence[str | Path]) -> str:
        """Run a command to its end; its standard output. Raises NobackfillError where it failed."""
        return self.wait(self.start(name, command))

    def stop(self, child: Child) -> None:
        """Ask it to end, then make it."""
        if child.process.poll() is None:
            child.process.terminate()
            try:
                child.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()

    def kill(self, child: Child) -> None:
        """End it as `kill -9` does."""
        child.process.kill()
        child.process.wait()


def wait_for_line(child: Child, pattern: str, seconds: float) -> str:
    """The first line of its standard output that a pattern matches. Raises NobackfillError where
    it ended, UnavailableError where none came in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended = child.process.poll() is not None
        for line in child.output.read_text(encoding="utf-8").splitlines():
            if re.match(pattern, line):
                return line
        if ended:
            raise child.failure()
        time.sleep(0.1)
    raise UnavailableError(f"{child.name} is not there after {seconds:.0f} s; see {child.log}")
