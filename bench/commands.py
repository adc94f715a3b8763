"""Commands as a user runs them: processes of their own, timed from start to end."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EDGE = Path(sys.executable).with_name("edge-client")
PEAK = Path(__file__).with_name("peak.py")


@dataclass(frozen=True)
class CommandResult:
    """A command that has ended well; `mib`: the most memory that it held at once."""

    seconds: float
    mib: float
    answer: dict[str, Any]


def run_command(program: Sequence[str | Path], folder: Path) -> CommandResult:
    """Run a command that prints one JSON object. Raises RuntimeError with its last words."""
    done = subprocess.run(
        [sys.executable, "-S", PEAK, *program], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False, cwd=folder,
    )  # fmt: skip
    words, _, figures = done.stderr.strip().rpartition("\n")
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, program))}: {words[-800:]}")
    seconds, kib = map(float, figures.split())
    return CommandResult(seconds, kib / 1024, json.loads(done.stdout))


def run_edge_client(gallery: Path, *arguments: str | Path) -> CommandResult:
    """`edge-client --gallery GALLERY ARGUMENTS --json`."""
    return run_command([EDGE, "--gallery", gallery, *arguments, "--json"], gallery.parent)


def gallery_mib(gallery: Path) -> float:
    """What a gallery takes on disk, with all that lies beside its file."""
    files = [path for path in gallery.parent.rglob("*") if path.name.startswith(gallery.name)]
    inside = [f for path in files if path.is_dir() for f in path.rglob("*") if f.is_file()]
    return sum(f.stat().st_size for f in {*inside, *(f for f in files if f.is_file())}) / 2**20
