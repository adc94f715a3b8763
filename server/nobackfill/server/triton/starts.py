"""Starts of the child that is Triton: how long to wait before another."""

import random

_LONGEST_PAUSE_S = 5.0


class Starts:
    """When the child was started, and whether it answered since."""

    def __init__(self) -> None:
        self.began = 0.0
        self.answered = False
        self._failures = 0

    def pause(self) -> float:
        """Seconds to wait: none after a child that worked, then growing, with jitter."""
        self._failures = 0 if self.answered else self._failures + 1
        self.answered = False
        if not self._failures:
            return 0.0
        longest: float = min(_LONGEST_PAUSE_S, 0.1 * 2**self._failures)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads restarts, hides nothing
