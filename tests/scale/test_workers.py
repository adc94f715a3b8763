"""Upgrades carried by processes and by Ray; workers die meanwhile, others put and delete."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nobackfill.errors import ConfigurationError, UnavailableError
from nobackfill.gallery.staging import UpgradeProgress
from nobackfill.release.manifest import Manifest
from nobackfill.server.upgrades.workers.processes import WorkerProcesses
from nobackfill.server.upgrades.workers.workers import PIECE
from tests.server.conftest import Stages
from tests.support.carried import Carried
from tests.support.ports import free_port
from tests.support.postgres import Server
from tests.support.waiting import wait_until

COUNT = 20_000


# Before there is a cluster here.
@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(60)
def test_a_cluster_that_is_not_there_or_has_ended_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    # Where the address of one that is gone is not found, either.
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    from nobackfill.plugins.ray.cluster import join_cluster

    with pytest.raises(UnavailableError, match="ray start"):
        join_cluster("auto")
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        join_cluster("nonsense")
    # What `ray start` has noted, and nobody has cleared.
    dead = f"127.0.0.1:{free_port()}"
    (tmp_path / "ray").mkdir(exist_ok=True)
    (tmp_path / "ray" / "ray_current_cluster").write_text(dead)
    for address in ("auto", dead):
        with pytest.raises(UnavailableError, match="ray stop"):
            join_cluster(address)


def test_a_killed_process_loses_doubles_and_revives_nothing(
    stages: Stages, one: Manifest, two: Manifest, postgres: Server
) -> None:
    workers = WorkerProcesses(2)
    with postgres.database() as url:
        carried = Carried(url, stages[2], one, two, COUNT)
        told: list[UpgradeProgress] = []

        def on_progress(progress: UpgradeProgress) -> None:
            told.append(progress)
            if len(told) in (1, 3):
                pid = multiprocessing.active_children()[0].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)

        try:
            # Stopped, it leaves the rest for the next time.
            halted = carried.upgrade(workers, lambda _: None, lambda: True)
            assert halted.was_stopped and halted.written_count == 0
            outcome = carried.upgrade(workers, on_progress)
            assert not outcome.was_stopped and outcome.left_behind_count == 0
            carried.check()
            assert told[-1].complete_count <= told[-1].item_count and len(told) >= COUNT // PIECE
        finally:
            workers.close()
            carried.database.close()
    assert not multiprocessing.active_children()


@pytest.mark.filterwarnings("default")
def test_a_node_killed_in_mid_run_loses_doubles_and_revives_nothing(
    two_nodes: Any, stages: Stages, one: Manifest, two: Manifest, postgres: Server
) -> None:
    import ray

    from nobackfill.plugins.ray.workers import RayCluster

    workers = RayCluster(two_nodes.address)
    with postgres.database() as url:
        carried = Carried(url, stages[2], one, two, COUNT)
        told: list[UpgradeProgress] = []

        def on_progress(progress: UpgradeProgress) -> None:
            told.append(progress)
            if len(told) == 1:
                (other,) = two_nodes.worker_nodes
                two_nodes.remove_node(other, allow_graceful=False)

        try:
            outcome = carried.upgrade(workers, on_progress)
            assert not outcome.was_stopped and outcome.left_behind_count == 0
            carried.check()
            assert len(told) >= COUNT // PIECE
            # The cluster itself notices after a while.
            wait_until(lambda: sum(bool(n["Alive"]) for n in ray.nodes()) == 1, "one node is left")
        finally:
            workers.close()
            carried.database.close()
