"""Who uses something that is let go of when nobody does any more."""

import threading

from nobackfill.server.galleries import lock_order
from nobackfill.server.galleries.lock_order import Level


class Users:
    """Counts those who use something that may only be let go when nobody does."""

    def __init__(self, level: Level, name: str = "") -> None:
        """`level` and `name`: what is used, for the order of locks."""
        self._level = level
        self._name = name
        self._lock = threading.Lock()
        self._none = threading.Condition(self._lock)
        self._count = 0
        self._closed = False

    def enter(self) -> bool:
        """One more uses it; False, and nothing is counted, once it is closed. Never waits."""
        with self._lock:
            self._count += not self._closed
            return not self._closed

    def leave(self) -> None:
        """One fewer does."""
        with self._lock:
            self._count -= 1
            if not self._count:
                self._none.notify_all()

    def wait_until_none(self, timeout_s: float) -> bool:
        """Wait until nobody uses it; False if somebody still does after `timeout_s` seconds."""
        lock_order.check(self._level, self._name)
        with self._lock:
            return self._none.wait_for(lambda: not self._count, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """The same, and nobody enters any more from the moment that nobody uses it."""
        lock_order.check(self._level, self._name)
        with self._lock:
            self._closed = self._none.wait_for(lambda: not self._count, timeout_s)
            return self._closed

    def reopen(self) -> None:
        """Let users in again."""
        with self._lock:
            self._closed = False
