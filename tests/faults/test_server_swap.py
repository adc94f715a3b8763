"""Ten swaps and rollbacks under load, mixed rollouts included: no failed call, no mixed space."""

import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from demo.load import SEARCH, Load, Run
from nobackfill.v1 import release_pb2
from tests.server.conftest import Stages, make_stages, publish_stage
from tests.server.process import serving, triton_venv
from tests.server.support import SEARCHED, Client, images, mixed_searches
from tests.support.blocks import manifest


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """Releases 1 and 2."""
    return make_stages(tmp_path_factory.mktemp("published"), 2)


def swap(
    repo: Path, stages: Stages, address: str, swaps: int, *, clients: int, seconds: float
) -> Run:
    """Fill, load, swap there and back again; what clients met meanwhile."""
    with Client(address) as client, Load() as load:
        client.create_gallery("g")
        for i in range(0, SEARCHED, 50):
            client.put_images(images(SEARCHED)[i : i + 50], first=i)
        publish_stage(repo, stages[2])
        searches = mixed_searches(repo.parent / "searches", manifest(repo, 1), manifest(repo, 2))
        load.begin(address, SEARCH, searches, clients, judged=True)
        time.sleep(seconds)
        began = time.monotonic()
        for number in range(swaps):
            rollout = ("cutover", "dual")[number % 2]
            assert client.swap(2, rollout).phase == release_pb2.PHASE_DONE
            time.sleep(seconds / 4)
            if number + 1 < swaps:
                assert client.rollback(confirm=True).lost_items == 0
                time.sleep(seconds / 4)
        ended = time.monotonic()
        met = load.end()
    print_latencies("steady", met, began - seconds, began)
    print_latencies(f"{swaps} swaps", met, began, ended)
    print(f"{len(met.latencies)} answers, {len(met.failures)} failed or wrong, "
          f"by release {Counter(met.releases)}")  # fmt: skip
    return met


def print_latencies(name: str, met: Run, begin: float, end: float) -> None:
    """Of calls that began in an interval."""
    found = [1e3 * answer.seconds for answer in met.answers if begin <= answer.start < end]
    p50, p99 = np.percentile(found, (50, 99))
    print(f"{name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {max(found):.1f} ms")


@pytest.mark.long
def test_two_swaps_under_load(stages: Stages, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    shutil.copytree(stages[1], repo)
    with serving(repo, tmp_path / "data", "--triton=in-process") as served:
        met = swap(repo, stages, served.address, 2, clients=4, seconds=1)
    assert not met.failures
    assert set(met.releases) == {1, 2}


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_ten_swaps_under_load(stages: Stages, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    shutil.copytree(stages[1], repo)
    venv = triton_venv()
    with serving(repo, tmp_path / "data", *([f"--triton-venv={venv}"] if venv else [])) as served:
        met = swap(repo, stages, served.address, 10, clients=8, seconds=8)
    assert not met.failures
    assert len(met.latencies) >= 10_000
