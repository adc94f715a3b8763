"""Edge against gateway: the same verbs, the same puts, upgrade and searches, the same answers.

The device follows the very gateway that it is compared with, over FetchFile.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nobackfill.client import Device, Gateway
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError, NotFoundError
from nobackfill.gallery.filters import AnyOf, Exists, Filter, Not, OneOf, Range, Scalar
from nobackfill.release.manifest import Manifest
from nobackfill.v1.release_pb2 import PHASE_DONE
from nobackfill.wire.answers import Answer, Hit, Image, Item, Status
from tests.server.support import running, vector
from tests.support import blocks, edge, releases

COUNT = 20
# What no float64 is.
BIG = 2**53 + 1
NOTED: dict[str, Scalar] = {"trip": "alps", "stars": 5, "raw": True, "big": BIG}
# Filters, and whether the one picture that has NOTED passes, alone.
FILTERED: dict[Filter, bool] = {
    Range("stars", greater_than=4, less_than=5.5): True,
    Range("big", at_least=BIG, at_most=BIG): True,
    Range("big", greater_than=BIG): False,
    OneOf("big", (BIG - 1, BIG + 1)): False,
    Not(Exists("stars")): False,
    AnyOf((OneOf("trip", ("sea",)), Not(Not(OneOf("raw", (True,)))))): True,
}
# What both have; a gateway's takes the gallery first.
VERBS = ("put", "search", "get", "list", "count", "delete", "status")


@dataclass(frozen=True)
class Gallery:
    """One gallery by its verbs, on a device or on a gateway."""

    of: Device | Gateway

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        if verb not in VERBS:
            raise AttributeError(verb)
        method = getattr(self.of, verb)
        return partial(method, "photos") if isinstance(self.of, Gateway) else method

    def __repr__(self) -> str:
        return type(self.of).__name__


@dataclass(frozen=True)
class Pair:
    """A device and a gateway, which it follows, that hold the same 20 images by the same ids."""

    device: Device
    gateway: Gateway
    repo: Path
    images: dict[str, Path]
    queries: list[Path]
    release: Manifest
    both: list[Gallery] = field(default_factory=list)


@pytest.fixture
def pair(world: edge.World, tmp_path: Path) -> Iterator[Pair]:
    repo = tmp_path / "pub" / "repo"
    world.publish(repo, 1)
    images = {path.name: path for path in blocks.write_pngs(tmp_path / "images", COUNT)}
    queries = blocks.write_pngs(tmp_path / "queries", 5, seed=6)
    with running(repo, tmp_path / "data") as served, Gateway(served.address) as gateway:
        # A device tells distances as they are.
        gateway.create_gallery("photos", exact_distances=True)
        source = f"grpc://{served.address}/"
        with Device.create(tmp_path / "gallery.sqlite", source, repo / "1.root.json") as device:
            both = [Gallery(device), Gallery(gateway)]
            given: dict[str, Image] = {name: path.read_bytes() for name, path in images.items()}
            for gallery in both:
                assert gallery.put(given) == {}
            release = blocks.manifest(repo, 1)
            yield Pair(device, gateway, repo, images, queries, release, both)


def seen(answer: Answer[Hit]) -> list[tuple[object, ...]]:
    """What must be the same; numbers as they are rounded on the way."""
    return [
        (h.id, pytest.approx(h.distance, abs=1e-5), h.release, h.origin, dict(h.metadata))
        for h in answer.hits
    ]


def agree(pair: Pair) -> list[Answer[Hit]]:
    """Both say the same of every query, item and count; the device's answers."""
    device, gateway = pair.both
    answers = []
    for query in pair.queries:
        mine, yours = device.search(image=query, k=7), gateway.search(image=query, k=7)
        assert seen(mine) == seen(yours)
        assert (mine.release, mine.space) == (yours.release, yours.space)
        scores = [[hit.score for hit in answer.hits] for answer in (mine, yours)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)
        beyond = [[hit.beyond_calibration for hit in answer.hits] for answer in (mine, yours)]
        assert beyond[0] == beyond[1]
        assert (mine.beyond_calibration, yours.beyond_calibration) == (all(beyond[0]),) * 2
        answers.append(mine)
    assert list(device.list()) == [as_known(item) for item in gateway.list()]
    assert device.count() == gateway.count()
    assert device.status() == gateway.status()
    return answers


