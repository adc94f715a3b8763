"""Fault hooks of the durable writes: a test can make any single step fail.

`NOBACKFILL_FAULT` holds `KIND@N` or `KIND@N+`: the N-th durable step of the process (from 1), or
every one from the N-th on. Kinds: `kill` (SIGKILL before the step), `short` (half of the bytes are
written, then SIGKILL; a step that writes nothing is killed before it), `eio` and `enospc` (the step
raises OSError instead of happening). A driver raises N until a run ends without firing; then every
step has failed once.
"""

import errno
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nobackfill.errors import ConfigurationError

VARIABLE = "NOBACKFILL_FAULT"

_SPEC = re.compile(r"^(kill|short|eio|enospc)@([1-9][0-9]*)(\+?)\Z")


@dataclass(frozen=True)
class Operation:
    """One durable step, as told to an observer after it happened.

    `kind`: mkdir, create, write, fsync, rename (`path` to `target`), unlink, rmdir, fsync_dir,
    begin, before_commit, after_commit. `data` holds the bytes of a write.
    """

    kind: str
    path: Path
    target: Path | None = None
    data: bytes | memoryview = b""


class Faults:
    """The armed fault, the count of steps so far, and the observer of a power-loss test."""

    def __init__(self, spec: str | None) -> None:
        """Raises ConfigurationError for a spec that is none of the kinds above."""
        self.observer: Callable[[Operation], None] | None = None
        self.arm(spec)

    def arm(self, spec: str | None) -> None:
        """Count from zero again, with another fault or none."""
        found = _SPEC.match(spec) if spec else None
        if spec and found is None:
            raise ConfigurationError(
                f"{VARIABLE}: expected kill@N, short@N, eio@N or enospc@N (N+ for every step from "
                f"N on), got {spec!r}"
            )
        self._kind = found[1] if found else ""
        self._at = int(found[2]) if found else 0
        self._onwards = bool(found and found[3])
        self.steps = 0
        self.fired = False

    def due(self) -> str:
        """Count one step; the kind of the fault that falls on it, or ''."""
        self.steps += 1
        hit = self.steps >= self._at if self._onwards else self.steps == self._at
        if not self._kind or not hit:
            return ""
        self.fired = True
        return self._kind

    def strike(self, kind: str, path: Path) -> None:
        """Let the fault happen."""
        if kind in ("kill", "short"):
            os.kill(os.getpid(), signal.SIGKILL)
        code = errno.EIO if kind == "eio" else errno.ENOSPC
        raise OSError(code, os.strerror(code), str(path))

    def happened(self, operation: Operation) -> None:
        """Tell the observer, if there is one."""
        if self.observer is not None:
            self.observer(operation)


FAULTS = Faults(os.environ.get(VARIABLE))
