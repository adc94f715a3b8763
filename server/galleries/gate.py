"""A gate that many pass together, or one passes alone: puts together, a flip alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Who waits to be alone goes before those who come later to be together."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._together = 0
        self._alone = False
        self._waiting = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Pass while nobody is alone."""
        with self._condition:
            self._condition.wait_for(lambda: not self._alone and not self._waiting)
            self._together += 1
        try:
            yield
        finally:
            with self._condition:
                self._together -= 1
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Pass once all others are through."""
        with self._condition:
            self._waiting += 1
            self._condition.wait_for(lambda: not self._alone and not self._together)
            self._waiting -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._condition:
                self._alone = False
                self._condition.notify_all()


class Users:
    """Counts those who use something that may only be let go when nobody does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._none = threading.Condition(self._lock)
        self._count = 0

    def enter(self) -> None:
        """One more uses it."""
        with self._lock:
            self._count += 1

    def leave(self) -> None:
        """One fewer does."""
        with self._lock:
            self._count -= 1
            if not self._count:
                self._none.notify_all()

    def wait_until_none(self, timeout_s: float) -> bool:
        """Wait until nobody uses it; False if somebody still does after `timeout_s` seconds."""
        with self._lock:
            return self._none.wait_for(lambda: not self._count, timeout_s)
