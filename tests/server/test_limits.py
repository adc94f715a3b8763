"""What must not bring the gateway down: floods, giants, garbage, clients that stand still."""

import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from nobackfill.errors import InvalidInputError, NotFoundError, OutOfRangeError, TooLargeError
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import MAX_ITEMS_PER_MESSAGE, OpenStream, StallMonitor
from nobackfill.server.grpc.services import gallery as gallery_service
from nobackfill.server.grpc.services.gallery import LISTED_ERRORS
from nobackfill.v1 import gallery_pb2, release_pb2, search_pb2
from nobackfill.wire.connection import translate_errors
from tests.server.guarded import few_watches
from tests.server.support import Client, ids, images, random_id, refused, running
from tests.server.test_rules import METHODS
from tests.support.blocks import png


def bomb(width: int, height: int) -> bytes:
    """A small PNG whose header announces width x height pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(13_266, 13_266), (60_000, 60_000), (1, 30_000_000)])
def test_image_bombs_are_refused_from_the_header(
    shared: Client, gallery: str, size: tuple[int, int]
) -> None:
    with refused(InvalidInputError, "pixels"):
        shared.search(gallery, image=bomb(*size))


@pytest.mark.parametrize("mebibytes", [34, 64])
def test_oversized_requests_are_refused(shared: Client, gallery: str, mebibytes: int) -> None:
    query = search_pb2.Query(image=bytes(mebibytes * 2**20))
    # Gateway sends no image of this size.
    with refused(TooLargeError):
        shared.raw.ask(query, gallery)
    assert shared.get_gallery(gallery).items == 0


def test_a_request_above_grpcs_own_default_passes(shared: Client, gallery: str) -> None:
    big = png(images(1)[0]) + bytes(5 * 2**20)
    assert not shared.put(gallery, {"big": big})


OURS = [method for method in METHODS if method.startswith("/nobackfill")]


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("garbage", [b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05ab"])
def test_garbage_is_an_invalid_argument(shared: Client, method: str, garbage: bytes) -> None:
    call = shared.raw.channel.stream_stream(
        method, request_serializer=bytes, response_deserializer=bytes
    )
    with refused(InvalidInputError):
        list(call(iter([garbage]), timeout=30))


def test_deep_messages_are_refused(shared: Client) -> None:
    deep = b""
    for _ in range(200):
        deep = b"\x12" + bytes([len(deep) & 0x7F]) + deep if len(deep) < 100 else deep
    call = shared.raw.channel.unary_unary(
        "/nobackfill.v1.SearchService/Search",
        request_serializer=bytes,
        response_deserializer=bytes,
    )
    with pytest.raises((InvalidInputError, NotFoundError)), translate_errors("the gateway"):
        call(deep, timeout=30)


def test_overload_is_shed_and_passes(repo: Path, tmp_path: Path) -> None:
    with (
        running(repo, tmp_path / "data", max_calls=8) as gateway,
        Client(gateway.address) as client,
    ):
        client.create_gallery("g")
        client.put_images(images(20))
        queries = [search_pb2.Query(image=png(image)) for image in images(20)] * 10
        request = search_pb2.SearchBatchRequest(gallery="g", queries=queries)
        calls = [client.raw.searches.SearchBatch.future(request, timeout=60) for _ in range(80)]
        codes = Counter(call.code() for call in calls)
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert codes[grpc.StatusCode.OK] >= 8
        assert ids(client.find(images(20)[3]))[0] == "i3"


def test_idle_streams_are_bounded_and_searches_go_on(repo: Path, tmp_path: Path) -> None:
    with (
        few_watches() as sizes,
        running(repo, tmp_path / "data") as gateway,
        Client(gateway.address) as client,
    ):
        client.create_gallery("g")
        _fill_the_watches(client, sizes["watches"].capacity)


def _fill_the_watches(shared: Client, places: int) -> None:
    shared.put_images(images(3))
    watches = [
        shared.raw.releases.WatchReleases(release_pb2.WatchReleasesRequest(), timeout=60)
        for _ in range(places + 10)
    ]

    def first(watch: Iterator[release_pb2.WatchReleasesResponse]) -> grpc.StatusCode:
        try:
            next(watch)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    with ThreadPoolExecutor(len(watches)) as pool:
        codes = Counter(pool.map(first, watches))
    assert codes == {
        grpc.StatusCode.OK: places,
        grpc.StatusCode.RESOURCE_EXHAUSTED: 10,
    }
    for _ in range(20):
        assert ids(shared.find(images(3)[1]))[0] == "i1"
    for watch in watches:
        watch.cancel()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        again = shared.raw.releases.WatchReleases(release_pb2.WatchReleasesRequest(), timeout=30)
        code = first(again)
        again.cancel()
        if code is grpc.StatusCode.OK:
            return
        time.sleep(0.05)
    pytest.fail("streams were not freed")


class _Context:
    """The part of a call's context that StallMonitor uses."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


