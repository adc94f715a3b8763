"""Calls that come together are answered together, each by itself, and an image's as a vector's."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, cast

import grpc
import pytest

from nobackfill.errors import BusyError, OverloadedError
from nobackfill.images import Pixels
from nobackfill.release.manifest import Manifest
from nobackfill.server.embedding import embedding
from nobackfill.server.embedding.embedding import (
    EmbeddingService,
    ImageQueue,
    QueuedImage,
    VectorsOrError,
)
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.grpc.context import Principal, Role
from nobackfill.server.grpc.rpc import DeferredAnswer, RpcMethod
from nobackfill.server.grpc.services.search import SEARCH
from nobackfill.v1 import search_pb2
from tests.server.support import TIMEOUT_S, Client, images, in_file, refused
from tests.server.test_immediate_answers import asking, on_a_thread, searched_in_batches
from tests.support.blocks import png
from tests.support.waiting import wait_until


@pytest.mark.hot_path
def test_what_comes_together_is_answered_together_and_each_by_itself(
    served: GatewayServer, one: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    answers = served.search.answer_immediately

    def slow(
        messages: Sequence[tuple[bytes, Principal]],
    ) -> Sequence[bytes | DeferredAnswer | None]:
        sizes.append(len(messages))
        time.sleep(0.02)
        return answers(messages)

    good, wrong = asking(one, 8), asking(one, 8)
    monkeypatch.setitem(kind_of(served, good).__dict__, "answer_immediately", slow)
    wrong.query.embeddings.embeddings[0].values = b"1234"
    with Client(served.address) as client:
        expected = on_a_thread(client, good)
        futures = [
            client.raw.searches.Search.future(wrong if n % 5 == 0 else good, timeout=TIMEOUT_S)
            for n in range(60)
        ]
        for number, future in enumerate(futures):
            if number % 5:
                assert future.result() == expected
            else:
                assert future.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sum(sizes) == 60 and 1 < max(sizes) <= 16


def kind_of(served: GatewayServer, request: search_pb2.SearchRequest) -> RpcMethod:
    """It is made at the first call."""
    with Client(served.address) as client:
        client.raw.searches.Search(request, timeout=TIMEOUT_S)
    assert served._listener is not None
    return served._listener._interceptor._methods[SEARCH][0]


def test_answers_at_once_count_among_the_calls_that_there_may_be(
    served: GatewayServer, one: Manifest
) -> None:
    request = asking(one, 9)
    lane = kind_of(served, request).lane
    with Client(served.address) as client:
        expected = on_a_thread(client, request)
        for caller in range(256):
            lane.enter(str(caller), Role.ADMIN)
        try:
            with refused(OverloadedError):
                client.raw.searches.Search(request, timeout=TIMEOUT_S)
        finally:
            for caller in range(256):
                lane.leave(str(caller), Role.ADMIN)
        assert client.raw.searches.Search(request, timeout=TIMEOUT_S) == expected


def test_an_image_is_searched_as_its_embedding_is(served: GatewayServer, one: Manifest) -> None:
    with Client(served.address) as client:
        request = asking(one, 10)
        request.query.image = png(images(11)[10])
        expected = on_a_thread(client, request)
        before = searched_in_batches(served)
        assert client.raw.searches.Search(request, timeout=TIMEOUT_S) == expected
        assert searched_in_batches(served) == before
        # What it cannot say at once is said by the same thread.
        request.fields.keys.append("colour")
        chosen = client.raw.searches.Search(request, timeout=TIMEOUT_S)
        assert [hit.id for hit in chosen.hits] == [hit.id for hit in expected.hits]
        assert all(set(hit.metadata) <= {"colour"} for hit in chosen.hits)


def test_an_image_is_searched_where_it_was_embedded_however_slow_searches_are(
    served: GatewayServer, one: Manifest
) -> None:
    """That thread waits for others: what it takes is no measure, and handing on no gain."""
    request = asking(one, 10)
    request.query.image = png(images(11)[10])
    speed = served.galleries.peek("g").search_speed
    with Client(served.address) as client:
        expected = on_a_thread(client, request)
        for _ in range(60):
            speed.record_search(0.5)
        usual, before = speed._typical, searched_in_batches(served)
        for _ in range(3):
            assert client.raw.searches.Search(request, timeout=TIMEOUT_S) == expected
        assert (speed._typical, searched_in_batches(served)) == (usual, before)
    for _ in range(200):
        speed.record_search(0.0001)


@pytest.mark.hot_path
def test_hits_of_an_image_are_read_where_it_was_embedded(
    served: GatewayServer, one: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is not repeated on a thread of the call because a hit is not in memory."""
    request = asking(one, 10)
    request.query.image = png(images(11)[10])
    hosted = in_file(served, "g")
    with Client(served.address) as client:
        expected = on_a_thread(client, request)
        before = searched_in_batches(served)
        for cache in hosted._items.values():
            cache.forget(list(cache._items))
        assert client.raw.searches.Search(request, timeout=TIMEOUT_S) == expected
        assert searched_in_batches(served) == before
        # The call's own thread reports an item that cannot be read.
        for cache in hosted._items.values():
            cache.forget(list(cache._items))

        def fail(*_: object) -> NoReturn:
            raise BusyError("the gallery is locked")

        monkeypatch.setattr(hosted.store, "items", fail)
        with refused(BusyError):
            client.raw.searches.Search(request, timeout=TIMEOUT_S)
    assert hosted.use_counter.wait_until_none(5) and hosted.plan.use_counter.wait_until_none(5)


