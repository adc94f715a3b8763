"""Many small galleries in one gateway: a start opens each file once, and few are open at a time."""

import os
import shutil
import time
from pathlib import Path

import pytest

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.sqlite_file import FileConnections
from nobackfill.release.manifest import Manifest
from nobackfill.v1 import gallery_pb2
from tests.server.process import Served, serving
from tests.server.support import Client, embedding, ids, images, refused, running

# Beside them, files that the galleries may have open: at six each far fewer than all would take.
FEW, FEW_FILES = 300, 1200
MANY, MANY_FILES = 10_000, 4096
# Half a minute where two cores are free for it; three times that on a busy machine.
START_S = 90.0


def fill(repo: Path, data: Path, count: int) -> None:
    """Galleries g0, g1, ... of five items each."""
    with running(repo, data) as gateway, Client(gateway.address) as client:
        client.create_gallery("g0")
        client.put_images(images(5), "g0")
    for i in range(1, count):
        shutil.copytree(data / "galleries" / "g0", data / "galleries" / f"g{i}")


def serves_each(served: Served, one: Manifest, numbers: range, most: int) -> None:
    """Searched and put to, with no more than `most` files open."""
    with Client(served.address) as client:
        for i in numbers:
            query = embedding(one, images(5)[i % 5])
            assert ids(client.find_by(query, name=f"g{i}", k=1)) == [f"i{i % 5}"]
            client.put_images(images(1, seed=i + 1), f"g{i}", first=5)
            assert client.get_gallery(f"g{i}").items == 6
    assert len([*Path(f"/proc/{served.process.pid}/fd").iterdir()]) <= most


def listed(client: Client, size: int = 0) -> list[str]:
    """Names in the order of their pages."""
    request, names = gallery_pb2.ListGalleriesRequest(page_size=size), list[str]()
    while True:
        answer = client.raw.galleries.ListGalleries(request, timeout=60)
        assert not size or len(answer.galleries) <= size
        names += [gallery.name for gallery in answer.galleries]
        if not answer.next_page_token:
            return names
        request.page_token = answer.next_page_token


@pytest.mark.long
def test_hundreds_with_few_descriptors(repo: Path, tmp_path: Path, one: Manifest) -> None:
    data = tmp_path / "data"
    fill(repo, data, FEW)
    with serving(repo, data, "--triton=in-process", OPEN_FILES=str(FEW_FILES)) as served:
        serves_each(served, one, range(0, FEW, 13), FEW_FILES)
        assert served.stop() == 0


def test_a_start_opens_each_once_and_listing_none(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, opened, really = tmp_path / "data", [], FileConnections._open

    def counted(connections: FileConnections) -> None:
        opened.append(connections.path)
        really(connections)

    fill(repo, data, 40)
    monkeypatch.setattr("nobackfill.server.storage.max_open_galleries", lambda: 8)
    monkeypatch.setattr(FileConnections, "_open", counted)
    with running(repo, data) as gateway, Client(gateway.address) as client:
        assert len(opened) == len(set(opened)) == 40
        names = sorted(f"g{i}" for i in range(40))
        assert listed(client) == names
        assert listed(client, 7) == listed(client, 8) == listed(client, 40) == names
        assert gateway.metrics.count_gallery_items() == {(1, "active"): 200}
        assert len(opened) == 40


def test_pages_of_galleries(repo: Path, tmp_path: Path) -> None:
    """What comes and goes between two pages moves no other; the sizes are bounded."""
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        assert listed(client, 2) == []
        for name in ("a", "c", "e", "g"):
            client.create_gallery(name)
        calls = client.raw.galleries
        request = gallery_pb2.ListGalleriesRequest(page_size=2)
        first = calls.ListGalleries(request)
        assert [one.name for one in first.galleries] == ["a", "c"]
        client.create_gallery("b")
        client.create_gallery("d")
        client.delete_gallery("c")
        request.page_token = first.next_page_token
        assert [one.name for one in calls.ListGalleries(request).galleries] == ["d", "e"]
        everything = gallery_pb2.ListGalleriesRequest(page_size=5)
        assert calls.ListGalleries(everything).next_page_token == ""
        wrong = gallery_pb2.ListGalleriesRequest(page_size=1001)
        with refused(InvalidInputError):
            calls.ListGalleries(wrong)


@pytest.mark.faults
def test_ten_thousand(repo: Path, tmp_path: Path, one: Manifest) -> None:
    data = tmp_path / "data"
    fill(repo, data, MANY)
    began = time.monotonic()
    with serving(repo, data, "--triton=in-process", OPEN_FILES=str(MANY_FILES)) as served:
        seconds = time.monotonic() - began
        print(f"{MANY} galleries started in {seconds:.1f} s, load {os.getloadavg()[0]:.1f}")
        serves_each(served, one, range(0, MANY, 97), MANY_FILES)
        with Client(served.address) as client:
            assert len(listed(client, 1000)) == MANY
        assert served.stop() == 0
    assert seconds < START_S
