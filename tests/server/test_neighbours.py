"""One slow gallery, or a slow model, keeps nobody else waiting."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Content, Index, Labels, Mask, Neighbours
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import Images
from nobackfill.server.galleries import hosted as speed
from nobackfill.server.galleries.hosted import HostedGallery
from nobackfill.server.gateway import GatewayServer
from nobackfill.vectors import Vectors
from nobackfill.wire import Answer, Hit
from tests.server.support import Client, embedding, ids, images, in_file

# More than a lane of calls has threads.
ASKERS = 20


class Held(ExactIndex):
    """Answers once it may."""

    open: threading.Event

    def search(
        self,
        queries: Vectors,
        k: int,
        allowed: Mask | None = None,
        passing: int | None = None,
        ef: int = 0,
    ) -> Neighbours:
        assert self.open.wait(60)
        return super().search(queries, k, allowed, passing, ef)


@contextmanager
def held(hosted: HostedGallery) -> Iterator[None]:
    """Searches of a gallery wait to the end of the block."""
    opened = threading.Event()

    def build(spec: SpaceSpec, labels: Labels, vectors: Content) -> Index:
        index = Held(spec, labels, vectors)
        index.open = opened
        return index

    (view,) = hosted.views().values()
    view.compact(build)
    try:
        yield
    finally:
        opened.set()


def test_a_large_gallery_without_a_graph_is_slow_before_it_is_searched(
    gateway: GatewayServer, client: Client, one: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first burst on it held every thread of the quick lane once."""
    client.create_gallery("g")
    client.put_images(images(5))
    asked = gateway.galleries.is_slow
    monkeypatch.setattr(speed, "_SLOW_ELEMENTS", 5 * one.embedder.dim)
    assert not asked("g")
    client.put_images(images(6)[5:], first=5)
    assert asked("g")


@pytest.mark.parametrize("askers", [3, ASKERS])
def test_a_slow_gallery_delays_no_other(
    gateway: GatewayServer, client: Client, one: Manifest, askers: int
) -> None:
    for name in ("slow", "quick"):
        client.create_gallery(name)
        client.put_images(images(5), name)
    query = embedding(one, images(5)[2])
    slow = gateway.galleries.peek("slow")
    # As its last searches did; nobody knows of one that was never searched.
    slow.search_speed.record_search(10.0)

    def ask() -> Answer[Hit]:
        return client.find_by(query, name="slow", k=1)

    with ThreadPoolExecutor(askers) as pool:
        with held(slow):
            asked = [pool.submit(ask) for _ in range(askers)]
            for _ in range(20):
                assert ids(client.find_by(query, name="quick", k=1)) == ["i2"]
            assert not any(future.done() for future in asked)
        assert all(ids(future.result(60)) == ["i2"] for future in asked)
    while slow.is_slow:
        ask()


def test_searches_by_embedding_wait_for_no_model(
    gateway: GatewayServer, client: Client, one: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_gallery("g")
    client.put_images(images(5))
    opened = threading.Event()
    models = gateway.models
    embed = models.embed_images

    def wait(manifest: Manifest, pixels: Images) -> Vectors:
        assert opened.wait(60)
        return embed(manifest, pixels)

    monkeypatch.setattr(models, "embed_images", wait)
    query = embedding(one, images(5)[2])
    with ThreadPoolExecutor(ASKERS) as pool:
        asked = [pool.submit(client.find, images(5)[1], "g", 1) for _ in range(ASKERS)]
        try:
            for _ in range(20):
                assert ids(client.find_by(query, k=1)) == ["i2"]
            assert not any(future.done() for future in asked)
        finally:
            opened.set()
        assert all(ids(future.result(60)) == ["i1"] for future in asked)


def test_searches_go_on_while_the_view_of_a_new_space_is_read(
    gateway: GatewayServer, client: Client, one: Manifest
) -> None:
    client.create_gallery("g")
    client.put_images(images(5))
    hosted = in_file(gateway)
    space = hosted.plan.parts[0].space
    # As who makes another view holds it for as long as that is read.
    with hosted._views_lock:
        assert ids(client.find_by(embedding(one, images(5)[2]), k=1)) == ["i2"]
        assert hosted.view(space) is hosted.views()[space]
