"""The tasks of a comparison among processes, of this machine or of a Ray cluster: each once its
needs are met."""

import multiprocessing
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

# Hands a task to a process.
Submit = Callable[..., Future[None]]


def do(planned: Planned, jobs: int, cluster: str | None = None) -> None:
    """Make the images, train every run, measure every row. What is done is not done again.

    `cluster`: address of a Ray cluster whose nodes do it, in place of `jobs` processes; they have
    the folders under the same paths. Raises UnavailableError where there is none.
    """
    for place, rows in planned:
        prepare(place, list(rows))
    if cluster is not None:
        with _nodes(cluster) as (submit, processors):
            _share(tasks(planned), processors, submit)
    elif jobs == 1:
        for task in tasks(planned):
            task.work(*task.arguments)
    else:
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, spawned, initializer=end_with_parent) as pool:
            try:
                _share(tasks(planned), jobs, pool.submit)
            except BrokenProcessPool as error:
                raise NobackfillError(
                    "a process of the comparison was ended: give the machine or its container more "
                    "memory, or fewer --jobs; run it again, it goes on after what is kept"
                ) from error


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


def _share(waiting: list[Task], jobs: int, submit: Submit) -> None:
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
