"""Which processes are there, and which run."""

import time
from pathlib import Path


def children(pid: int) -> set[int]:
    """All processes below `pid`, at any depth."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found: set[int] = set()
    while new := {p for p, parent in parents.items() if parent in found | {pid}} - found:
        found |= new
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: set[int], seconds: float = 20.0) -> set[int]:
    """Those of `pids` that still run after a while."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.05)
    return {pid for pid in pids if alive(pid)}
