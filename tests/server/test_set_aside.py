"""A gallery whose files cannot be served is set aside and named; all others serve."""

import json
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nobackfill.errors import AlreadyExistsError, VerificationError
from nobackfill.server.cli.main import main
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.healing.registration import HealingSource
from nobackfill.server.state import StateFile
from nobackfill.server.upgrades.upgrading import Job, JobState, job_from_json
from nobackfill.v1 import release_pb2
from tests.server.conftest import Stages, publish_stage
from tests.server.process import command
from tests.server.support import Client, images, refused, running
from tests.support.commands import run_here
from tests.support.waiting import wait_until


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20_000])


def overwrite(file: Path) -> None:
    file.write_bytes(b"\xa5" * file.stat().st_size)


def lose_a_table(file: Path) -> None:
    """It was a traceback: SQLite reports it as an error of the statement."""
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("DROP TABLE spaces")


def unknown_release(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE spaces SET release = 9")


def bad_state(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("INSERT OR REPLACE INTO state VALUES ('rollout', '{')")


def garbled_page(file: Path) -> None:
    """The first page stays good: it shows when items are counted."""
    content = bytearray(file.read_bytes())
    content[16384:] = b"\xa5" * (len(content) - 16384)
    file.write_bytes(content)


DAMAGES = (cut, overwrite, lose_a_table, unknown_release, bad_state, garbled_page)


def test_damaged_galleries_are_set_aside_and_named(repo: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(repo, data) as gateway, Client(gateway.address) as client:
        client.create_gallery("good")
        client.put_images(images(3), "good")
    for damage in DAMAGES:
        copy(data, damage)
    with running(repo, data) as gateway, Client(gateway.address) as client:
        assert [hit.id for hit in client.find(images(3)[1], "good", 1).hits] == ["i1"]
        reasons = {gallery.name: gallery.set_aside for gallery in client.list_galleries()}
        assert reasons.pop("good") == ""
        assert reasons.keys() == {damage.__name__ for damage in DAMAGES}
        assert all(reasons.values())
        assert not any("/" in reason for reason in reasons.values()), "folders stay here"
        name = "lose_a_table"
        with refused(VerificationError, "set aside"):
            client.find(images(1)[0], name)
        with refused(AlreadyExistsError):
            client.create_gallery(name)
        health = health_pb2_grpc.HealthStub(client.raw.channel)
        asked = health_pb2.HealthCheckRequest(service=f"gallery/{name}")
        assert health.Check(asked).status == health_pb2.HealthCheckResponse.NOT_SERVING
        told = json.loads(
            run_here(main, "gateway", "status", f"--server={gateway.address}", "--json").stdout
        )
        assert name in {gallery["name"] for gallery in told["galleries"] if "set_aside" in gallery}
        client.delete_gallery(name)
        client.create_gallery(name)
        assert client.get_gallery(name).items == 0
        assert health.Check(asked).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    with running(repo, data) as gateway:
        assert gateway.galleries.quarantine_reasons().keys() == reasons.keys() - {name}


def test_a_source_of_a_newer_version_spoils_nothing_else(repo: Path, tmp_path: Path) -> None:
    """The list of galleries failed whole, and so did each search of this one."""
    data = tmp_path / "data"
    sound = {**HealingSource.checked("folder:/a").to_state(), "seconds": 0.5}
    sources: dict[str, object] = {
        "newer": {**sound, "later": 3}, "other": ["folder:/a"], "wide": {**sound, "seconds": 1e300},
        "half": {**sound, "hits": 20.5}, "short": {"address": "folder:/a"},
    }  # fmt: skip
    assert HealingSource.from_state(sound).to_state() == sound
    names = ("good", *sources)
    with running(repo, data) as gateway, Client(gateway.address) as client:
        for name in names:
            client.create_gallery(name)
            client.put_images(images(3), name)
    for name, source in sources.items():
        with closing(sqlite3.connect(data / "galleries" / name / "gallery.sqlite")) as file, file:
            file.execute("INSERT INTO state VALUES ('source', ?)", [json.dumps(source)])
    with running(repo, data) as gateway, Client(gateway.address) as client:
        listed = {gallery.name: gallery for gallery in client.list_galleries()}
        assert [(name, listed[name].items) for name in names] == [(name, 3) for name in names]
        assert listed["good"].note == ""
        for name in sources:
            assert "newer nobackfill" in listed[name].note
            assert client.get_gallery(name).note == listed[name].note
            assert not listed[name].HasField("source")
            assert client.find(images(3)[1], name, 1).hits[0].id == "i1"
            assert [step.state for step in client.watch_upgrade(name)]
        command = ("gateway", "update-gallery", "newer", "--source", "none")
        assert run_here(main, *command, f"--server={gateway.address}").returncode == 0
        assert client.get_gallery("newer").note == ""


def test_the_progress_that_a_newer_gateway_stored_is_refused_with_a_sentence() -> None:
    """As in a database that gateways of two versions share; it was INTERNAL."""
    job = Job("g", 1, 2, JobState.DONE, 3, 3)
    assert job_from_json(job.to_json()) == job
    values = json.loads(job.to_json())
    newer = ({**values, "later": 1}, {**values, "state": "later"}, {"state": "done"}, [values])
    for text in (*map(json.dumps, newer), "{"):
        with pytest.raises(VerificationError, match="newer nobackfill"):
            job_from_json(text)


def test_one_that_breaks_meanwhile_spoils_no_list(
    gateway: GatewayServer, client: Client, tmp_path: Path
) -> None:
    for name in ("bad", "good"):
        client.create_gallery(name)
        client.put_images(images(3), name)
    with closing(sqlite3.connect(tmp_path / "data/galleries/bad/gallery.sqlite")) as file, file:
        file.execute("INSERT INTO state VALUES ('damaged', '{')")
    # Sizes are known without the file, until something changes.
    client.put_images(images(4), "bad")
    client.put_images(images(4), "good")
    # The state is read again after a change.
    with refused(VerificationError, "damaged"):
        client.update_gallery("bad", exact_distances=True)
    listed = {gallery.name: gallery for gallery in client.list_galleries()}
    assert listed["good"].items == 4 and not listed["good"].set_aside
    assert "damaged" in listed["bad"].set_aside and "/" not in listed["bad"].set_aside


def test_one_that_breaks_meanwhile_ends_no_scrape(repo: Path, tmp_path: Path) -> None:
    """Prometheus got no metric at all of a gateway with one damaged file."""
    data = tmp_path / "data"
    with running(repo, data) as gateway, Client(gateway.address) as client:
        for name in ("bad", "good"):
            client.create_gallery(name)
            client.put_images(images(3), name)
    with running(repo, data) as gateway, Client(gateway.address) as client:
        with closing(sqlite3.connect(data / "galleries" / "bad" / "gallery.sqlite")) as file, file:
            file.execute("UPDATE spaces SET dim = 0")
        # After a change, vectors of a gallery that nobody has searched are counted in its file.
        assert client.set_metadata("bad", {"a": 1}, ids=["i0"]) == 1
        with urlopen(f"http://{gateway.metrics_address}/metrics") as answer:
            lines = answer.read().decode().splitlines()
    assert 'nobackfill_gallery_items{release="1",state="active"} 3.0' in lines


def test_one_that_cannot_be_brought_back_is_set_aside(
    repo: Path, stages: Stages, tmp_path: Path
) -> None:
    """A restart after a broken swap brings galleries back; one without its old space ended it."""
    data = tmp_path / "data"
    publish_stage(repo, stages[2])
    with running(stages[1], data) as gateway, Client(gateway.address) as client:
        for name in ("bad", "good"):
            client.create_gallery(name)
            client.put_images(images(3), name)
    with running(repo, data) as gateway, Client(gateway.address) as client:
        client.swap(2)
    StateFile(data / "state.json").change(active=1, previous=())
    with (
        closing(sqlite3.connect(data / "galleries" / "bad" / "gallery.sqlite")) as connection,
        connection,
    ):
        connection.execute("DELETE FROM spaces WHERE state = 'previous'")
    with running(repo, data) as gateway, Client(gateway.address) as client:
        assert gateway.galleries.quarantine_reasons().keys() == {"bad"}
        hit = client.find(images(3)[1], "good", 1).hits[0]
        assert (hit.id, hit.release) == ("i1", 1)


def test_one_that_a_swap_cannot_read_is_set_aside(
    repo: Path, stages: Stages, tmp_path: Path, gateway: GatewayServer, client: Client
) -> None:
    """The swap stopped at it, and the galleries after it stayed in their old plans."""
    for name in ("bad", "good"):
        client.create_gallery(name)
        client.put_images(images(3), name)
    publish_stage(repo, stages[2])
    upgrading = gateway.upgrading
    upgrading.pause("bad")
    with ThreadPoolExecutor(1) as pool:
        activation = pool.submit(client.swap, 2)
        wait_until(lambda: (job := upgrading.job("bad")) is not None and job.total == 3, "staged")
        with (
            closing(
                sqlite3.connect(tmp_path / "data" / "galleries" / "bad" / "gallery.sqlite")
            ) as file,
            file,
        ):
            file.execute("INSERT INTO state VALUES ('damaged', '{')")
        upgrading.resume("bad")
        assert activation.result().phase == release_pb2.PHASE_DONE
    assert gateway.galleries.quarantine_reasons().keys() == {"bad"}
    asked = health_pb2.HealthCheckRequest(service="gallery/bad")
    health = health_pb2_grpc.HealthStub(client.raw.channel)
    assert health.Check(asked).status == health_pb2.HealthCheckResponse.NOT_SERVING
    hit = client.find(images(3)[1], "good", 1).hits[0]
    assert (hit.id, hit.release) == ("i1", 2)
    with refused(VerificationError, "set aside"):
        client.find(images(3)[1], "bad", 1)
    client.delete_gallery("bad")
    client.create_gallery("bad")
    assert client.get_gallery("bad").items == 0
    assert health.Check(asked).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def copy(data: Path, damage: Callable[[Path], None]) -> None:
    folder = data / "galleries" / damage.__name__
    shutil.copytree(data / "galleries" / "good", folder)
    damage(folder / "gallery.sqlite")


@pytest.mark.parametrize("damage", [lose_a_table, overwrite])
def test_nothing_to_serve_is_exit_65_and_no_traceback(
    repo: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    data = tmp_path / "data"
    with running(repo, data) as gateway, Client(gateway.address) as client:
        client.create_gallery("good")
    damage(data / "galleries" / "good" / "gallery.sqlite")
    serve = command(
        "serve", f"--model-repo={repo}", f"--data={data}", "--address=127.0.0.1:0",
        "--metrics-address=127.0.0.1:0", "--triton=in-process",
    )  # fmt: skip
    done = subprocess.run(serve, capture_output=True, timeout=60, check=False)
    assert done.returncode == 65
    assert b"none of the 1 galleries" in done.stderr
    assert b"Traceback" not in done.stderr
