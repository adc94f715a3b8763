"""A signed release that this version cannot read is named and passed over; older news is taken."""

import json
from pathlib import Path

import pytest

from nobackfill.client.device import Device
from nobackfill.errors import UnfitError
from nobackfill.release.paths import NEWEST_FORMAT, manifest_path
from nobackfill.release.publishing.inspection import list_releases
from nobackfill.release.trust.trust import TrustedFolder
from tests.support import blocks, edge
from tests.support.edge import Setting
from tests.support.publication import publish_manifest

NEWER = b'{"format": %d, "everything": "else"}' % (NEWEST_FORMAT + 1)


def unknown_key(repo: Path) -> bytes:
    fields = json.loads((repo / manifest_path(2)).read_bytes())
    return json.dumps(fields | {"surprise": 1}).encode()


def taking_a_file_of_ours(repo: Path) -> bytes:
    """Its embedder would be written over the device's trusted metadata."""
    fields = json.loads((repo / manifest_path(2)).read_bytes())
    fields["embedder"]["file"]["path"] = "trusted.json"
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (lambda _: NEWER, "release 3 needs a newer nobackfill: its manifest has format 6"),
        (
            unknown_key,
            "release 3 needs a newer nobackfill: its manifest has keys that this version does not "
            "know, surprise",
        ),
        (taking_a_file_of_ours, "release 3: its manifest cannot be used"),
        (lambda _: b"\xff", "release 3: its manifest cannot be used"),
    ],
    ids=["format", "key", "path", "bytes"],
)
def test_a_device_goes_on_to_the_newest_release_that_it_can_use(
    setting: Setting, world: edge.World, text: object, sentence: str
) -> None:
    assert callable(text)
    world.publish(setting.repo, 2)
    publish_manifest(setting.repo, 3, text(setting.repo))
    report = edge.follow(setting.gallery)
    assert report.release == 2
    assert edge.spaces(setting.gallery)[2] == "active"
    again = edge.follow(setting.gallery)
    assert (again.state, again.release) == ("behind", 2)
    assert any(note.startswith(sentence) for note in again.notes)
    with Device(setting.gallery) as device:
        assert not device.state("held_back", {})


def test_init_takes_the_newest_that_it_can_use(
    setting: Setting, world: edge.World, tmp_path: Path
) -> None:
    world.publish(setting.repo, 2)
    publish_manifest(setting.repo, 3, NEWER)
    gallery = edge.make_device(setting.repo, tmp_path / "new.sqlite")
    assert edge.spaces(gallery) == {2: "active"}


def test_init_says_so_where_none_can_be_used(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    blocks.publish_block_release(repo, 1)
    for number in (1, 2):
        publish_manifest(repo, number, NEWER)
    with pytest.raises(UnfitError, match="release 2 needs a newer nobackfill"):
        edge.make_device(repo, tmp_path / "new.sqlite")


def test_a_listing_names_it_and_shows_the_others(setting: Setting, tmp_path: Path) -> None:
    publish_manifest(setting.repo, 2, NEWER)
    first, second = list_releases(setting.repo)
    assert (first.release, first.unfit) == (1, None)
    assert second.unfit is not None
    assert second.unfit.startswith("release 2 needs a newer nobackfill")
    trust = TrustedFolder(setting.repo, tmp_path / "state")
    trust.refresh()
    assert set(trust.manifests()) == {1}
    assert trust.newest_release() == 1
