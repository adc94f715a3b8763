"""A gateway in this process, and a client of its gRPC calls."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status
from numpy.typing import NDArray

from demo.load import write_requests
from nobackfill.release.manifest import Manifest
from nobackfill.server.gateway import Gateway
from nobackfill.server.settings import Settings
from nobackfill.v1 import gallery_pb2, release_pb2, search_pb2, types_pb2, upgrade_pb2
from nobackfill.v1.gallery_pb2_grpc import GalleryServiceStub
from nobackfill.v1.release_pb2_grpc import ReleaseServiceStub
from nobackfill.v1.search_pb2_grpc import SearchServiceStub
from nobackfill.v1.upgrade_pb2_grpc import UpgradeServiceStub
from nobackfill.v1.vault_pb2_grpc import VaultServiceStub
from tests.support import graphs, releases
from tests.support.blocks import png

TIMEOUT_S = 60.0


# Items `i0`, `i1`, ... that `mixed_searches` asks for.
SEARCHED = 400


def mixed_searches(file: Path, one: Manifest, two: Manifest) -> Path:
    """Requests of demo.load for images of gallery `g`: by image, and by the embeddings of old and
    of new clients. Release v embeds into its own orthogonal block, so a query that met a vector of
    another space would find cosine 0 instead of itself at distance 0.
    """
    searches, items = [], []
    for number, picture in enumerate(images(SEARCHED)):
        old, new = (embedding(manifest, picture) for manifest in (one, two))
        by_image = search_pb2.Query(image=png(picture))
        by_old = search_pb2.Query(embeddings=search_pb2.Embeddings(embeddings=[old]))
        by_both = search_pb2.Query(embeddings=search_pb2.Embeddings(embeddings=[old, new]))
        for query in (by_image, by_image, by_old, by_both):
            request = search_pb2.SearchRequest(gallery="g", query=query, k=5)
            searches.append(request.SerializeToString())
            items.append(f"i{number}")
    order = np.random.default_rng(0).permutation(len(items))
    return write_requests(file, [searches[i] for i in order], [items[i] for i in order])


def settings(model_repo: Path, data: Path, **given: Any) -> Settings:
    """Free ports, and onnxruntime in process unless told otherwise."""
    defaults: dict[str, Any] = {
        "address": "127.0.0.1:0",
        "metrics_address": "127.0.0.1:0",
        "triton": "in-process",
        "drain_seconds": 5,
    }
    return Settings(model_repo=model_repo, data=data, **(defaults | given))


@contextmanager
def running(model_repo: Path, data: Path, **given: Any) -> Iterator[Gateway]:
    """A gateway from start to stop."""
    gateway = Gateway(settings(model_repo, data, **given))
    gateway.start()
    try:
        yield gateway
    finally:
        gateway.stop()


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Sends a token with each call: gRPC's own credentials demand TLS."""

    def __init__(self, token: str) -> None:
        self._metadata = [("authorization", f"Bearer {token}")]

    def _send(self, continuation: Any, details: Any, argument: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), argument)

    intercept_unary_unary = _send  # type: ignore[assignment]
    intercept_unary_stream = _send  # type: ignore[assignment]
    intercept_stream_unary = _send  # type: ignore[assignment]
    intercept_stream_stream = _send  # type: ignore[assignment]


