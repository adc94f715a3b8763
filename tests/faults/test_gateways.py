"""Three gateways with one database: swaps there and back in each rollout, while any of them is
killed at random moments and all are restarted in turn. No call fails, no answer is mixed."""

import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nobackfill.errors import NobackfillError
from tests.server import process
from tests.server.conftest import Stages, make_direct_stages, make_stages, publish_stage
from tests.server.crowd import Crowd
from tests.server.support import Client, images
from tests.support.blocks import manifest
from tests.support.ports import free_port
from tests.support.postgres import Server
from tests.support.waiting import wait_until

PICTURES = images(120)
SWAPS = int(os.environ.get("SWAPS", "6"))


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """Releases 1 and 2."""
    return make_stages(tmp_path_factory.mktemp("published"), 2)


@pytest.fixture(scope="module")
def direct_stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """What make_direct_stages makes."""
    return make_direct_stages(tmp_path_factory.mktemp("direct"))


class Fleet:
    """Three gateway processes, each at an address that it keeps."""

    def __init__(self, folder: Path, repo: Path, url: str) -> None:
        self._folder, self._repo, self._url = folder, repo, url
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        self._served = [self._start(number) for number in range(3)]

    def _start(self, number: int) -> process.Served:
        options = [f"--store={self._url}", f"--address={self.addresses[number]}"]
        data = self._folder / f"data{number}"
        return process.start(self._repo, data, "--triton=in-process", *options)

    def kill(self, number: int) -> None:
        """kill -9, and start again."""
        self._served[number].process.kill()
        self._served[number].process.wait(60)
        self._served[number] = self._start(number)

    def restart(self, number: int) -> None:
        assert self._served[number].stop() == 0
        self._served[number] = self._start(number)

    def stop(self) -> None:
        for served in self._served:
            served.stop()

    def active(self) -> set[int]:
        """What each answers with."""
        found = set()
        for address in self.addresses:
            with Client(address) as client:
                states = client.states().items()
                found |= {number for number, state in states if state == "ACTIVE"}
        return found

    def until(self, release: int, ask: Callable[[Client], object]) -> None:
        """Ask one after the other, until all answer with a release."""
        deadline = time.monotonic() + 300
        for address in self._in_turn():
            assert time.monotonic() < deadline, f"release {release} is not reached"
            # One that is being killed, another that leads already: asked again elsewhere.
            try:
                if self.active() == {release}:
                    return
                with Client(address) as client:
                    ask(client)
            except NobackfillError:
                time.sleep(0.2)

    def _in_turn(self) -> Iterator[str]:
        while True:
            yield random.choice(self.addresses)


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rollout", ["cutover", "dual", "direct"])
def test_swaps_while_gateways_are_killed(
    stages: Stages, direct_stages: Stages, tmp_path: Path, postgres: Server, rollout: str
) -> None:
    published = direct_stages if rollout == "direct" else stages
    repo = tmp_path / "repo"
    shutil.copytree(published[1], repo)
    with postgres.database() as url, ExitStack() as closing:
        fleet = Fleet(tmp_path, repo, url)
        closing.callback(fleet.stop)
        with Client(fleet.addresses[0]) as client:
            client.create_gallery("g")
            client.put_images(PICTURES)
        publish_stage(repo, published[2])
        both = [manifest(repo, number) for number in (1, 2)]
        with Crowd(fleet.addresses, PICTURES, both).asking(4, 0.0) as crowd:
            for number in range(SWAPS):
                moment = random.uniform(0, 3)
                killing = threading.Timer(moment, fleet.kill, [number % 3])
                killing.start()
                fleet.until(2, lambda client: client.swap(2, rollout))
                killing.join()
                fleet.until(2, lambda client: client.swap(2, rollout))
                print(f"{rollout}: swap {number}, a gateway killed after {moment:.1f} s")
                fleet.until(1, lambda client: client.rollback(confirm=True, to=1))
            for number in range(3):
                fleet.restart(number)
            seen = len(crowd.answers)
            wait_until(lambda: len(crowd.answers) > seen + 100, "answers go on")
        print(f"{len(crowd.answers)} answers, by release {Counter(crowd.answers)}")
    assert crowd.failures == []
    assert set(crowd.answers) == {1, 2}
