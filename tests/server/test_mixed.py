"""Galleries in the middle of an upgrade: one ranking over two spaces, each item exactly once.

The upgrade is paused before it carries anything, so items put before the activation live in the old
space, and those put after it in both.
"""

import time
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nobackfill.errors import (
    BusyError,
    InvalidInputError,
    ReleaseRetiredError,
)
from nobackfill.release.manifest import Manifest
from nobackfill.server.cli import operations  # noqa: F401 - puts its commands into app
from nobackfill.server.cli.app import app
from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import gallery_pb2
from nobackfill.wire import Answer, Hit
from tests.server.conftest import Stages, publish_stage
from tests.server.support import (
    Client,
    embedding,
    ids,
    images,
    refused,
    running,
    scores,
    side_info,
    vector,
)
from tests.support.blocks import png

OLD, ALL = 6, 12


def fill_and_begin(client: Client, repo: Path, stages: Stages, rollout: str) -> None:
    """OLD items, then the paused activation of release 2, then items up to ALL."""
    client.create_gallery("g")
    client.put_images(images(ALL)[:OLD])
    client.pause_upgrade("g")
    publish_stage(repo, stages[2])
    client.begin(2, rollout)
    client.put_images(images(ALL)[OLD:], first=OLD)


def finish(client: Client) -> None:
    """Let the upgrade go on, and wait for the end of the activation."""
    client.start_upgrade("g", 0)
    while "ACTIVATING" in client.states().values() or client.get_gallery("g").release == 1:
        pass
    client.create_when_idle("idle")


@pytest.fixture
def dual(client: Client, repo: Path, stages: Stages) -> Client:
    fill_and_begin(client, repo, stages, "dual")
    return client


def check_complete(client: Client, query: int, origins: dict[bool, str]) -> Answer[Hit]:
    """Every item once, the query's own first at distance 0, scores falling."""
    answer = client.find(images(ALL)[query], k=100)
    assert sorted(ids(answer)) == sorted(f"i{i}" for i in range(ALL))
    assert ids(answer)[0] == f"i{query}"
    assert answer.hits[0].distance == pytest.approx(0, abs=1e-5)
    assert scores(answer) == sorted(scores(answer), reverse=True)
    for hit in answer.hits:
        assert hit.origin == origins[int(hit.id[1:]) >= OLD]
    return answer


DUAL_ORIGINS = {False: "old-model", True: "native"}


def test_dual_is_one_ranking_like_an_unmixed_one(dual: Client, one: Manifest) -> None:
    vectors = np.stack([vector(one, image) for image in images(ALL)])
    for query in (0, OLD, ALL - 1):
        answer = check_complete(dual, query, DUAL_ORIGINS)
        assert answer.release == 2
        assert {hit.release for hit in answer.hits} == {1, 2}
        # Blocks hold the same projection, so distances within a space are the same in both.
        distances = ((vectors - vectors[query]) ** 2).sum(axis=1)
        assert ids(answer) == [f"i{i}" for i in np.argsort(distances, kind="stable")]
    finish(dual)
    answer = dual.find(images(ALL)[0], k=100)
    assert {hit.release for hit in answer.hits} == {2}
    assert len(answer.hits) == ALL


def test_rollback_half_way_of_dual(dual: Client, two: Manifest) -> None:
    bare = gallery_pb2.PutItem(
        id="bare", vectors=gallery_pb2.Vectors(embedding=embedding(two, images(1, 5)[0]))
    )
    assert not dual.put_items("g", [bare])
    asked = dual.rollback(confirm=False)
    assert (asked.number, asked.lost_items) == (1, 1)
    assert [(lost.gallery, lost.id) for lost in asked.lost] == [("g", "bare")]
    assert len(dual.find(images(1)[0], k=100).hits) == ALL + 1
    assert dual.rollback(confirm=True).done
    assert dual.states() == {1: "ACTIVE", 2: "PUBLISHED"}
    answer = dual.find(images(1)[0], k=100)
    assert len(answer.hits) == ALL
    assert {hit.release for hit in answer.hits} == {1}


def test_rollback_half_way_of_cutover(client: Client, repo: Path, stages: Stages) -> None:
    fill_and_begin(client, repo, stages, "cutover")
    assert client.find(images(1)[0]).release == 1
    assert client.rollback(confirm=True).lost_items == 0
    assert client.states() == {1: "ACTIVE", 2: "PUBLISHED"}
    answer = client.find(images(1)[0], k=100)
    assert (len(answer.hits), answer.release) == (ALL, 1)


def test_a_second_activation_is_aborted(dual: Client) -> None:
    with refused(BusyError):
        dual.swap(2)


