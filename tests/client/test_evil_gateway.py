"""A gateway that means harm: every behaviour ends as an error of ours, and harms nothing."""

import sys
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from nobackfill import pace
from nobackfill.client import sync
from nobackfill.client.cli.main import run_line
from nobackfill.client.device import Device
from nobackfill.client.maintenance import verify
from nobackfill.client.search import Search
from nobackfill.errors import NobackfillError, UnavailableError
from nobackfill.release.trust import trust
from nobackfill.v1 import search_pb2, search_pb2_grpc
from nobackfill.wire.gateway import Gateway
from tests.support import edge
from tests.support.edge import Setting
from tests.support.evil_gateway import BEHAVIOURS, ESCAPES, EvilGateway, evil_gateway
from tests.support.evil_host import every_fifth
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def attacked(
    world: edge.World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EvilGateway, Setting]]:
    """A gateway with news of release 2, and a gallery of release 1 that follows it."""
    setting = world.setting(tmp_path_factory.mktemp("attacked") / "top")
    world.publish(setting.repo, 2)
    with evil_gateway(setting.repo) as (evil, address):
        with Device(setting.gallery) as device:
            device.store.update_state({"source": address})
        yield evil, setting


def elsewhere(setting: Setting) -> dict[str, bytes]:
    """Every file that is not the gallery's own."""
    top = setting.gallery.parent
    return {
        str(path.relative_to(top)): path.read_bytes()
        for path in top.rglob("*")
        if path.is_file() and not path.relative_to(top).parts[0].startswith(setting.gallery.name)
    }


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "READ_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(pace, "STALL_SECONDS", 0.25)
    monkeypatch.setattr(trust, "METADATA_SECONDS", 0.4)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", every_fifth(BEHAVIOURS))
def test_no_behaviour_holds_a_sync_or_leaves_anything(
    attacked: tuple[EvilGateway, Setting], name: str
) -> None:
    evil, setting = attacked
    evil.behaviour = BEHAVIOURS[name]
    before = elsewhere(setting)
    # From the first byte on, or a gateway that is honest until the models are fetched.
    for harmed in ("", ".onnx"):
        evil.harmed = lambda path, end=harmed: path.endswith(end)  # type: ignore[misc]
        with pytest.raises(NobackfillError):
            edge.follow(setting.gallery)
        assert elsewhere(setting) == before
    assert edge.spaces(setting.gallery) == {1: "active"}
    wait_until(
        lambda: all(thread.name != "fetch" for thread in threading.enumerate()),
        "a fetch thread outlives what it fetched",
    )


def test_afterwards_the_gallery_is_sound_and_an_honest_gateway_leads_on(
    attacked: tuple[EvilGateway, Setting],
) -> None:
    """Whatever parts the others left in the models folder."""
    evil, setting = attacked
    evil.harmed = lambda path: False
    with Device(setting.gallery) as device:
        assert verify(device)["problems"] == []
        (answer,) = Search(device, {}).by_images([setting.images[0]], 1)
        assert answer.release == 1
    assert edge.follow(setting.gallery).state == "upgraded"


class _Refuses(search_pb2_grpc.SearchServiceServicer):
    """Answers each search with a status, and details that `details` makes."""

    code = grpc.StatusCode.OK
    details: bytes | None = None

    def Search(  # noqa: N802
        self, request: search_pb2.SearchRequest, context: grpc.ServicerContext
    ) -> search_pb2.SearchResponse:
        if self.details is not None:
            context.set_trailing_metadata((("grpc-status-details-bin", self.details),))
        context.abort(self.code, ESCAPES)


@pytest.mark.parametrize("details", [None, b"", b"\xff\xff", b"\x08\x05\x12\x02no"])
def test_every_status_and_any_details_are_an_error_of_ours(details: bytes | None) -> None:
    servicer = _Refuses()  # type: ignore[abstract] # nothing else is called
    servicer.details = details
    server = grpc.server(futures.ThreadPoolExecutor(2))
    search_pb2_grpc.add_SearchServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Gateway(f"127.0.0.1:{port}", seconds=0.05) as gateway:
            for servicer.code in grpc.StatusCode:
                if servicer.code is not grpc.StatusCode.OK:
                    with pytest.raises(NobackfillError):
                        gateway.search("g", image=b"")
    finally:
        server.stop(0).wait()


def test_what_a_gateway_says_is_shown_without_controls(
    attacked: tuple[EvilGateway, Setting],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evil, setting = attacked
    evil.harmed = lambda path: True
    evil.behaviour = BEHAVIOURS["INTERNAL"]
    command = ["edge-client", "--gallery", str(setting.gallery), "sync"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        run_line()
    said = capsys.readouterr().err
    assert ended.value.code == UnavailableError.exit_code
    assert "all is well" in said
    assert all(line.isprintable() for line in said.splitlines())
    assert len(said.splitlines()) == 1
