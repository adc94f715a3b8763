"""The life of a gallery: images put, a release swapped in, rolled back, retired; restarts."""

from pathlib import Path

import pytest

from nobackfill.errors import PreconditionError
from nobackfill.v1 import release_pb2
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, ids, images, refused, running


def finds_itself(client: Client, count: int, *, release: int, origin: str) -> None:
    """Each image's own item comes first, at distance 0: no vector met a query of another space."""
    for i, image in enumerate(images(count)):
        answer = client.find(image)
        assert answer.release == release
        assert answer.hits[0].id == f"i{i}"
        assert answer.hits[0].distance == pytest.approx(0, abs=1e-5)
        assert answer.hits[0].release == release
        assert answer.hits[0].origin == origin
        assert answer.hits[0].score == pytest.approx(1, abs=1e-3)


def test_the_first_release_is_activated_at_the_start(client: Client) -> None:
    assert client.states() == {1: "ACTIVE"}


def test_images_are_found(client: Client) -> None:
    client.create_gallery("g")
    client.put_images(images(8))
    finds_itself(client, 8, release=1, origin="native")


@pytest.mark.parametrize("rollout", ["unspecified", "cutover", "dual"])
def test_an_activation_carries_the_gallery_over(
    client: Client, repo: Path, stages: Stages, rollout: str
) -> None:
    client.create_gallery("g")
    client.put_images(images(8))
    publish_stage(repo, stages[2])
    event = client.swap(2, rollout)
    assert (event.phase, event.message) == (release_pb2.PHASE_DONE, "")
    assert client.states() == {1: "PREVIOUS", 2: "ACTIVE"}
    finds_itself(client, 8, release=2, origin="upgraded")


def test_rollback_returns_with_what_was_put_meanwhile(
    client: Client, repo: Path, stages: Stages
) -> None:
    client.create_gallery("g")
    client.put_images(images(4))
    publish_stage(repo, stages[2])
    client.swap(2)
    client.put_images(images(6)[4:], first=4)
    asked = client.rollback(confirm=False)
    assert (asked.number, asked.lost_items, asked.done) == (1, 0, False)
    assert client.states()[2] == "ACTIVE"
    assert client.rollback(confirm=True).done
    assert client.states() == {1: "ACTIVE", 2: "PUBLISHED"}
    finds_itself(client, 6, release=1, origin="native")
    client.swap(2)
    assert client.find(images(1)[0]).release == 2


def test_retire_ends_the_way_back(client: Client, repo: Path, stages: Stages) -> None:
    client.create_gallery("g")
    client.put_images(images(4))
    publish_stage(repo, stages[2])
    client.swap(2)
    assert client.retire() == [1]
    assert client.states() == {1: "RETIRED", 2: "ACTIVE"}
    assert [space.release for space in client.get_gallery("g").spaces] == [2]
    with refused(PreconditionError):
        client.rollback(confirm=True)
    finds_itself(client, 4, release=2, origin="upgraded")


def test_a_chain_of_releases(client: Client, repo: Path, stages: Stages) -> None:
    client.create_gallery("g")
    client.put_images(images(4))
    publish_stage(repo, stages[3])
    client.swap(2)
    client.put_images(images(6)[4:], first=4)
    client.swap(3)
    assert client.states() == {1: "PREVIOUS", 2: "PREVIOUS", 3: "ACTIVE"}
    for i, image in enumerate(images(6)):
        hit = client.find(image).hits[0]
        assert (hit.id, hit.release) == (f"i{i}", 3)
        assert hit.distance == pytest.approx(0, abs=1e-5)


def test_a_restart_serves_what_was_there(repo: Path, stages: Stages, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(repo, data) as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(4))
        publish_stage(repo, stages[2])
        client.swap(2)
    with running(repo, data) as gateway, Client(gateway.address) as client:
        assert client.states() == {1: "PREVIOUS", 2: "ACTIVE"}
        finds_itself(client, 4, release=2, origin="upgraded")
        assert client.rollback(confirm=True).number == 1
        finds_itself(client, 4, release=1, origin="native")


def test_a_first_start_activates_what_is_published(repo: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(repo, data, activates=True) as gateway, Client(gateway.address) as client:
        client.create_when_idle()
        assert client.states() == {1: "ACTIVE"}
    # As do the folders that other tests begin with.
    with running(repo, tmp_path / "copied") as gateway, Client(gateway.address) as client:
        assert client.states() == {1: "ACTIVE"}


def test_nothing_published_yet(tmp_path: Path, stages: Stages) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        with refused(PreconditionError):
            client.create_gallery("g")
        publish_stage(repo, stages[1])
        for seen in client.watch_releases():
            if [r.state for r in seen] == [release_pb2.RELEASE_STATE_ACTIVE]:
                break
        client.create_when_idle()
        client.put_images(images(2))
        assert ids(client.find(images(2)[1]))[0] == "i1"
