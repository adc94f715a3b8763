"""`gateway serve` as a process of its own, with its real Triton where wanted."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S = 120.0


@dataclass
class Served:
    """A gateway process: its address, its metrics' address, its log."""

    process: subprocess.Popen[bytes]
    log: Path
    address: str
    metrics: str

    def events(self) -> list[dict[str, Any]]:
        """Its log lines so far; everything it writes there must be JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return self.process.wait(60)


def command(*arguments: str) -> list[str]:
    """The command `gateway` of this environment."""
    return [str(Path(sys.executable).with_name("gateway")), *arguments]


def triton_venv() -> Path | None:
    """Where `make setup` puts Triton, if it is there."""
    venv = Path(os.environ.get("NOBACKFILL_TRITON_VENV", ROOT / ".venv-triton"))
    return venv if (venv / "bin" / "python").exists() else None


def start(repo: Path, data: Path, *arguments: str, **environment: str) -> Served:
    """Start on free ports; returns when it serves. Fails with its log when it does not.

    OPEN_FILES in its environment bounds how many files it may have open.
    """
    limited = ["sh", "-c", '[ -z "$OPEN_FILES" ] || ulimit -n "$OPEN_FILES"; exec "$@"', "sh"]
    data.mkdir(parents=True, exist_ok=True)
    log = data.parent / f"{data.name}.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            limited + command(
                "serve", f"--model-repo={repo}", f"--data={data}", "--address=127.0.0.1:0",
                "--metrics-address=127.0.0.1:0", *arguments,
            ),
            stderr=stderr,
            env={**os.environ, **environment},
        )  # fmt: skip
    served = Served(process, log, "", "")
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if '"event": "serving"' in line:
                event = json.loads(line)
                served.address, served.metrics = event["address"], event["metrics"]
                return served
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"gateway did not start: {log.read_text()}")


@contextmanager
def serving(repo: Path, data: Path, *arguments: str, **environment: str) -> Iterator[Served]:
    """A gateway process, ended with the block; see `start`."""
    served = start(repo, data, *arguments, **environment)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.stop()