def _stream(context: _Context) -> OpenStream:
    return OpenStream(cast(Any, context), lambda: None, 60.0, checks_stop=True, drains_on_stop=True)


def test_a_client_that_stands_still_is_cut_and_a_slow_gateway_is_not() -> None:
    stalls = StallMonitor(Metrics(), patience_s=0.5)
    try:
        stuck, busy = _Context(), _Context()
        streams = [_stream(stuck), _stream(busy)]
        for stream in streams:
            stalls.watch(stream)

        def nothing_comes() -> Iterator[int]:
            yield 1
            stuck.cancelled.wait(30)

        assert list(stalls.watch_requests(nothing_comes(), streams[0])) == [1]
        assert stuck.cancelled.is_set()

        for _ in stalls.watch_requests(iter([1, 2]), streams[1]):
            time.sleep(1.2)
        assert not busy.cancelled.is_set()
    finally:
        stalls.close()


def test_fetching_files_resumes_and_stays_inside(shared: Client, gallery: str, repo: Path) -> None:
    def fetch(path: str, offset: int = 0) -> bytes:
        return b"".join(shared.fetch_file(path, offset))

    for path in ("timestamp.json", "1.root.json", "release-1.json", "embedder_1/1/model.onnx"):
        whole = (repo / path).read_bytes()
        assert fetch(path) == whole
        assert fetch(path, 10) == whole[10:]
        assert fetch(path, len(whole)) == b""
        with refused(OutOfRangeError):
            fetch(path, len(whole) + 1)
    (repo / "secret").write_text("nobody signed this")
    for path in ("secret", "embedder_9/1/model.onnx", "embedder_1", random_id(1)):
        with refused(NotFoundError):
            fetch(path)
    for path in ("../data/state.json", "/etc/passwd", "", "a//b", "embedder_1/../timestamp.json"):
        with refused(InvalidInputError):
            fetch(path)


def test_a_message_of_too_many_parts_is_refused_before_it_is_read(
    shared: Client, gallery: str
) -> None:
    """Tiny bad items, and tiny parts further down, 30 MiB of each."""
    put = shared.raw.channel.stream_stream("/nobackfill.v1.GalleryService/PutItems", bytes, bytes)
    search = shared.raw.channel.unary_unary("/nobackfill.v1.SearchService/Search", bytes, bytes)
    empty = b"\x0a\x00" * (15 * 2**20)
    # SearchRequest.query.embeddings.embeddings, each empty.
    nested = field(2, field(2, empty))
    with refused(TooLargeError, "10000 items"):
        list(put(iter([b"\x12\x00" * (15 * 2**20)]), timeout=60))
    with refused(TooLargeError, "10000 items"):
        search(nested, timeout=60)


def test_one_item_too_many_is_refused_however_small(shared: Client, gallery: str) -> None:
    """So few bytes that nobody counts their parts."""
    items = [gallery_pb2.PutItem()] * MAX_ITEMS_PER_MESSAGE
    assert shared.raw.put(items, gallery).refused == MAX_ITEMS_PER_MESSAGE
    with refused(TooLargeError, "10000 items"):
        shared.raw.put([*items, gallery_pb2.PutItem()], gallery)


def test_nothing_is_made_of_items_for_no_gallery(
    shared: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[gallery_pb2.PutItem] = []
    monkeypatch.setattr(gallery_service, "_put", made.append)
    with refused(NotFoundError):
        shared.raw.put([gallery_pb2.PutItem(id="a")], "nothing")
    assert not made


def field(number: int, content: bytes) -> bytes:
    """A field of bytes on the wire."""
    length, rest = b"", len(content)
    while rest > 0x7F:
        length += bytes([rest & 0x7F | 0x80])
        rest >>= 7
    return bytes([number << 3 | 2]) + length + bytes([rest]) + content


def test_the_first_refused_items_are_listed_and_all_are_counted(
    shared: Client, gallery: str
) -> None:
    bad = [gallery_pb2.PutItem(id=f"b{i}") for i in range(LISTED_ERRORS + 5)]
    response = shared.raw.put(bad, gallery)
    assert len(response.errors) == LISTED_ERRORS
    assert response.refused == LISTED_ERRORS + 5
    assert response.errors[0].id == "b0"
