"""Search: by image and by embedding, filters, batches, and every refusal."""

import re
import struct
from collections.abc import Sequence

import grpc
import numpy as np
import pytest

from nobackfill.errors import (
    IncompatibleSpaceError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    TooLargeError,
)
from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries.hosted_file import ItemCache
from nobackfill.v1 import search_pb2, types_pb2
from tests.server.support import (
    Client,
    embedding,
    ids,
    images,
    refused,
    scores,
    vector,
)
from tests.support.blocks import png

COUNT = 60


@pytest.fixture(scope="module")
def filled(shared: Client) -> str:
    """A gallery of COUNT images with metadata, on the shared gateway."""
    shared.create_gallery("filled")
    notes = {
        f"i{i}": {"number": i, "colour": ("red", "blue")[i % 2], "odd": bool(i % 2)}
        for i in range(COUNT)
    }
    pictures = {f"i{i}": png(image) for i, image in enumerate(images(COUNT))}
    assert not shared.put("filled", pictures, notes)
    return "filled"


def nearest(one: Manifest, query: int, k: int, allowed: set[int] | None = None) -> list[str]:
    """The oracle: exact distances by hand."""
    vectors = np.stack([vector(one, image) for image in images(COUNT)])
    distances = ((vectors - vectors[query]) ** 2).sum(axis=1)
    order = [i for i in np.argsort(distances, kind="stable") if allowed is None or i in allowed]
    return [f"i{i}" for i in order[:k]]


@pytest.mark.parametrize("k", [1, 7, COUNT, 1000])
def test_image_and_embedding_agree_with_exact_search(
    shared: Client, filled: str, one: Manifest, k: int
) -> None:
    for query in (0, 17):
        image = images(COUNT)[query]
        expected = nearest(one, query, k)
        by_image = shared.find(image, filled, k)
        by_embedding = shared.find_by(embedding(one, image), name=filled, k=k)
        assert ids(by_image) == ids(by_embedding) == expected
        assert by_image.space == one.space
        distances = [hit.distance for hit in by_image.hits]
        assert distances == sorted(distances)
        assert scores(by_image) == sorted(scores(by_image), reverse=True)


def test_k_0_means_10(shared: Client, filled: str) -> None:
    assert len(shared.find(images(1)[0], filled, 0).hits) == 10


def test_hits_carry_metadata(shared: Client, filled: str) -> None:
    hit = shared.find(images(COUNT)[3], filled, 1).hits[0]
    assert hit.metadata == {"number": 3, "colour": "blue", "odd": True}


def condition(key: str, **test: object) -> types_pb2.Condition:
    return types_pb2.Condition(key=key, **test)  # type: ignore[arg-type]


VALUE = types_pb2.Value
FILTERS = [
    ([condition("colour", equals=VALUE(text="red"))], set(range(0, COUNT, 2))),
    ([condition("odd", equals=VALUE(flag=True))], set(range(1, COUNT, 2))),
    ([condition("odd", equals=VALUE(number=1))], set()),
    ([condition("number", range=types_pb2.Condition.Range(at_least=10, less_than=13))],
     {10, 11, 12}),
    ([condition("number", one_of=types_pb2.Condition.OneOf(
        values=[VALUE(number=4), VALUE(number=9), VALUE(number=999)]))], {4, 9}),
    ([condition("number", range=types_pb2.Condition.Range(at_least=50)),
      condition("colour", equals=VALUE(text="blue"))], set(range(51, COUNT, 2))),
    ([condition("missing", equals=VALUE(text="x"))], set()),
]  # fmt: skip


@pytest.mark.parametrize(("conditions", "allowed"), FILTERS)
def test_filters(
    shared: Client,
    filled: str,
    one: Manifest,
    conditions: list[types_pb2.Condition],
    allowed: set[int],
) -> None:
    request = search_pb2.SearchRequest(
        gallery=filled,
        query=search_pb2.Query(image=png(images(COUNT)[5])),
        k=8,
        filter=types_pb2.Filter(conditions=conditions),
    )
    assert ids(shared.raw.searches.Search(request, timeout=30)) == nearest(one, 5, 8, allowed)


def test_a_batch_answers_in_order(shared: Client, filled: str, one: Manifest) -> None:
    pictures = images(COUNT)
    queries = [search_pb2.Query(image=png(pictures[i])) for i in (5, 50)]
    by = search_pb2.Embeddings(embeddings=[embedding(one, pictures[30])])
    # Gateway sends images first.
    queries.insert(1, search_pb2.Query(embeddings=by))
    request = search_pb2.SearchBatchRequest(gallery=filled, queries=queries, k=2)
    answer = shared.raw.searches.SearchBatch(request, timeout=30)
    assert [ids(one)[0] for one in answer.responses] == ["i5", "i30", "i50"]


