"""PutItems, GetItem, DeleteItems: durable, idempotent, refused one by one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nobackfill.errors import AlreadyExistsError, InvalidInputError, NotFoundError, TooLargeError
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.release.manifest import Manifest
from nobackfill.v1 import gallery_pb2, types_pb2
from tests.server.support import (
    Client,
    embedding,
    ids,
    images,
    refused,
    running,
    side_info,
)
from tests.support.blocks import png


def image_item(name: str, seed: int) -> gallery_pb2.PutItem:
    return gallery_pb2.PutItem(id=name, image=png(images(1, seed)[0]))


def bare_item(name: str, one: Manifest, seed: int, *, side: bool = False) -> gallery_pb2.PutItem:
    image = images(1, seed)[0]
    vectors = gallery_pb2.Vectors(embedding=embedding(one, image))
    if side:
        vectors.side_info.CopyFrom(side_info(one, image))
    return gallery_pb2.PutItem(id=name, vectors=vectors)


def test_a_stream_acknowledges_what_is_durable(shared: Client, gallery: str) -> None:
    def requests() -> Iterator[gallery_pb2.PutItemsRequest]:
        for i in range(5):
            items = [image_item(f"i{i}-{j}", 10 * i + j) for j in range(3)]
            yield gallery_pb2.PutItemsRequest(gallery=gallery if i == 0 else "", items=items)

    answers = shared.raw.galleries.PutItems(requests(), timeout=60)
    assert [answer.stored for answer in answers] == [3, 6, 9, 12, 15]
    assert shared.get_gallery(gallery).items == 15


def test_the_same_again_changes_nothing(shared: Client, gallery: str) -> None:
    for _ in range(2):
        assert not shared.put_items(gallery, [image_item("a", 1), image_item("b", 2)])
    assert shared.get_gallery(gallery).items == 2


def test_other_content_replaces(shared: Client, gallery: str) -> None:
    shared.put_items(gallery, [image_item("a", 1)])
    shared.put_items(gallery, [image_item("a", 2)])
    hits = shared.find(images(1, 2)[0], gallery).hits
    assert [hit.id for hit in hits] == ["a"]
    assert hits[0].distance == pytest.approx(0, abs=1e-5)


def test_new_metadata_of_the_same_image_is_seen_at_once(shared: Client, gallery: str) -> None:
    image = png(images(1, 1)[0])
    for colour in ("red", "blue"):
        shared.put(gallery, {"a": image}, {"a": {"colour": colour}})
        hit = shared.search(gallery, image=image).hits[0]
        assert hit.metadata == shared.get(gallery, "a").metadata == {"colour": colour}


def test_the_same_image_without_metadata_keeps_what_it_has(shared: Client, gallery: str) -> None:
    image = png(images(1, 1)[0])
    shared.put(gallery, {"a": image}, {"a": {"colour": "red"}})
    shared.put(gallery, {"a": image})
    hit = shared.search(gallery, image=image).hits[0]
    assert hit.metadata == shared.get(gallery, "a").metadata == {"colour": "red"}


def test_the_last_of_an_id_in_one_message_wins(shared: Client, gallery: str) -> None:
    items = [image_item("a", 1), image_item("b", 2), image_item("a", 3)]
    assert not shared.put_items(gallery, items)
    assert shared.get_gallery(gallery).items == 2
    assert shared.find(images(1, 3)[0], gallery).hits[0].distance == pytest.approx(0, abs=1e-5)


def test_bare_vectors_are_found_like_images(shared: Client, gallery: str, one: Manifest) -> None:
    items = [bare_item("a", one, 1), bare_item("b", one, 2, side=True)]
    assert not shared.put_items(gallery, items)
    hit = shared.find(images(1, 2)[0], gallery).hits[0]
    assert hit.id == "b"
    assert hit.distance == pytest.approx(0, abs=1e-4)


def bad_items(one: Manifest) -> dict[str, gallery_pb2.PutItem]:
    wrong_space = bare_item("bad", one, 1)
    wrong_space.vectors.embedding.space = "sp-" + "1" * 64
    short = bare_item("bad", one, 1)
    short.vectors.embedding.values = short.vectors.embedding.values[:-4]
    nan = bare_item("bad", one, 1)
    nan.vectors.embedding.values = np.full(32, np.nan, "<f4").tobytes()
    not_unit = bare_item("bad", one, 1)
    not_unit.vectors.embedding.values = np.ones(32, "<f4").tobytes()
    wrong_side = bare_item("bad", one, 1, side=True)
    wrong_side.vectors.side_info.space = "ss-" + "1" * 64
    nan_side = bare_item("bad", one, 1, side=True)
    nan_side.vectors.side_info.values = np.full(16, np.inf, "<f4").tobytes()
    nan_metadata = image_item("bad", 1)
    nan_metadata.metadata["x"].number = float("nan")
    no_value = image_item("bad", 1)
    no_value.metadata["x"].CopyFrom(types_pb2.Value())
    return {
        "nothing": gallery_pb2.PutItem(id="bad"),
        "no id": gallery_pb2.PutItem(image=png(images(1)[0])),
        "long id": image_item("x" * 257, 1),
        "no image": gallery_pb2.PutItem(id="bad", image=b"GIF89a"),
        "wrong space": wrong_space,
        "short": short,
        "NaN": nan,
        "not unit": not_unit,
        "wrong side": wrong_side,
        "infinite side": nan_side,
        "NaN metadata": nan_metadata,
        "no value": no_value,
    }


def test_bad_items_are_named_and_the_others_stored(
    shared: Client, gallery: str, one: Manifest
) -> None:
    bad = bad_items(one)
    items = [image_item("first", 1), *bad.values(), image_item("last", 2)]
    answer = shared.raw.put(items, gallery)
    assert answer.stored == 2
    assert len(answer.errors) == len(bad)
    assert all(error.message for error in answer.errors)
    assert {hit.id for hit in shared.find(images(1, 1)[0], gallery, 10).hits} == {"first", "last"}


def test_two_galleries_in_one_stream_are_refused(shared: Client, gallery: str) -> None:
    requests = [gallery_pb2.PutItemsRequest(gallery=name) for name in (gallery, "other")]
    with refused(InvalidInputError):
        list(shared.raw.galleries.PutItems(iter(requests), timeout=30))


def test_deleted_items_are_gone(shared: Client, gallery: str) -> None:
    shared.put_items(gallery, [image_item("a", 1), image_item("b", 2)])
    assert shared.delete(gallery, ["a", "never"]) == 1
    assert ids(shared.find(images(1, 1)[0], gallery)) == ["b"]
    with refused(NotFoundError):
        shared.get(gallery, "a")
    with refused(TooLargeError):
        shared.delete(gallery, ["x"] * 10_001)


def test_get_item_names_its_spaces(shared: Client, gallery: str, one: Manifest) -> None:
    shared.put_items(gallery, [image_item("a", 1)])
    request = gallery_pb2.GetItemRequest(gallery=gallery, id="a")
    assert list(shared.raw.galleries.GetItem(request, timeout=30).spaces) == [one.space]


@pytest.mark.parametrize("name", ["", "Upper", "a b", "../x", "x" * 65, "é"])
def test_gallery_names(shared: Client, name: str) -> None:
    with refused(InvalidInputError):
        shared.create_gallery(name)


def test_a_gallery_is_made_once_listed_and_deleted(shared: Client, gallery: str) -> None:
    with refused(AlreadyExistsError):
        shared.create_gallery(gallery)
    shared.put_items(gallery, [image_item("a", 1)])
    assert gallery in {one.name for one in shared.list_galleries()}
    shared.delete_gallery(gallery)
    with refused(NotFoundError):
        shared.get_gallery(gallery)
    shared.create_gallery(gallery)
    assert shared.get_gallery(gallery).items == 0


def test_what_was_put_is_in_the_file(repo: Path, tmp_path: Path) -> None:
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(3))
    path = tmp_path / "data" / "galleries" / "g" / "gallery.sqlite"
    assert path.stat().st_mode & 0o077 == 0
    with SqliteGallery.open(path) as store:
        assert store.count() == 3
        item = store.get("i0")
        assert item is not None
        assert item.digest is not None


def test_an_image_is_not_kept(repo: Path, tmp_path: Path) -> None:
    canary = png(images(1, 77)[0])
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put("g", {"a": canary})
        client.find(images(1, 77)[0])
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file():
            assert canary[40:80] not in path.read_bytes(), path
