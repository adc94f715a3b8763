"""Gateways that fall silent in the middle of a stream: real gRPC servers that stop sending."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from nobackfill.client.sync import SyncOptions
from nobackfill.client.vault.transport import download_blob, upload_blob
from nobackfill.errors import UnavailableError
from nobackfill.v1 import release_pb2, vault_pb2
from nobackfill.wire.gateway import Gateway
from tests.support import edge
from tests.support.edge import Setting

CHUNK = 1000
MODEL = "upgrade_1_to_2/1/model.onnx"
BLOB = bytes(range(256)) * 40


class Silence:
    """`wait` holds a call until its client has gone; `times` calls are left to be held."""

    def __init__(self) -> None:
        self.times = 0

    def falls(self) -> bool:
        self.times -= 1
        return self.times >= 0

    def wait(self, context: grpc.ServicerContext) -> None:
        gone = futures.Future[None]()
        if context.add_callback(lambda: gone.set_result(None)):
            gone.result()


class Stalling:
    """Serves a publication folder and one blob; goes silent after `before` bytes of a stream."""

    def __init__(self) -> None:
        self.repo = Path()
        self.before = 0
        self.silence = Silence()
        self.offsets: list[int] = []
        self.received = bytearray()

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """The three calls, under the contract's names."""
        fetch = grpc.unary_stream_rpc_method_handler(
            self.fetch_file,
            release_pb2.FetchFileRequest.FromString,
            release_pb2.FetchFileResponse.SerializeToString,
        )
        get = grpc.unary_stream_rpc_method_handler(
            self.get_blob,
            vault_pb2.GetBlobRequest.FromString,
            vault_pb2.GetBlobResponse.SerializeToString,
        )
        put = grpc.stream_unary_rpc_method_handler(
            self.put_blob,
            vault_pb2.PutBlobRequest.FromString,
            vault_pb2.PutBlobResponse.SerializeToString,
        )
        named = grpc.method_handlers_generic_handler
        return [
            named("nobackfill.v1.ReleaseService", {"FetchFile": fetch}),
            named("nobackfill.v1.VaultService", {"GetBlob": get, "PutBlob": put}),
        ]

    def _sent(
        self, data: bytes, offset: int, context: grpc.ServicerContext, *, may_fall: bool
    ) -> Iterator[bytes]:
        falls = may_fall and self.silence.falls()
        if may_fall:
            self.offsets.append(offset)
        end = offset + self.before if falls else len(data)
        for start in range(offset, end, CHUNK):
            yield data[start : min(start + CHUNK, end)]
        if falls:
            self.silence.wait(context)

    def fetch_file(
        self, request: release_pb2.FetchFileRequest, context: grpc.ServicerContext
    ) -> Iterator[release_pb2.FetchFileResponse]:
        path = self.repo / request.path
        if not path.is_file():
            context.abort(grpc.StatusCode.NOT_FOUND, request.path)
        data = path.read_bytes()
        for chunk in self._sent(data, request.offset, context, may_fall=request.path == MODEL):
            yield release_pb2.FetchFileResponse(chunk=chunk, size=len(data))

    def get_blob(
        self, request: vault_pb2.GetBlobRequest, context: grpc.ServicerContext
    ) -> Iterator[vault_pb2.GetBlobResponse]:
        for chunk in self._sent(BLOB, request.offset, context, may_fall=True):
            yield vault_pb2.GetBlobResponse(chunk=chunk)

    def put_blob(
        self,
        request_iterator: Iterator[vault_pb2.PutBlobRequest],
        context: grpc.ServicerContext,
    ) -> vault_pb2.PutBlobResponse:
        for request in request_iterator:
            if not request.chunk:
                continue
            if self.silence.falls():
                self.received += request.chunk[: self.before]
                self.silence.wait(context)
            else:
                self.received += request.chunk
        return vault_pb2.PutBlobResponse(received=len(self.received))


@pytest.fixture
def stalling() -> Iterator[tuple[Stalling, str]]:
    service = Stalling()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(service.handlers())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nobackfill.client.sync.READ_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr("nobackfill.client.vault.transport.STREAM_SECONDS", 0.3)


def test_a_download_goes_on_where_the_gateway_fell_silent(
    setting: Setting, world: edge.World, stalling: tuple[Stalling, str]
) -> None:
    world.publish(setting.repo, 2)
    service, address = stalling
    service.repo, service.before, service.silence.times = setting.repo, 2500, 2
    report = edge.follow(setting.gallery, SyncOptions(source=f"grpc://{address}"))
    assert report.state == "upgraded"
    assert service.offsets == [0, 2500, 5000]


def test_a_gateway_that_stays_silent_is_given_up_and_what_came_is_kept(
    setting: Setting, world: edge.World, stalling: tuple[Stalling, str]
) -> None:
    world.publish(setting.repo, 2)
    service, address = stalling
    service.repo, service.silence.times = setting.repo, 1000
    part = setting.gallery.with_name("gallery.sqlite.models") / f"{MODEL}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes((setting.repo / MODEL).read_bytes()[:1234])
    wishes = SyncOptions(source=f"grpc://{address}")
    with pytest.raises(UnavailableError, match=r"no bytes arrived for 0\.3 s"):
        edge.follow(setting.gallery, wishes)
    assert {origin for origin, _ in edge.contents(setting.gallery).values()} == {"native"}
    assert part.stat().st_size == 1234
    service.silence.times = 0
    assert edge.follow(setting.gallery, wishes).state == "upgraded"
    assert service.offsets == [1234, 1234]


def _blob() -> vault_pb2.Blob:
    return vault_pb2.Blob(id="ab" * 32, size=len(BLOB), sha256=hashlib.sha256(BLOB).hexdigest())


def _pulled(gateway: Gateway, folder: Path) -> bytes:
    download_blob(gateway, _blob(), folder / "pulled")
    return (folder / "pulled").read_bytes()


def _pushed(gateway: Gateway, folder: Path) -> int:
    (folder / "sealed").write_bytes(BLOB)
    return upload_blob(gateway, _blob(), folder / "sealed")


def test_a_vault_that_falls_silent_is_taken_up_again(
    stalling: tuple[Stalling, str], tmp_path: Path
) -> None:
    service, address = stalling
    service.before, service.silence.times = 3000, 2
    with Gateway(address) as gateway:
        assert _pulled(gateway, tmp_path) == BLOB
        assert service.offsets == [0, 3000, 6000]
        service.silence.times = 2
        assert _pushed(gateway, tmp_path) == len(BLOB)
    assert bytes(service.received) == BLOB


@pytest.mark.parametrize("transfer", [_pulled, _pushed])
def test_a_vault_that_stays_silent_is_given_up(
    stalling: tuple[Stalling, str], tmp_path: Path, transfer: Callable[[Gateway, Path], object]
) -> None:
    service, address = stalling
    service.silence.times = 1000
    with Gateway(address) as gateway, pytest.raises(UnavailableError, match="stopped at"):
        transfer(gateway, tmp_path)
