"""Two gateways with one database, one of which stands still in the middle of something."""

import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psycopg
import pytest

from nobackfill.errors import NobackfillError
from nobackfill.v1 import release_pb2
from tests.server import process
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, images
from tests.support.blocks import png
from tests.support.postgres import Server
from tests.support.waiting import wait_until

# Longer than a transaction waits for a lock.
STOPPED_S = 8.0
PICTURES = images(60)


@pytest.fixture
def pair(
    stages: Stages, tmp_path: Path, postgres: Server
) -> Iterator[tuple[str, list[process.Served]]]:
    """A database and two gateways that serve gallery `g` by release 1; release 2 is published."""
    shutil.copytree(stages[1], tmp_path / "repo")
    with postgres.database() as url, ExitStack() as closing:
        options = ["--triton=in-process", f"--store={url}"]
        served = []
        for number in range(2):
            one = process.start(tmp_path / "repo", tmp_path / f"data{number}", *options)
            closing.callback(one.stop)
            served.append(one)
        with Client(served[0].address) as client:
            client.create_gallery("g")
            client.put_images(PICTURES)
        publish_stage(tmp_path / "repo", stages[2])
        wait_until(lambda: sees(served, 2), "release 2 is not seen")
        yield url, served


def sees(served: list[process.Served], release: int) -> bool:
    for one in served:
        with Client(one.address) as client:
            if release not in client.states():
                return False
    return True


@pytest.mark.long
@pytest.mark.parametrize(
    "statement",
    ["LOCK TABLE {schema}.gate IN ROW SHARE MODE", "SELECT 1 FROM nobackfill.gateway FOR UPDATE"],
    ids=["a put", "a change of state"],
)
def test_an_activation_waits_for_who_stands_still(
    pair: tuple[str, list[process.Served]], statement: str
) -> None:
    """As a gateway that is stopped between the first statement of a transaction and its last."""
    url, served = pair
    with (
        Client(served[0].address) as client,
        psycopg.connect(url) as still,
        psycopg.connect(url, autocommit=True) as looking,
    ):
        find = "SELECT schemaname FROM pg_tables WHERE tablename = 'gate'"
        (schema,) = still.execute(find).fetchone() or ("",)
        events = client.begin(2, until="PROBING")
        still.execute(statement.format(schema=schema).encode())
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        wait_until(lambda: looking.execute(waiting).fetchone() != (0,), "nobody waits")
        time.sleep(STOPPED_S)
        still.rollback()
        assert [*events][-1].phase == release_pb2.PHASE_DONE
        assert client.states()[2] == "ACTIVE"


@pytest.mark.faults
@pytest.mark.parametrize("leads", [True, False], ids=["leader", "other"])
def test_an_activation_survives_a_gateway_that_is_stopped_for_a_while(
    pair: tuple[str, list[process.Served]], leads: bool
) -> None:
    _, served = pair
    still = served[0 if leads else 1].process
    over = threading.Event()

    def put(number: int) -> None:
        with Client(served[1].address) as client:
            while not over.is_set():
                with suppress(NobackfillError):
                    client.put("g", {f"p{number}": png(PICTURES[number])})

    putting = [threading.Thread(target=put, args=(number,)) for number in range(4)]
    for thread in putting:
        thread.start()
    try:
        with Client(served[0].address) as client:
            for pause in (0.3, 1.0, 2.0):
                events = client.activate(2)
                next(events)
                time.sleep(pause)
                still.send_signal(signal.SIGSTOP)
                time.sleep(STOPPED_S)
                still.send_signal(signal.SIGCONT)
                assert [*events][-1].phase == release_pb2.PHASE_DONE
                assert client.rollback(confirm=True).number == 1
                client.retire()
    finally:
        still.send_signal(signal.SIGCONT)
        over.set()
        for thread in putting:
            thread.join()
