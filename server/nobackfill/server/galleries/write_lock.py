"""The lock on writes to a gallery: shared by puts, exclusive to who changes its spaces."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nobackfill.server.galleries import lock_order
from nobackfill.server.galleries.lock_order import Level


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
        lock_order.check(Level.WRITES, self._name)
        with self._condition:
            self._condition.wait_for(lambda: not self._exclusive and not self._waiting)
            self._shared += 1
        try:
            with lock_order.holding(Level.WRITES, self._name):
                yield
        finally:
            with self._condition:
                self._shared -= 1
                self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Held by the caller only."""
        lock_order.check(Level.WRITES, self._name)
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: not self._exclusive and not self._shared)
            finally:
                self._waiting -= 1
            self._exclusive = True
        try:
            with lock_order.holding(Level.WRITES, self._name):
                yield
        finally:
            with self._condition:
                self._exclusive = False
                self._condition.notify_all()
