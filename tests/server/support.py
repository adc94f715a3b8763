"""A gateway in this process, and the client of its calls."""

import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from demo.load import write_requests
from nobackfill import wire
from nobackfill.errors import BusyError, NobackfillError
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries.hosted_file import HostedInFile
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.grpc import listener
from nobackfill.server.settings import Settings
from nobackfill.v1 import gallery_pb2, release_pb2, search_pb2, types_pb2
from nobackfill.v1.gallery_pb2_grpc import GalleryServiceStub
from nobackfill.v1.release_pb2_grpc import ReleaseServiceStub
from nobackfill.v1.search_pb2_grpc import SearchServiceStub
from nobackfill.v1.upgrade_pb2_grpc import UpgradeServiceStub
from nobackfill.v1.vault_pb2_grpc import VaultServiceStub
from nobackfill.wire.answers import Answer, Hit
from nobackfill.wire.connection import translate_errors
from nobackfill.wire.values import metadata_value_message
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


def in_file(gateway: GatewayServer, name: str = "g") -> HostedInFile:
    """An open gallery of a gateway that keeps its galleries in files."""
    hosted = gateway.galleries.peek(name)
    assert isinstance(hosted, HostedInFile), hosted
    return hosted


# Data folders of gateways that have activated a publication and hold no gallery, by the bytes of
# its timestamp.json.
ACTIVATED: dict[bytes, Path] = {}
# Settings under which a gateway keeps its state elsewhere, or tries releases in another way.
_ELSEWHERE = {"root", "store", "triton", "triton_venv"}


def copy_activated(model_repo: Path, data: Path) -> None:
    """Let a gateway that has no `data` yet find the publication's newest release active and tried,
    where a template is there: it starts in a tenth of the time."""
    timestamp = model_repo / "timestamp.json"
    template = ACTIVATED.get(timestamp.read_bytes()) if timestamp.exists() else None
    if template is not None and not data.exists():
        shutil.copytree(template, data)


@contextmanager
def running(model_repo: Path, data: Path, **given: Any) -> Iterator[GatewayServer]:
    """A gateway from start to stop.

    One of `stages` in a new data folder is active already; with `activates=True`, the gateway tries
    and activates it as it starts.
    """
    activates = given.pop("activates", False)
    elsewhere = "NOBACKFILL_STORE" in os.environ or any(
        given.get(name) is not None for name in _ELSEWHERE
    )
    if not activates and not elsewhere:
        copy_activated(model_repo, data)
    gateway = GatewayServer(settings(model_repo, data, **given))
    gateway.start()
    try:
        yield gateway
    finally:
        with pytest.MonkeyPatch.context() as patch:
            if "drain_seconds" not in given:
                # Nobody is left whose calls it would lose by not waiting half a second for them.
                patch.setattr(listener, "_LAME_DUCK_SECONDS", 0.0)
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


