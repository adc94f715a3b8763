"""Threads for work that may hang: no stop has to wait for it."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

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
