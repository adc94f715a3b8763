"""Pictures that are damaged, make no vector, or cost too much: their own trouble, nobody else's."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from PIL import Image

from nobackfill.errors import InvalidInputError, TooLargeError
from nobackfill.server.embedding import embedding
from nobackfill.v1 import gallery_pb2, search_pb2
from tests.server.support import Client, ids, images, refused, running
from tests.support import pictures
from tests.support.blocks import png, publish_block_release
from tests.support.waiting import wait_until

BLACK = png(np.zeros((8, 8, 3), np.uint8))


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A gateway whose embedder makes nothing of a black picture; its gallery g holds 20 others."""
    folder = tmp_path_factory.mktemp("blind")
    publish_block_release(folder / "repo", 1, middle=0.0)
    with running(folder / "repo", folder / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(20))
        yield client


def test_a_picture_without_a_vector_fails_nobody_else(blind: Client) -> None:
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            with refused(InvalidInputError):
                blind.search("g", image=BLACK)

    def ask(row: int) -> list[str]:
        return ids(blind.find(images(20)[row % 20]))[:1]

    with ThreadPoolExecutor(6) as pool:
        disturbing = [pool.submit(disturb) for _ in range(2)]
        try:
            answers = list(pool.map(ask, range(200)))
        finally:
            stop.set()
        for one in disturbing:
            one.result()
    assert answers == [[f"i{row % 20}"] for row in range(200)]


def test_in_a_batch_it_is_one_querys_error(blind: Client) -> None:
    good = [png(image) for image in images(3)]
    contents = [good[0], BLACK, good[1], b"no image", good[2]]
    answers = blind.search_batch("g", images=contents, k=1)
    assert [ids(answer) for answer in answers] == [["i0"], [], ["i1"], [], ["i2"]]
    assert [bool(answer.error) for answer in answers] == [False, True, False, True, False]
    assert "single colour" in answers[1].error
    assert "expected a JPEG, PNG, WebP" in answers[3].error
    assert [bool(answer.error) for answer in blind.search_batch("g", images=[BLACK])] == [True]


def test_in_a_message_of_items_it_is_one_items_error(blind: Client) -> None:
    blind.create_gallery("put")
    exif = pictures.exif(1).tobytes()
    tiny = Image.fromarray(images(1, 5)[0])
    items = {
        "black": BLACK,
        "torn": pictures.KINDS["jpeg"][:200],
        "exif": pictures.encoded(tiny, "JPEG", exif=exif[: len(exif) // 2]),
        **{f"good{i}": png(image) for i, image in enumerate(images(3))},
        "black again": BLACK,
    }
    assert blind.put("put", items).keys() == {"black", "torn", "black again"}
    assert blind.get_gallery("put").items == 4


def test_in_a_backfill_it_is_one_images_error(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    publish_block_release(repo, 1, middle=0.0)
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(4))
        publish_block_release(repo, 2, [1], middle=0.0)
        client.swap(2)
        sent = {f"i{i}": png(image) for i, image in enumerate(images(4))}
        with refused(
            InvalidInputError, "1 of 4 images were refused, the others are re-embedded: i2: "
        ) as caught:
            client.start_upgrade("g", 0, backfill=sent | {"i2": BLACK})
        assert "single colour" in str(caught.value)
        assert client.start_upgrade("g", 0).re_embedded == 3


def test_cut_exif_is_no_reason_to_refuse_a_query(shared: Client, gallery: str) -> None:
    shared.put_images(images(2), gallery)
    image = Image.fromarray(np.kron(images(2)[0], np.ones((8, 8, 1), np.uint8)))
    exif = pictures.exif(1).tobytes()
    for length in range(6, len(exif), 5):
        query = pictures.encoded(image, "JPEG", exif=exif[:length])
        assert ids(shared.search(gallery, image=query, k=1)) == ["i0"]


def test_what_a_message_cannot_afford_is_refused_by_name(
    shared: Client, gallery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "MAX_DECODE_COST", 5 * 3 * 64)
    items = [gallery_pb2.PutItem(id=f"a{i % 7}", image=png(images(1, i)[0])) for i in range(9)]
    answer = shared.raw.put(items, gallery)
    assert answer.stored == 5
    assert [error.id for error in answer.errors] == ["a5", "a6", "a0", "a1"]
    assert "fewer images" in answer.errors[0].message


@pytest.mark.long
def test_batches_of_large_pictures_free_their_threads(shared: Client, gallery: str) -> None:
    """Their clients go after a second; all other calls are answered during it and after it."""
    shared.put_images(images(3), gallery)
    large = search_pb2.Query(image=pictures.blank_png(4000, 4000))
    request = search_pb2.SearchBatchRequest(gallery=gallery, queries=[large] * 41)
    too_large = search_pb2.SearchBatchRequest(gallery=gallery, queries=[large] * 256)
    with refused(TooLargeError, "smaller copies"):
        shared.raw.searches.SearchBatch(too_large, timeout=60)
    flood = [shared.raw.searches.SearchBatch.future(request, timeout=2) for _ in range(8)]
    time.sleep(0.5)
    assert ids(shared.find(images(3)[1], gallery))[0] == "i1"
    codes = [call.code() for call in flood]
    assert set(codes) <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert 1 <= codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) <= 5
    # Nothing is decoded for them any more, beyond the pictures that were at hand.
    small = search_pb2.SearchBatchRequest(gallery=gallery, queries=[large] * 6)
    wait_until(lambda: admitted(shared, small), "the threads are free again")


def admitted(client: Client, request: search_pb2.SearchBatchRequest) -> bool:
    try:
        return bool(client.raw.searches.SearchBatch(request, timeout=30).responses)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return False


def test_a_gallery_file_is_not_touched_by_refused_items(blind: Client, tmp_path: Path) -> None:
    blind.create_gallery("untouched")
    assert len(blind.put("untouched", {f"b{i}": BLACK for i in range(70)})) == 70
    assert blind.get_gallery("untouched").items == 0
