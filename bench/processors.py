"""Processor seconds of this process and of those that it has started, by what they do for it."""

import os
from pathlib import Path

# Workers; this process, which hands out; the database; Ray's own: head, raylets, agents.
KINDS = ("workers", "bench", "postgresql", "ray")
_TICKS = os.sysconf("SC_CLK_TCK")


def seconds_by_kind() -> dict[str, float]:
    """Seconds that each kind has worked so far, those of processes that have ended left out, but
    of the database's."""
    worked = dict.fromkeys(KINDS, 0.0)
    found: dict[int, tuple[int, float, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # It has ended.
        kind = _kind(words)
        # A backend that has ended counts on as its parent's child: each job opens its own.
        ticks = sum(map(int, fields[11 : 15 if kind == "postgresql" else 13]))
        found[int(folder.name)] = int(fields[1]), ticks / _TICKS, kind
    for number, (parent, seconds, kind) in found.items():
        if number == os.getpid():
            worked["bench"] += seconds
            continue
        while parent in found and parent != os.getpid():
            parent = found[parent][0]
        if parent == os.getpid():
            worked[kind] += seconds
    return worked


def _kind(words: list[str]) -> str:
    program = words[0].rpartition("/")[2]
    if program == "postgres" or words[0].startswith("postgres:"):
        return "postgresql"
    if "multiprocessing" in " ".join(words) or words[0] in ("ray::IDLE", "ray::migrate_piece"):
        return "workers"
    return "ray"


def microseconds_per_item(before: dict[str, float], items: int) -> dict[str, float]:
    """Microseconds an item of each kind since then."""
    now = seconds_by_kind()
    return {kind: 1e6 * (now[kind] - before[kind]) / items for kind in KINDS}


def machine_seconds() -> float:
    """Seconds that this machine has worked since its start, whoever for."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq")
    ticks = dict(zip(names, Path("/proc/stat").read_text().split()[1:], strict=False))
    worked = sum(int(ticks[name]) for name in names if name not in ("idle", "iowait"))
    return worked / _TICKS