class Client(wire.Gateway):
    """The client that everybody uses, asking each call once; short names for what tests do most."""

    def __init__(self, address: str, token: str | None = None, seconds: float = TIMEOUT_S) -> None:
        super().__init__(address, seconds=seconds, retries=False)
        # Gateway sends no token without TLS.
        self._bearer = None if token is None else _Bearer(token)
        if self._bearer is not None:
            self._channel = grpc.intercept_channel(self._channel, self._bearer)

    @cached_property
    def raw(self) -> "Stubs":
        """Stubs, for what Gateway does not send."""
        return Stubs(self.address, self._bearer)

    def close(self) -> None:
        if "raw" in vars(self):
            self.raw.channel.close()
        super().close()

    def create_when_idle(self, gallery: str = "g") -> None:
        """Make a gallery once no activation is under way."""
        while True:
            try:
                self.create_gallery(gallery)
            except BusyError:
                time.sleep(0.05)
            else:
                return

    def put_images(self, images: NDArray[np.uint8], name: str = "g", first: int = 0) -> None:
        """Images as items `i0`, `i1`, ... from number `first` on."""
        assert not self.put(name, {f"i{first + i}": png(image) for i, image in enumerate(images)})

    def find(self, image: NDArray[np.uint8], name: str = "g", k: int = 3) -> Answer[Hit]:
        return self.search(name, image=png(image), k=k)

    def find_by(self, *embeddings: types_pb2.Embedding, name: str = "g", k: int = 3) -> Answer[Hit]:
        """By embeddings as `embedding` makes them."""
        return self.search(name, embeddings=vectors_of(*embeddings), k=k)

    def swap(
        self, number: int, rollout: str = "unspecified", old_space_seconds: int = 0
    ) -> release_pb2.ActivateReleaseResponse:
        """Activate to the end; the last event. Raises PreconditionError where it fails."""
        return [*self.activate(number, rollout=rollout, old_space_seconds=old_space_seconds)][-1]

    def begin(
        self, number: int, rollout: str = "unspecified", until: str = "UPGRADING"
    ) -> Iterator[release_pb2.ActivateReleaseResponse]:
        """Activate up to a phase; the events to come."""
        events = self.activate(number, rollout=rollout)
        next(event for event in events if event.phase == release_pb2.Phase.Value(f"PHASE_{until}"))
        return events

    def states(self) -> dict[int, str]:
        """Release numbers with their states."""
        name = release_pb2.ReleaseState.Name
        return {
            r.number: name(r.state).removeprefix("RELEASE_STATE_") for r in self.list_releases()
        }


class Stubs:
    """The calls as gRPC makes them, over a connection of their own without bounds."""

    def __init__(self, address: str, bearer: _Bearer | None) -> None:
        self.channel = grpc.insecure_channel(address, [("grpc.enable_retries", 0)])
        if bearer is not None:
            self.channel = grpc.intercept_channel(self.channel, bearer)
        self.searches = SearchServiceStub(self.channel)
        self.galleries = GalleryServiceStub(self.channel)
        self.releases = ReleaseServiceStub(self.channel)
        self.upgrades = UpgradeServiceStub(self.channel)
        self.vault = VaultServiceStub(self.channel)

    def ask(
        self, query: search_pb2.Query, name: str = "g", k: int = 3
    ) -> search_pb2.SearchResponse:
        """A query of any bytes."""
        request = search_pb2.SearchRequest(gallery=name, query=query, k=k)
        return self.searches.Search(request, timeout=TIMEOUT_S)

    def put(
        self, items: Iterable[gallery_pb2.PutItem], name: str = "g"
    ) -> gallery_pb2.PutItemsResponse:
        """All items in one message; the response to it, with each error."""
        request = gallery_pb2.PutItemsRequest(gallery=name, items=items)
        (response,) = self.galleries.PutItems(iter([request]), timeout=TIMEOUT_S)
        return response


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
    return {key: metadata_value_message(value) for key, value in values.items()}


def vectors_of(*embeddings: types_pb2.Embedding) -> dict[str, list[float]]:
    """Embeddings as Gateway takes them: by space."""
    return {one.space: np.frombuffer(one.values, "<f4").tolist() for one in embeddings}


@contextmanager
def refused(
    kind: type[NobackfillError], sentence: str = ""
) -> Iterator[pytest.ExceptionInfo[NobackfillError]]:
    """What is inside is refused: with an error of just this kind, whose words hold `sentence`. The
    status of a stub is read as Gateway reads it."""
    with pytest.raises(kind) as caught, translate_errors("the gateway"):
        yield caught
    assert type(caught.value) is kind
    assert sentence in str(caught.value)


def ids(answer: Answer[Hit] | search_pb2.SearchResponse) -> list[str]:
    return [hit.id for hit in answer.hits]


def scores(answer: Answer[Hit]) -> list[float]:
    """Of hits that all have one."""
    found = [hit.score for hit in answer.hits if hit.score is not None]
    assert len(found) == len(answer.hits)
    return found


def random_id(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()
