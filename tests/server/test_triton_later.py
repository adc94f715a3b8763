"""A gateway whose Triton does not start serves what needs none, and the rest once it comes."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nobackfill.errors import PreconditionError, UnavailableError
from nobackfill.release.manifest import Manifest
from tests.server.conftest import Stages, publish_stage
from tests.server.process import serving, triton_venv
from tests.server.support import Client, embedding, ids, images, refused, running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(triton_venv() is None, reason="no Triton here: run make setup")


@pytest.fixture
def late(tmp_path: Path) -> tuple[Path, Callable[[], None]]:
    """The environment of Triton with a tritonserver that ends at once, and what mends it."""
    whole, broken, mended = triton_venv(), tmp_path / "venv", tmp_path / "mended"
    assert whole is not None
    binary = next(whole.absolute().glob("lib/python3*/site-packages/pytriton")) / BINARY
    mirror(whole.absolute(), broken, binary)
    script = broken / binary.relative_to(whole.absolute())
    script.write_text(
        "#!/bin/sh\n"
        f'[ -e "{mended}" ] && exec "{binary}" "$@"\n'
        'echo "error while loading shared libraries: libnone.so" >&2\nexit 127\n'
    )
    script.chmod(0o755)
    return broken, mended.touch


BINARY = Path("tritonserver", "bin", "tritonserver")


def mirror(whole: Path, other: Path, without: Path) -> None:
    """Links to all that is in `whole`, but for the file `without`."""
    other.mkdir()
    for path in whole.iterdir():
        if path in without.parents:
            mirror(path, other / path.name, without)
        elif path.name == "pyvenv.cfg":
            shutil.copy(path, other)
        elif path != without:
            (other / path.name).symlink_to(path)


def embeds(client: Client) -> bool:
    """What health says of searches by image; it serves in any case."""
    health = health_pb2_grpc.HealthStub(client.raw.channel)
    status = health_pb2.HealthCheckResponse
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == status.SERVING
    request = health_pb2.HealthCheckRequest(service="nobackfill.v1.SearchService")
    return bool(health.Check(request, timeout=5).status == status.SERVING)


def answers_without(client: Client, one: Manifest) -> None:
    """By embedding it is searched, by image it is told why not."""
    assert not embeds(client)
    assert ids(client.find_by(embedding(one, images(5)[3]), k=1)) == ["i3"]
    with refused(UnavailableError, "by embedding work"):
        client.find(images(1)[0])


@pytest.fixture
def filled(repo: Path, tmp_path: Path) -> Iterator[Path]:
    """The data of a gateway that served release 1."""
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(5))
    yield tmp_path / "data"


@pytest.mark.long
def test_the_gateway_serves_before_triton_starts(
    filled: Path, repo: Path, late: tuple[Path, Callable[[], None]], one: Manifest
) -> None:
    """The models of the active release are loaded when it comes."""
    venv, mend = late
    with serving(repo, filled, f"--triton-venv={venv}") as served, Client(served.address) as client:
        sentence = "the model server (Triton) does not answer yet"
        assert any(sentence in event["event"] for event in served.events())
        answers_without(client, one)
        # Nor does going back need it, where there is nothing to go back to.
        with refused(PreconditionError):
            client.rollback(confirm=True)
        mend()
        wait_until(lambda: embeds(client), "Triton did not come")
        assert ids(client.find(images(5)[2], k=1)) == ["i2"]


@pytest.mark.faults
def test_activations_wait_for_triton(
    filled: Path, repo: Path, stages: Stages, late: tuple[Path, Callable[[], None]], one: Manifest
) -> None:
    """Neither the first one of a gateway nor one that a restart resumes has failed meanwhile; a
    rollback calls off a third."""
    venv, mend = late
    fresh = filled.parent / "fresh"
    publish_stage(repo, stages[2])
    triton = f"--triton-venv={venv}"
    with serving(repo, filled, triton) as served, Client(served.address) as client:
        client.begin(2, until="LOADING")
        assert client.states() == {1: "ACTIVE", 2: "ACTIVATING"}
        assert client.rollback(confirm=True).number == 1
        assert client.states() == {1: "ACTIVE", 2: "PUBLISHED"}
        client.begin(2, until="LOADING")
    with (
        serving(repo, filled, triton) as resumed,
        serving(repo, fresh, triton) as first,
        Client(resumed.address) as old,
        Client(first.address) as new,
    ):
        answers_without(old, one)
        wait_until(lambda: new.states()[2] == "ACTIVATING", "the first one did not begin")
        assert old.states() == {1: "ACTIVE", 2: "ACTIVATING"}
        mend()
        for client in (old, new):
            wait_until(lambda c=client: c.states()[2] == "ACTIVE", "it is not activated")  # type: ignore[misc]
        assert ids(old.find(images(5)[4], k=1)) == ["i4"]
        new.create_when_idle()
        new.put_images(images(2))
        assert ids(new.find(images(2)[1], k=1)) == ["i1"]


@pytest.mark.faults
def test_somebody_elses_triton_may_be_away(filled: Path, repo: Path, one: Manifest) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with (
            serving(repo, filled, f"--triton={address}") as served,
            Client(served.address) as client,
        ):
            answers_without(client, one)
            assert served.stop() == os.EX_OK
