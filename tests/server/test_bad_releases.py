"""Validly signed releases that are wrong: each fails by name, and the active one serves on."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from nobackfill.errors import PreconditionError, VerificationError
from tests.server.support import Client, ids, images, running
from tests.support.bad_releases import (
    BAD,
    LATE_ROWS,
    QUICK,
    ROUTELESS,
    fails_late,
    publish_bad,
    publish_spoiled,
)
from tests.support.blocks import publish_block_release


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [QUICK, pytest.param(list(BAD), marks=pytest.mark.faults)])
def test_bad_releases_fail_and_the_active_one_serves_on(
    tmp_path: Path, names: Sequence[str]
) -> None:
    repo, data = tmp_path / "repo", tmp_path / "data"
    publish_block_release(repo, 1)
    publish_block_release(repo, 2, [1])
    with running(repo, data) as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(5))
        for number, name in enumerate(names, 3):
            publish_bad(repo, number, name, tmp_path / "drafts")
            said = _why(client, number, name in ROUTELESS)
            print(name, "->", said)
            assert said
            assert ids(client.find(images(5)[1]))[0] == "i1"
            assert client.get_gallery("g").release == 2
    # And a restart, which looks at all of them again.
    with running(repo, data) as gateway, Client(gateway.address) as client:
        assert ids(client.find(images(5)[1]))[0] == "i1"
        assert "ACTIVATING" not in client.states().values()


def test_an_upgrade_that_fails_after_its_trial_leaves_no_vectors(tmp_path: Path) -> None:
    repo, data = tmp_path / "repo", tmp_path / "data"
    publish_block_release(repo, 1)
    publish_block_release(repo, 2, [1])
    with running(repo, data) as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(LATE_ROWS))
        publish_spoiled(repo, 3, fails_late, tmp_path / "drafts")
        with pytest.raises(PreconditionError, match="cannot run this model"):
            client.swap(3)
        assert client.states()[3] == "FAILED"
        (hosted,) = gateway.galleries.all()
        assert [info.spec.release for info in hosted.spaces()] == [2]


def _why(client: Client, number: int, routeless: bool) -> str:
    """What is said of the release, which must not become what answers in the gallery."""
    if routeless:
        event = client.swap(number)
        assert "g: no upgrade leads from release 2" in event.message
        return event.message
    with pytest.raises((PreconditionError, VerificationError)) as caught:
        client.swap(number)
    if "is not activated" in str(caught.value):
        assert client.states()[number] == "FAILED"
    return str(caught.value)
