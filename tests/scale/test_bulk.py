"""A folder embedded on two nodes, of which one is killed; a release activated from a job."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nobackfill.server.bulk import fill_by_ray
from tests.server.conftest import Stages, publish_stage
from tests.server.process import command
from tests.server.support import Client, images, running
from tests.server.test_texts import published
from tests.support.blocks import png
from tests.support.postgres import Server
from tests.support.waiting import wait_until

COUNT = 300


@pytest.mark.filterwarnings("default")
def test_a_file_of_texts_is_embedded_by_nodes(two_nodes: Any, tmp_path: Path) -> None:
    repo, file = tmp_path / "repo", tmp_path / "notes.jsonl"
    published(repo, 1, "texts")
    lines = [{"id": n, "text": f"w{n % 40} w{n // 40}", "tens": n // 10} for n in range(COUNT)]
    bad: list[dict[str, object]] = [
        {"id": "blank", "text": " "},
        {"id": "x", "text": "w1", "y": {}},
    ]
    file.write_text("\n".join(map(json.dumps, [*lines, *bad])))
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        done = fill_by_ray(client, "g", str(file), repo, two_nodes.address, batch_size=30)
        assert (done.stored_count, set(done.refusals)) == (COUNT, {"blank", "x"})
        assert client.get_gallery("g").items == COUNT
        for number in range(0, COUNT, 37):
            (hit,) = client.search("g", text=lines[number]["text"], k=1).hits  # type: ignore[arg-type]
            assert hit.distance < 1e-5 and hit.metadata == {"tens": int(hit.id) // 10}


@pytest.mark.filterwarnings("default")
def test_a_job_leads_an_activation_that_ray_carries(
    two_nodes: Any, stages: Stages, tmp_path: Path, postgres: Server
) -> None:
    repo = tmp_path / "repo"
    shutil.copytree(stages[1], repo)
    with (
        postgres.database() as url,
        running(repo, tmp_path / "data", store=url) as gateway,
        Client(gateway.address) as client,
    ):
        client.create_when_idle()
        client.put_images(images(20))
        publish_stage(repo, stages[2])
        words = command("upgrade", "2", "--ray", two_nodes.address, "--json")
        settings = {
            "NOBACKFILL_STORE": url, "NOBACKFILL_MODEL_REPO": str(repo),
            "NOBACKFILL_TRITON": "in-process",
        }  # fmt: skip
        environment = {**os.environ, **settings}
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"release": 2, "left_behind": ""}
        # The gateway that served meanwhile answers with what the job's nodes have carried.
        wait_until(lambda: client.get_gallery("g").release == 2, "the gateway followed")
        assert client.find(images(20)[7]).hits[0].id == "i7"
        # Again there is nothing left to do.
        again = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
        assert again.returncode == 0, again.stderr


@pytest.mark.filterwarnings("default")
def test_a_folder_is_embedded_by_nodes_that_may_die(
    two_nodes: Any, stages: Stages, tmp_path: Path
) -> None:
    pictures, folder = images(COUNT), tmp_path / "pictures"
    folder.mkdir()
    for number, picture in enumerate(pictures):
        (folder / f"{number:03}.png").write_bytes(png(picture))
    (folder / "bad.png").write_bytes(b"no picture")
    told: list[int] = []

    def on_stored(stored: int) -> None:
        told.append(stored)
        if len(told) == 5:
            (other,) = two_nodes.worker_nodes
            two_nodes.remove_node(other, allow_graceful=False)

    with running(stages[1], tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        done = fill_by_ray(
            client, "g", str(folder), stages[1], two_nodes.address, on_stored, batch_size=10
        )
        assert done.stored_count == COUNT == told[-1] and list(done.refusals) == ["bad.png"]
        assert len(told) == COUNT // 10 + 1 and client.get_gallery("g").items == COUNT
        for number in range(0, COUNT, 7):
            (hit,) = client.find(pictures[number], k=1).hits
            assert hit.id == f"{number:03}.png" and hit.distance < 1e-5
