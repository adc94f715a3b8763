"""Calls a second: so many on the average, and what was not used of a second at once."""

import threading
import time

from nobackfill.errors import OverloadedError


class Rate:
    """Of the calls under one name, at one gateway."""

    def __init__(self, name: str, most: float) -> None:
        """`most`: calls a second."""
        self.most = most
        self._name = name
        self._lock = threading.Lock()
        # What may be called at once: a second's worth, one at least.
        self._full = max(1.0, most)
        self._left = self._full
        self._at = time.monotonic()

    def take(self) -> None:
        """Count one call. Raises OverloadedError where it is one too many."""
        with self._lock:
            now = time.monotonic()
            self._left = min(self._full, self._left + (now - self._at) * self.most)
            self._at = now
            if self._left < 1:
                raise OverloadedError(
                    f"expected at most {self.most:g} calls a second under the name {self._name}; "
                    "try again with a growing delay, or ask its operator for more"
                )
            self._left -= 1
