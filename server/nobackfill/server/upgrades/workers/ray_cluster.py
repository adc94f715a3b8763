"""Workers that are processes of a Ray cluster: a task a piece, which Ray repeats where a node dies.

A task's process keeps connections and models for the next one. Ray Core alone: Ray Data's
checkpoints may double rows.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import structlog

from nobackfill.errors import UnavailableError
from nobackfill.extras import extra
from nobackfill.gallery.search.index import Labels
from nobackfill.ray_cluster import join
from nobackfill.server.upgrades.workers.window import Piece, Work, carry_piece
from nobackfill.server.upgrades.workers.workers import AHEAD, TRIES

with extra("ray"):
    import ray
    from ray.exceptions import RayError, RayTaskError

log = structlog.get_logger("server.upgrading")
# How long a cluster may have no processor for us.
_PATIENCE_S = 120.0
Shared = TypeVar("Shared")
Part = TypeVar("Part")
Result = TypeVar("Result")


class RayCluster:
    """What is said of each method: Workers."""

    def __init__(self, address: str) -> None:
        """`address`: HOST:PORT of the head of a cluster that this machine is a node of, or auto for
        the one that runs here. Raises ConfigurationError, UnavailableError."""
        join(address)

    def carry(self, work: Work, pieces: Iterable[Piece]) -> Iterator[Labels]:
        return self.run(carry_piece, work, pieces)

    def run(
        self, do: Callable[[Shared, Part], Result], work: Shared, parts: Iterable[Part]
    ) -> Iterator[Result]:
        """What `do(work, part)` returns of each part, as they end; otherwise as `carry`."""
        task = ray.remote(num_cpus=1, max_retries=TRIES)(do)
        waiting = iter(parts)
        shared = ray.put(work)
        under_way: list[Any] = []
        try:
            while True:
                while len(under_way) < AHEAD * _processors():
                    part = next(waiting, None)
                    if part is None:
                        break
                    under_way.append(task.remote(shared, part))
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


def _processors() -> int:
    """Of the nodes that are alive now."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _result(task: Any) -> Any:
    try:
        return ray.get(task)
    except RayTaskError as error:
        # What the piece raised, as it would have been raised here.
        raise error.cause from error
    except RayError as error:
        raise UnavailableError(
            f"the Ray cluster lost the same items {TRIES} times ({type(error).__name__}); look at "
            "its nodes"
        ) from error
