"""The one thing that pages do at a time: a sync, or embedding again; watched while it runs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nobackfill.client.output import Advance, Output
from nobackfill.errors import BusyError, NobackfillError

# Sentences that are kept of one task.
_MOST_NOTES = 100


@dataclass
class Task:
    """How far it is; written by its thread, read by pages."""

    title: str
    began: float = field(default_factory=time.monotonic)
    step: str = ""
    done: int = 0
    total: int = 0
    notes: list[str] = field(default_factory=list)
    # How it ended: a sentence, and whether that tells of a failure.
    outcome: str = ""
    failed: bool = False

    @property
    def running(self) -> bool:
        """Whether it goes on."""
        return not self.outcome

    @property
    def remaining_s(self) -> float | None:
        """Seconds that the present step may still take, by its pace so far."""
        if not 0 < self.done < self.total:
            return None
        return (time.monotonic() - self.began) / self.done * (self.total - self.done)


@dataclass(frozen=True)
class _TaskOutput(Output):
    """What a command would print, for a page."""

    task: Task = field(default_factory=lambda: Task(""))

    def note(self, line: str) -> None:
        if len(self.task.notes) < _MOST_NOTES:
            self.task.notes.append(line)

    @contextmanager
    def progress(self, what: str) -> Iterator[Advance]:
        task = self.task
        task.step, task.done, task.total, task.began = what, 0, 0, time.monotonic()

        def advance(done: int, total: int) -> None:
            task.done, task.total = min(done, total), total

        yield advance


class Desk:
    """Starts tasks, one at a time, and remembers the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.task: Task | None = None

    def start(self, title: str, work: Callable[[Output], str]) -> Task:
        """Run `work` on a thread; its sentence is the outcome. Raises BusyError while another
        task runs."""
        with self._lock:
            if self.task is not None and self.task.running:
                raise BusyError(f"{self.task.title} goes on; wait for its end")
            task = self.task = Task(title)
        threading.Thread(target=_run, args=(task, work), name="task", daemon=True).start()
        return task


def _run(task: Task, work: Callable[[Output], str]) -> None:
    try:
        task.outcome = work(_TaskOutput(bars=False, task=task)) or "done"
    except NobackfillError as error:
        task.failed = True
        task.outcome = str(error)
    except BaseException:
        task.failed = True
        task.outcome = "It failed for an unforeseen reason: see where edge-client browse runs."
        raise