@pytest.mark.hot_path
def test_images_that_come_together_hold_no_threads_and_fail_by_themselves(
    served: GatewayServer, one: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    add = ImageQueue.add

    def counted(queue: ImageQueue[object], waiting: QueuedImage[object]) -> None:
        begun.append(waiting)
        add(queue, waiting)

    monkeypatch.setattr(ImageQueue, "add", counted)
    requests = [asking(one, number) for number in range(6)]
    for request, image in zip(requests, images(6), strict=True):
        request.query.image = png(image)
    requests[5].query.image = b"no picture"
    with Client(served.address) as client:
        expected = [on_a_thread(client, request) for request in requests[:5]]
        for cheap in (embedding.CHEAP_DECODE_COST, 0):
            # Dear ones are decoded on a thread.
            monkeypatch.setattr(embedding, "CHEAP_DECODE_COST", cheap)
            futures = [
                client.raw.searches.Search.future(requests[n % 6], timeout=TIMEOUT_S)
                for n in range(60)
            ]
            for number, future in enumerate(futures):
                if number % 6 < 5:
                    assert future.result() == expected[number % 6]
                else:
                    assert future.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(begun) == 120
        assert client.raw.searches.Search(requests[0], timeout=TIMEOUT_S) == expected[0]
    # Nobody is left to be waited for by who deletes the gallery, or swaps its model.
    hosted = served.galleries.peek("g")
    assert hosted.use_counter.wait_until_none(5) and hosted.plan.use_counter.wait_until_none(5)


class Model:
    """The gateway's, which answers release `held` once it is `open`."""

    def __init__(self, served: GatewayServer, manifest: Manifest, held: int = 0) -> None:
        self._served, self._manifest, self._held = served, manifest, held
        self.open = threading.Event()
        self.seen: list[int] = []

    def embed_each(self, manifest: Manifest, pixels: Sequence[Pixels]) -> list[VectorsOrError]:
        self.seen += [manifest.release] * len(pixels)
        assert manifest.release != self._held or self.open.wait(TIMEOUT_S)
        return self._served.embedding.embed_each(self._manifest, pixels)


class Queue:
    """One of its own, and what it has answered."""

    def __init__(self, served: GatewayServer, model: Model) -> None:
        self.answers: list[tuple[str, bool]] = []
        self.queue = ImageQueue[str](cast(EmbeddingService, model), served.metrics, self._answer)

    def _answer(self, made: Sequence[tuple[QueuedImage[str], object]]) -> None:
        self.answers += [(waiting.owner, vector is not None) for waiting, vector in made]

    def add(self, of: str, manifest: Manifest, wanted: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        self.queue.add(QueuedImage(of, manifest, png(images(1)[0]), deadline, wanted))
        self.queue.begin()

    def until(self, count: int) -> dict[str, bool]:
        """Whether there was a vector, by who asked."""
        wait_until(lambda: len(self.answers) >= count, "no answer")
        return dict(self.answers)


def test_an_image_that_is_decoded_while_the_queue_closes_is_answered(
    served: GatewayServer, one: Manifest
) -> None:
    decoding_now, go_on = threading.Event(), threading.Event()

    def wanted() -> bool:
        decoding_now.set()
        return go_on.wait(TIMEOUT_S)

    queue = Queue(served, Model(served, one))
    queue.add("a", one, wanted)
    assert decoding_now.wait(TIMEOUT_S)
    closing = threading.Thread(target=queue.queue.close)
    closing.start()
    wait_until(lambda: queue.queue._is_closed, "it does not close")
    go_on.set()
    closing.join(TIMEOUT_S)
    assert queue.answers == [("a", False)]


def test_another_releases_images_wait_for_no_model_call(
    served: GatewayServer, one: Manifest
) -> None:
    model = Model(served, one, held=one.release)
    queue = Queue(served, model)
    with queue.queue._changed:
        queue.add("held", one, lambda: True)
        queue.add("other", one.model_copy(update={"release": 9}), lambda: True)
    try:
        assert queue.until(1) == {"other": True}
    finally:
        model.open.set()
    assert queue.until(2)["held"]
    queue.queue.close()


def test_an_image_whose_caller_has_gone_is_not_embedded(
    served: GatewayServer, one: Manifest
) -> None:
    model = Model(served, one)
    queue = Queue(served, model)
    waits = iter((True, False))  # while it is decoded, and no longer
    queue.add("gone", one, lambda: next(waits, False))
    assert queue.until(1) == {"gone": False}
    queue.queue.close()
    assert model.seen == []