def as_known(item: Item) -> Item:
    return Item(item.id, dict(item.metadata), item.origin, item.uncertainty)


@pytest.mark.parametrize("verb", VERBS)
def test_both_have_the_same_verbs(verb: str) -> None:
    """A device's takes what the gateway's takes, by the same names, after the gallery's."""
    mine = list(inspect.signature(getattr(Device, verb)).parameters)
    yours = list(inspect.signature(getattr(Gateway, verb)).parameters)
    assert [name for name in yours if name in mine] == mine
    assert yours[1] == "gallery"


def test_the_same_life_gives_the_same_answers(pair: Pair, world: edge.World) -> None:
    agree(pair)
    world.publish(pair.repo, 2)
    assert pair.device.sync().state == "upgraded"
    assert list(pair.gateway.activate(2))[-1].phase == PHASE_DONE
    assert {hit.origin for answer in agree(pair) for hit in answer.hits} == {"upgraded"}
    gone = list(pair.images)[3]
    for gallery in pair.both:
        assert gallery.delete([gone, "nothing"]) == 1
        assert gallery.status() == Status(COUNT - 1, 2)
    agree(pair)
    assert pair.device.rollback() == Status(COUNT - 1, 1)
    assert pair.gateway.rollback(confirm=True, to=1).done
    agree(pair)


def test_what_is_put_is_found_by_every_verb(pair: Pair) -> None:
    """Each alone, with the answers that are right, not only the same."""
    name, path = next(iter(pair.images.items()))
    for gallery in pair.both:
        data = path.read_bytes()
        assert gallery.put({"again": data}, {"again": NOTED}) == {}
        for key, value in NOTED.items():
            hits = gallery.search(image=path, where={key: value}).hits
            assert [hit.id for hit in hits] == ["again"], gallery
        for filtered, found in FILTERED.items():
            hits = gallery.search(image=path, k=1000, where=filtered).hits
            assert ([hit.id for hit in hits] == ["again"]) is found, (gallery, filtered)
            assert (gallery.count(where=filtered) == 1) is found, (gallery, filtered)
        assert as_known(gallery.get("again")) == Item("again", NOTED, "native")
        assert [item.id for item in gallery.list()] == [*pair.images, "again"]
        assert [item.id for item in gallery.list(where={"trip": "alps"})] == ["again"]
        # Put again with other content, it is another item of that id, and the last.
        other = pair.queries[0].read_bytes()
        assert gallery.put({name: other}) == {}
        assert gallery.search(image=other, k=1).hits[0].id == name
        assert [item.id for item in gallery.list()][-1] == name
        assert gallery.delete(["again"]) == 1
        assert list(gallery.put({"text": b"not an image"})) == ["text"]
        assert gallery.count() == COUNT
    agree(pair)


def test_an_embedding_is_a_query(pair: Pair) -> None:
    image = releases.images(1, 3)[0]
    query = list(map(float, vector(pair.release, image)))
    found = [one.search(embeddings={pair.release.space: query}, k=4) for one in pair.both]
    assert seen(found[0]) == seen(found[1])
    assert len(found[0].hits) == 4
    for gallery in pair.both:
        with pytest.raises(IncompatibleSpaceError):
            gallery.search(embeddings={"sp-" + "0" * 64: query})
        with pytest.raises(InvalidInputError):
            gallery.search(embeddings={pair.release.space: query[:-1]})


def test_both_refuse_alike(pair: Pair, tmp_path: Path) -> None:
    query = pair.queries[0]
    for gallery in pair.both:
        for wrong in (
            partial(gallery.search),
            partial(gallery.search, image=query, embeddings={}),
            partial(gallery.search, image=b"not an image"),
            partial(gallery.search, image=tmp_path / "none.png"),
            partial(gallery.search, image=query, k=1001),
        ):
            with pytest.raises(InvalidInputError):
                wrong()
        with pytest.raises(NotFoundError):
            gallery.get("nothing")
        assert list(gallery.put({"none": tmp_path / "none.png"})) == ["none"]
    with pytest.raises(NotFoundError):
        pair.gateway.search("nothing", image=query)
    with pytest.raises(NotFoundError, match="there is no gallery"):
        Device(tmp_path / "nothing.sqlite")
