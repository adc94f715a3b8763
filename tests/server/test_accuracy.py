"""How hard a search looks: by what was really asked, and as a request says."""

import numpy as np
import pytest
from numpy.typing import NDArray

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.release.manifest import Manifest
from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import gallery_pb2, search_pb2, types_pb2
from nobackfill.vectors import Vectors
from tests.server.support import TIMEOUT_S, Client, ids, in_file, refused
from tests.support import graphs
from tests.support.waiting import wait_until

COUNT, CLUSTERS, K = 2_500, 8, 10


@pytest.fixture(autouse=True)
def always_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gallery as small as this one would soon be searched exactly."""
    monkeypatch.setattr(hnsw, "_GRAPH_QUERY", 0)
    monkeypatch.setattr(hnsw, "_GRAPH_CANDIDATE", 0)


def unit(content: NDArray[np.float64]) -> Vectors:
    made: Vectors = (content / np.linalg.norm(content, axis=1, keepdims=True)).astype("<f4")
    return made


@pytest.fixture
def index(gateway: GatewayServer, client: Client, one: Manifest) -> ExactIndex:
    """Gallery g, tight clusters, with a graph; the same, exactly, by row."""
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((CLUSTERS, graphs.DIM))
    near = 0.05 * rng.standard_normal((COUNT, graphs.DIM))
    content = unit(centres[rng.integers(0, CLUSTERS, COUNT)] + near)
    client.create_gallery("g")
    vectors = (types_pb2.Embedding(space=one.space, values=row.tobytes()) for row in content)
    client.put_items(
        "g",
        (
            gallery_pb2.PutItem(id=f"i{row}", vectors=gallery_pb2.Vectors(embedding=vector))
            for row, vector in enumerate(vectors)
        ),
    )
    hosted = in_file(gateway)
    view = hosted.view(one.space)
    wait_until(hosted.index_path(one.space).exists, "no graph")
    assert isinstance(view.snapshot().base.index, hnsw.HnswIndex)
    return ExactIndex(view.spec, np.arange(COUNT), content)


def recall(
    client: Client,
    one: Manifest,
    index: ExactIndex,
    queries: Vectors,
    ef: int | None = None,
    *,
    exact: bool = False,
) -> float:
    """Recall at 10 of the gateway, asked one query after another."""
    true = index.search(queries, K).labels
    found = 0
    for query, labels in zip(queries, true, strict=True):
        brought = {one.space: query.tolist()}
        answer = client.search("g", embeddings=brought, k=K, ef=ef, exact=exact)
        found += len({*ids(answer)} & {f"i{label}" for label in labels})
    return found / (K * len(queries))


def test_queries_of_another_distribution_are_answered_once_some_were_asked(
    gateway: GatewayServer, client: Client, one: Manifest, index: ExactIndex
) -> None:
    queries = unit(np.random.default_rng(2).standard_normal((200, graphs.DIM)))
    view = in_file(gateway).view(one.space)
    base = view.snapshot().base.index
    assert isinstance(base, hnsw.HnswIndex)
    before = base.ef
    first = recall(client, one, index, queries[:40])

    def ef() -> int:
        found = view.snapshot().base.index
        assert isinstance(found, hnsw.HnswIndex)
        return found.ef

    wait_until(lambda: ef() > before, f"not tuned: recall {first}, ef {before}")
    later = recall(client, one, index, queries[40:])
    assert first < 0.95 <= later


def test_a_request_says_how_hard_to_look(
    gateway: GatewayServer, client: Client, one: Manifest, index: ExactIndex
) -> None:
    queries = unit(np.random.default_rng(3).standard_normal((30, graphs.DIM)))
    view = in_file(gateway).view(one.space)
    plain = recall(client, one, index, queries[:10])
    seen = view.query_sample.count
    wide = recall(client, one, index, queries, 1500)
    assert plain < 1 and wide >= 0.99
    assert recall(client, one, index, queries, exact=True) == 1
    # What a request looks harder for says nothing about the others.
    assert view.query_sample.count == seen == 10
    assert recall(client, one, index, queries[:3], 4096) == 1
    brought = [{one.space: query.tolist()} for query in queries]
    with refused(InvalidInputError, "got both"):
        client.search("g", embeddings=brought[0], exact=True, ef=9)
    with refused(InvalidInputError, "expected 1 to 4096, got 5000"):
        client.search("g", embeddings=brought[0], ef=5000)
    answers = client.search_batch("g", embeddings=brought, k=K, exact=True)
    true = index.search(queries, K).labels
    assert [ids(answer) for answer in answers] == [
        [f"i{label}" for label in labels] for labels in true
    ]


@pytest.mark.parametrize("ef", [0, 4097, 2**32 - 1])
def test_an_ef_out_of_range_is_refused(shared: Client, one: Manifest, ef: int) -> None:
    shared.create_gallery(f"accuracy-{ef}")
    vector = np.eye(1, graphs.DIM, dtype="<f4").tobytes()
    embedding = types_pb2.Embedding(space=one.space, values=vector)
    request = search_pb2.SearchRequest(
        gallery=f"accuracy-{ef}",
        query=search_pb2.Query(embeddings=search_pb2.Embeddings(embeddings=[embedding])),
        accuracy=search_pb2.Accuracy(ef=ef),
    )
    with refused(InvalidInputError, f"expected 1 to 4096, got {ef}"):
        shared.raw.searches.Search(request, timeout=TIMEOUT_S)
