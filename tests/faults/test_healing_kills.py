"""A gateway that heals a gallery is killed again and again, while people look and delete."""

import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest

from nobackfill.errors import NobackfillError
from nobackfill.v1 import gallery_pb2
from nobackfill.wire.answers import Answer, Hit
from tests.server.conftest import Stages, make_stages, publish_stage
from tests.server.process import serving
from tests.server.support import Client, ids, images
from tests.server.test_texts import published
from tests.support.blocks import png
from tests.support.picture_host import PictureHost
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

COUNT, KILLS = 120, 8
# The source has other pictures than were put: what is healed finds itself, what is not does not.
TRUE = images(COUNT, seed=5)


@dataclass(frozen=True)
class Pictures:
    """Items `i0`, `i1` … of a gallery `g`, put as something else than the source has."""

    stages: Stages

    @contextmanager
    def source(self, _: Path) -> Iterator[tuple[str, PictureHost | None]]:
        with PictureHost({f"i{i}": png(image) for i, image in enumerate(TRUE)}) as host:
            yield host.address, host

    def put(self, client: Client) -> None:
        client.put_images(images(COUNT))

    def find(self, client: Client, number: int, k: int) -> Answer[Hit]:
        return client.find(TRUE[number], k=k)


@dataclass(frozen=True)
class Notes(Pictures):
    """Texts of three words, from a file of lines."""

    @contextmanager
    def source(self, folder: Path) -> Iterator[tuple[str, PictureHost | None]]:
        file = folder / "notes.jsonl"
        texts = ({"id": f"i{i}", "text": self.text(i)} for i in range(COUNT))
        file.write_text("".join(json.dumps(one) + "\n" for one in texts))
        yield f"texts:{file}", None

    def put(self, client: Client) -> None:
        assert not client.put_texts("g", {f"i{i}": self.text(i + COUNT) for i in range(COUNT)})

    def find(self, client: Client, number: int, k: int) -> Answer[Hit]:
        return client.search("g", text=self.text(number), k=k)

    def text(self, number: int) -> str:
        words = list(combinations(range(40), 3))[7 * number]
        return " ".join(f"w{word}" for word in words)


@pytest.fixture(params=["pictures", "notes"])
def items(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    """With releases 1 and 2 that read them."""
    folder = tmp_path_factory.mktemp("published")
    if request.param == "pictures":
        return Pictures(make_stages(folder, 2))
    stages = {}
    for number in (1, 2):
        published(folder / "repo", number, "texts")
        stages[number] = folder / f"stage{number}"
        shutil.copytree(folder / "repo", stages[number])
    return Notes(stages)


def look(items: Pictures, address: str, stopping: threading.Event) -> None:
    """Ask for items until the gateway is gone."""
    while not stopping.is_set():
        try:
            with Client(address, seconds=5) as client:
                while not stopping.is_set():
                    items.find(client, random.randrange(COUNT), 10)
        except NobackfillError:
            stopping.wait(0.05)


def test_what_was_healed_stays_and_what_was_deleted_stays_away(
    items: Pictures, tmp_path: Path
) -> None:
    repo, data = tmp_path / "repo", tmp_path / "data"
    shutil.copytree(items.stages[1], repo)
    options = (
        "--triton=in-process", "--item-host=127.0.0.1", f"--item-folder={tmp_path}",
    )  # fmt: skip
    deleted: list[str] = []
    with items.source(tmp_path) as (address, host):
        with serving(repo, data, *options) as served, Client(served.address) as client:
            client.create_gallery("g")
            items.put(client)
            publish_stage(repo, items.stages[2])
            client.swap(2)
            source = gallery_pb2.ItemSource(address=address, hits=20, items_a_day=2000)
            source.patience.FromMilliseconds(300)
            client.update_gallery("g", source=source)
        healed: set[str] = set()
        for turn in range(KILLS):
            with serving(repo, data, *options) as served:
                stopping = threading.Event()
                threads = [
                    threading.Thread(target=look, args=(items, served.address, stopping))
                    for _ in range(3)
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
                found = items.find(client, i, COUNT)
                assert sorted(ids(found)) == sorted(f"i{j}" for j in range(KILLS, COUNT))
                assert (found.hits[0].id == f"i{i}") == (i >= KILLS)
        if host is not None:
            print("fetched more than once:", sum(count > 1 for count in host.asked.values()))
            # Only what a kill had interrupted: a batch a thread and one of the background, each
            # time.
            assert sum(host.asked.values()) <= COUNT + KILLS * 8 * 3
