"""Edge against gateway: the same puts, upgrade and searches give the same answers.

The device follows the very gateway that it is compared with, over FetchFile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from nobackfill.client.device import Device
from nobackfill.client.photos.search import Search
from nobackfill.errors import NotFoundError
from nobackfill.gallery.filters import AnyOf, Exists, Filter, Not, OneOf, Range, Scalar
from nobackfill.wire.gateway import Gateway
from tests.server.support import Client, running
from tests.support import blocks, edge

# (file name, distance, score, release, origin) of each hit.
Hits = list[tuple[str, float, float, int, str]]
# What no float64 is.
BIG = 2**53 + 1
# Filters, and whether the one picture that has `stars` passes, alone.
FILTERED: dict[Filter, bool] = {
    Range("stars", greater_than=4, less_than=5.5): True,
    Range("big", at_least=BIG, at_most=BIG): True,
    Range("big", greater_than=BIG): False,
    OneOf("big", (BIG - 1, BIG + 1)): False,
    Not(Exists("stars")): False,
    AnyOf((OneOf("trip", ("sea",)), Not(Not(OneOf("raw", (True,)))))): True,
}


@dataclass(frozen=True)
class Pair:
    """A gateway and a device that hold the same 20 images, and 5 queries."""

    address: str
    gallery: Path
    repo: Path
    images: Sequence[Path]
    queries: Sequence[Path]

    def ask_gateway(self) -> list[Hits]:
        with Gateway(self.address) as gateway:
            answers = [gateway.search("photos", image=query, k=7) for query in self.queries]
        return [
            [(h.id, h.distance, h.score or 0, h.release, h.origin) for h in answer.hits]
            for answer in answers
        ]

    def ask_device(self) -> list[Hits]:
        with Device(self.gallery) as device:
            answers = Search(device, {}).by_images(list(self.queries), 7)
        return [
            [
                (Path(h.path).name, h.distance, h.score or 0, h.release, h.origin)
                for h in answer.hits
            ]
            for answer in answers
        ]


@pytest.fixture
def pair(world: edge.World, tmp_path: Path) -> Iterator[Pair]:
    repo = tmp_path / "pub" / "repo"
    world.publish(repo, 1)
    images = blocks.write_pngs(tmp_path / "images", 20)
    queries = blocks.write_pngs(tmp_path / "queries", 5, seed=6)
    with running(repo, tmp_path / "data") as gateway:
        source = f"grpc://{gateway.address}"
        gallery = edge.make_device(repo, tmp_path / "gallery.sqlite", source)
        assert edge.fill(gallery, tmp_path / "images") == 20
        with Gateway(gateway.address) as app:
            # A device tells distances as they are.
            app.create_gallery("photos", exact_distances=True)
            assert app.put("photos", {path.name: path for path in images}) == {}
        yield Pair(gateway.address, gallery, repo, images, queries)


def agree(one: list[Hits], other: list[Hits]) -> None:
    for mine, yours in zip(one, other, strict=True):
        assert [(h[0], h[3], h[4]) for h in mine] == [(h[0], h[3], h[4]) for h in yours]
        for column in (1, 2):
            assert [h[column] for h in mine] == pytest.approx([h[column] for h in yours], abs=1e-5)


def test_the_same_life_gives_the_same_answers(pair: Pair, world: edge.World) -> None:
    agree(pair.ask_device(), pair.ask_gateway())
    world.publish(pair.repo, 2)
    assert edge.follow(pair.gallery).state == "upgraded"
    with Client(pair.address) as client:
        client.activate(2)
        assert client.gallery("photos").release == 2
    after = pair.ask_device()
    assert {hit[4] for hits in after for hit in hits} == {"upgraded"}
    agree(after, pair.ask_gateway())
    with Device(pair.gallery) as device, Gateway(pair.address) as app:
        gone = pair.images[3].name
        item = next(i for i in device.store.listing() if i.metadata["name"] == gone)
        device.store.delete([item.id])
        assert app.delete("photos", [gone]) == 1
    agree(pair.ask_device(), pair.ask_gateway())


def test_the_app_client_filters_and_names_what_is_missing(pair: Pair) -> None:
    with Gateway(pair.address) as app:
        noted: dict[str, dict[str, Scalar]] = {
            "again": {"trip": "alps", "stars": 5, "raw": True, "big": BIG}
        }
        assert app.put("photos", {"again": pair.images[0]}, noted) == {}
        for key, value in noted["again"].items():
            data = pair.images[0].read_bytes()
            hits = app.search("photos", image=data, where={key: value}).hits
            assert [hit.id for hit in hits] == ["again"]
        for filtered, found in FILTERED.items():
            hits = app.search("photos", image=pair.images[0], k=1000, where=filtered).hits
            assert ([hit.id for hit in hits] == ["again"]) is found
        refused = app.put("photos", {"text": b"not an image"})
        assert list(refused) == ["text"]
        with pytest.raises(NotFoundError):
            app.search("nothing", image=pair.images[0])