def test_a_restart_half_way_goes_on(repo: Path, stages: Stages, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(repo, data) as gateway, Client(gateway.address) as client:
        fill_and_begin(client, repo, stages, "dual")
    with running(repo, data) as gateway, Client(gateway.address) as client:
        check_complete(client, 3, DUAL_ORIGINS)
        finish(client)
        assert {hit.release for hit in client.find(images(1)[0], k=100).hits} == {2}
        assert client.get_gallery("g").items == ALL


@pytest.fixture
def direct(direct_stages: Stages, tmp_path: Path) -> Iterator[Client]:
    repo = tmp_path / "repo"
    publish_stage(repo, direct_stages[1])
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        fill_and_begin(client, repo, direct_stages, "unspecified")
        yield client


def test_direct_searches_old_vectors_as_they_are(direct: Client, direct_stages: Stages) -> None:
    origins = {False: "direct", True: "native"}
    for query in (1, ALL - 1):
        answer = direct.find(images(ALL)[query], k=100)
        assert sorted(ids(answer)) == sorted(f"i{i}" for i in range(ALL))
        assert answer.hits[0].id == f"i{query}"
        assert all(hit.origin == origins[int(hit.id[1:]) >= OLD] for hit in answer.hits)
    finish(direct)
    assert {hit.release for hit in direct.find(images(1)[0], k=100).hits} == {2}


def test_a_retired_space_goes_when_its_gallery_leaves_it(
    direct_stages: Stages, tmp_path: Path, one: Manifest
) -> None:
    """Found by `make random`, seed 9: it went with the next restart."""
    repo = tmp_path / "repo"
    publish_stage(repo, direct_stages[1])
    image = images(1)[0]
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        # Without side-information it cannot be carried: the gallery stays half-way.
        vectors = gallery_pb2.Vectors(embedding=embedding(one, image))
        client.put_items("g", [gallery_pb2.PutItem(id="i0", vectors=vectors)])
        publish_stage(repo, direct_stages[2])
        client.swap(2)
        assert client.retire() == [1]
        assert client.find(image).hits[0].origin == "direct"
        client.put_images(images(1))
        client.start_upgrade("g", 0)
        client.create_when_idle("idle")
        assert [space.release for space in client.get_gallery("g").spaces] == [2]
        assert client.find(image).hits[0].release == 2


def test_old_queries_are_answered_until_the_end(
    gateway: GatewayServer, client: Client, repo: Path, stages: Stages, one: Manifest
) -> None:
    client.create_gallery("g")
    client.put_images(images(4))
    publish_stage(repo, stages[2])
    with refused(InvalidInputError):
        client.swap(2, old_space_seconds=10**12)
    client.swap(2, old_space_seconds=3600)
    old = embedding(one, images(4)[1])
    answer = client.find_by(old)
    assert (answer.release, answer.space, answer.hits[0].id) == (1, one.space, "i1")
    # Whoever asks is told until when, and so is whoever looks.
    end = answer.space_end_time
    assert end is not None
    assert 3000 < end.timestamp() - time.time() <= 3600
    ends = [one.ends_at for one in client.list_releases() if one.HasField("ends_at")]
    assert [one.ToDatetime(UTC) for one in ends] == [end]
    spaces = {space.release: space for space in client.get_gallery("g").spaces}
    assert spaces[1].ends_at.ToDatetime(UTC) == end
    assert not spaces[2].HasField("ends_at")
    assert client.find(images(4)[1]).space_end_time is None
    wide = CliRunner(env={"COLUMNS": "200"})
    status = wide.invoke(app, ["status", "--server", gateway.address])
    assert "1: 4 previous until 20" in status.stdout
    shown = wide.invoke(app, ["releases", "--server", gateway.address])
    assert end.strftime("%Y-%m-%d %H:%M") in shown.stdout
    client.put_images(images(5)[4:], first=4)
    assert client.find_by(embedding(one, images(5)[4])).hits[0].id == "i4"
    # As a version that took any number has written it.
    gateway.state.change(ends={one.space: 1e13})
    assert {one.ends_at.ToDatetime(UTC).year for one in client.list_releases()} == {9999, 1970}
    gateway.state.change(ends={one.space: 1.0})
    with refused(ReleaseRetiredError):
        client.find_by(old)
    # The end was that of one swap; the next announces none.
    client.rollback(confirm=True)
    assert client.find_by(old).release == 1
    assert client.find_by(old).space_end_time is None
    client.swap(2)
    assert client.find_by(old).release == 1
    client.retire()
    with refused(ReleaseRetiredError):
        client.find_by(old)


def test_old_clients_put_vectors_that_are_carried_over(
    client: Client, repo: Path, stages: Stages, one: Manifest
) -> None:
    client.create_gallery("g")
    client.put_images(images(2))
    publish_stage(repo, stages[2])
    client.swap(2)
    image = images(1, 9)[0]
    vectors = gallery_pb2.Vectors(embedding=embedding(one, image))
    assert client.put_items("g", [gallery_pb2.PutItem(id="old", vectors=vectors)]).keys() == {"old"}
    vectors.side_info.CopyFrom(side_info(one, image))
    assert not client.put_items("g", [gallery_pb2.PutItem(id="old", vectors=vectors)])
    hit = client.find(image).hits[0]
    assert (hit.id, hit.release, hit.origin) == ("old", 2, "upgraded")
    assert hit.distance == pytest.approx(0, abs=1e-4)
    assert client.rollback(confirm=True).lost_items == 0
    assert client.find(image).hits[0].id == "old"


def test_vectors_that_only_a_withdrawn_upgrade_carries_are_refused_alone(
    client: Client, repo: Path, stages: Stages, withdrawn_stage: Path, one: Manifest
) -> None:
    """Found by `make random`, seed 1: they were carried until a restart, then failed the call."""
    client.create_gallery("g")
    client.put_images(images(2))
    publish_stage(repo, stages[2])
    client.swap(2)

    def old(number: int) -> gallery_pb2.PutItem:
        image = images(1, number)[0]
        vectors = gallery_pb2.Vectors(
            embedding=embedding(one, image), side_info=side_info(one, image)
        )
        return gallery_pb2.PutItem(id=f"old{number}", vectors=vectors)

    assert not client.put_items("g", [old(5)])
    publish_stage(repo, withdrawn_stage)
    while client.states()[2] != "ACTIVE" or 3 not in client.states():
        pass
    image = gallery_pb2.PutItem(id="new", image=png(images(1, 7)[0]))
    assert client.put_items("g", [old(6), image]).keys() == {"old6"}
