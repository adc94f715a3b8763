"""A gallery that asks both models after an upgrade: one ranking of carried and native items."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nobackfill.errors import InvalidInputError
from nobackfill.release.manifest import Manifest
from nobackfill.v1 import search_pb2
from nobackfill.wire.values import metadata_value_message
from tests.server.conftest import Stages
from tests.server.support import Client, ids, images, refused, running, vector
from tests.support import graphs, trials
from tests.support import postgres as servers
from tests.support.blocks import png, publish_block_release
from tests.support.waiting import wait_until

OLD, ALL = 24, 36
# Of the distance to the carried vector, of the old model's own, and beside both.
NEW, BEFORE, OFFSET = 0.3, 1.1, 0.05
MIDDLE = 0.2


def by_new(image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Release 2 by hand: another middle than release 1, so that the two tell images apart
    otherwise."""
    pixels = image.astype(np.float64).reshape(1, -1) / 255 - MIDDLE
    made = (pixels @ graphs.into_block(graphs.projection(graphs.BLOCK, 1), 2))[0]
    return np.asarray(made / np.linalg.norm(made))


def carried(one: Manifest, image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What an upgrade makes of an item of release 1: the same in the next block."""
    return np.roll(vector(one, image).astype(np.float64), graphs.BLOCK)


@pytest.fixture(params=["file", "postgresql", pytest.param("milvus", marks=pytest.mark.scale)])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str | None]:
    if request.param == "file":
        yield None
        return
    server: servers.Server = request.getfixturevalue("postgres")
    vectors = ""
    if request.param == "milvus":
        vectors = f"&vectors={request.getfixturevalue('milvus_address')}"
        from nobackfill.plugins.milvus import candidates

        # So that Milvus is asked, for all that there are few.
        monkeypatch.setattr(candidates, "SMALL", 10)
    with server.database() as url:
        yield f"{url}{vectors}"


@pytest.fixture
def repo(stages: Stages, tmp_path: Path) -> Path:
    """Release 1."""
    for name in ("keys", "drafts"):
        shutil.copytree(stages[1].parent / f"repo.{name}", tmp_path / f"repo.{name}")
    return shutil.copytree(stages[1], tmp_path / "repo")


def second(repo: Path) -> Manifest:
    """Publish release 2, which has weights for both."""
    with trials.near():
        return publish_block_release(repo, 2, [1], middle=MIDDLE, both=(NEW, BEFORE, OFFSET))


class Gallery:
    """By hand: which items there are, and which of them release 2 embedded itself."""

    def __init__(self, one: Manifest, two: Manifest) -> None:
        self.one, self.two, self.native = one, two, set[int]()
        self.old = np.stack([vector(one, image) for image in images(ALL)]).astype(float)
        self.carried = np.stack([carried(one, image) for image in images(ALL)])
        self.new = np.stack([by_new(image) for image in images(ALL)])
        self.count = OLD

    def order(self, old: NDArray[np.float64] | None, new: NDArray[np.float64]) -> list[str]:
        """`old`: None where the new model is alone."""
        apart = ((self.carried - new) ** 2).sum(1)
        if old is not None:
            apart = NEW * apart + BEFORE * ((self.old - old) ** 2).sum(1) + OFFSET
        rows = sorted(self.native)
        apart[rows] = ((self.new[rows] - new) ** 2).sum(1)
        return [f"i{i}" for i in np.argsort(apart[: self.count], kind="stable")]


def given(manifest: Manifest, values: NDArray[np.float64]) -> dict[str, list[float]]:
    return {manifest.space: values.tolist()}


@pytest.mark.long
def test_both_models_rank_what_was_carried(
    repo: Path, one: Manifest, tmp_path: Path, store: str | None
) -> None:
    served = {} if store is None else {"store": store}
    with running(repo, tmp_path / "data", **served) as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(ALL)[:OLD])
        client.update_gallery("g", both_models=True)
        # Nothing is carried yet.
        assert client.get_gallery("g").both_with == 0
        known = Gallery(one, second(repo))
        client.swap(2)
        assert client.get_gallery("g").both_with == 1
        check(client, known)
        client.put_images(images(ALL)[OLD:], first=OLD)
        known.native, known.count = set(range(OLD, ALL)), ALL
        check(client, known)
        client.put_images(images(ALL)[:2])
        known.native |= {0, 1}
        check(client, known)
        batches(client, known)
        nobody = search_pb2.SearchRequest(gallery="g", k=5)
        nobody.query.image = png(images(1, seed=9)[0])
        nobody.filter.conditions.add(key="shelf", equals=metadata_value_message("none"))
        assert not client.raw.searches.Search(nobody).hits

        # While the next release is carried, too, until its space answers.
        with trials.near():
            publish_block_release(repo, 3, [2], middle=MIDDLE)
        client.pause_upgrade("g")
        events = client.begin(3, "cutover")
        assert client.get_gallery("g").both_with == 1
        check(client, known)
        client.start_upgrade("g", 0)
        assert list(events)
        assert client.get_gallery("g").both_with == 0
        client.rollback(confirm=True)
        assert client.get_gallery("g").both_with == 1
        check(client, known)

        assert not client.update_gallery("g", both_models=False).both_models
        query = images(1, seed=9)[0]
        assert ids(client.find(query, k=ALL)) == known.order(None, by_new(query))
        assert client.update_gallery("g", both_models=True).both_with == 1
        # When nothing is left that was carried, the new model alone ranks.
        client.put_images(images(ALL))
        known.native = set(range(ALL))
        check(client, known)
        # With the space before gone, the new model is alone.
        client.retire()
        wait_until(lambda: client.get_gallery("g").both_with == 0, "asked after its end")
        assert client.get_gallery("g").both_models
        assert ids(client.find(query, k=ALL)) == known.order(None, by_new(query))


def check(client: Client, known: Gallery) -> None:
    """Queries by image, by an embedding of each, and of the new model alone."""
    for seed in (7, 8):
        first, second = images(2, seed=seed)
        old, new = vector(known.one, first).astype(float), by_new(second)
        for k in (3, 100):
            expected = known.order(vector(known.one, first).astype(float), by_new(first))
            assert ids(client.find(first, k=k)) == expected[:k]
            # As different images, so that each has its say.
            both = client.search("g", embeddings=given(known.one, old) | given(known.two, new), k=k)
            assert ids(both) == known.order(old, new)[:k]
            alone = client.search("g", embeddings=given(known.two, new), k=k)
            assert ids(alone) == known.order(None, new)[:k]
    shown = client.find(first, k=100).hits
    apart = {f"i{i}": ((v - by_new(first)) ** 2).sum() for i, v in enumerate(known.carried)}
    apart |= {f"i{i}": ((known.new[i] - by_new(first)) ** 2).sum() for i in known.native}
    # What is told is the distance in the space that answers.
    assert [hit.distance for hit in shown] == pytest.approx(
        [apart[hit.id] for hit in shown], rel=0.01, abs=1e-4
    )


def batches(client: Client, known: Gallery) -> None:
    """Several queries in one call, those that are none among them."""
    some = images(3, seed=11)
    old = search_pb2.Embeddings()
    old.embeddings.add(space=known.two.space, values=by_new(some[2]).astype("<f4").tobytes())
    old.embeddings.add(space=known.one.space, values=vector(known.one, some[2]).tobytes())
    short = search_pb2.Embeddings()
    short.embeddings.add(space=known.two.space, values=by_new(some[2]).astype("<f4").tobytes())
    short.embeddings.add(space=known.one.space, values=b"\0" * 8)
    queries = [
        search_pb2.Query(image=png(some[0])),
        search_pb2.Query(image=b"no image"),
        search_pb2.Query(embeddings=old),
        search_pb2.Query(embeddings=short),
        search_pb2.Query(image=png(some[1])),
    ]
    request = search_pb2.SearchBatchRequest(gallery="g", queries=queries, k=9)
    answers = client.raw.searches.SearchBatch(request).responses
    assert [bool(answer.error) for answer in answers] == [False, True, False, True, False]
    for answer, image in zip(
        [answers[0], answers[2], answers[4]], [some[0], some[2], some[1]], strict=True
    ):
        old_vector = vector(known.one, image).astype(float)
        assert ids(answer) == known.order(old_vector, by_new(image))[:9]


def test_a_query_that_is_none_is_refused(repo: Path, one: Manifest, tmp_path: Path) -> None:
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(4))
        client.update_gallery("g", both_models=True)
        two = second(repo)
        client.swap(2)
        new = by_new(images(1)[0])
        broken = given(one, np.full(graphs.DIM, np.nan)) | given(two, new)
        with refused(InvalidInputError):
            client.search("g", embeddings=broken)
        # A rollback ends it, and coming back begins it again.
        client.rollback(confirm=True)
        assert client.get_gallery("g").both_with == 0
        assert ids(client.find(images(1)[0], k=1)) == ["i0"]
        client.swap(2)
        assert client.get_gallery("g").both_with == 1
