"""The vault through a real gateway: ciphertext only, resumed, compared, really removed."""

import functools
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nobackfill.client.device import Device
from nobackfill.client.maintenance import remove, verify
from nobackfill.client.status import status
from nobackfill.client.sync import SyncOptions
from nobackfill.client.vault import keys
from nobackfill.client.vault.transfer import PullReport, PushReport, pull, push
from nobackfill.errors import ConfigurationError, NotFoundError, UnavailableError
from nobackfill.wire import Gateway
from tests.server.support import running
from tests.support import edge
from tests.support.crash import KILLED
from tests.support.edge import Setting


@dataclass(frozen=True)
class VaultReader:
    """A gallery, the gateway that keeps its images, and the folder where that keeps them."""

    gallery: Path
    images: list[Path]
    gateway: str
    folder: Path

    def push(self, *recipients: str) -> PushReport:
        with Device(self.gallery) as device:
            return push(device, recipients, f"grpc://{self.gateway}", edge.QUIET)

    def pull(self, folder: Path, *items: str, **options: object) -> PullReport:
        chosen = {"identity": None, "include_unknown": False, **options}
        with Device(self.gallery) as device:
            return pull(device, items, folder, **chosen, output=edge.QUIET)  # type: ignore[arg-type]

    def hold_copies(self, folder: Path, count: int) -> Path:
        """Hold copies of some images, in a folder of the test's own, instead of all."""
        folder.mkdir()
        for image in self.images[:count]:
            (folder / image.name).write_bytes(image.read_bytes())
        with Device(self.gallery) as device:
            device.store.delete([item.id for item in device.store.list_items()])
        edge.fill(self.gallery, folder)
        return folder

    def blobs(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def vault(self) -> dict[str, int]:
        with Device(self.gallery) as device:
            states: dict[str, int] = status(device)["vault"]
        return states


@pytest.fixture(scope="module")
def gateway(world: edge.World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    top = tmp_path_factory.mktemp("gateway")
    world.publish(top / "pub" / "repo", 1)
    with running(top / "pub" / "repo", top / "data") as gateway:
        yield f"{gateway.address} {top / 'data'}"


@pytest.fixture
def vaulted(setting: Setting, gateway: str) -> Iterator[VaultReader]:
    address, data = gateway.split()
    made = VaultReader(setting.gallery, setting.images, address, Path(data) / "vault")
    yield made
    # The gateway is shared: leave nothing for the next test.
    with Device(made.gallery) as device:
        remove(device, [item.id for item in device.store.list_items()])
    made.push()
    assert made.blobs() == []


def test_what_is_pulled_is_what_was_added(vaulted: VaultReader, tmp_path: Path) -> None:
    pushed = vaulted.push()
    assert (pushed.pushed_count, pushed.duplicate_count, pushed.missing_files) == (12, 0, [])
    assert vaulted.push().duplicate_count == 12
    pulled = vaulted.pull(tmp_path / "restored")
    assert len(pulled.restored) == 12
    for image in vaulted.images:
        assert (tmp_path / "restored" / image.name).read_bytes() == image.read_bytes()
    assert vaulted.pull(tmp_path / "restored").duplicate_count == 12
    stale = [p for p in vaulted.gallery.parent.rglob("*") if p.parent.name.endswith("box")]
    assert stale == []


def test_the_gateway_holds_ciphertext_and_random_names(vaulted: VaultReader) -> None:
    vaulted.push()
    stored = vaulted.blobs()
    assert len(stored) == 12
    everything = b"".join(path.read_bytes() + str(path).encode() for path in stored)
    for image in vaulted.images:
        data = image.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        for canary in (data[40:72], image.name.encode(), digest[:16].encode()):
            assert canary not in everything
    assert all(path.read_bytes().startswith(keys.MAGIC) for path in stored)


def test_a_recovery_key_opens_everything_without_the_device(
    vaulted: VaultReader, world: edge.World, tmp_path: Path
) -> None:
    recovery = tmp_path / "recovery"
    key = keys.new_identity(recovery)
    vaulted.push(str(key.to_public()))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        vaulted.pull(tmp_path / "no", identity=tmp_path / "lost")
    other = world.setting(tmp_path / "new-phone")
    with Device(other.gallery) as device:
        device.store.update_state({"vault": f"grpc://{vaulted.gateway}"})
        pulled = pull(device, [], tmp_path / "saved", recovery, True, edge.QUIET)
    assert len(pulled.restored) == 12
    saved = {path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    assert saved == {image.read_bytes() for image in vaulted.images}
    assert {path.suffix for path in (tmp_path / "saved").iterdir()} == {".png"}


def test_what_is_removed_leaves_the_vault_too(vaulted: VaultReader, tmp_path: Path) -> None:
    vaulted.push()
    with Device(vaulted.gallery) as device:
        done = remove(device, [str(vaulted.images[0])])
    assert done == {"removed": 1, "left_in_vault": 1}
    assert len(vaulted.blobs()) == 12
    assert vaulted.push().removed_count == 1
    assert len(vaulted.blobs()) == 11
    assert vaulted.vault() == {"sealed": 0, "stored": 11, "removing": 0}
    with pytest.raises(NotFoundError):
        vaulted.pull(tmp_path, hashlib.sha256(vaulted.images[0].read_bytes()).hexdigest()[:16])


def test_half_an_upload_leaves_the_vault_too(
    vaulted: VaultReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:

        def half(source: Path, offset: int) -> Iterator[bytes]:
            yield source.read_bytes()[offset:300]

        broken.setattr("nobackfill.client.vault.transport._chunks", half)
        broken.setattr("nobackfill.client.vault.transport._STANDSTILLS", 1)
        with pytest.raises(UnavailableError):
            vaulted.push()
    assert [path.stat().st_size for path in vaulted.blobs()] == [300]
    with Device(vaulted.gallery) as device:
        remove(device, [str(path) for path in vaulted.images])
    vaulted.push()
    assert vaulted.blobs() == []


def test_damage_in_the_vault_is_named_and_leaves_no_plaintext(
    vaulted: VaultReader, tmp_path: Path
) -> None:
    vaulted.push()
    first, second, third, *_ = vaulted.blobs()
    originals = {path: path.read_bytes() for path in (first, second, third)}
    first.write_bytes(first.read_bytes()[:-20])
    second.write_bytes(third.read_bytes()[: second.stat().st_size])
    third.unlink()
    pulled = vaulted.pull(tmp_path / "restored")
    for path, data in originals.items():
        path.write_bytes(data)
    assert len(pulled.failed) == 3
    assert len(pulled.restored) == 9
    assert len(list((tmp_path / "restored").iterdir())) == 9
    assert len(vaulted.pull(tmp_path / "restored").restored) == 3


def test_a_push_killed_at_any_step_loses_and_doubles_nothing(vaulted: VaultReader) -> None:
    code = (
        "import sys; from pathlib import Path; from nobackfill.client.device import Device\n"
        "from nobackfill.client.vault.transfer import push\n"
        "from nobackfill.client.output import Output\n"
        "with Device(Path(sys.argv[1])) as d: push(d, [], sys.argv[2], Output())"
    )

    def attempt(fault: str) -> int:
        command = [sys.executable, "-c", code, str(vaulted.gallery), f"grpc://{vaulted.gateway}"]
        return subprocess.run(command, env={"NOBACKFILL_FAULT": fault}, check=False).returncode

    assert [attempt(f"kill@{step}") for step in (3, 9, 14, 17, 21)] == [KILLED] * 5
    vaulted.push()
    assert len(vaulted.blobs()) == 12
    assert vaulted.vault() == {"sealed": 0, "stored": 12, "removing": 0}
    with Device(vaulted.gallery) as device:
        assert verify(device)["problems"] == []


def test_a_file_that_was_changed_is_not_pushed_as_the_old_picture(
    vaulted: VaultReader, world: edge.World, tmp_path: Path
) -> None:
    own = vaulted.hold_copies(tmp_path / "own", 2)
    (own / vaulted.images[0].name).write_bytes(vaulted.images[5].read_bytes())
    pushed = vaulted.push()
    assert (pushed.pushed_count, len(pushed.missing_files)) == (1, 1)


def test_backfill_takes_images_from_the_vault(
    vaulted: VaultReader, world: edge.World, tmp_path: Path
) -> None:
    own = vaulted.hold_copies(tmp_path / "own", 3)
    vaulted.push()
    for image in own.iterdir():
        image.unlink()
    repo = vaulted.gallery.parent / "pub" / "repo"
    world.publish(repo, 2)
    report = edge.follow(vaulted.gallery, SyncOptions(backfill=2))
    assert report.re_embedded == 2
    origins = sorted(str(origin) for origin, _ in edge.contents(vaulted.gallery).values())
    assert origins == ["re-embedded", "re-embedded", "upgraded"]


def test_a_backfill_does_without_a_vault_that_is_away(
    vaulted: VaultReader, world: edge.World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = vaulted.hold_copies(tmp_path / "own", 3)
    vaulted.push()
    (own / vaulted.images[0].name).unlink()
    world.publish(vaulted.gallery.parent / "pub" / "repo", 2)
    with Device(vaulted.gallery) as device:
        device.store.update_state({"vault": "grpc://127.0.0.1:1"})
    assert edge.follow(vaulted.gallery, SyncOptions(backfill=3)).re_embedded == 2
    assert "no images from the vault" in capsys.readouterr().err


def test_an_item_removed_during_its_push_leaves_nothing_behind(vaulted: VaultReader) -> None:
    vaulted.push()
    with Device(vaulted.gallery) as device:
        # What a push leaves that had listed the item before it was removed.
        device.store.delete([device.store.list_items()[0].id])
    assert vaulted.push().removed_count == 1
    assert len(vaulted.blobs()) == 11


def test_a_vault_that_is_away(vaulted: VaultReader, monkeypatch: pytest.MonkeyPatch) -> None:
    soon = functools.partial(Gateway, seconds=0.3)
    monkeypatch.setattr("nobackfill.client.vault.transfer.Gateway", soon)
    with Device(vaulted.gallery) as device, pytest.raises(UnavailableError):
        push(device, [], "grpc://127.0.0.1:1", edge.QUIET)
