"""The tasks of a comparison among processes, of this machine or of a Ray cluster: each once its
needs are met."""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from nobackfill.errors import NobackfillError
from nobackfill.extras import extra
from nobackfill.leash import end_with_parent
from nobackfill.ray_cluster import join
from nobackfill.training.comparison.settings import prepare
from nobackfill.training.comparison.tasks import Planned, Task, Views, tasks

# Seconds between lines of progress.
_LINE_EVERY = 10.0

# Hands a task to a process.
Submit = Callable[..., Future[None]]


def do(planned: Planned, jobs: int, cluster: str | None = None) -> None:
    """Make the images, train every run, measure every row. What is done is not done again.

    `cluster`: address of a Ray cluster whose nodes do it, in place of `jobs` processes; they have
    the folders under the same paths. Raises UnavailableError where there is none.
    """
    for place, rows in planned:
        prepare(place, list(rows))
    waiting = tasks(planned)
    progress = _Progress(len(waiting))
    if cluster is not None:
        with _nodes(cluster) as (submit, processors):
            _share(waiting, processors, submit, progress)
    elif jobs == 1:
        for task in waiting:
            task.work(*task.arguments)
            progress.finish_one()
    else:
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, spawned, initializer=end_with_parent) as pool:
            try:
                _share(waiting, jobs, pool.submit, progress)
            except BrokenProcessPool as error:
                raise NobackfillError(
                    "a process of the comparison was ended: give the machine or its container more "
                    "memory, or fewer --jobs; run it again, it goes on after what is kept"
                ) from error


class _Progress:
    """Lines on stderr: how many tasks there are, and how many are done."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._began = self._printed = time.monotonic()
        self._print("trainings and measurements to do; finished ones are kept and skipped")

    def finish_one(self) -> None:
        """Count a finished task, and print a line when the last one is old enough."""
        self._done += 1
        now = time.monotonic()
        if now - self._printed >= _LINE_EVERY and self._done < self._total:
            self._printed = now
            self._print(f"done after {now - self._began:.0f} s")

    def _print(self, text: str) -> None:
        count = f"{self._done} of {self._total}" if self._done else str(self._total)
        print(f"compare.py: {count} {text}", file=sys.stderr, flush=True)


@contextmanager
def _nodes(address: str) -> Iterator[tuple[Submit, int]]:
    """What hands tasks to a cluster, and how many processors it has. A task whose node dies is done
    again: it goes on from what is kept."""
    with extra("ray"):
        import ray
    join(address)

    def submit(work: Callable[..., None], *arguments: object) -> Future[None]:
        task: Future[None] = ray.remote(num_cpus=1)(work).remote(*arguments).future()
        return task

    try:
        yield submit, max(1, int(ray.cluster_resources().get("CPU", 1)))
    finally:
        ray.shutdown()


def _share(waiting: list[Task], jobs: int, submit: Submit, progress: _Progress) -> None:
    """Carry tasks out in `jobs` processes, the first that can begin first.

    No more are handed out than processes, so that a failure is raised as soon as what is in hand
    ends.
    """
    made: set[Path | Views] = set()
    running: dict[Future[None], Task] = {}
    while waiting or running:
        ready = [task for task in waiting if task.needs <= made][: jobs - len(running)]
        for task in ready:
            waiting.remove(task)
            running[submit(task.work, *task.arguments)] = task
        ended, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in ended:
            future.result()
            made |= running.pop(future).made
            progress.finish_one()
