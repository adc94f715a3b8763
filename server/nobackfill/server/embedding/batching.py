"""Micro-batches: whatever waits while one batch runs becomes the next. Nobody waits when idle."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from nobackfill.errors import DeadlineError
from nobackfill.server.grpc import context

Query = TypeVar("Query")
Answer = TypeVar("Answer")


class _Entry(Generic[Query, Answer]):
    """One thread's query. `turn` is held until there is an answer, an error, or a batch to lead."""

    __slots__ = ("answer", "deadline", "error", "leads", "query", "turn")

    def __init__(self, query: Query) -> None:
        self.query = query
        self.deadline = context.current().deadline
        self.turn = threading.Lock()
        self.turn.acquire()
        self.leads = False
        self.answer: Answer | None = None
        self.error: Exception | None = None


class Batcher(Generic[Query, Answer]):
    """Runs queries of many threads together, on the threads themselves.

    The thread that finds nothing running leads: it runs all that wait, its own query first, and
    then passes the lead to the next that waits. `run` gets 1 to `largest` queries and gives one
    answer each, in order; an error of `run` reaches every thread of the batch. Up to `at_once`
    batches run at the same time.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Query]], Sequence[Answer]],
        *,
        largest: int,
        at_once: int = 1,
        observe: Callable[[float], None] = lambda _size: None,
    ) -> None:
        self._run = run
        self._largest = largest
        self._free = at_once
        self._observe = observe
        self._lock = threading.Lock()
        # While anything waits here, `at_once` batches are running.
        self._waiting: deque[_Entry[Query, Answer]] = deque()

    def __call__(self, query: Query) -> Answer:
        """The answer to `query`. Raises DeadlineError when the call's time passes while waiting."""
        entry: _Entry[Query, Answer] = _Entry(query)
        with self._lock:
            if self._free:
                self._free -= 1
                entry.leads = True
            else:
                self._waiting.append(entry)
        if not entry.leads:
            self._wait(entry)
        if entry.leads:
            self._lead(entry)
        if entry.error is not None:
            raise entry.error
        return entry.answer  # type: ignore[return-value] # set with the turn

    def _wait(self, entry: _Entry[Query, Answer]) -> None:
        if entry.turn.acquire(timeout=context.current().remaining()):
            return
        with self._lock:
            if entry in self._waiting:
                self._waiting.remove(entry)
                raise DeadlineError("the call's deadline passed in the queue; allow more time")
        # Its batch is running, or it was made leader, just now.
        entry.turn.acquire()

    def _lead(self, first: _Entry[Query, Answer]) -> None:
        batch = [first]
        with self._lock:
            while self._waiting and len(batch) < self._largest:
                batch.append(self._waiting.popleft())
        try:
            self._observe(len(batch))
            if len(batch) == 1:
                answers = self._run([first.query])
            else:
                with context.until(max(entry.deadline for entry in batch)):
                    answers = self._run([entry.query for entry in batch])
            for entry, answer in zip(batch, answers, strict=True):
                entry.answer = answer
        except Exception as error:
            for entry in batch[1:]:
                entry.error = error
            raise
        finally:
            self._pass_on()
            for entry in batch[1:]:
                entry.turn.release()

    def _pass_on(self) -> None:
        with self._lock:
            if not self._waiting:
                self._free += 1
                return
            entry = self._waiting.popleft()
            entry.leads = True
        entry.turn.release()