def test_an_item_deleted_while_it_is_found_makes_room_for_the_next(
    shared: Client, gallery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.put_images(images(20), gallery)
    before = ids(shared.find(images(20)[0], gallery, 6))
    doomed, read = [before[1]], ItemCache.get

    def delete_then_read(cache: ItemCache, labels: Sequence[int]) -> list[StoredItem | None]:
        """The moment between finding and reading, made wide enough for a deletion."""
        if doomed:
            assert shared.delete(gallery, [doomed.pop()]) == 1
        return read(cache, labels)

    monkeypatch.setattr(ItemCache, "get", delete_then_read)
    after = ids(shared.find(images(20)[0], gallery, 5))
    assert after == [before[0], *before[2:]]


def test_an_empty_gallery_has_no_hits(shared: Client, gallery: str) -> None:
    assert shared.find(images(1)[0], gallery).hits == []


def unit(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def bad_queries(space: str) -> dict[str, search_pb2.Query]:
    def by(values: bytes, of: str = space) -> search_pb2.Query:
        one = types_pb2.Embedding(space=of, values=values)
        return search_pb2.Query(embeddings=search_pb2.Embeddings(embeddings=[one]))

    good = unit([1.0] + [0.0] * 31)
    twice = by(good)
    twice.embeddings.embeddings.add(space=space, values=good)
    return {
        "nothing": search_pb2.Query(),
        "no embedding": search_pb2.Query(embeddings=search_pb2.Embeddings()),
        "empty image": search_pb2.Query(image=b""),
        "not an image": search_pb2.Query(image=b"%PDF-1.7 nothing to see"),
        "half an image": search_pb2.Query(image=png(images(1)[0])[:60]),
        "short": by(good[:-4]),
        "long": by(good + bytes(4)),
        "not whole": by(good[:-1]),
        "empty": by(b""),
        "NaN": by(unit([float("nan")] + [0.0] * 31)),
        "infinite": by(unit([float("inf")] + [0.0] * 31)),
        "huge": by(unit([3e38] * 32)),
        "zero": by(unit([0.0] * 32)),
        "not unit": by(unit([2.0] + [0.0] * 31)),
        "twice": twice,
    }


@pytest.mark.parametrize("name", bad_queries(""))
def test_bad_queries_are_refused(shared: Client, filled: str, one: Manifest, name: str) -> None:
    query = bad_queries(one.space)[name]
    with refused(InvalidInputError) as caught:
        shared.raw.ask(query, filled)
    assert re.search("expected|cannot", str(caught.value))


def test_a_bad_query_leaves_its_neighbours_alone(
    shared: Client, filled: str, one: Manifest
) -> None:
    """Queries that arrive together are answered together; one that is refused hurts no other."""
    good = search_pb2.SearchRequest(
        gallery=filled,
        query=search_pb2.Query(
            embeddings=search_pb2.Embeddings(embeddings=[embedding(one, images(COUNT)[7])])
        ),
        k=1,
    )
    bad = search_pb2.SearchRequest(gallery=filled, query=bad_queries(one.space)["NaN"], k=1)
    for _ in range(20):
        calls = [
            shared.raw.searches.Search.future(bad if i % 4 == 0 else good, timeout=30)
            for i in range(16)
        ]
        for i, call in enumerate(calls):
            if i % 4 == 0:
                assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
            else:
                assert ids(call.result()) == ["i7"]


def test_an_unknown_space_is_incompatible(shared: Client, filled: str) -> None:
    stranger = types_pb2.Embedding(space="sp-" + "0" * 64, values=unit([1.0] + [0.0] * 31))
    with refused(IncompatibleSpaceError):
        shared.find_by(stranger, name=filled)


@pytest.mark.parametrize("k", [1001, 10**9])
def test_k_has_a_bound(shared: Client, filled: str, k: int) -> None:
    with refused(InvalidInputError):
        shared.find(images(1)[0], filled, k)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, InvalidInputError), (257, TooLargeError)],
)
def test_batches_have_bounds(
    shared: Client, filled: str, count: int, expected: type[NobackfillError]
) -> None:
    with refused(expected):
        shared.search_batch(filled, images=[b"x"] * count)


def test_an_unknown_gallery_is_not_found(shared: Client) -> None:
    with refused(NotFoundError, "nowhere"):
        shared.find(images(1)[0], "nowhere")


@pytest.mark.parametrize(
    "bad",
    [
        types_pb2.Condition(key="number"),
        condition("number", equals=VALUE()),
        condition("number", equals=VALUE(number=float("nan"))),
        condition("number", range=types_pb2.Condition.Range(at_least=float("nan"))),
    ],
)
def test_bad_filters_are_refused(shared: Client, filled: str, bad: types_pb2.Condition) -> None:
    request = search_pb2.SearchRequest(
        gallery=filled,
        query=search_pb2.Query(image=png(images(1)[0])),
        filter=types_pb2.Filter(conditions=[bad]),
    )
    with refused(InvalidInputError):
        shared.raw.searches.Search(request, timeout=30)
