"""The gateway's life with its galleries in PostgreSQL: tests of a life in files, and what only a
database brings."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    UnavailableError,
    VerificationError,
)
from nobackfill.server.settings import Settings, load_settings
from nobackfill.wire.gateway import Gateway as Caller
from tests.server.conftest import Stages, publish_stage
from tests.server.process import serving
from tests.server.support import Client, images, refused, running
from tests.server.test_adapters import (
    life as life,
)
from tests.server.test_adapters import (
    test_an_adapter_searches_old_vectors as test_an_adapter_searches_old_vectors,
)
from tests.server.test_adapters import (
    test_new_items_are_ranked_among_old_ones as test_new_items_are_ranked_among_old_ones,
)
from tests.server.test_life import (
    test_a_chain_of_releases as test_a_chain_of_releases,
)
from tests.server.test_life import (
    test_a_restart_serves_what_was_there as test_a_restart_serves_what_was_there,
)
from tests.server.test_life import (
    test_an_activation_carries_the_gallery_over as test_an_activation_carries_the_gallery_over,
)
from tests.server.test_life import (
    test_retire_ends_the_way_back as test_retire_ends_the_way_back,
)
from tests.server.test_mixed import (
    direct as direct,
)
from tests.server.test_mixed import (
    dual as dual,
)
from tests.server.test_mixed import (
    test_direct_searches_old_vectors_as_they_are as test_direct_searches_old_vectors_as_they_are,
)
from tests.server.test_mixed import (
    test_dual_is_one_ranking_like_an_unmixed_one as test_dual_is_one_ranking_like_an_unmixed_one,
)
from tests.server.test_mixed import (
    test_rollback_half_way_of_dual as test_rollback_half_way_of_dual,
)
from tests.support import postgres as servers


@pytest.fixture(autouse=True)
def store(
    postgres: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The address of a database, where every gateway of the test keeps its galleries."""
    with postgres.database() as url:
        monkeypatch.setenv("NOBACKFILL_STORE", url)
        yield url
    # Nothing of them, nor of the state, is in a data folder.
    assert not [*tmp_path.glob("*/state.json"), *tmp_path.glob("*/galleries/*")]


@pytest.mark.long
def test_a_database_that_crashes_is_waited_for(
    repo: Path, stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches and puts by a client that retries, over two ends of the server, and a swap after."""
    with servers.running() as server, server.database() as url:
        monkeypatch.setenv("NOBACKFILL_STORE", url)
        with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
            client.create_gallery("g")
            client.put_images(images(8))
            with Caller(gateway.address) as caller:
                for how in (signal.SIGQUIT, signal.SIGINT):
                    server.stop(how)
                    server.start()
                    spaces = caller.get_gallery("g").spaces
                    assert [space.items for space in spaces] == [8]
                    assert client.find(images(1)[0]).hits[0].id == "i0"
                    client.put_images(images(8))
            # One that stays away is no reason to set a gallery aside.
            # What it remembers is read anew by the next plan.
            gateway.galleries.peek("g").store_state({"nothing": None})
            server.stop()
            with pytest.raises(UnavailableError):
                gateway.serving.replan_all()
            server.start()
            assert not gateway.galleries.quarantine_reasons()
            publish_stage(repo, stages[2])
            client.swap(2)
            assert client.find(images(1)[0]).release == 2
            assert client.get_gallery("g").items == 8


@pytest.mark.parametrize("table", ["vectors_1", "items", "spaces", "gate"])
def test_a_gallery_that_lost_a_table_is_set_aside(
    repo: Path, tmp_path: Path, store: str, table: str
) -> None:
    """It was reported for ever as what another gateway does, and its health as good."""
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        for name in ("bad", "good"):
            client.create_gallery(name)
            client.put_images(images(3), name)
        number = gateway.galleries.peek("bad").number
        with psycopg.connect(store, autocommit=True) as connection:
            connection.execute(f"DROP TABLE nobackfill_{number}.{table}".encode())
        with refused(VerificationError, f"nobackfill_{number}.{table} is missing"):
            if table == "vectors_1":
                client.find(images(1)[0], "bad")
            client.put_images(images(1), "bad")
        with refused(VerificationError, "set aside"):
            client.find(images(1)[0], "bad")
        health = health_pb2_grpc.HealthStub(client.raw.channel)
        asked = health_pb2.HealthCheckRequest(service="gallery/bad")
        assert health.Check(asked).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert client.find(images(1)[0], "good").hits[0].id == "i0"
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        assert gateway.galleries.quarantine_reasons().keys() == {"bad"}
        assert client.find(images(1)[0], "good").hits[0].id == "i0"
        client.delete_gallery("bad")


@pytest.mark.long
def test_a_password_is_in_no_log(repo: Path, tmp_path: Path, store: str) -> None:
    address = store.replace("postgres@", "postgres:hush-hush@")
    with (
        serving(repo, tmp_path / "data", "--triton=in-process", f"--store={address}") as served,
        Client(served.address) as client,
    ):
        client.create_gallery("g")
        client.put_images(images(1))
    told = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*.log"))
    assert "serving" in told and "hush-hush" not in told
    assert "hush-hush" not in repr(Settings(store=address))


@pytest.mark.parametrize("wrong", ["mysql://u:hush-hush@x/y", "postgresql:/u:hush-hush@x", "x"])
def test_an_address_that_is_none_is_refused_without_its_password(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="sqlite:FOLDER or postgresql://") as refused:
        load_settings({"store": wrong}, None)
    assert "hush-hush" not in str(refused.value)


def test_a_database_over_the_network_demands_tls(repo: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match="TLS"),
        running(repo, tmp_path / "data", store="postgresql://u:hush-hush@db.example/x"),
    ):
        pass


def test_a_folder_of_galleries_may_be_another_than_the_data(
    repo: Path, stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "far" / "away"
    with running(repo, tmp_path / "data", store=f"sqlite:{folder}") as gateway:
        with Client(gateway.address) as client:
            client.create_gallery("g")
        with (
            pytest.raises(BusyError),
            running(repo, tmp_path / "other", store=f"sqlite:{folder}"),
        ):
            pass
    assert json.loads((folder / "state.json").read_bytes())["active"] == 1
    assert (folder / "galleries" / "g" / "gallery.sqlite").is_file()
    shutil.rmtree(folder)
