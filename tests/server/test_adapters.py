"""A gateway searches old vectors by queries of a new release, through the release's query adapter.

Blocks of two releases are orthogonal: without the adapter, every distance would be that of cosine
0. With it, distances are those of the old release's own queries, up to rounding.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nobackfill.errors import (
    IncompatibleSpaceError,
    InvalidInputError,
    PreconditionError,
)
from nobackfill.release.manifest import Manifest, adapter_path
from nobackfill.server.cli import operations  # noqa: F401 - puts its commands into app
from nobackfill.server.cli.app import app
from nobackfill.server.gateway import GatewayServer
from nobackfill.wire import Answer, Hit
from tests.server.conftest import publish_stage
from tests.server.support import (
    Client,
    embedding,
    ids,
    images,
    refused,
    running,
    scores,
    vector,
)
from tests.support import trials
from tests.support.blocks import publish_block_release

OLD, ALL = 30, 36


@dataclass(frozen=True)
class Life:
    """A gateway on release 1, with OLD items, whose publication has release 2 by now."""

    repo: Path
    gateway: GatewayServer
    client: Client
    one: Manifest
    two: Manifest


@pytest.fixture(params=[(), (1,)], ids=["adapter", "adapter and upgrade"])
def life(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Life]:
    later, repo = tmp_path / "later", tmp_path / "repo"
    with trials.near():
        one = publish_block_release(later, 1)
        shutil.copytree(later, repo)
        two = publish_block_release(later, 2, request.param, adapts=[1])
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(ALL)[:OLD])
        client.pause_upgrade("g")
        publish_stage(repo, later)
        yield Life(repo, gateway, client, one, two)


def begin(life: Life) -> None:
    """Activate release 2 without a word of the rollout, and leave every item in the old space."""
    if life.two.upgrades:
        life.client.begin(2)
    else:
        life.client.swap(2)


def check(life: Life, answer: Answer[Hit], query: np.ndarray, count: int = OLD) -> None:
    """Compare with a search of the old vectors by the old release's query, in numpy."""
    vectors = np.stack([vector(life.one, image) for image in images(ALL)[:count]])
    distances = ((vectors - vector(life.one, query)) ** 2).sum(axis=1)
    nearest = np.argsort(distances, kind="stable")[: len(answer.hits)]
    assert ids(answer) == [f"i{i}" for i in nearest]
    found = [hit.distance for hit in answer.hits]
    np.testing.assert_allclose(found, distances[nearest], rtol=5e-3, atol=1e-5)
    assert scores(answer) == sorted(scores(answer), reverse=True)


def test_an_adapter_searches_old_vectors(life: Life) -> None:
    store = life.gateway.galleries.peek("g").store
    before = store.count(life.one.space)
    begin(life)
    strange = images(1, seed=7)[0]
    for query in (images(ALL)[3], strange):
        by_image = life.client.find(query, k=10)
        by_vector = life.client.find_by(embedding(life.two, query), k=10)
        for answer in (by_image, by_vector):
            check(life, answer, query)
            assert (answer.release, answer.space) == (2, life.two.space)
            assert {hit.origin for hit in answer.hits} == {"direct"}
            assert {hit.release for hit in answer.hits} == {1}
    # No vector was migrated, and those of release 1 are where they were.
    assert (store.count(life.one.space), store.count(life.two.space)) == (before, 0)


def test_releases_names_what_an_adapter_searches(life: Life) -> None:
    life.gateway.catalog.refresh()
    wide = CliRunner(env={"COLUMNS": "200"})
    result = wide.invoke(app, ["releases", "--server", life.gateway.address])
    assert "adapter to" in result.stdout
    last = [line.split()[-2] for line in result.stdout.splitlines() if "squared_l2" in line]
    assert last[-1] == "1" != last[0]


