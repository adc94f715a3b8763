"""Validly signed releases that are wrong: held back and named, and the one before serves on."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from nobackfill.client.device import Device
from nobackfill.client.maintenance import verify
from nobackfill.client.search import Search
from nobackfill.release.paths import release_of_manifest
from tests.support import edge
from tests.support.bad_releases import (
    BAD,
    LATE_ROWS,
    QUICK,
    fails_late,
    publish_bad,
    publish_spoiled,
    sign,
)
from tests.support.edge import Setting


@pytest.fixture
def followed(world: edge.World, setting: Setting) -> Setting:
    """The gallery at release 2."""
    world.publish(setting.repo, 2)
    edge.follow(setting.gallery)
    return setting


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [QUICK, pytest.param(list(BAD), marks=pytest.mark.faults)])
def test_bad_releases_are_named_and_not_followed(
    followed: Setting, names: Sequence[str], tmp_path: Path
) -> None:
    numbers = {name: number for number, name in enumerate(names, 3)}
    for name, number in numbers.items():
        publish_bad(followed.repo, number, name, tmp_path / "drafts")
    before = edge.contents(followed.gallery)
    report = edge.follow(followed.gallery)
    assert (report.state, report.release) == ("behind", 2)
    said = {
        name: [note for note in report.notes if re.search(rf"release[ -]{number}\b", note)]
        for name, number in numbers.items()
    }
    print("\n".join(f"{name}: {notes}" for name, notes in said.items()))
    assert [n for n, notes in said.items() if not notes or BAD[n][1] not in notes[0]] == []
    after = edge.contents(followed.gallery)
    assert after.keys() == before.keys()
    assert all((after[path][1] == before[path][1]).all() for path in before)
    with Device(followed.gallery) as device:
        assert verify(device)["problems"] == []
        (answer,) = Search(device, {}).by_images([followed.images[3]], 1)
    assert answer.release == 2
    shutil.rmtree(tmp_path / "drafts")
    beside = (path.name for path in tmp_path.iterdir())
    assert {name for name in beside if not name.startswith(followed.gallery.name)} == {"pub"}


def test_a_release_that_fails_after_its_trial_is_held_back_by_digest(
    followed: Setting, tmp_path: Path
) -> None:
    assert len(followed.images) == LATE_ROWS
    publish_spoiled(followed.repo, 3, fails_late, tmp_path / "drafts")
    before = edge.contents(followed.gallery)
    report = edge.follow(followed.gallery)
    assert (report.state, report.release) == ("behind", 2)
    assert "onnxruntime cannot run this model" in report.notes[0]
    assert edge.spaces(followed.gallery) == {2: "active", 1: "previous"}
    assert edge.contents(followed.gallery).keys() == before.keys()
    assert "held back here" in edge.follow(followed.gallery).notes[0]
    # The same number published anew is another release.
    publish_spoiled(followed.repo, 3, lambda bad: None, tmp_path / "mended")
    assert edge.follow(followed.gallery).state == "upgraded"


def test_numbers_that_no_release_has_are_no_releases(followed: Setting) -> None:
    names = [f"release-{'9' * n}.json" for n in (5000, 200, 8)]
    names += ["release-00.json", "release-3.json.json", "release-.json", "release-\u0663.json"]
    sign(followed.repo, {name: b"{}" for name in names if len(name) < 255})
    assert [release_of_manifest(name) for name in names] == [None] * len(names)
    assert edge.follow(followed.gallery).state == "up-to-date"
