"""The documents' fenced blocks, and running them as they stand."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The environment's own commands come first, as in an activated one.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page(name: str | Path) -> str:
    """The text of a document, by its path in the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """What stands under a heading of the second level."""
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """Language and content of each fenced block in one of `languages`, in order."""
    return [(kind, content) for kind, content in _BLOCK.findall(text) if kind in languages]


def lines(text: str, language: str) -> list[str]:
    """The lines of every block in `language`, in order."""
    return [line for _, content in blocks(text, language) for line in content.splitlines()]


def run_script(script: str, folder: Path, environment: Mapping[str, str], seconds: float) -> str:
    """Run a bash script in `folder`; what it printed. It ends at the first failure, and what it
    started in the background ends with it."""
    program = f"set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n{script}"
    process = subprocess.Popen(
        ["bash", "-c", program],
        cwd=folder,
        env={**os.environ, "PATH": PATH, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, f"{output[-3000:]}\n{errors[-3000:]}"
    return output


def run_command(
    main: Callable[[], object], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a command of ours in this process. Fails the test where it does not exit with 0."""
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
        raise SystemExit(0)
    assert ended.value.code in (0, None), words
