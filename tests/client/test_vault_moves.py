"""A vault stays where it is when the gallery follows elsewhere; images that were replaced; ids that
name no file."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nobackfill.client.device import Device
from nobackfill.client.maintenance import remove, verify
from nobackfill.client.photos import put
from nobackfill.client.sync import SyncOptions
from nobackfill.client.vault.queue import VaultQueue
from nobackfill.client.vault.transfer import PullReport, PushReport, pull, push
from nobackfill.errors import ConfigurationError, UnavailableError
from tests.server.support import running
from tests.support import edge
from tests.support.edge import Setting


@pytest.fixture(scope="module")
def gateways(world: edge.World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two, whose vaults are empty at first."""
    top = tmp_path_factory.mktemp("gateways")
    world.publish(top / "pub" / "repo", 1)
    repo = top / "pub" / "repo"
    with running(repo, top / "one") as one, running(repo, top / "two") as two:
        yield [f"grpc://{one.address}", f"grpc://{two.address}"]


def pushed(gallery: Path, where: str | None = None) -> PushReport:
    with Device(gallery) as device:
        return push(device, [], where, edge.QUIET)


def pulled(gallery: Path, folder: Path) -> PullReport:
    with Device(gallery) as device:
        return pull(device, [], folder, None, False, edge.QUIET)


def emptied(gallery: Path, where: str) -> None:
    with Device(gallery) as device:
        remove(device, [item.id for item in device.store.list_items()])
    pushed(gallery, where)


def test_a_vault_stays_where_it_was_when_the_gallery_follows_elsewhere(
    setting: Setting, gateways: list[str], tmp_path: Path
) -> None:
    first, second = gateways
    with Device(setting.gallery) as device:
        device.store.update_state({"source": first})
    assert pushed(setting.gallery).pushed_count == 12
    with Device(setting.gallery) as device:
        device.store.update_state({"source": second})
        remove(device, [str(setting.images[0])])
    assert (again := pushed(setting.gallery)).removed_count == 1 and again.duplicate_count == 11
    assert len(pulled(setting.gallery, tmp_path / "restored").restored) == 11
    emptied(setting.gallery, first)


def test_a_vault_that_lacks_what_was_pushed_is_refused_and_not_remembered(
    setting: Setting, gateways: list[str]
) -> None:
    first, second = gateways
    assert pushed(setting.gallery, first).pushed_count == 12
    with pytest.raises(ConfigurationError, match="lacks 12 of the 12 images.*" + first):
        pushed(setting.gallery, second)
    with pytest.raises(ConfigurationError, match="holds no vault"):
        pushed(setting.gallery, "grp://127.0.0.1:50051")
    assert pushed(setting.gallery).duplicate_count == 12
    emptied(setting.gallery, first)


@pytest.mark.long
def test_a_mistyped_vault_is_not_remembered(setting: Setting, gateways: list[str]) -> None:
    with pytest.raises(UnavailableError):
        pushed(setting.gallery, "grpc://127.0.0.1:1")
    with Device(setting.gallery) as device:
        assert device.state("vault") is None
        device.store.update_state({"source": gateways[0]})
    assert pushed(setting.gallery).pushed_count == 12
    emptied(setting.gallery, gateways[0])


def test_a_vault_whose_gateway_has_another_address_now_is_followed(
    setting: Setting, world: edge.World, tmp_path: Path
) -> None:
    repo = setting.gallery.parent / "pub" / "repo"
    with running(repo, tmp_path / "old") as before:
        assert pushed(setting.gallery, f"grpc://{before.address}").pushed_count == 12
    shutil.copytree(tmp_path / "old" / "vault", tmp_path / "new" / "vault")
    with running(repo, tmp_path / "new") as after:
        assert pushed(setting.gallery, f"grpc://{after.address}").duplicate_count == 12
        assert len(pulled(setting.gallery, tmp_path / "restored").restored) == 12


