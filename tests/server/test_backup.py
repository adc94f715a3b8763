"""Backup, restore, verify: consistent under load, and every damage is found."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from nobackfill import durable
from nobackfill.errors import (
    AlreadyExistsError,
    CannotWriteError,
    DamagedError,
    NotFoundError,
    VerificationError,
)
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.release.manifest import Manifest
from nobackfill.server.backup import backup, restore, verify
from nobackfill.server.state import AUDIT, StateFile
from nobackfill.server.vault import Vault
from tests.server.support import Client, images, running
from tests.server.test_vault import QUOTA, blob_of, sealed


@pytest.fixture(scope="module")
def made(stages: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A backup taken while items were put; and how many were acknowledged before it began."""
    folder = tmp_path_factory.mktemp("backup")
    shutil.copytree(stages[1], folder / "repo")
    pictures = images(400)
    with (
        running(folder / "repo", folder / "data") as gateway,
        Client(gateway.address) as client,
    ):
        client.create_gallery("g")
        client.put_images(pictures[:50])
        done = threading.Event()

        def put() -> None:
            for i in range(50, 400, 5):
                if done.is_set():
                    return
                client.put_images(pictures[i : i + 5], first=i)

        thread = threading.Thread(target=put)
        thread.start()
        backup(folder / "data", folder / "backup")
        done.set()
        thread.join()
    return folder / "backup", 50


def test_what_was_acknowledged_is_in_it(made: tuple[Path, int], tmp_path: Path) -> None:
    source, acknowledged = made
    summary = restore(source, tmp_path / "data")
    count = summary.galleries["g"]
    assert acknowledged <= count <= 400
    repo = source.parent / "repo"
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        for i in (0, acknowledged - 1, count - 1):
            assert client.find(images(400)[i], k=1).hits[0].id == f"i{i}"
        assert client.get_gallery("g").items == count


def test_verifying_twice_changes_nothing(made: tuple[Path, int]) -> None:
    assert verify(made[0]) == verify(made[0])


def test_every_damage_is_found(made: tuple[Path, int], tmp_path: Path) -> None:
    source = made[0]
    names = [p.relative_to(source) for p in source.rglob("*") if p.is_file()]
    passing = (".lock", "-wal", "-shm")
    names = [n for n in names if (source / n).stat().st_size and not n.name.endswith(passing)]
    assert len(names) >= 4
    for number, name in enumerate(names):
        copy = tmp_path / str(number)
        shutil.copytree(source, copy)
        data = bytearray((copy / name).read_bytes())
        data[len(data) // 2] ^= 1
        (copy / name).write_bytes(data)
        with pytest.raises((VerificationError, NotFoundError, ValueError)):
            verify(copy)
        (copy / name).unlink()
        with pytest.raises((VerificationError, NotFoundError)):
            restore(copy, tmp_path / f"restored{number}")
        assert not (tmp_path / f"restored{number}").exists()


def test_nothing_is_overwritten(made: tuple[Path, int], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(AlreadyExistsError):
        restore(made[0], tmp_path / "full")
    with pytest.raises(AlreadyExistsError):
        backup(made[0], tmp_path / "full")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder whose gateway has remembered something."""
    folder = tmp_path / "data"
    folder.mkdir()
    StateFile(folder / "state.json").change(paused=("g",))
    return folder


def make_gallery(data: Path, name: str, one: Manifest) -> Path:
    folder = data / "galleries" / name
    folder.mkdir(parents=True)
    with SqliteGallery.create(folder / "gallery.sqlite", SpaceSpec.of(one)):
        return folder


def test_the_audit_comes_back(data: Path, tmp_path: Path) -> None:
    """Up to the deed that is being written."""
    state = StateFile(data / "state.json")
    state.audit("ann", "delete", "gallery g")
    state.audit("jürgen", "roll back", "to release 1")
    deeds = state.deeds()
    written = (data / AUDIT).read_bytes()
    durable.append(data / AUDIT, b'{"time": 1.0, "wh')
    backup(data, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "restored")
    for folder in ("backup", "restored"):
        assert (tmp_path / folder / AUDIT).read_bytes() == written
        assert (tmp_path / folder / AUDIT).stat().st_mode & 0o777 == 0o600
    assert StateFile(tmp_path / "restored" / "state.json").deeds() == deeds
    (tmp_path / "backup" / AUDIT).unlink()
    with pytest.raises(VerificationError, match=AUDIT):
        verify(tmp_path / "backup")


def test_blobs_deleted_meanwhile_are_left_out(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One before it is copied, one when its bytes have been, but not its mode."""
    vault = Vault(data / "vault", QUOTA)
    for number in range(3):
        content = sealed(seed=number)
        vault.put("a", blob_of(content, number), 0, [content])
    copy_bytes = shutil.copyfile
    copied: list[Path] = []

    def copy_and_delete(source: str, target: str, **options: bool) -> object:
        result = copy_bytes(source, target, **options)
        if not copied:
            others = [path for path in (data / "vault").glob("*/??/*") if path != Path(source)]
            for path in (Path(source), others[0]):
                vault.delete("a", path.name.partition(".")[0])
        copied.append(Path(source))
        return result

    monkeypatch.setattr(shutil, "copyfile", copy_and_delete)
    assert backup(data, tmp_path / "backup").blobs == 1
    kept = [path.name for path in (tmp_path / "backup" / "vault").glob("*/??/*")]
    assert kept == [path.name for path in (data / "vault").glob("*/??/*")]
    monkeypatch.undo()
    assert restore(tmp_path / "backup", tmp_path / "restored").blobs == 1


def test_a_file_that_cannot_be_copied_is_named(data: Path, tmp_path: Path) -> None:
    (data / "vault").mkdir()
    os.mkfifo(data / "vault" / "pipe")
    with pytest.raises(CannotWriteError, match="pipe"):
        backup(data, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize("left", ["nothing", "its folder"])
def test_a_gallery_deleted_meanwhile_is_left_out(
    data: Path, tmp_path: Path, one: Manifest, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """Between its listing and its copy; nothing takes its place."""
    gone = make_gallery(data, "gone", one)
    make_gallery(data, "kept", one)
    make_dir = durable.make_dir

    def delete_and_make(path: Path, mode: int = 0o755) -> None:
        if path.name == "gone" and gone.exists():
            shutil.rmtree(gone)
            if left == "its folder":
                gone.mkdir()
        make_dir(path, mode)

    monkeypatch.setattr(durable, "make_dir", delete_and_make)
    assert backup(data, tmp_path / "backup").galleries == {"kept": 0}
    assert [path.name for path in (tmp_path / "backup" / "galleries").iterdir()] == ["kept"]
    assert not gone.exists() or not list(gone.iterdir())


def test_a_damaged_gallery_is_named(data: Path, tmp_path: Path, one: Manifest) -> None:
    path = make_gallery(data, "g", one) / "gallery.sqlite"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(DamagedError, match=r"g/gallery\.sqlite"):
        backup(data, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_a_folder_of_any_name_is_backed_up(data: Path, tmp_path: Path, one: Manifest) -> None:
    """SQLite reads ? # and % of an address otherwise than of a path: it made another file, and
    looked at that."""
    make_gallery(data, "g", one)
    odd = data.rename(tmp_path / "50% of #1?mode=memory")
    assert backup(odd, tmp_path / "backup #2").galleries == {"g": 0}
    assert {path.name for path in tmp_path.iterdir()} == {odd.name, "backup #2"}
