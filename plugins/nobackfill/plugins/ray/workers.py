"""Workers in processes of a Ray cluster: one task per piece, which Ray repeats if a node dies.

A task's process caches connections and models for the next task. Only Ray Core is used: checkpoints
of Ray Data may duplicate rows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from nobackfill.errors import UnavailableError
from nobackfill.extras import require_extra
from nobackfill.gallery.search.index import Labels
from nobackfill.plugins.ray.cluster import join_cluster
from nobackfill.server.upgrades.workers.cache import OpenCache
from nobackfill.server.upgrades.workers.workers import (
    AHEAD,
    TRIES,
    MigrationPiece,
    Part,
    Result,
    Shared,
    UpgradeWork,
    migrate_piece,
    read_route_files,
)

with require_extra("ray"):
    import ray
    from ray.exceptions import RayError, RayTaskError


log = structlog.get_logger("server.upgrading")
# How long a cluster may have no free processor for this gateway.
_PATIENCE_S = 120.0


class RayCluster:
    """Runs work of a gateway in processes of a Ray cluster."""

    def __init__(self, address: str) -> None:
        """Join a cluster, of which this machine must be a node.

        Blocks for some seconds. The caller closes it.

        Args:
            address: HOST:PORT of the head, or auto for a cluster that runs on this machine.

        Raises:
            ConfigurationError: the address has another form.
            UnavailableError: no cluster answers there, or this process has joined Ray already.
        """
        join_cluster(address)

    def migrate_pieces(
        self, work: UpgradeWork, pieces: Iterable[MigrationPiece]
    ) -> Iterator[Labels]:
        """Migrate pieces of a gallery; each task reads and writes the gallery's database itself.

        Model files in a folder are read in this call. Nothing else runs before the first result is
        asked for.

        Args:
            work: the gallery, the route and its models, which travel with the tasks.
            pieces: the pieces; they are taken from the iterable as tasks start.

        Yields:
            For each piece the labels that were written, int64 [n], in the order of completion.

        Raises:
            UnavailableError: the cluster lost a piece several times, or finished no task for two
                minutes.
            NobackfillError: an error of a piece, as if it had run in this process.
            OSError: a model file in a folder cannot be read.
        """
        if isinstance(work.model_files, Path):
            work = replace(work, model_files=read_route_files(work.model_files, work.route))
        return self.run(migrate_piece, work, pieces)

    def run(
        self, do: Callable[[Shared, Part], Result], work: Shared, parts: Iterable[Part]
    ) -> Iterator[Result]:
        """Call a function for each part, in processes of the cluster.

        Ray repeats a task if its node dies, so `do` must allow repeated calls. If the iterator is
        closed early, running tasks are cancelled. Nothing runs before the first result is asked
        for. At the end or an error, running tasks are cancelled, and waited for at most two
        minutes.

        Args:
            do: gets the shared data and a part; it and its arguments are pickled.
            work: data that all calls share; it is sent to each process once.
            parts: the parts; they are taken from the iterable as tasks start. An error of the
                iterable passes through.

        Yields:
            The results, in the order of completion.

        Raises:
            UnavailableError: the cluster lost a part several times, or finished no task for two
                minutes.
            Exception: any error of `do`.
        """
        task = ray.remote(num_cpus=1, max_retries=TRIES)(_run_part).options(name=do.__name__)
        remaining = iter(parts)
        # In a list: Ray would resolve a bare reference, megabytes of models, for every task.
        shared = [ray.put(work)]
        running: list[Any] = []
        try:
            while True:
                # Nodes come and go, so ask the head each time.
                room = AHEAD * _processor_count()
                while len(running) < room:
                    part = next(remaining, None)
                    if part is None:
                        break
                    running.append(task.remote(do, shared, part))
                if not running:
                    return
                finished, running = ray.wait(running, num_returns=1, timeout=_PATIENCE_S)
                if not finished:
                    raise UnavailableError(
                        f"the Ray cluster has finished no task for {_PATIENCE_S:.0f} s; check with "
                        "`ray status` that a processor is free"
                    )
                yield _task_result(finished[0])
        finally:
            for one in running:
                ray.cancel(one, force=False)
            if running:
                ray.wait(running, num_returns=len(running), timeout=_PATIENCE_S)

    def close(self) -> None:
        """Leave the cluster; running tasks of this process are cancelled.

        A second call does nothing.
        """
        ray.shutdown()


# The cache of a worker's process.
_shared: OpenCache[Any, Any] = OpenCache(lambda reference, _: ray.get(reference))


def _run_part(do: Callable[[Shared, Part], Result], shared: list[Any], part: Part) -> Result:
    return do(_shared.open_for(shared[0], shared[0].hex()), part)


def _processor_count() -> int:
    """Return the number of processors of the nodes that are alive now."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _task_result(task: Any) -> Any:
    try:
        return ray.get(task)
    except RayTaskError as error:
        if not isinstance(error.cause, RayError):
            # Raise the error of the piece, as if it had run in this process.
            raise error.cause from error
        loss: RayError = error.cause
    except RayError as error:
        loss = error
    raise UnavailableError(
        f"the Ray cluster lost the task of the same items {TRIES} times ({type(loss).__name__}); "
        "look in the logs of its nodes for a crash or too little memory, then run the command again"
    ) from loss
