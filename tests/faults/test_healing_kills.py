"""A gateway that heals a gallery is killed again and again, while people look and delete."""

import os
import random
import shutil
import signal
import threading
from pathlib import Path

import pytest

from nobackfill.errors import NobackfillError
from nobackfill.v1 import gallery_pb2
from tests.server.conftest import Stages, make_stages, publish_stage
from tests.server.process import serving
from tests.server.support import Client, ids, images
from tests.support.blocks import png
from tests.support.picture_host import PictureHost
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

COUNT, KILLS = 120, 8
# The source has other pictures than were put: what is healed finds itself, what is not does not.
TRUE = images(COUNT, seed=5)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """Releases 1 and 2."""
    return make_stages(tmp_path_factory.mktemp("published"), 2)


def look(address: str, stopping: threading.Event) -> None:
    """Ask for pictures until the gateway is gone."""
    while not stopping.is_set():
        try:
            with Client(address, seconds=5) as client:
                while not stopping.is_set():
                    client.find(TRUE[random.randrange(COUNT)], k=10)
        except NobackfillError:
            stopping.wait(0.05)


def test_what_was_healed_stays_and_what_was_deleted_stays_away(
    stages: Stages, tmp_path: Path
) -> None:
    repo, data = tmp_path / "repo", tmp_path / "data"
    shutil.copytree(stages[1], repo)
    options = ("--triton=in-process", "--item-host=127.0.0.1")
    deleted: list[str] = []
    with PictureHost({f"i{i}": png(image) for i, image in enumerate(TRUE)}) as host:
        with serving(repo, data, *options) as served, Client(served.address) as client:
            client.create_gallery("g")
            client.put_images(images(COUNT))
            publish_stage(repo, stages[2])
            client.swap(2)
            source = gallery_pb2.ItemSource(address=host.address, hits=20, items_a_day=2000)
            source.patience.FromMilliseconds(300)
            client.update_gallery("g", source=source)
        healed: set[str] = set()
        for turn in range(KILLS):
            with serving(repo, data, *options) as served:
                stopping = threading.Event()
                threads = [
                    threading.Thread(target=look, args=(served.address, stopping)) for _ in range(3)
                ]
                with Client(served.address) as client:
                    now = {item.id: item.origin for item in client.list("g")}
                    # What was seen healed before the kill still is; what went stays away.
                    assert {now[item] for item in healed - set(deleted)} <= {"re-embedded"}
                    assert not set(deleted) & set(now)
                    for thread in threads:
                        thread.start()
                    gone = f"i{turn}"
                    assert client.delete("g", [gone]) == 1
                    deleted.append(gone)
                    stopping.wait(random.uniform(0.1, 0.8))
                    healed = {item.id for item in client.list("g") if item.origin == "re-embedded"}
                os.kill(served.process.pid, signal.SIGKILL)
                stopping.set()
                for thread in threads:
                    thread.join()
        with serving(repo, data, *options) as served, Client(served.address) as client:
            wait_until(
                lambda: {item.origin for item in client.list("g")} == {"re-embedded"},
                "the rest is not embedded",
            )
            for i in range(COUNT):
                found = client.find(TRUE[i], k=COUNT)
                assert sorted(ids(found)) == sorted(f"i{j}" for j in range(KILLS, COUNT))
                assert (found.hits[0].id == f"i{i}") == (i >= KILLS)
        print("fetched more than once:", sum(count > 1 for count in host.asked.values()))
        # Only what a kill had interrupted: a batch a thread and one of the background, each time.
        assert sum(host.asked.values()) <= COUNT + KILLS * 8 * 3
