"""Ten swaps and rollbacks under load, mixed rollouts included: no failed call, no mixed space."""

import shutil
import time
from pathlib import Path

import pytest

from nobackfill.v1 import release_pb2
from tests.server.conftest import Stages, make_stages, publish_stage
from tests.server.load import ITEMS, Load
from tests.server.process import serving, triton_venv
from tests.server.support import Client, images
from tests.support.blocks import manifest


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """Releases 1 and 2."""
    return make_stages(tmp_path_factory.mktemp("published"), 2)


def swap(
    repo: Path, stages: Stages, address: str, swaps: int, *, clients: int, seconds: float
) -> Load:
    """Fill, load, swap there and back again; the load that was on meanwhile."""
    with Client(address) as client:
        client.create()
        for i in range(0, ITEMS, 50):
            client.put_images(images(ITEMS)[i : i + 50], first=i)
        publish_stage(repo, stages[2])
        one, two = manifest(repo, 1), manifest(repo, 2)
        with Load(address, clients, one, two) as load:
            time.sleep(seconds)
            steady = (time.monotonic() - seconds, time.monotonic())
            began = time.monotonic()
            for number in range(swaps):
                rollout = ("CUTOVER", "DUAL")[number % 2]
                assert client.activate(2, rollout).phase == release_pb2.PHASE_DONE
                time.sleep(seconds / 4)
                if number + 1 < swaps:
                    assert client.rollback(confirm=True).lost_items == 0
                    time.sleep(seconds / 4)
            ended = time.monotonic()
    p50, p99, most = load.milliseconds(*steady)
    print(f"steady: p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {most:.1f} ms")
    p50, p99, most = load.milliseconds(began, ended)
    print(f"{swaps} swaps: p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {most:.1f} ms")
    print(f"{len(load.latencies)} answers, {sum(load.failed.values())} failed, "
          f"{len(load.wrong)} wrong, by release {dict(load.answered)}")  # fmt: skip
    return load


def test_two_swaps_under_load(stages: Stages, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    shutil.copytree(stages[1], repo)
    with serving(repo, tmp_path / "data", "--triton=in-process") as served:
        load = swap(repo, stages, served.address, 2, clients=4, seconds=1)
    assert not load.failed
    assert not load.wrong
    assert set(load.answered) == {1, 2}


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_ten_swaps_under_load(stages: Stages, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    shutil.copytree(stages[1], repo)
    venv = triton_venv()
    with serving(repo, tmp_path / "data", *([f"--triton-venv={venv}"] if venv else [])) as served:
        load = swap(repo, stages, served.address, 10, clients=8, seconds=8)
    assert not load.failed
    assert not load.wrong
    assert len(load.latencies) >= 10_000
