"""The client of all five services against a real gateway on the loopback."""

import hashlib
import inspect
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nobackfill.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    OutOfRangeError,
    PreconditionError,
    TooLargeError,
)
from nobackfill.gallery.filters import Range, TimeRange
from nobackfill.images import LARGEST_IMAGE_BYTES
from nobackfill.v1 import gallery_pb2, release_pb2, search_pb2, upgrade_pb2, vault_pb2
from nobackfill.wire import Gateway
from nobackfill.wire.answers import Image, Item, Status
from tests.server.conftest import publish_stage, stages_of_run
from tests.server.support import running
from tests.support import blocks

FILES = (search_pb2, gallery_pb2, release_pb2, upgrade_pb2, vault_pb2)
# Calls under another name than the contract's.
NAMES = {
    "PutItems": "put", "GetItem": "get", "ListItems": "list", "CountItems": "count",
    "DeleteItems": "delete", "ActivateRelease": "activate", "RollbackRelease": "rollback",
    "RetireRelease": "retire",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A gateway at release 1 with gallery `g` of `images` i0 to i11, its publication, and that
    publication with release 2."""

    gateway: Gateway
    images: list[Path]
    repo: Path
    second: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    top = tmp_path_factory.mktemp("wire")
    stages = stages_of_run(tmp_path_factory)
    repo = top / "served"
    shutil.copytree(stages[1], repo)
    images = blocks.write_pngs(top / "images", 12)
    with running(repo, top / "data") as served, Gateway(served.address) as gateway:
        gateway.create_gallery("g", exact_distances=True)
        noted = {f"i{n}": {"n": n} for n in range(12)}
        assert gateway.put("g", {f"i{n}": one for n, one in enumerate(images)}, noted) == {}
        yield Place(gateway, images, repo, stages[2])


def test_every_call_of_the_contract_is_there() -> None:
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                words = "".join(f"_{c.lower()}" if c.isupper() else c for c in method.name)
                name = NAMES.get(method.name, words.strip("_"))
                assert inspect.getdoc(getattr(Gateway, name)), method.name


def test_galleries(place: Place) -> None:
    gateway = place.gateway
    names = [f"more-{n}" for n in range(3)]
    for name in names:
        gateway.create_gallery(name)
    with pytest.raises(AlreadyExistsError):
        gateway.create_gallery("more-0")
    assert gateway.create_gallery("more-0", exact_distances=True, exist_ok=True).name == "more-0"
    assert not gateway.get_gallery("more-0").exact_distances
    assert {gallery.name for gallery in gateway.list_galleries()} >= {"g", *names}
    assert gateway.update_gallery("more-0", exact_distances=True).exact_distances
    assert gateway.get_gallery("more-0").exact_distances
    assert gateway.status("more-0") == Status(item_count=0, release=1)
    for name in names:
        gateway.delete_gallery(name)
    with pytest.raises(NotFoundError):
        gateway.delete_gallery("more-0")


def test_items(place: Place, tmp_path: Path) -> None:
    gateway, images = place.gateway, place.images
    gateway.create_gallery("items")
    ids = [f"a{n}" for n in range(250)]
    seen: list[int] = []
    data = images[0].read_bytes()
    put = (gallery_pb2.PutItem(id=name, image=data) for name in ids)
    assert gateway.put_items("items", put, seen.append) == {}
    assert seen == [100, 200, 250]
    assert [item.id for item in gateway.list("items")] == ids
    assert gateway.set_metadata("items", {"tags": ["sea"]}, ids=ids[:2], remove=["x"]) == 2
    assert gateway.get("items", "a1") == Item("a1", {"tags": ["sea"]}, "native")
    assert gateway.count("items", where={"tags": "sea"}) == 2
    assert gateway.delete("items", where={"tags": "sea"}) == 2
    assert gateway.delete("items", ["a2", "gone"]) == 1
    assert gateway.count("items") == 247
    with pytest.raises(NotFoundError):
        gateway.get("items", "a0")
    with pytest.raises(InvalidInputError, match="either ids or a filter"):
        gateway.delete("items", where={})
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(LARGEST_IMAGE_BYTES + 1)
    odd: dict[str, Image] = {"none": tmp_path / "none.png", "large": large, "good": images[1]}
    odd["text"] = b"no image"
    assert sorted(gateway.put("items", odd)) == ["large", "none", "text"]
    assert gateway.get("items", "good").id == "good"
    with pytest.raises(TooLargeError, match="smaller copy"):
        gateway.search("items", image=bytes(LARGEST_IMAGE_BYTES + 1))


def test_metadata_of_another_kind_is_refused_without_sending(place: Place) -> None:
    notes: dict[str, dict[str, str]] = {"odd": {"n": {"a": "b"}}}  # type: ignore[dict-item]
    for refusals in (
        place.gateway.put("g", {"odd": place.images[0]}, notes),
        place.gateway.put_texts("g", {"odd": "a text"}, notes),
    ):
        assert refusals["odd"].startswith("metadata 'n': expected a text, a number")
    with pytest.raises(InvalidInputError, match="neither"):
        place.gateway.set_metadata("g", {"n": 1})


def test_what_cannot_be_sent_is_refused_by_name(place: Place) -> None:
    """One such item ended the whole call, and those before it stayed stored."""
    gateway, half = place.gateway, "\ud800"
    gateway.create_gallery("unsendable")
    notes: dict[str, dict[str, Any]] = {
        "huge": {"n": 10**400}, "half": {"n": half}, "list": {"n": [half]}, "key": {half: 1},
        "number": {1: "a"}, "time": {"n": datetime(9999, 1, 1, tzinfo=UTC)},  # type: ignore[dict-item]
        "large": {"n": 2**64},
    }  # fmt: skip
    names, refused = ["first", *notes, half, "last"], {*notes, half} - {"large"}
    refusals = gateway.put("unsendable", dict.fromkeys(names, place.images[0]), notes)
    assert refusals.keys() == refused
    # This release embeds no texts: the gateway refuses the others.
    refusals = gateway.put_texts("unsendable", dict.fromkeys(names, "a text"), notes)
    assert {name for name in names if refusals[name].startswith(("metadata", "id"))} == refused
    assert [item.id for item in gateway.list("unsendable")] == ["first", "large", "last"]
    for where in ({"n": 10**400}, {"n": half}, {half: 1}, TimeRange("n", at_least=2**62)):
        with pytest.raises(InvalidInputError):
            gateway.count("unsendable", where=where)
        with pytest.raises(InvalidInputError):
            gateway.search("unsendable", image=place.images[0], where=where)
    with pytest.raises(InvalidInputError, match="largest float"):
        gateway.set_metadata("unsendable", {"n": -(10**400)}, ids=["first"])


def test_searches(place: Place) -> None:
    gateway, images = place.gateway, place.images
    alone = gateway.search("g", image=images[4], k=3)
    assert (alone.hits[0].id, alone.hits[0].metadata) == ("i4", {"n": 4})
    assert alone.hits[0].distance == pytest.approx(0, abs=1e-6)
    assert (alone.release, alone.space_end_time, alone.error) == (1, None, "")
    vector = np.eye(1, gateway.get_release(1).dim, dtype=np.float32)[0]
    answers = gateway.search_batch(
        "g", images=[images[4], b"no image"], embeddings=[{alone.space: list(vector)}], k=3
    )
    assert answers[0] == alone
    assert (answers[1].hits, bool(answers[1].error)) == ([], True)
    assert len(answers[2].hits) == 3
    few = gateway.search("g", image=images[4], k=9, where=Range("n", at_least=9), exact=True)
    assert {hit.id for hit in few.hits} == {"i9", "i10", "i11"}
    with pytest.raises(InvalidInputError, match="got both"):
        gateway.search("g", image=images[4], ef=9, exact=True)
    with pytest.raises(InvalidInputError, match="expected exactly one of image="):
        gateway.search("g")


def test_a_file_of_the_publication(place: Place) -> None:
    gateway = place.gateway
    data = b"".join(gateway.fetch_file("release-1.json"))
    assert b"".join(gateway.fetch_file("release-1.json", 10)) == data[10:]
    with pytest.raises(OutOfRangeError):
        list(gateway.fetch_file("release-1.json", len(data) + 1))
    with pytest.raises(NotFoundError):
        list(gateway.fetch_file("release-9.json"))


def test_the_vault(place: Place) -> None:
    gateway = place.gateway
    data = b"age-encryption.org/v1\n" + bytes(1000)
    blob = vault_pb2.Blob(id="0" * 64, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    assert gateway.put_blob(blob, [data[:400]]) == gateway.received_bytes(blob) == 400
    with pytest.raises(NotFoundError):
        list(gateway.get_blob(blob.id))
    assert gateway.put_blob(blob, [data[400:700], data[700:]], 400) == len(data)
    assert b"".join(gateway.get_blob(blob.id, 10)) == data[10:]
    assert list(gateway.list_blobs().blobs) == [blob]
    for _ in range(2):
        gateway.delete_blob(blob.id)
    assert not gateway.list_blobs().blobs


def test_a_release_comes_and_goes(place: Place) -> None:
    gateway, images = place.gateway, place.images
    with pytest.raises(PreconditionError):
        gateway.rollback()
    with pytest.raises(InvalidInputError, match="cutover, direct, dual, unspecified"):
        gateway.activate(2, rollout="at once")
    seen = gateway.watch_releases()
    assert [release.number for release in next(seen)] == [1]
    publish_stage(place.repo, place.second)
    assert [release.number for release in next(seen)] == [1, 2]
    assert gateway.estimate_upgrade("g", 2).items == 12
    phases = [report.phase for report in gateway.activate(2, rollout="cutover")]
    assert phases[-1] == release_pb2.PHASE_DONE
    assert gateway.search("g", image=images[4]).hits[0].origin == "upgraded"
    done = upgrade_pb2.UPGRADE_STATE_DONE
    assert [job.state for job in gateway.watch_upgrade("g", by_key="n")][-1] == done
    gateway.start_upgrade("g", 2, backfill={"i4": images[4]})
    list(gateway.watch_upgrade("g"))
    assert gateway.search("g", image=images[4]).hits[0].origin == "re-embedded"
    assert next(gateway.list("g", least_certain=True)).origin == "upgraded"
    back = gateway.rollback()
    assert (back.number, back.done) == (1, False)
    assert gateway.rollback(confirm=True, to=1).done
    assert gateway.status("g") == Status(item_count=12, release=1)
    assert list(gateway.activate(2))[-1].phase == release_pb2.PHASE_DONE
    assert list(gateway.retire()) == [1]


@pytest.mark.parametrize(
    "call",
    [
        lambda gateway: gateway.search("g", text="a"),
        lambda gateway: gateway.get("g", "a"),
        lambda gateway: gateway.list_releases(),
        lambda gateway: gateway.pause_upgrade("g"),
    ],
)
def test_a_closed_connection_refuses_its_first_call(call: Callable[[Gateway], object]) -> None:
    """grpcio crashed the process."""
    gateway = Gateway("127.0.0.1:1")
    gateway.close()
    with pytest.raises(ValueError, match="closed"):
        call(gateway)
