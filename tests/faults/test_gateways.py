"""Three gateways with one database: swaps there and back in each rollout, while any of them is
killed at random moments and all are restarted in turn. No call fails, no answer is mixed.

A few of them over every rollout: tests/scale/test_gateway_kills.py.
"""

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.server.conftest import Stages, make_direct_stages, make_stages
from tests.server.crowd import Crowd
from tests.server.fleet import Fleet
from tests.server.support import images
from tests.support.blocks import manifest
from tests.support.postgres import Server
from tests.support.waiting import wait_until

PICTURES = images(120)
KILLS = int(os.environ.get("KILLS", "20"))


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """Releases 1 and 2."""
    return make_stages(tmp_path_factory.mktemp("published"), 2)


@pytest.fixture(scope="module")
def direct_stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """What make_direct_stages makes."""
    return make_direct_stages(tmp_path_factory.mktemp("direct"))


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rollout", ["cutover", "dual", "direct"])
def test_swaps_while_gateways_are_killed(
    stages: Stages, direct_stages: Stages, tmp_path: Path, postgres: Server, rollout: str
) -> None:
    published = direct_stages if rollout == "direct" else stages
    swaps = 0
    with (
        postgres.database() as url,
        Fleet.serving(tmp_path, url, published[1], published[2], PICTURES) as (fleet, repo),
    ):
        both = [manifest(repo, number) for number in (1, 2)]
        with Crowd(fleet.addresses, PICTURES, both).asking(4, 0.0) as crowd:
            began = time.monotonic()
            fleet.there_and_back(2, rollout)
            took = time.monotonic() - began
            with fleet.killed(KILLS, took) as killing:
                while not killing.done():
                    fleet.there_and_back(2, rollout)
                    swaps += 1
            print(f"{rollout}: {swaps} swaps and rollbacks, killed: {killing.result()}")
            for number in range(3):
                fleet.restart(number)
            seen = len(crowd.answers)
            wait_until(lambda: len(crowd.answers) > seen + 100, "answers go on")
        print(f"{len(crowd.answers)} answers, by release {Counter(crowd.answers)}")
    assert crowd.failures == []
    assert set(crowd.answers) == {1, 2}
