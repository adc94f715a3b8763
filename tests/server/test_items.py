"""Items by page and by filter, and what answers bring of them, over gRPC."""

from pathlib import Path

import numpy as np
import pytest

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries import hosted_file as cached
from nobackfill.server.galleries.hosted_file import ItemCache, cached_bytes
from nobackfill.v1 import gallery_pb2 as pb
from nobackfill.v1.types_pb2 import Filter
from tests.gallery import making
from tests.server.support import TIMEOUT_S, Client, ids, images, metadata, refused, scores, vector
from tests.server.test_filters import every, listed, where
from tests.support.blocks import png

COUNT = 40


def test_metadata_is_set_and_items_are_deleted(shared: Client, gallery: str) -> None:
    shared.put_images(images(6), gallery)
    some = ["i1", "i2", "nobody"]
    assert shared.set_metadata(gallery, {"tag": "x"}, ids=some) == 2
    tagged = {"tag": "x"}
    assert [item.id for item in shared.list(gallery, where=tagged)] == ["i1", "i2"]
    # A hit shows it at once.
    assert shared.find(images(6)[1], gallery, 1).hits[0].metadata == tagged
    assert shared.set_metadata(gallery, {"n": 7}, where=tagged, remove=["tag"]) == 2
    assert not list(shared.list(gallery, where=tagged))
    assert shared.delete(gallery, where={"n": 7.0}) == 2
    assert [item.id for item in shared.list(gallery)] == ["i0", "i3", "i4", "i5"]
    assert shared.delete(gallery, ["i0", "i1"]) == 1


@pytest.mark.parametrize("filtered", [Filter(), where(every())])
def test_a_filter_without_a_condition_changes_nothing(
    shared: Client, gallery: str, filtered: Filter
) -> None:
    shared.put_images(images(2), gallery)
    with refused(InvalidInputError, "filter"):
        shared.raw.galleries.DeleteItems(pb.DeleteItemsRequest(gallery=gallery, filter=filtered))
    with refused(InvalidInputError, "filter"):
        shared.raw.galleries.SetMetadata(pb.SetMetadataRequest(gallery=gallery, filter=filtered))
    with refused(InvalidInputError, "filter"):
        shared.delete(gallery, ["i0"], where={"a": ""})
    with refused(InvalidInputError, "filter"):
        shared.set_metadata(gallery, {})
    assert shared.count(gallery) == 2


def test_metadata_is_bounded_and_pages_end_early(shared: Client, gallery: str) -> None:
    large = [
        pb.PutItem(id=f"i{i}", image=png(image), metadata=metadata(text="ü" * 30_000))
        for i, image in enumerate(images(30))
    ]
    large.append(pb.PutItem(id="huge", image=png(images(1)[0]), metadata=metadata(t="x" * 65_530)))
    response = shared.raw.put(large, gallery)
    assert response.stored == 30
    (error,) = response.errors
    assert error.id == "huge" and "at most 65536 bytes" in error.message
    request = pb.ListItemsRequest(gallery=gallery, page_size=1000)
    page = shared.raw.galleries.ListItems(request, timeout=TIMEOUT_S)
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
        answer = shared.find(query, gallery, 20)
        assert ids(answer) == [f"i{i}" for i in order]
        assert scores(answer) == sorted(scores(answer), reverse=True)
        same = {(hit.distance, hit.score) for hit in answer.hits}
        assert len(same) == len({distance for distance, _ in same})
        return [hit.distance for hit in answer.hits]

    def option(exact: bool) -> pb.Gallery:
        return shared.update_gallery(gallery, exact_distances=exact)

    rounded = told()
    assert rounded == [np.float32(f"{distances[i]:.3g}") for i in order]
    assert option(True).exact_distances and shared.get_gallery(gallery).exact_distances
    assert told() == pytest.approx(distances[order], rel=1e-5)
    assert not option(False).exact_distances
    assert told() == rounded


def test_items_in_memory_are_bounded_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = NewVectors(making.spec().space, making.vectors(50, 1))
    texts = [{"text": "x" * (1000 * (n % 7)), "tags": ["y" * n] * 3} for n in range(50)]
    monkeypatch.setattr(cached, "MAX_CACHE_BYTES", 40_000)
    with SqliteGallery.create(tmp_path / "g.sqlite", making.spec()) as store:
        store.put(making.ids(50), [new], metadata=texts)
        cache = ItemCache(store, making.spec().space)
        store.subscribe(cache.on_change)
        for start in (0, 10, 20, 30, 40, 0):
            found = cache.get(range(start + 1, start + 11))
            assert [item and item.metadata for item in found] == texts[start : start + 10]
            held = [*cache._items.values()]
            assert 3 <= len(held) < 50
            assert sum(map(cached_bytes, held)) == cache._bytes <= 40_000
        store.delete(making.ids(10))
        assert cache.get(range(1, 11)) == [None] * 10
        assert sum(map(cached_bytes, cache._items.values())) == cache._bytes
