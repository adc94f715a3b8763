"""What outlives its owner: children of a process that ends, connections after a fork, threads."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import connection, parent_process
from typing import Any, Protocol, TypeVar


def end_with_parent() -> None:
    """In a process of multiprocessing's: end as soon as its parent has, however that ended; what is
    under way goes on in nobody's name otherwise, beside whoever starts it again."""
    parent = parent_process()
    assert parent is not None, "started by another process"

    def end() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, name="leash", daemon=True).start()


# Resources that a process must not share with one that it forks: connections, and locks that
# another thread held at that moment. Servers that open things before they fork their workers meet
# this.


class Forked(Protocol):
    """An object that is open while its process forks."""

    def before_fork(self) -> None:
        """Wait until no other thread is at work in it, and keep it so."""

    def after_fork(self, child: bool) -> None:
        """Go on; in the child without what is its parent's."""


_OPEN: "weakref.WeakSet[Forked]" = weakref.WeakSet()
# Of the fork that is under way.
_forking: list[Forked] = []


def watch_forks(one: Forked) -> None:
    """Tell `one` of every fork, as long as somebody uses it."""
    _OPEN.add(one)


def _before() -> None:
    for one in list(_OPEN):
        one.before_fork()
        _forking.append(one)


def _after(child: bool) -> None:
    while _forking:
        _forking.pop().after_fork(child)


os.register_at_fork(
    before=_before,
    after_in_parent=lambda: _after(child=False),
    after_in_child=lambda: _after(child=True),
)


Result = TypeVar("Result")


class DaemonThreads:
    """As concurrent.futures' ThreadPoolExecutor, whose threads the end of the process waits for."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads = 0

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Do `work` on the next free thread."""
        future: Future[Result] = Future()
        with self._changed:
            self._waiting.append((future, work))
            if self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def close(self, seconds: float) -> bool:
        """Cancel what has not begun, and wait so long for what has; whether it has ended."""
        with self._changed:
            dropped, self._waiting = self._waiting, deque()
        for future, _ in dropped:
            future.cancel()
            future.set_running_or_notify_cancel()
        with self._changed:
            return self._changed.wait_for(lambda: not self._threads, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._threads -= 1
                    self._changed.notify_all()
                    return
                future, work = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                    future.set_exception(error)
                else:
                    future.set_result(result)
