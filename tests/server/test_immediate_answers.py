"""Searches that are answered where they arrive say what a thread says."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.view import parse_search_request
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries import answering, hosted_file
from nobackfill.server.galleries.answering import ReceiverSearch
from nobackfill.server.galleries.indexing import IndexMaintenance
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.grpc.context import LOCAL, Principal, Role
from nobackfill.server.grpc.services.search import _parse_simple
from nobackfill.v1 import gallery_pb2, search_pb2, types_pb2
from tests.server.conftest import SERVED as COUNT
from tests.server.support import (
    TIMEOUT_S,
    Client,
    embedding,
    ids,
    images,
    in_file,
    metadata,
    side_info,
)  # fmt: skip

LARGE = 2200


def asking(one: Manifest, query: int, k: int = 10) -> search_pb2.SearchRequest:
    embeddings = search_pb2.Embeddings(embeddings=[embedding(one, images(query + 1)[query])])
    return search_pb2.SearchRequest(gallery="g", query=search_pb2.Query(embeddings=embeddings), k=k)


def answer_immediately(
    served: GatewayServer, request: search_pb2.SearchRequest
) -> search_pb2.SearchResponse | None:
    answer = told(served, request.SerializeToString())
    return None if answer is None else search_pb2.SearchResponse.FromString(answer)


def told(served: GatewayServer, message: bytes) -> bytes | None:
    answer = served.search.answer_immediately([(message, LOCAL)])[0]
    assert answer is None or isinstance(answer, bytes)
    return answer


def on_a_thread(client: Client, request: search_pb2.SearchRequest) -> search_pb2.SearchResponse:
    batch = search_pb2.SearchBatchRequest(
        gallery=request.gallery, queries=[request.query], k=request.k
    )
    if request.HasField("max_distance"):
        batch.max_distance = request.max_distance
    return client.raw.searches.SearchBatch(batch, timeout=TIMEOUT_S).responses[0]


def searched_in_batches(served: GatewayServer) -> float:
    found = served.metrics.registry.get_sample_value(
        "nobackfill_batch_size_count", {"stage": "search"}
    )
    return found or 0.0


def test_the_same_answer_with_and_without_a_thread(
    served: GatewayServer, one: Manifest, untimed: None
) -> None:
    with Client(served.address) as client:

        @hypothesis_settings(max_examples=60, deadline=None)
        @given(
            query=st.integers(0, COUNT + 5),
            k=st.integers(0, 64),
            farthest=st.none() | st.floats(0, 2, width=32),
            exact=st.booleans(),
        )
        def same(query: int, k: int, farthest: float | None, exact: bool) -> None:
            served.galleries.peek("g").exact_distances = exact
            request = asking(one, query, k)
            if farthest is not None:
                request.max_distance = farthest
            expected = on_a_thread(client, request)
            assert answer_immediately(served, request) == expected
            assert client.raw.searches.Search(request, timeout=TIMEOUT_S) == expected

        same()
        served.galleries.peek("g").exact_distances = False


def test_compiled_code_and_python_answer_byte_for_byte(
    served: GatewayServer, one: Manifest, untimed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The graph made below has no file: after 20 s the gateway would make another, and the snapshot
    # whose answers are compared would no longer be the one that is searched.
    monkeypatch.setattr(IndexMaintenance, "_pending_work", lambda *_: iter(()))
    with Client(served.address) as client:
        client.create_gallery("large")
        rng = np.random.default_rng(0)
        dim = one.embedder.dim
        made = rng.standard_normal((LARGE, dim)).astype("<f4")
        made /= np.linalg.norm(made, axis=1, keepdims=True)
        side = side_info(one, images(1)[0])
        for start in range(0, LARGE, 500):
            items = [
                gallery_pb2.PutItem(
                    id=f"item {row}",
                    vectors=gallery_pb2.Vectors(
                        embedding=types_pb2.Embedding(space=one.space, values=made[row].tobytes()),
                        side_info=side,
                    ),
                    metadata=metadata(name="x" * int(rng.integers(200)), number=row),
                )
                for row in range(start, min(LARGE, start + 500))
            ]
            assert not client.put_items("large", items)
        hosted = in_file(served, "large")
        view = hosted.view(one.space)
        view.compact(hnsw.build_index)
        # A few beside the graph, and tombstones in neither.
        extra = items[:20]
        for number, item in enumerate(extra):
            item.id = f"late {number}"
        assert not client.put_items("large", extra)
        snapshot = view.snapshot()
        beyond = set[bool]()
        if parse_search_request is None:
            pytest.skip("nothing was compiled: there is no compiler")
        assert snapshot.compiled is not None

        @hypothesis_settings(max_examples=80, deadline=None)
        @given(
            seed=st.integers(0, 2**32),
            k=st.integers(1, 64),
            farthest=st.none() | st.floats(0, 2, width=32),
            exact=st.booleans(),
        )
        def same(seed: int, k: int, farthest: float | None, exact: bool) -> None:
            hosted.exact_distances = exact
            chosen = np.random.default_rng(seed)
            query = (
                made[chosen.integers(LARGE)]
                + chosen.choice([0, 0.05, 1]) * made[chosen.integers(LARGE)]
            )
            query /= np.linalg.norm(query)
            request = asking(one, 0, k)
            request.gallery = "large"
            request.query.embeddings.embeddings[0].values = query.astype("<f4").tobytes()
            if farthest is not None:
                request.max_distance = farthest
            expected = on_a_thread(client, request)
            message = request.SerializeToString()
            # The second time in one call.
            compiled = told(served, message)
            assert served.search._immediate.search_by_last_plan([message]) == [compiled]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ReceiverSearch, "search_by_last_plan", lambda *_: None)
                assert told(served, message) == compiled
                patch.setitem(snapshot.__dict__, "compiled", None)
                assert told(served, message) == compiled
            assert compiled is not None
            assert search_pb2.SearchResponse.FromString(compiled) == expected
            beyond.update(hit.beyond_calibration for hit in expected.hits)

        same()
        assert beyond == {True, False}


@hypothesis_settings(max_examples=300, deadline=None)
@given(
    gallery=st.text(max_size=20), space=st.text(max_size=70), values=st.binary(max_size=600),
    k=st.integers(0, 2**32 - 1), farthest=st.none() | st.floats(width=32),
    more=st.binary(max_size=6), cut=st.integers(0, 40),
)  # fmt: skip
def test_requests_are_read_alike(
    gallery: str,
    space: str,
    values: bytes,
    k: int,
    farthest: float | None,
    more: bytes,
    cut: int,
) -> None:
    if parse_search_request is None:
        pytest.skip("nothing was compiled: there is no compiler")
    embedding = types_pb2.Embedding(space=space, values=values)
    embeddings = search_pb2.Embeddings(embeddings=[embedding])
    request = search_pb2.SearchRequest(
        gallery=gallery, query=search_pb2.Query(embeddings=embeddings), k=k, max_distance=farthest
    )
    by_image = search_pb2.SearchRequest()
    by_image.CopyFrom(request)
    by_image.query.image = values
    for message in (request.SerializeToString(), by_image.SerializeToString()):
        if gallery and space:
            # NaN is not equal to itself.
            assert repr(parse_search_request(message)) == repr(_parse_simple(message))
        for other in (message + more, message[: len(message) - cut], more + message):
            found = parse_search_request(other)
            assert found is None or repr(found) == repr(_parse_simple(other))


@pytest.mark.hot_path
def test_it_takes_no_thread_once_its_items_are_in_memory(
    served: GatewayServer, one: Manifest
) -> None:
    with Client(served.address) as client:
        request = asking(one, 3)
        expected = on_a_thread(client, request)
        before = searched_in_batches(served)
        assert client.raw.searches.Search(request, timeout=TIMEOUT_S) == expected
        assert searched_in_batches(served) == before


def test_what_was_changed_is_not_answered_as_it_was(served: GatewayServer, one: Manifest) -> None:
    with Client(served.address) as client:
        request = asking(one, 4)
        first = client.raw.searches.Search(request, timeout=TIMEOUT_S).hits[0]
        assert answer_immediately(served, request) is not None
        client.set_metadata("g", {"colour": "changed"}, ids=[first.id])
        assert answer_immediately(served, request) is None, "what changed has to be read"
        again = client.raw.searches.Search(request, timeout=TIMEOUT_S).hits[0]
        assert again.id == first.id and again.metadata["colour"].text == "changed"
        assert answer_immediately(served, request) is not None


def test_what_may_wait_or_is_wrong_is_left_to_a_thread(
    served: GatewayServer, one: Manifest
) -> None:
    good = asking(one, 5)
    with Client(served.address) as client:
        on_a_thread(client, good)
    assert answer_immediately(served, good) is not None
    others = [search_pb2.SearchRequest() for _ in range(8)]
    for other in others:
        other.CopyFrom(good)
    unknown, foreign, short, wrong, many, exact, chosen, filtered = others
    unknown.gallery = "elsewhere"
    foreign.query.embeddings.embeddings[0].space = "sp-0"
    short.query.embeddings.embeddings[0].values = b"1234"
    dim = len(good.query.embeddings.embeddings[0].values) // 4
    wrong.query.embeddings.embeddings[0].values = np.full(dim, math.nan, "<f4").tobytes()
    many.k = 1001
    exact.accuracy.exact = True
    chosen.fields.keys.append("colour")
    filtered.filter.conditions.append(types_pb2.Condition(key="odd", exists=True))
    assert [answer_immediately(served, other) for other in others] == [None] * len(others)
    stranger = Principal("somebody", Role.READER, frozenset({"others"}))
    assert served.search.answer_immediately([(good.SerializeToString(), stranger)]) == [None]
    assert served.search.answer_immediately(
        [(good.SerializeToString(), replace(stranger, galleries=None))]
    )[0]
    assert served.search.answer_immediately([(b"\xff\xff", LOCAL)]) == [None]


def test_a_slow_gallery_is_searched_on_threads_until_it_is_quick(
    served: GatewayServer, one: Manifest
) -> None:
    request = asking(one, 6)
    with Client(served.address) as client:
        on_a_thread(client, request)
        assert answer_immediately(served, request) is not None
        speed = served.galleries.peek("g").search_speed
        for _ in range(60):
            speed.record_search(0.5)
        assert answer_immediately(served, request) is None
        for _ in range(200):
            speed.record_search(0.0001)
        assert answer_immediately(served, request) is not None
        assert len(ids(client.raw.searches.Search(request, timeout=TIMEOUT_S))) == 10


@pytest.mark.hot_path
def test_a_gallery_larger_than_memory_is_not_searched_twice(
    served: GatewayServer, one: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where items have to be read, a search on arrival is one for nothing."""
    tried: list[int] = []
    in_python = answering._answer_in_python

    def counted(*given: Any, may_read: bool) -> bytes | None:
        tried.append(len(tried))
        return in_python(*given, may_read=may_read)

    monkeypatch.setattr(answering, "_answer_in_python", counted)
    with Client(served.address) as client:
        request = asking(one, 7)
        expected = client.raw.searches.Search(request, timeout=TIMEOUT_S)
        tried.clear()
        with monkeypatch.context() as patch:
            patch.setattr(hosted_file, "MAX_CACHE_BYTES", 0)
            in_file(served).item_cache(one.space).forget(range(10 * COUNT))
            for _ in range(96):
                assert client.raw.searches.Search(request, timeout=TIMEOUT_S) == expected
        assert 5 <= len(tried) <= 20
        # Once its items are in memory, it is answered at once again.
        for _ in range(160):
            assert client.raw.searches.Search(request, timeout=TIMEOUT_S) == expected
        assert answer_immediately(served, request) is not None
