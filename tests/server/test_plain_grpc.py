"""A plain `grpc.server` serves where the hot path does not fit the installed grpcio."""

import re
import sys
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest
from grpc import _server
from grpc_health.v1 import health_pb2_grpc

import nobackfill.server.grpc
from nobackfill.errors import CancelledError, ConfigurationError, InvalidInputError
from nobackfill.server.grpc.listener import (
    HealthService,
    PlainServer,
    make_grpc_server,
    needs_plain_server,
)
from nobackfill.server.grpc.loop import check_grpcio
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import Interceptor
from nobackfill.server.settings import load_settings
from tests.server.guarded import silence
from tests.server.support import Client, ids, images, refused, running
from tests.support.waiting import wait_until

LOOP = "nobackfill.server.grpc.loop"


def test_a_grpcio_that_was_not_tested_serves_plainly(
    repo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("NOBACKFILL_PLAIN_GRPC", raising=False)
    monkeypatch.setattr(grpc, "__version__", "1.99.0")
    monkeypatch.delitem(sys.modules, LOOP)
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        assert gateway._listener is not None
        assert type(gateway._listener._calls) is PlainServer
        assert LOOP not in sys.modules
        client.create_gallery("g")
        client.put_images(images(5))
        assert ids(client.find(images(5)[3]))[0] == "i3"
        assert [release.number for release in next(client.watch_releases())] == [1]
        assert b"".join(client.fetch_file("timestamp.json"))
    assert "grpcio 1.99.0 was not tested" in capsys.readouterr().out


def test_the_hot_path_names_what_a_grpcio_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    check_grpcio()

    def renamed(rpc_event: Any, state: Any, response: Any) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(_server, "_status", renamed)
        with pytest.raises(ImportError, match=r"has no grpc\._server\._status\(rpc_event"):
            check_grpcio()
    with monkeypatch.context() as patch:
        patch.delattr(_server, "_CLOSED")
        with pytest.raises(ImportError, match=r"has no grpc\._server\._CLOSED"):
            check_grpcio()


def test_a_plain_server_stays_on_loopback_unless_it_is_let() -> None:
    wide = {
        "address": "0.0.0.0:50051", "tls_cert": Path("c"), "tls_key": Path("k"),
        "tokens_file": Path("t"), "plain_grpc": True,
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match="plain_grpc_open"):
        needs_plain_server(load_settings(wide, None))
    assert needs_plain_server(load_settings({**wide, "plain_grpc_open": True}, None))
    assert needs_plain_server(load_settings({"plain_grpc": True}, None))


def test_a_call_without_its_message_gives_its_thread_back() -> None:
    metrics = Metrics()
    interceptor = Interceptor(
        metrics, None, 8, max_call_seconds=60, receive_timeout_s=0.5, is_plain_server=True
    )
    calls = make_grpc_server(interceptor, [])
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(), calls.grpc_server)
    port = calls.grpc_server.add_insecure_port("127.0.0.1:0")
    calls.grpc_server.start()
    try:
        with Client(f"127.0.0.1:{port}") as client:
            call = client.raw.channel.stream_stream("/grpc.health.v1.Health/Check", bytes, bytes)
            over = Event()
            with refused(CancelledError):
                list(call(silence(over), timeout=30))
            over.set()
            with refused(InvalidInputError, "got none"):
                list(call(iter([]), timeout=30))
            assert list(call(iter([b""]), timeout=30))
        wait_until(lambda: not interceptor.admission.working_calls, "a call holds its thread")
        assert metrics.calls.lanes["message"][0]() == 0
    finally:
        calls.grpc_server.stop(None).wait()
        calls.close()
        interceptor.close()


def test_only_the_hot_path_uses_private_names_of_grpc() -> None:
    package = Path(nobackfill.server.grpc.__path__[0])
    private = re.compile(r"^\s*(from grpc(\._\w+)? import _|(from|import) grpc\._)", re.MULTILINE)
    users = [path for path in package.parents[1].rglob("*.py") if private.search(path.read_text())]
    assert users == [package / "loop.py"]
