"""Workers that are processes of a Ray cluster: a task a piece, which Ray repeats where a node dies.

A task's process keeps connections and models for the next one. Ray Core alone: Ray Data's
checkpoints may double rows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from nobackfill.errors import UnavailableError
from nobackfill.extras import extra
from nobackfill.gallery.search.index import Labels
from nobackfill.plugins.ray.cluster import join
from nobackfill.server.upgrades.workers.cache import OpenCache
from nobackfill.server.upgrades.workers.workers import (
    AHEAD,
    TRIES,
    Part,
    Piece,
    Result,
    Shared,
    UpgradeWork,
    carry_piece,
    files_of,
)

with extra("ray"):
    import ray
    from ray.exceptions import RayError, RayTaskError


log = structlog.get_logger("server.upgrading")
# How long a cluster may have no processor for us.
_PATIENCE_S = 120.0


class RayCluster:
    """What is said of each method: Cluster."""

    def __init__(self, address: str) -> None:
        """`address`: HOST:PORT of the head of a cluster that this machine is a node of, or auto for
        the one that runs here. Raises ConfigurationError, UnavailableError."""
        join(address)

    def carry(self, work: UpgradeWork, pieces: Iterable[Piece]) -> Iterator[Labels]:
        if isinstance(work.files, Path):
            work = replace(work, files=files_of(work.files, work.route))
        return self.run(carry_piece, work, pieces)

    def run(
        self, do: Callable[[Shared, Part], Result], work: Shared, parts: Iterable[Part]
    ) -> Iterator[Result]:
        task = ray.remote(num_cpus=1, max_retries=TRIES)(_do).options(name=do.__name__)
        waiting = iter(parts)
        # In a list: Ray would read it out anew for every task, megabytes of models.
        shared = [ray.put(work)]
        under_way: list[Any] = []
        try:
            while True:
                # Asked of the head, for nodes come and go.
                room = AHEAD * _processors()
                while len(under_way) < room:
                    part = next(waiting, None)
                    if part is None:
                        break
                    under_way.append(task.remote(do, shared, part))
                if not under_way:
                    return
                ended, under_way = ray.wait(under_way, num_returns=1, timeout=_PATIENCE_S)
                if not ended:
                    raise UnavailableError(
                        f"the Ray cluster has carried nothing for {_PATIENCE_S:.0f} s; has it a "
                        "processor that is free?"
                    )
                yield _result(ended[0])
        finally:
            for one in under_way:
                ray.cancel(one, force=False)
            if under_way:
                ray.wait(under_way, num_returns=len(under_way), timeout=_PATIENCE_S)

    def close(self) -> None:
        ray.shutdown()


# By a worker's process.
_shared: OpenCache[Any, Any] = OpenCache(lambda reference, _: ray.get(reference))


def _do(do: Callable[[Shared, Part], Result], shared: list[Any], part: Part) -> Result:
    return do(_shared.of(shared[0], shared[0].hex()), part)


def _processors() -> int:
    """Of the nodes that are alive now."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _result(task: Any) -> Any:
    try:
        return ray.get(task)
    except RayTaskError as error:
        if not isinstance(error.cause, RayError):
            # What the piece raised, as it would have been raised here.
            raise error.cause from error
        lost: RayError = error.cause
    except RayError as error:
        lost = error
    raise UnavailableError(
        f"the Ray cluster lost the same items {TRIES} times ({type(lost).__name__}); look at its "
        "nodes"
    ) from lost