class Client:
    """Short names for the calls that tests make most."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.channel = grpc.insecure_channel(address, [("grpc.enable_retries", 0)])
        if token is not None:
            self.channel = grpc.intercept_channel(self.channel, _Bearer(token))
        self.searches = SearchServiceStub(self.channel)
        self.galleries = GalleryServiceStub(self.channel)
        self.releases = ReleaseServiceStub(self.channel)
        self.upgrades = UpgradeServiceStub(self.channel)
        self.vault = VaultServiceStub(self.channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_error: object) -> None:
        self.channel.close()

    def create(self, name: str = "g") -> gallery_pb2.Gallery:
        request = gallery_pb2.CreateGalleryRequest(name=name)
        return self.galleries.CreateGallery(request, timeout=TIMEOUT_S).gallery

    def create_when_idle(self, name: str = "g") -> None:
        """Like `create`, once no activation is under way."""
        while True:
            try:
                self.create(name)
            except grpc.RpcError as error:
                if code_of(error) is not grpc.StatusCode.ABORTED:
                    raise
                time.sleep(0.05)
            else:
                return

    def gallery(self, name: str = "g") -> gallery_pb2.Gallery:
        request = gallery_pb2.GetGalleryRequest(name=name)
        return self.galleries.GetGallery(request, timeout=TIMEOUT_S).gallery

    def put(
        self, items: Iterable[gallery_pb2.PutItem], name: str = "g"
    ) -> gallery_pb2.PutItemsResponse:
        """All items in one message; the response to it."""
        request = gallery_pb2.PutItemsRequest(gallery=name, items=items)
        (response,) = self.galleries.PutItems(iter([request]), timeout=TIMEOUT_S)
        return response

    def put_images(self, images: NDArray[np.uint8], name: str = "g", first: int = 0) -> None:
        """Images as items `i0`, `i1`, ... from number `first` on."""
        items = [
            gallery_pb2.PutItem(id=f"i{first + i}", image=png(image))
            for i, image in enumerate(images)
        ]
        response = self.put(items, name)
        assert not response.errors
        assert response.stored == len(items)

    def search(
        self, image: NDArray[np.uint8], name: str = "g", k: int = 3
    ) -> search_pb2.SearchResponse:
        return self.ask(search_pb2.Query(image=png(image)), name, k)

    def search_by(
        self, *embeddings: types_pb2.Embedding, name: str = "g", k: int = 3
    ) -> search_pb2.SearchResponse:
        query = search_pb2.Query(embeddings=search_pb2.Embeddings(embeddings=embeddings))
        return self.ask(query, name, k)

    def ask(
        self, query: search_pb2.Query, name: str = "g", k: int = 3
    ) -> search_pb2.SearchResponse:
        request = search_pb2.SearchRequest(gallery=name, query=query, k=k)
        return self.searches.Search(request, timeout=TIMEOUT_S)

    def activate(
        self, number: int, rollout: str = "UNSPECIFIED", old_space_seconds: int = 0
    ) -> release_pb2.ActivateReleaseResponse:
        """Activate to the end; the last event."""
        request = release_pb2.ActivateReleaseRequest(
            number=number, rollout=f"ROLLOUT_{rollout}", old_space_seconds=old_space_seconds
        )
        event = release_pb2.ActivateReleaseResponse()
        for event in self.releases.ActivateRelease(request, timeout=TIMEOUT_S):  # noqa: B007
            pass
        return event

    def begin(self, number: int, rollout: str = "UNSPECIFIED", until: str = "UPGRADING") -> Any:
        """Activate up to a phase; the call, which goes on."""
        request = release_pb2.ActivateReleaseRequest(number=number, rollout=f"ROLLOUT_{rollout}")
        events = self.releases.ActivateRelease(request, timeout=TIMEOUT_S)
        for event in events:
            if event.phase == release_pb2.Phase.Value(f"PHASE_{until}"):
                break
        return events

    def pause(self, name: str = "g") -> upgrade_pb2.UpgradeProgress:
        request = upgrade_pb2.PauseUpgradeRequest(gallery=name)
        return self.upgrades.PauseUpgrade(request, timeout=TIMEOUT_S).progress

    def start_upgrade(self, name: str = "g", **given: Any) -> upgrade_pb2.UpgradeProgress:
        request = upgrade_pb2.StartUpgradeRequest(gallery=name, **given)
        return self.upgrades.StartUpgrade(request, timeout=TIMEOUT_S).progress

    def states(self) -> dict[int, str]:
        """Release numbers with their states."""
        answer = self.releases.ListReleases(release_pb2.ListReleasesRequest(), timeout=TIMEOUT_S)
        name = release_pb2.ReleaseState.Name
        return {r.number: name(r.state).removeprefix("RELEASE_STATE_") for r in answer.releases}

    def rollback(self, *, confirm: bool, to: int = 0) -> release_pb2.RollbackReleaseResponse:
        request = release_pb2.RollbackReleaseRequest(confirm=confirm, to_release=to)
        return self.releases.RollbackRelease(request, timeout=TIMEOUT_S)

    def retire(self) -> list[int]:
        answer = self.releases.RetireRelease(release_pb2.RetireReleaseRequest(), timeout=TIMEOUT_S)
        return list(answer.retired)


def images(count: int, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 [count,8,8,3], no two alike."""
    return releases.images(count, seed)


def embedding(manifest: Manifest, image: NDArray[np.uint8]) -> types_pb2.Embedding:
    """What a client with release `manifest` on board sends: the image's vector and its space."""
    return types_pb2.Embedding(space=manifest.space, values=vector(manifest, image).tobytes())


def vector(manifest: Manifest, image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The block embedder by hand: float32 [dim]."""
    pixels = image.astype(np.float32).reshape(1, -1) / np.float32(255) - np.float32(0.4987)
    weights = graphs.into_block(graphs.projection(graphs.BLOCK, 1), manifest.release)
    made = pixels @ weights
    unit: NDArray[np.float32] = (made / np.linalg.norm(made)).astype("<f4")[0]
    return unit


def side_info(manifest: Manifest, image: NDArray[np.uint8]) -> types_pb2.SideInfo:
    """The block side encoder by hand."""
    pixels = image.astype(np.float32).reshape(1, -1) / np.float32(255) - np.float32(0.4987)
    weights = graphs.into_block(graphs.projection(graphs.SIDE_BLOCK, 2), manifest.release)
    values = (pixels @ weights).astype("<f4")[0]
    return types_pb2.SideInfo(space=manifest.side_space or "", values=values.tobytes())


def metadata(**values: str | float | bool) -> dict[str, types_pb2.Value]:
    """Metadata as messages."""
    kinds: dict[type, str] = {bool: "flag", str: "text", float: "number", int: "number"}
    return {
        key: types_pb2.Value(**{kinds[type(value)]: value})  # type: ignore[arg-type]
        for key, value in values.items()
    }


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str, str]:
    """The status with which `call` is refused: code, sentence, ErrorInfo's reason."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    error = refused.value
    reason = ""
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        info = ErrorInfo()
        if detail.Unpack(info):
            reason = info.reason
    return error.code(), error.details() or "", reason


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    return error.code()


def ids(response: search_pb2.SearchResponse) -> list[str]:
    return [hit.id for hit in response.hits]


def random_id(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()