@pytest.mark.long
def test_a_vault_that_has_lost_images_is_noticed_at_the_same_address(
    setting: Setting, tmp_path: Path
) -> None:
    repo = setting.gallery.parent / "pub" / "repo"
    own = tmp_path / "own"
    own.mkdir()
    paths = [Path(shutil.copy(image, own)) for image in setting.images]
    with Device(setting.gallery) as device:
        device.store.delete([item.id for item in device.store.list_items()])
        put(device, {path.name: path for path in paths})
    with running(repo, tmp_path / "data") as gateway:
        address = gateway.address
        assert pushed(setting.gallery, f"grpc://{address}").pushed_count == 12
        assert pushed(setting.gallery).duplicate_count == 12
        with Device(setting.gallery) as device:
            assert verify(device)["problems"] == []
    with Device(setting.gallery) as device:
        found = verify(device)
    assert found["problems"] == []
    assert "the vault was not checked" in found["notes"][0]
    # As an older backup leaves it, restored at the same address.
    with Device(setting.gallery) as device:
        entries = [VaultQueue(device.store).latest_entry(path.name) for path in paths[:7]]
    for entry in entries:
        assert entry is not None
        (blob,) = (tmp_path / "data" / "vault").glob(f"*/??/{entry.blob_id}.*")
        blob.unlink()
    paths[0].unlink()
    with running(repo, tmp_path / "data", address=address):
        with Device(setting.gallery) as device:
            (problem,) = verify(device)["problems"]
        assert f"grpc://{address} lacks 7 of the 12 images" in problem
        again = pushed(setting.gallery)
        assert (again.pushed_count, again.duplicate_count, again.lost_copies) == (
            6,
            5,
            [paths[0].name],
        )
        assert pushed(setting.gallery).duplicate_count == 11
        done = pulled(setting.gallery, tmp_path / "restored")
        assert len(done.restored) == 11 and list(done.failed) == [paths[0].name]


def test_an_image_that_was_replaced_is_pushed_anew(
    setting: Setting, gateways: list[str], world: edge.World, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    old, new = setting.images[0].read_bytes(), setting.images[1].read_bytes()
    (own / "cover.png").write_bytes(old)
    with Device(setting.gallery) as device:
        device.store.delete([item.id for item in device.store.list_items()])
        put(device, {"cover": own / "cover.png"})
    assert pushed(setting.gallery, gateways[0]).pushed_count == 1
    (own / "cover.png").write_bytes(new)
    with Device(setting.gallery) as device:
        put(device, {"cover": own / "cover.png"})
    (own / "cover.png").unlink()
    # Its file is gone before it was pushed: what the vault holds is another picture.
    assert pushed(setting.gallery).missing_files == ["cover"]
    (restored,) = pulled(setting.gallery, tmp_path / "before").restored
    assert Path(restored).name != "cover.png" and Path(restored).read_bytes() == old
    repo = setting.gallery.parent / "pub" / "repo"
    world.publish(repo, 2)
    with Device(setting.gallery) as device:
        device.store.update_state({"source": str(repo)})
    assert edge.follow(setting.gallery, SyncOptions(backfill=1)).re_embedded == 0

    (own / "cover.png").write_bytes(new)
    again = pushed(setting.gallery)
    assert (again.pushed_count, again.removed_count) == (1, 1)
    (restored,) = pulled(setting.gallery, tmp_path / "after").restored
    assert Path(restored) == tmp_path / "after" / "cover.png"
    assert Path(restored).read_bytes() == new
    emptied(setting.gallery, gateways[0])


def test_images_of_any_id_are_restored_inside_the_folder(
    setting: Setting, gateways: list[str], tmp_path: Path
) -> None:
    ids = ["trips/2", "/abs", "..", ".", "a" * 240, "../../out"]
    own = tmp_path / "own"
    own.mkdir()
    # All of one name, so that each but the first needs another.
    images = {name: own / f"{number}" / "p.png" for number, name in enumerate(ids)}
    for path, image in zip(images.values(), setting.images, strict=False):
        path.parent.mkdir()
        path.write_bytes(image.read_bytes())
    with Device(setting.gallery) as device:
        device.store.delete([item.id for item in device.store.list_items()])
        assert put(device, dict(images)) == {}
    assert pushed(setting.gallery, gateways[0]).pushed_count == len(ids)
    done = pulled(setting.gallery, tmp_path / "to" / "here")
    assert done.failed == {}
    contents = {path.read_bytes() for path in (tmp_path / "to" / "here").iterdir()}
    assert contents == {image.read_bytes() for image in images.values()}
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["here"]
    emptied(setting.gallery, gateways[0])
