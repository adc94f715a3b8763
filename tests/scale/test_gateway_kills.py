"""Three gateways with one database, a swap in each rollout, and kill -9 of any of them at random
moments: no call fails, no answer is mixed. More of both: tests/faults/test_gateways.py."""

import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.server.conftest import Stages
from tests.server.crowd import Crowd
from tests.server.fleet import Fleet
from tests.server.support import images
from tests.support import trials
from tests.support.blocks import manifest, publish_block_release
from tests.support.postgres import Server

PICTURES = images(60)
# In each rollout.
KILLS = 2


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    """The publication after release 1, and after two that replace it: 2 embeds into a block of its
    own, 3 searches the vectors of 1."""
    published, first = tmp_path / "published", tmp_path / "first"
    with trials.near():
        publish_block_release(published, 1)
        shutil.copytree(published, first)
        publish_block_release(published, 2, [1])
        publish_block_release(published, 3, [1], directly=[1])
    return {1: first, 3: published}


def test_swaps_in_each_rollout_while_gateways_are_killed(
    stages: Stages, tmp_path: Path, postgres: Server
) -> None:
    with (
        postgres.database() as url,
        Fleet.serving(tmp_path, url, stages[1], stages[3], PICTURES) as (fleet, repo),
    ):
        manifests = [manifest(repo, number) for number in (1, 2, 3)]
        with Crowd(fleet.addresses, PICTURES, manifests).asking() as crowd:
            began = time.monotonic()
            fleet.there_and_back(2, "cutover")
            took = time.monotonic() - began
            for release, rollout in ((2, "cutover"), (2, "dual"), (3, "direct")):
                with fleet.killed(KILLS, took) as killing:
                    while not killing.done():
                        fleet.there_and_back(release, rollout)
                print(f"{rollout}: killed {killing.result()}")
    print(f"{len(crowd.answers)} answers, by release {Counter(crowd.answers)}")
    assert crowd.failures == []
    assert set(crowd.answers) == {1, 2, 3}
