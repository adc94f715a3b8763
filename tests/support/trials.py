"""Trials of releases that cost less than a process of its own, which takes a second to start."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nobackfill.release import trial

ROOT = Path(__file__).parents[2]
# As they come.
_COMMAND, _REFUSAL = trial._COMMAND, trial.explain_trial_failure_in_child


@contextmanager
def near() -> Iterator[None]:
    """In this process, to the end of the block: they write nothing. Children are tried in
    tests/release and by gateways of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trial,
            "explain_trial_failure_in_child",
            lambda request, _: trial.explain_trial_failure(request),
        )
        yield


@contextmanager
def started() -> Iterator[None]:
    """As they come, to the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "explain_trial_failure_in_child", _REFUSAL)
        yield


@contextmanager
def forked() -> Iterator[None]:
    """In children with the same limits, to the end of the block, but of a process that has imported
    already what they need: trial_forks.py."""
    forks = _Forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "explain_trial_failure_in_child", forks.refusal)
        try:
            yield
        finally:
            forks.close()


class _Forks:
    """The process that forks, started by the first trial."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._name = ""

    def _begin(self) -> None:
        with self._lock:
            if self._process is None:
                self._name = f"nobackfill-trials-{uuid.uuid4().hex}"
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.support.trial_forks", self._name],
                    cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, text=True,
                    env={**os.environ, **dict.fromkeys(trial._THREADS, "1")},
                )  # fmt: skip
                assert self._process.stdout is not None
                assert self._process.stdout.readline() == "listening\n"

    def close(self) -> None:
        if self._process is not None:
            # Which ends it.
            self._process.communicate(timeout=60)

    def refusal(self, request: trial._Request, meanwhile: Callable[[], None]) -> str | None:
        """See trial.explain_trial_failure_in_child."""
        if trial._COMMAND is not _COMMAND:
            # A test wants another child.
            return _REFUSAL(request, meanwhile)
        self._begin()
        end = time.monotonic() + trial.WALL_SECONDS
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(f"\0{self._name}")
            child = int(asked.recv(64))
            try:
                asked.sendall(f"{Path.cwd()}\n{request.model_dump_json()}".encode())
                asked.shutdown(socket.SHUT_WR)
                said = _read(asked, end, meanwhile)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                raise
        *answer, status = said.decode().splitlines()
        return trial._refusal_of(int(status), "\n".join(answer))


def _read(asked: socket.socket, end: float, meanwhile: Callable[[], None]) -> bytes:
    """To the end. Raises TimeoutError at `end`."""
    said = b""
    asked.settimeout(trial._LOOK_SECONDS)
    while True:
        try:
            part = asked.recv(1 << 16)
        except TimeoutError:
            if time.monotonic() > end:
                raise
            meanwhile()
            continue
        if not part:
            return said
        said += part
