"""Items by page and by filter, and what answers bring of them, over gRPC."""

from pathlib import Path

import grpc
import numpy as np
import pytest

from nobackfill.gallery.store import Store
from nobackfill.gallery.writing import NewVectors
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries import items as cached
from nobackfill.server.galleries.items import ItemCache, size_of
from nobackfill.v1 import gallery_pb2 as pb
from nobackfill.v1.types_pb2 import Condition, Filter, Value
from tests.gallery import making
from tests.server.support import TIMEOUT_S, Client, ids, images, metadata, refusal, vector
from tests.server.test_filters import every, has, listed, where
from tests.support.blocks import png

COUNT = 40
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def test_metadata_is_set_and_items_are_deleted(shared: Client, gallery: str) -> None:
    shared.put_images(images(6), gallery)
    some_ids = pb.SetMetadataRequest(gallery=gallery, ids=["i1", "i2", "nobody"])
    some_ids.set["tag"].text = "x"
    assert shared.galleries.SetMetadata(some_ids, timeout=TIMEOUT_S).items == 2
    tagged = where(has("tag", "x"))
    assert listed(shared, gallery, filter=tagged) == ["i1", "i2"]
    # A hit shows it at once.
    assert dict(shared.search(images(6)[1], gallery, 1).hits[0].metadata) == metadata(tag="x")
    passing = pb.SetMetadataRequest(gallery=gallery, filter=tagged, remove=["tag"])
    passing.set["n"].integer = 7
    assert shared.galleries.SetMetadata(passing, timeout=TIMEOUT_S).items == 2
    assert not listed(shared, gallery, filter=tagged)
    seven = Filter(conditions=[Condition(key="n", equals=Value(number=7.0))])
    delete = pb.DeleteItemsRequest(gallery=gallery, filter=seven)
    assert shared.galleries.DeleteItems(delete, timeout=TIMEOUT_S).deleted == 2
    assert listed(shared, gallery) == ["i0", "i3", "i4", "i5"]
    by_ids = pb.DeleteItemsRequest(gallery=gallery, ids=["i0", "i1"])
    assert shared.galleries.DeleteItems(by_ids, timeout=TIMEOUT_S).deleted == 1


@pytest.mark.parametrize("filtered", [Filter(), where(every())])
def test_a_filter_without_a_condition_changes_nothing(
    shared: Client, gallery: str, filtered: Filter
) -> None:
    shared.put_images(images(2), gallery)
    delete = pb.DeleteItemsRequest(gallery=gallery, filter=filtered)
    change = pb.SetMetadataRequest(gallery=gallery, filter=filtered)
    both = pb.DeleteItemsRequest(gallery=gallery, ids=["i0"], filter=where(has("a", "")))
    neither = pb.SetMetadataRequest(gallery=gallery)
    for call in (
        lambda: shared.galleries.DeleteItems(delete, timeout=TIMEOUT_S),
        lambda: shared.galleries.DeleteItems(both, timeout=TIMEOUT_S),
        lambda: shared.galleries.SetMetadata(change, timeout=TIMEOUT_S),
        lambda: shared.galleries.SetMetadata(neither, timeout=TIMEOUT_S),
    ):
        code, sentence, _ = refusal(call)
        assert code is INVALID and "filter" in sentence
    assert listed(shared, gallery) == ["i0", "i1"]


def test_metadata_is_bounded_and_pages_end_early(shared: Client, gallery: str) -> None:
    large = [
        pb.PutItem(id=f"i{i}", image=png(image), metadata=metadata(text="ü" * 30_000))
        for i, image in enumerate(images(30))
    ]
    large.append(pb.PutItem(id="huge", image=png(images(1)[0]), metadata=metadata(t="x" * 65_530)))
    response = shared.put(large, gallery)
    assert response.stored == 30
    (error,) = response.errors
    assert error.id == "huge" and "at most 65536 bytes" in error.message
    request = pb.ListItemsRequest(gallery=gallery, page_size=1000)
    page = shared.galleries.ListItems(request, timeout=TIMEOUT_S)
    assert page.next_page_token and page.ByteSize() < 1 << 21
    assert listed(shared, gallery, page_size=1000) == [f"i{i}" for i in range(30)]


def test_distances_are_told_to_three_digits_unless_asked_otherwise(
    shared: Client, gallery: str, one: Manifest
) -> None:
    shared.put_images(images(COUNT), gallery)
    query = images(COUNT + 1)[COUNT]
    vectors = np.stack([vector(one, image) for image in images(COUNT)])
    distances = ((vectors - vector(one, query)) ** 2).sum(axis=1)
    order = np.argsort(distances, kind="stable")[:20]

    def told() -> list[float]:
        answer = shared.search(query, gallery, 20)
        assert ids(answer) == [f"i{i}" for i in order]
        scores = [hit.score for hit in answer.hits]
        assert scores == sorted(scores, reverse=True)
        same = {(hit.distance, hit.score) for hit in answer.hits}
        assert len(same) == len({distance for distance, _ in same})
        return [hit.distance for hit in answer.hits]

    def option(exact: bool) -> pb.Gallery:
        request = pb.UpdateGalleryRequest(name=gallery, exact_distances=exact)
        return shared.galleries.UpdateGallery(request, timeout=TIMEOUT_S).gallery

    rounded = told()
    assert rounded == [np.float32(f"{distances[i]:.3g}") for i in order]
    assert option(True).exact_distances and shared.gallery(gallery).exact_distances
    assert told() == pytest.approx(distances[order], rel=1e-5)
    assert not option(False).exact_distances
    assert told() == rounded


def test_items_in_memory_are_bounded_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = NewVectors(making.spec().space, making.vectors(50, 1))
    texts = [{"text": "x" * (1000 * (n % 7)), "tags": ["y" * n] * 3} for n in range(50)]
    monkeypatch.setattr(cached, "MOST_BYTES", 40_000)
    with Store.create(tmp_path / "g.sqlite", making.spec()) as store:
        store.put(making.ids(50), [new], metadata=texts)
        cache = ItemCache(store, making.spec().space)
        store.subscribe(cache.on_change)
        for start in (0, 10, 20, 30, 40, 0):
            found = cache.get(range(start + 1, start + 11))
            assert [item and item.metadata for item in found] == texts[start : start + 10]
            held = [*cache._items.values()]
            assert 3 <= len(held) < 50
            assert sum(map(size_of, held)) == cache._bytes <= 40_000
        store.delete(making.ids(10))
        assert cache.get(range(1, 11)) == [None] * 10
        assert sum(map(size_of, cache._items.values())) == cache._bytes
