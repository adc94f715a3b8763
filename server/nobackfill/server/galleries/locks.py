"""Order the locks of the galleries, and provide counted users and a readers-writer lock."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class Level(IntEnum):
    """Name the things that a thread may wait for, in the order in which it must take them."""

    RELEASES = 0
    NAMES = 1
    GALLERY = 2
    PLAN = 3
    WRITES = 4
    VIEW = 5


class LockOrderError(AssertionError):
    """A thread waited against the order of locks; two threads could wait for each other for
    ever.
    """


class _HeldLocks(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[Level, str]] = []


_held = _HeldLocks()


def check_lock_order(level: Level, name: str = "") -> None:
    """Check that this thread may wait for a lock.

    Args:
        level: the kind of lock.
        name: the gallery's name, for locks of one gallery; names are taken in rising order.

    Raises:
        LockOrderError: the thread holds a lock that comes later.
    """
    for other, held_name in _held.stack:
        if other > level or (other == level and held_name >= name):
            raise LockOrderError(
                f"waiting for {level.name} {name!r} while holding {other.name} {held_name!r}; "
                "take them in the order of nobackfill.server.galleries.locks.Level"
            )


@contextmanager
def hold_level(level: Level, name: str = "") -> Iterator[None]:
    """Record that this thread holds a lock during a block.

    Args:
        level: the kind of lock.
        name: the gallery's name, for locks of one gallery.
    """
    _held.stack.append((level, name))
    try:
        yield
    finally:
        _held.stack.remove((level, name))


class Users:
    """Count the users of an object that may only be freed when it has none."""

    def __init__(self, level: Level, name: str = "") -> None:
        """Start without users.

        Args:
            level: the kind of object, for the order of locks.
            name: its gallery's name, for the order of locks.
        """
        self._level = level
        self._name = name
        self._lock = threading.Lock()
        self._is_free = threading.Condition(self._lock)
        self._count = 0
        self._is_closed = False

    def enter(self) -> bool:
        """Count one more user, without waiting; False if the object is closed."""
        with self._lock:
            self._count += not self._is_closed
            return not self._is_closed

    def leave(self) -> None:
        """Count one user less."""
        with self._lock:
            self._count -= 1
            if not self._count:
                self._is_free.notify_all()

    def wait_until_none(self, timeout_s: float) -> bool:
        """Wait until there is no user.

        Args:
            timeout_s: longest wait in seconds.

        Returns:
            False if there is still a user.

        Raises:
            LockOrderError: the thread holds a lock that comes later.
        """
        check_lock_order(self._level, self._name)
        with self._lock:
            return self._is_free.wait_for(lambda: not self._count, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Wait until there is no user, and from then on let none enter.

        Args:
            timeout_s: longest wait in seconds.

        Returns:
            False if there is still a user; then the object stays open.

        Raises:
            LockOrderError: the thread holds a lock that comes later.
        """
        check_lock_order(self._level, self._name)
        with self._lock:
            self._is_closed = self._is_free.wait_for(lambda: not self._count, timeout_s)
            return self._is_closed

    def reopen(self) -> None:
        """Let users enter again."""
        with self._lock:
            self._is_closed = False


class WriteLock:
    """Lock the writes of a gallery: puts share it, and a change of its spaces holds it exclusively.

    A thread that waits to hold it exclusively goes before threads that come later to share it.
    """

    def __init__(self, name: str = "") -> None:
        """Make a free lock.

        Args:
            name: the gallery's name, for the order of locks.
        """
        self._name = name
        self._condition = threading.Condition()
        self._shared = 0
        self._exclusive = False
        self._waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock during a block, together with others that share it.

        Raises:
            LockOrderError: the thread holds a lock that comes later.
        """
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
        """Hold the lock during a block, alone.

        Raises:
            LockOrderError: the thread holds a lock that comes later.
        """
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
