"""Activations that cannot be: the old release serves on, the new one is FAILED and says why."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nobackfill.errors import NotFoundError, PreconditionError, VerificationError
from nobackfill.release.manifest import Manifest, embedder_path, probes_path, upgrade_path
from nobackfill.release.models import Images
from nobackfill.release.paths import manifest_path
from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import gallery_pb2, release_pb2
from nobackfill.vectors import Vectors
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, embedding, ids, images, refused, running
from tests.support.blocks import png


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: list[tuple[str, Callable[[Path], None]]] = [
    (embedder_path(2), flip_a_bit),
    (upgrade_path(1, 2), flip_a_bit),
    (probes_path(2), cut),
    ("side_encoder_2/config.pbtxt", flip_a_bit),
    (embedder_path(2), Path.unlink),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_a_damaged_release_fails_and_the_old_one_serves_on(
    client: Client, repo: Path, stages: Stages, name: str, damage: Callable[[Path], None]
) -> None:
    client.create_gallery("g")
    client.put_images(images(3))
    publish_stage(repo, stages[2])
    damage(repo / name)
    with refused(PreconditionError, name.split("/")[0]):
        client.swap(2)
    assert client.states() == {1: "ACTIVE", 2: "FAILED"}
    assert name.split("/")[0] in client.get_release(2).reason
    assert ids(client.find(images(3)[1]))[0] == "i1"
    client.put_images(images(4)[3:], first=3)
    publish_stage(repo, stages[2])
    assert client.swap(2).phase == release_pb2.PHASE_DONE
    assert client.states()[2] == "ACTIVE"
    assert client.find(images(4)[3]).hits[0].release == 2


def test_a_damaged_manifest_hides_no_other_release(
    client: Client, repo: Path, stages: Stages
) -> None:
    publish_stage(repo, stages[3])
    cut(repo / manifest_path(2))
    with refused(VerificationError, manifest_path(2)):
        client.swap(2)
    assert client.swap(3).phase == release_pb2.PHASE_DONE


def test_models_that_answer_otherwise_than_published_are_refused(
    gateway: GatewayServer,
    client: Client,
    repo: Path,
    stages: Stages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish_stage(repo, stages[2])
    embed = gateway.models.embed_images

    def turned(manifest: Manifest, images: Images) -> Vectors:
        vectors = embed(manifest, images)
        return np.roll(vectors, 1, axis=1) if manifest.release == 2 else vectors

    monkeypatch.setattr(gateway.models, "embed_images", turned)
    with refused(PreconditionError, "golden probe"):
        client.swap(2)
    assert client.states() == {1: "ACTIVE", 2: "FAILED"}


def test_a_withdrawn_release_is_not_activated(
    client: Client, repo: Path, withdrawn_stage: Path
) -> None:
    publish_stage(repo, withdrawn_stage)
    with refused(PreconditionError, "mistakes cats for dogs"):
        client.swap(2)
    assert client.states() == {1: "ACTIVE", 2: "WITHDRAWN", 3: "PUBLISHED"}


def test_the_first_start_takes_the_newest_that_is_not_withdrawn(
    withdrawn_stage: Path, tmp_path: Path
) -> None:
    with (
        running(withdrawn_stage, tmp_path / "data") as gateway,
        Client(gateway.address) as client,
    ):
        assert client.states() == {1: "PUBLISHED", 2: "WITHDRAWN", 3: "ACTIVE"}


def test_an_unknown_release_is_not_found(client: Client) -> None:
    with refused(NotFoundError, "published releases: 1"):
        client.swap(9)


def test_an_older_release_needs_a_rollback(client: Client, repo: Path, stages: Stages) -> None:
    publish_stage(repo, stages[2])
    client.swap(2)
    with refused(PreconditionError, "run `gateway rollback`"):
        client.swap(1)


def test_there_is_nothing_to_roll_back_to_at_first(client: Client) -> None:
    for confirm in (False, True):
        with refused(PreconditionError):
            client.rollback(confirm=confirm)


def test_a_rollout_that_the_release_does_not_declare(
    client: Client, repo: Path, stages: Stages
) -> None:
    client.create_gallery("g")
    publish_stage(repo, stages[2])
    with refused(PreconditionError, "does not declare"):
        client.swap(2, "direct")
    assert client.states()[1] == "ACTIVE"


def bare(one: Manifest, seed: int) -> gallery_pb2.PutItem:
    vectors = gallery_pb2.Vectors(embedding=embedding(one, images(1, seed)[0]))
    return gallery_pb2.PutItem(id=f"bare{seed}", vectors=vectors)


def test_a_gallery_whose_items_cannot_go_stays_and_is_named(
    client: Client, repo: Path, stages: Stages, one: Manifest
) -> None:
    client.create_gallery("goes")
    client.create_gallery("stays")
    client.put_images(images(3), "goes")
    client.put_images(images(3), "stays")
    assert not client.put_items("stays", [bare(one, 8)])
    publish_stage(repo, stages[2])
    event = client.swap(2)
    assert event.phase == release_pb2.PHASE_DONE
    assert "stays: 1 items have no vector in release 1 with the side-information" in event.message
    assert client.get_gallery("goes").release == 2
    staying = client.get_gallery("stays")
    assert staying.release == 1
    assert "send their images again" in staying.note
    for name, release in (("goes", 2), ("stays", 1)):
        hit = client.find(images(3)[2], name).hits[0]
        assert (hit.id, hit.release) == ("i2", release)
        assert hit.distance == pytest.approx(0, abs=1e-5)
    assert client.find(images(1, 8)[0], "stays").hits[0].id == "bare8"
    # Its image makes the gallery whole; then it can follow.
    client.put("stays", {"bare8": png(images(1, 8)[0])})
    client.start_upgrade("stays", 0)
    client.create_when_idle("idle")
    assert client.get_gallery("stays").release == 2
    assert client.get_gallery("stays").note == ""
    assert client.find(images(1, 8)[0], "stays").hits[0].release == 2


def test_a_retired_release_that_comes_back_is_kept_as_any_other(
    client: Client, repo: Path, stages: Stages, one: Manifest
) -> None:
    """Found by `make random`, seed 1: images were not embedded for it, and a restart dropped it."""
    client.create_gallery("g")
    client.create_gallery("stays")
    client.put_items("stays", [bare(one, 8)])
    publish_stage(repo, stages[3])
    client.swap(2)
    client.swap(3)
    # Release 1 still answers in a gallery, so a rollback leads there, past the one that is gone.
    assert client.retire() == [2]
    assert client.rollback(confirm=True).number == 1
    client.swap(2)
    client.swap(3)
    assert client.states()[2] == "PREVIOUS"
    client.put_images(images(4))
    asked = client.rollback(confirm=False)
    assert (asked.number, asked.lost_items) == (2, 0)


def test_no_route_at_all(sideless_stages: Stages, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    publish_stage(repo, sideless_stages[1])
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(3))
        publish_stage(repo, sideless_stages[2])
        event = client.swap(2)
        assert event.phase == release_pb2.PHASE_DONE
        assert "g: no upgrade leads from release 1 to 2" in event.message
        hit = client.find(images(3)[1]).hits[0]
        assert (hit.id, hit.release) == ("i1", 1)
        client.create_gallery("new")
        client.put_images(images(3), "new")
        assert client.find(images(3)[1], "new").hits[0].release == 2
        # What a gallery lives in is not retired under it.
        assert client.retire() == []
        assert client.find(images(3)[2]).hits[0].id == "i2"


def test_a_gallery_made_after_a_swap_takes_images(
    repo: Path, stages: Stages, tmp_path: Path
) -> None:
    """Found by `make random`, seed 2: nobody else kept the release before, so it was unloaded."""
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        publish_stage(repo, stages[2])
        client.swap(2)
        client.create_gallery("late")
        client.put_images(images(2), "late")
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("later")
        client.put_images(images(2), "later")
        assert client.rollback(confirm=True).lost_items == 0
        assert len(client.find(images(1)[0], "late").hits) == 2