def test_new_items_are_ranked_among_old_ones(life: Life) -> None:
    begin(life)
    life.client.put_images(images(ALL)[OLD:], first=OLD)
    answer = life.client.find(images(ALL)[ALL - 1], k=ALL)
    check(life, answer, images(ALL)[ALL - 1], ALL)
    assert {hit.id: hit.origin for hit in answer.hits} == {
        f"i{i}": "direct" if i < OLD else "native" for i in range(ALL)
    }


def test_a_query_without_a_vector_refuses_no_other(life: Life) -> None:
    begin(life)
    # All of it lies outside of what the adapter reads, so that it maps to zero.
    lost = embedding(life.one, images(1)[0]).values
    nan = np.full(64, np.nan, "<f4").tobytes()
    good = embedding(life.two, images(ALL)[5])
    for bad, sentence in ((lost, "query adapter of release 2"), (nan, "finite")):
        wrong = type(good)(space=life.two.space, values=bad)
        with refused(InvalidInputError, sentence):
            life.client.find_by(wrong)
    assert ids(life.client.find_by(good))[0] == "i5"


def test_a_restart_and_a_rollback_keep_every_item(life: Life, tmp_path: Path) -> None:
    begin(life)
    life.gateway.stop()
    with running(life.repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        query = images(ALL)[4]
        check(life, client.find(query, k=10), query)
        assert client.rollback(confirm=True).done
        assert client.states() == {1: "ACTIVE", 2: "PUBLISHED"}
        answer = client.find(query, k=10)
        assert {hit.release for hit in answer.hits} == {1} and answer.release == 1
        # The adapter ends with the release that published it.
        with refused(IncompatibleSpaceError):
            client.find_by(embedding(life.two, query))


def test_an_upgrade_beside_the_adapter_ends_in_the_new_space(life: Life) -> None:
    begin(life)
    if not life.two.upgrades:
        gallery = life.client.get_gallery("g")
        assert "no upgrade was published" in gallery.note
        assert [space.release for space in gallery.spaces] == [1, 2]
        return
    life.client.start_upgrade("g", 0)
    life.client.create_when_idle("idle")
    answer = life.client.find(images(ALL)[0], k=OLD)
    assert {(hit.release, hit.origin) for hit in answer.hits} == {(2, "upgraded")}
    assert len(answer.hits) == OLD


def test_an_adapter_is_not_used_before_its_release_was_tried(life: Life) -> None:
    life.client.list_releases()
    life.gateway.catalog.refresh()
    with refused(IncompatibleSpaceError):
        life.client.find_by(embedding(life.two, images(1)[0]))


def test_an_adapter_without_calibration_ranks_nothing_beside_new_items(tmp_path: Path) -> None:
    """Distances of two spaces do not compare, so that a mixture needs scores."""
    later, repo = tmp_path / "later", tmp_path / "repo"
    with trials.near():
        publish_block_release(later, 1)
        shutil.copytree(later, repo)
        publish_block_release(later, 2, adapts=[1], calibrated=False)
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(3))
        publish_stage(repo, later)
        for rollout in ("unspecified", "direct"):
            with refused(PreconditionError, "release 2 has no calibration to rank its hits"):
                client.swap(2, rollout)
        assert client.find(images(1)[0]).release == 1
        client.swap(2, "cutover")
        assert client.states()[2] == "ACTIVE"


def test_a_damaged_adapter_activates_nothing(life: Life) -> None:
    file = life.repo / adapter_path(2, 1)
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with refused(PreconditionError, "adapter_2_to_1"):
        life.client.swap(2)
    assert life.client.find(images(1)[0]).release == 1


def test_a_gallery_that_is_left_behind_is_searched_by_new_embeddings(life: Life) -> None:
    """A cutover leaves a gallery without an upgrade in its space."""
    if life.two.upgrades:
        return
    life.client.swap(2, "cutover")
    query = images(ALL)[2]
    check(life, life.client.find_by(embedding(life.two, query), k=5), query)
