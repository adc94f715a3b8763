"""End children with their parent, protect resources across forks, and run daemon threads."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import connection, parent_process
from typing import Any, Protocol, TypeVar


def end_with_parent() -> None:
    """End this child process as soon as its parent has ended, however the parent ended.

    Without it, a child would go on working along with the children of a restarted parent. Starts a
    daemon thread, which ends the process with exit code 1 and without cleanup. Call it only in a
    process that multiprocessing started.

    Raises:
        AssertionError: This process was not started by multiprocessing.
    """
    parent = parent_process()
    assert parent is not None, "started by another process"

    def end() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, name="leash", daemon=True).start()


# A process must not share connections with a process that it forks, nor locks that another thread
# holds at that moment. Servers that connect before they fork their workers meet this.


class ForkAware(Protocol):
    """An object that needs care while its process forks, such as a connection."""

    def before_fork(self) -> None:
        """Wait until no other thread uses the object, and keep it unused until `after_fork`.

        It runs in the thread that forks; its error is printed and ignored.
        """

    def after_fork(self, child: bool) -> None:
        """Allow use again; in the child, drop what belongs to the parent.

        It runs in parent and child, in the reverse order of `before_fork`.

        Args:
            child: Whether this process is the new one.
        """


_OPEN: "weakref.WeakSet[ForkAware]" = weakref.WeakSet()
# Objects whose `before_fork` has run for the fork that is under way.
_forking: list[ForkAware] = []


def register_for_forks(resource: ForkAware) -> None:
    """Call `before_fork` and `after_fork` of an object at every fork, while the object is
    referenced.

    A second call for the same object changes nothing.

    Args:
        resource: The object; only a weak reference to it is stored.

    Raises:
        TypeError: The object is not hashable, or its class allows no weak references.
    """
    _OPEN.add(resource)


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
    """A pool of daemon threads: unlike ThreadPoolExecutor, the end of the process does not wait for
    it."""

    def __init__(self, most_threads: int, name: str) -> None:
        """Create a pool without threads; they start with work and end when there is none.

        Args:
            most_threads: Largest number of threads, at least 1; with 0, work never begins.
            name: Name of each thread.
        """
        self._most, self._name = most_threads, name
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads = 0

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run a function on the next free thread, and return its future at once.

        Works after `close`, too. Any thread may call it; work begins in the order of the calls.

        Args:
            work: Called without arguments. Its error, if any, is raised by the future's `result`.

        Raises:
            RuntimeError: The system can start no thread, and the pool has none that could take the
                work; it is not queued.
        """
        future: Future[Result] = Future()
        with self._changed:
            self._waiting.append((future, work))
            if self._threads < self._most:
                self._threads += 1
                try:
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
                except RuntimeError:
                    self._threads -= 1
                    if not self._threads:
                        self._waiting.pop()
                        raise
        return future

    def close(self, seconds: float) -> bool:
        """Cancel work that has not begun, and wait for work that has.

        The pool can be used again, and closed again.

        Args:
            seconds: The longest wait; 0 does not wait.

        Returns:
            Whether all threads have ended. If not, they go on; futures of cancelled work raise
            CancelledError of concurrent.futures.
        """
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
