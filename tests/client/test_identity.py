"""The gallery's key when its file is lost or exchanged: said by whoever needs it, never silent."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nobackfill.client.device import Device
from nobackfill.client.gallery_file import sidecar_path
from nobackfill.client.maintenance import verify
from nobackfill.client.status import status
from nobackfill.client.sync import SyncOptions
from nobackfill.client.vault.keys import new_identity, read_identity
from nobackfill.client.vault.transfer import PushReport, pull, push
from nobackfill.errors import ConfigurationError
from tests.server.support import running
from tests.support import edge
from tests.support.edge import Setting


@pytest.fixture(scope="module")
def address(world: edge.World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    top = tmp_path_factory.mktemp("keys")
    world.publish(top / "pub" / "repo", 1)
    with running(top / "pub" / "repo", top / "data") as gateway:
        yield f"grpc://{gateway.address}"


@pytest.fixture
def pushed(setting: Setting, address: str) -> Iterator[Setting]:
    """A gallery that has pushed its twelve images, copies of its own."""
    folder = setting.gallery.parent / "own"
    folder.mkdir()
    own = [shutil.copy(image, folder) for image in setting.images]
    with Device(setting.gallery) as device:
        device.store.delete([item.id for item in device.store.list_items()])
    edge.fill(setting.gallery, folder)
    setting = dataclasses.replace(setting, images=[Path(image) for image in own])
    assert pushes(setting, address).pushed_count == 12
    yield setting
    with Device(setting.gallery) as device:
        device.store.delete([item.id for item in device.store.list_items()])
    pushes(setting, address, new_key=True)


def pushes(setting: Setting, address: str, *, new_key: bool = False) -> PushReport:
    with Device(setting.gallery) as device:
        return push(device, [], address, edge.QUIET, new_key=new_key)


def lose(setting: Setting) -> Path:
    path = sidecar_path(setting.gallery, "identity")
    return path.rename(path.with_name("copy-elsewhere"))


def problems(setting: Setting) -> list[str]:
    with Device(setting.gallery) as device:
        found = verify(device)["problems"]
        assert status(device)["vault_key_problem"] == (found[0] if found else None)
    return list(found)


def test_a_lost_key_is_said_by_every_command_that_needs_it(
    pushed: Setting, address: str, tmp_path: Path
) -> None:
    assert problems(pushed) == []
    copy = lose(pushed)
    (problem,) = problems(pushed)
    public = str(read_identity(copy).to_public())
    assert public in problem
    assert "--new-key" in problem
    with pytest.raises(ConfigurationError, match="is missing"):
        pushes(pushed, address)
    assert not sidecar_path(pushed.gallery, "identity").exists()
    with Device(pushed.gallery) as device:
        with pytest.raises(ConfigurationError, match="is missing"):
            pull(device, [], tmp_path / "no", None, False, edge.QUIET)
        done = pull(device, [], tmp_path / "yes", copy, False, edge.QUIET)
    assert len(done.restored) == 12
    copy.rename(sidecar_path(pushed.gallery, "identity"))
    assert problems(pushed) == []
    assert pushes(pushed, address).duplicate_count == 12


def test_another_key_in_its_place_is_noticed(pushed: Setting, address: str) -> None:
    lose(pushed)
    new_identity(sidecar_path(pushed.gallery, "identity"))
    (problem,) = problems(pushed)
    assert "expected" in problem
    with pytest.raises(ConfigurationError, match="expected the gallery's secret key"):
        pushes(pushed, address)


def test_a_new_key_pushes_again_what_the_lost_one_sealed(
    pushed: Setting, address: str, tmp_path: Path
) -> None:
    copy = lose(pushed)
    gone = pushed.images[0].rename(tmp_path / "moved.png")
    done = pushes(pushed, address, new_key=True)
    assert (done.pushed_count, done.duplicate_count, done.removed_count, len(done.unreadable)) == (
        11,
        0,
        11,
        1,
    )
    assert problems(pushed) == []
    with Device(pushed.gallery) as device:
        restored = pull(device, [], tmp_path / "restored", None, False, edge.QUIET)
        assert (len(restored.restored), len(restored.failed)) == (11, 1)
        # What only the lost key opens was kept, in case it is found.
        found = pull(device, list(restored.failed), tmp_path / "found", copy, False, edge.QUIET)
    assert Path(found.restored[0]).read_bytes() == gone.read_bytes()
    assert pushes(pushed, address).unreadable == done.unreadable
    gone.rename(pushed.images[0])
    assert pushes(pushed, address).pushed_count == 1


def test_a_gallery_of_an_older_version_learns_its_key(pushed: Setting, address: str) -> None:
    with Device(pushed.gallery) as device, device.store.transaction() as connection:
        connection.execute("ALTER TABLE vault DROP COLUMN key")
        connection.execute("DELETE FROM state WHERE key = 'identity'")
    assert problems(pushed) == []
    copy = lose(pushed)
    assert "is missing" in problems(pushed)[0]
    copy.rename(sidecar_path(pushed.gallery, "identity"))
    assert pushes(pushed, address).duplicate_count == 12
    with Device(pushed.gallery) as device, device.store.read_snapshot() as connection:
        keys = {key for (key,) in connection.execute("SELECT key FROM vault")}
        (state,) = connection.execute("SELECT value FROM state WHERE key = 'identity'").fetchone()
    assert keys == {json.loads(state)}


def test_a_backfill_says_why_the_vault_is_of_no_use(
    pushed: Setting, world: edge.World, capsys: pytest.CaptureFixture[str]
) -> None:
    lose(pushed)
    for image in pushed.images:
        image.rename(image.with_suffix(".away"))
    world.publish(pushed.gallery.parent / "pub" / "repo", 2)
    assert edge.follow(pushed.gallery, SyncOptions(backfill=2)).re_embedded == 0
    assert "is missing" in capsys.readouterr().err
