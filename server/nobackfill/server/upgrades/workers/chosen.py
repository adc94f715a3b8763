"""Where upgrades are carried, by the settings."""

from typing import TYPE_CHECKING

from nobackfill.server.settings import Settings

if TYPE_CHECKING:
    # It needs the extra `postgres`.
    from nobackfill.server.upgrades.workers.run import ByWorkers


def workers_of(settings: Settings) -> "ByWorkers | None":
    """None: a thread of the gateway carries."""
    if settings.ray is not None:
        from nobackfill.server.upgrades.workers.ray_cluster import RayCluster
        from nobackfill.server.upgrades.workers.run import ByWorkers

        return ByWorkers(RayCluster(settings.ray), settings.model_repo)
    if settings.workers:
        from nobackfill.server.upgrades.workers.processes import Processes
        from nobackfill.server.upgrades.workers.run import ByWorkers

        return ByWorkers(Processes(settings.workers), settings.model_repo)
    return None
