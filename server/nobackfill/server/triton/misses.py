"""Probes that Triton missed in a row: is it away, does it hang, or is it only busy?

A model on a large batch, or a machine with too much to do, answers a probe late; ending it then
costs more than waiting. What hangs uses no processor time, what is busy does.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

# Missed probes in a row: from `_UNREADY` on, calls are refused at once and those under way are cut.
# One missed probe is no evidence: a machine under load starves a healthy child. At `_HANGS` a
# hanging child is killed.
_UNREADY = 2
_HANGS = 4
# Of one core: a child that works uses more even where a dozen others want the same core, an idle
# one less.
_BUSY = 0.02
# Busy for so long without any answer is a loop.
_LONGEST_S = 30.0
_MARK_EVERY_S = 1.0


class Misses:
    """Counted since the last answer. `processor_s` tells the seconds of processor time that the
    child has used, None where it is not ours to look at."""

    def __init__(self, processor_s: Callable[[], float] | None) -> None:
        self._processor_s = processor_s
        self._count = 0
        self._answered = self._marked = time.monotonic()
        self._used = 0.0

    @property
    def count(self) -> int:
        return self._count

    @property
    def unready(self) -> bool:
        return self._count >= _UNREADY

    @property
    def hangs(self) -> bool:
        return self._count >= _HANGS

    def clear(self) -> None:
        """It answered, or it starts anew."""
        self._count = 0
        self._answered = time.monotonic()
        if self._answered - self._marked >= _MARK_EVERY_S:
            self._mark()

    def add(self) -> None:
        """Count a missed probe, unless the child was busy since the last look."""
        share = self._mark()
        late = time.monotonic() - self._answered > _LONGEST_S
        if late or share < _BUSY:
            self._count += 1

    def _mark(self) -> float:
        """The share of a core that was used since the last mark."""
        if self._processor_s is None:
            return 0.0
        used, now = self._processor_s(), time.monotonic()
        share = (used - self._used) / max(now - self._marked, 1e-3)
        self._used, self._marked = used, now
        return share


def group_processor_s(group: int) -> float:
    """Seconds of processor time used by the living processes of a process group; 0 where there is
    no /proc."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which stands in parentheses and may hold anything.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            # It ended since it was listed.
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
