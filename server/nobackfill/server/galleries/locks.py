"""Locks of a gallery: their order, its readers and writers, and one writer at a time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class Level(IntEnum):
    """What may be waited for, in the order above."""

    RELEASES = 0
    NAMES = 1
    GALLERY = 2
    PLAN = 3
    WRITES = 4
    VIEW = 5


class LockOrderError(AssertionError):
    """A wait against the order: two threads could wait for each other for ever."""


class _HeldLocks(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[Level, str]] = []


_held = _HeldLocks()


def check_lock_order(level: Level, name: str = "") -> None:
    """Before this thread waits for `level` of the gallery `name`. Raises LockOrderError."""
    for other, held in _held.stack:
        if other > level or (other == level and held >= name):
            raise LockOrderError(
                f"waiting for {level.name} {name!r} while holding {other.name} {held!r}; "
                "take them in the order of server/galleries/lock_order.py"
            )


@contextmanager
def hold_level(level: Level, name: str = "") -> Iterator[None]:
    """Remember that this thread holds `level` of the gallery `name`."""
    _held.stack.append((level, name))
    try:
        yield
    finally:
        _held.stack.remove((level, name))


# Who uses something that is let go of when nobody does any more.


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
        check_lock_order(self._level, self._name)
        with self._lock:
            return self._none.wait_for(lambda: not self._count, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """The same, and nobody enters any more from the moment that nobody uses it."""
        check_lock_order(self._level, self._name)
        with self._lock:
            self._closed = self._none.wait_for(lambda: not self._count, timeout_s)
            return self._closed

    def reopen(self) -> None:
        """Let users in again."""
        with self._lock:
            self._closed = False


# The lock on writes to a gallery: shared by puts, exclusive to who changes its spaces.


class WriteLock:
    """Who waits to have it exclusively goes before those who come later to share it."""

    def __init__(self, name: str = "") -> None:
        """`name`: of its gallery, for the order of locks."""
        self._name = name
        self._condition = threading.Condition()
        self._shared = 0
        self._exclusive = False
        self._waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Held together with others who share it."""
        check_lock_order(Level.WRITES, self._name)
        with self._condition:
            self._condition.wait_for(lambda: not self._exclusive and not self._waiting)
            self._shared += 1
        try:
            with hold_level(Level.WRITES, self._name):
                yield
        finally:
            with self._condition:
                self._shared -= 1
                self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Held by the caller only."""
        check_lock_order(Level.WRITES, self._name)
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: not self._exclusive and not self._shared)
            finally:
                self._waiting -= 1
            self._exclusive = True
        try:
            with hold_level(Level.WRITES, self._name):
                yield
        finally:
            with self._condition:
                self._exclusive = False
                self._condition.notify_all()
