"""An activation that a full disk has failed stays failed, whatever comes after."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nobackfill.errors import CannotWriteError, PreconditionError
from nobackfill.server.cli import operations  # noqa: F401 - puts its commands into app
from nobackfill.server.cli.app import app
from nobackfill.server.state import StateFile
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, images, running
from tests.support import disks
from tests.support.postgres import Server
from tests.support.waiting import wait_until


@contextmanager
def published(stages: Stages, repo: Path, data: Path, **given: str) -> Iterator[Client]:
    """A gateway with items of release 1, where release 2 has come."""
    with running(repo, data, **given) as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(400))
        # Deleted rows leave the write-ahead log, which gives its room back.
        client.delete("g", ["i399"])
        publish_stage(repo, stages[2])
        wait_until(lambda: 2 in client.states(), seconds=20, what="release 2 is seen")
        yield client


def is_failed(client: Client, reason: str) -> bool:
    two = client.list_releases()[1]
    return client.states() == {1: "ACTIVE", 2: "FAILED"} and reason in two.reason


def stays_failed(client: Client, reason: str) -> None:
    """For longer than a gateway takes to look for what nobody leads."""
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        assert is_failed(client, reason)
        time.sleep(0.1)


@pytest.mark.long
def test_in_files(stages: Stages, repo: Path, tmp_path: Path) -> None:
    """Its end has room of its own. A restart with room does not begin it anew, an operator does."""
    with disks.small_disk(tmp_path / "disk", 24) as disk:
        with published(stages, repo, disk / "data") as client:
            disks.fill(disk, 60_000)
            with pytest.raises(PreconditionError, match="free some space"):
                client.swap(2)
            disks.fill(disk, 0)
            assert is_failed(client, "free some space")
            told = CliRunner().invoke(app, ["status", "--json", f"--server={client.address}"])
            assert "free some space" in json.loads(told.stdout)["failed_releases"]["2"]
        (disk / "filler").unlink()
        with running(repo, disk / "data") as gateway, Client(gateway.address) as client:
            stays_failed(client, "free some space")
            assert client.find(images(1)[0]).release == 1
            client.swap(2)
            assert client.states() == {1: "PREVIOUS", 2: "ACTIVE"}
        assert not [*(disk / "data").glob("*.spare")]


def test_an_end_finds_room_on_a_full_disk(tmp_path: Path) -> None:
    """Whoever calls an activation off, too; none begins without that room."""
    with disks.small_disk(tmp_path / "disk", 4) as disk:
        state = StateFile(disk / "state.json")
        state.change(active=1)
        begun = {"release": 2, "rollout": "cutover", "spare_cores": 0.5, "old_space_seconds": 0}
        disks.fill(disk, 0)
        with pytest.raises(CannotWriteError, match="free some space"):
            state.change(activation=begun)
        assert state.current.activation is None
        (disk / "filler").unlink()
        state.change(activation=begun)
        disks.fill(disk, 0)
        state.change(activation=None, failed={2: "reason " * 1000})
        assert StateFile(disk / "state.json").current == state.current


_FULL = """
CREATE TABLE nobackfill.full_disk ();
-- What a sequence has counted, no rollback takes back.
CREATE SEQUENCE nobackfill.refusals;
CREATE FUNCTION nobackfill.refuse() RETURNS trigger AS $$ BEGIN
    IF to_regclass('nobackfill.full_disk') IS NOT NULL
        AND OLD.value::jsonb ->> 'activation' IS NOT NULL
        AND (NEW.value::jsonb ->> 'activation' IS NULL OR NEW.value::jsonb ->> 'active' = '2')
    THEN
        PERFORM nextval('nobackfill.refusals');
        RAISE 'could not extend file' USING ERRCODE = 'disk_full'; END IF;
    RETURN NEW;
END $$ LANGUAGE plpgsql;
CREATE TRIGGER refuse BEFORE UPDATE ON nobackfill.gateway FOR EACH ROW
    EXECUTE FUNCTION nobackfill.refuse()
"""


@pytest.mark.long
def test_in_a_database(stages: Stages, repo: Path, tmp_path: Path, postgres: Server) -> None:
    """FAILED is told once it is recorded; room does not begin it anew, an operator does."""
    with (
        postgres.connected() as (url, connection),
        published(stages, repo, tmp_path / "data", store=url) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        # The database has no room for the end of an activation, well or not.
        connection.execute(_FULL.encode())
        swapping = pool.submit(client.swap, 2)
        refusals = b"SELECT last_value >= 2 FROM nobackfill.refusals"
        wait_until(
            lambda: connection.execute(refusals).fetchone() == (True,),
            "neither the flip nor its failure can be recorded",
        )
        assert not swapping.done()
        assert client.states() == {1: "ACTIVE", 2: "ACTIVATING"}
        connection.execute(b"DROP TABLE nobackfill.full_disk")
        with pytest.raises(PreconditionError, match="free some space"):
            swapping.result(20)
        stays_failed(client, "free some space")
        client.swap(2)
        assert client.states() == {1: "PREVIOUS", 2: "ACTIVE"}
