"""How much of the machine an upgrade takes."""

import os
import time

DEFAULT_SPARE_CORES = 0.5


class Throttle:
    """Leaves a share of the cores to searches: fewer threads, then pauses between chunks."""

    def __init__(self, spare_cores: float) -> None:
        """`spare_cores`: 0 to just below 1."""
        self.cores = len(os.sched_getaffinity(0))
        share = max(0.05, 1 - spare_cores) * self.cores
        self.threads = max(1, int(share))
        self.pause_per_second = max(0.0, self.threads / share - 1)
        self._last = time.monotonic()

    def rest(self) -> None:
        """Called after each chunk: pause in proportion to the work since the last call."""
        worked = time.monotonic() - self._last
        time.sleep(min(2.0, worked * self.pause_per_second))
        self._last = time.monotonic()
