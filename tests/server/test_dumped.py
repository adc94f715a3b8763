"""A database dumped by PostgreSQL's own program while gateways write to it, and brought back."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, images, running
from tests.server.test_cli import run_json
from tests.support.postgres import Server
from tests.support.waiting import wait_until

PICTURES = images(201)


@pytest.mark.long
def test_a_dump_is_one_state_that_another_gateway_serves(
    near_gate: None, stages: Stages, tmp_path: Path, postgres: Server
) -> None:
    repo, dump = tmp_path / "repo", tmp_path / "gateways.dump"
    publish_stage(repo, stages[1])

    def ask(program: str, *words: str) -> None:
        subprocess.run([postgres.programs / program, *words], check=True, timeout=120)

    with postgres.database() as url, postgres.database() as other:
        with running(repo, tmp_path / "data", store=url) as gateway, Client(gateway.address) as one:
            one.create_gallery("g")
            one.put_images(PICTURES[:40])
            publish_stage(repo, stages[2])
            one.swap(2)
            one.delete("g", ["i3"])
            put = 40
            with ThreadPoolExecutor(1) as beside:
                dumping = beside.submit(ask, "pg_dump", "--format=custom", f"--file={dump}", url)
                while not dumping.done() and put < 200:
                    one.put_images(PICTURES[put : put + 2], first=put)
                    put += 2
                dumping.result()
            assert put > 40
        ask("pg_restore", f"--dbname={other}", str(dump))
        with (
            running(repo, tmp_path / "else", store=other) as gateway,
            Client(gateway.address) as client,
        ):
            assert client.states() == {1: "PREVIOUS", 2: "ACTIVE"}
            gallery = client.get_gallery("g")
            # What was acknowledged before it began, and of the rest all up to some put.
            last = gallery.items
            assert 39 <= last < put and last % 2 == 1
            for number in (0, 39, last):
                hit = client.find(PICTURES[number]).hits[0]
                assert (hit.id, hit.release) == (f"i{number}", 2)
            assert client.find(PICTURES[3]).hits[0].id != "i3"
            # Labels go on where they were.
            client.put_images(PICTURES[200:], first=200)
            assert client.find(PICTURES[200]).hits[0].id == "i200"
            wait_until(lambda: client.get_gallery("g").items == last + 1, "it is counted")
            assert client.rollback(confirm=True).lost_items == 0
            assert client.find(PICTURES[39]).hits[0].release == 1
        deeds = [deed["what"] for deed in run_json("audit", "--store", other)["audit"]]
        assert deeds == ["activate", "delete", "roll back"]
