"""The one order in which threads of a gateway wait for one another, checked at every wait.

    RELEASES  which release answers: to begin an activation, undo one, retire; to make a gallery
    NAMES     the mapping of names: to make a gallery, to take a name away
    GALLERY   a use of a gallery; its deletion waits until there is none
    PLAN      a use of a plan; who lets go of old views and models waits until there is none
    WRITES    a gallery's lock: puts share it, a flip has it exclusively; several by rising name
    VIEW      the making of a gallery's views; searches of views that are there never wait for it

A thread waits only for what stands below everything that it holds. All other locks are leaves:
the store's writer, then a view's or a cache's own, held for one statement or one swap of a
reference. Only a gallery's own is held longer, while the store reads its spaces or its state.
"""

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


class _Held(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[Level, str]] = []


_held = _Held()


def check(level: Level, name: str = "") -> None:
    """Before this thread waits for `level` of the gallery `name`. Raises LockOrderError."""
    for other, held in _held.stack:
        if other > level or (other == level and held >= name):
            raise LockOrderError(
                f"waiting for {level.name} {name!r} while holding {other.name} {held!r}; "
                "take them in the order of server/galleries/lock_order.py"
            )


@contextmanager
def holding(level: Level, name: str = "") -> Iterator[None]:
    """Remember that this thread holds `level` of the gallery `name`."""
    _held.stack.append((level, name))
    try:
        yield
    finally:
        _held.stack.remove((level, name))
