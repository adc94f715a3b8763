"""Backup, restore, verify: consistent under load, and every damage is found."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from nobackfill import durable
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    CannotWriteError,
    ConfigurationError,
    DamagedError,
    NobackfillError,
    NotFoundError,
    VerificationError,
)
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from nobackfill.release.manifest import Manifest
from nobackfill.server.backup import RESERVE, backup, restore, verify
from nobackfill.server.cli.main import main
from nobackfill.server.state import AUDIT, UNFINISHED_RESTORE, StateFile
from nobackfill.server.storage import Storage
from nobackfill.server.vault import VaultBlobs
from tests.server.support import Client, images, running
from tests.server.test_vault import QUOTA, blob_of, sealed
from tests.support import crash, disks
from tests.support.commands import run_here


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
    state.record_audit("ann", "delete", "gallery g")
    state.record_audit("jürgen", "roll back", "to release 1")
    deeds = state.audit_entries()
    written = (data / AUDIT).read_bytes()
    durable.append_bytes(data / AUDIT, b'{"time": 1.0, "wh')
    backup(data, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "restored")
    for folder in ("backup", "restored"):
        assert (tmp_path / folder / AUDIT).read_bytes() == written
        assert (tmp_path / folder / AUDIT).stat().st_mode & 0o777 == 0o600
    assert StateFile(tmp_path / "restored" / "state.json").audit_entries() == deeds
    (tmp_path / "backup" / AUDIT).unlink()
    with pytest.raises(VerificationError, match=AUDIT):
        verify(tmp_path / "backup")


def test_the_log_of_a_killed_gateway_is_read_and_stays(
    data: Path, one: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nobackfill.server.backup._PATIENCE_S", 0.1)
    source = make_gallery(tmp_path / "source", "g", one) / "gallery.sqlite"
    copy = data / "galleries" / "g" / "gallery.sqlite"
    copy.parent.mkdir(parents=True)
    with SqliteGallery.open(source) as store:
        store.put(["a"], [NewVectors(one.space, np.eye(1, one.embedder.dim, dtype=np.float32))])
        files = [path.with_name(path.name + "-wal") for path in (source, copy)]
        assert files[0].stat().st_size
        shutil.copy(source, copy)
        shutil.copy(*files)
    before = [path.read_bytes() for path in (copy, files[1])]
    assert backup(data, tmp_path / "backup").galleries == {"g": 1}
    assert [path.read_bytes() for path in (copy, files[1])] == before


def test_blobs_deleted_meanwhile_are_left_out(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One before it is copied, one when its bytes have been, but not its mode."""
    vault = VaultBlobs(data / "vault", QUOTA)
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


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@pytest.fixture
def full(tmp_path: Path, one: Manifest) -> Iterator[Path]:
    """A small disk with a data folder of 6 MB, and 4 MB left."""
    with disks.small_disk(tmp_path / "disk", 24) as disk:
        (disk / "data").mkdir()
        StateFile(disk / "data" / "state.json").change(paused=("g",))
        make_gallery(disk / "data", "g", one)
        put_blobs(disk / "data", 6)
        disks.fill(disk, 4 << 20)
        yield disk


def put_blobs(data: Path, megabytes: int) -> None:
    vault = VaultBlobs(data / "vault", QUOTA)
    for number in range(megabytes):
        content = sealed(1 << 20, seed=number)
        vault.put("a", blob_of(content, number), 0, [content])


def test_unfinished_uploads_are_listed(data: Path, tmp_path: Path) -> None:
    """They hold quota, and ListBlobs leaves them out."""
    put_blobs(data, 1)
    content = sealed(1 << 20, seed=9)
    VaultBlobs(data / "vault", QUOTA).put("b", blob_of(content, 9), 0, [content[:5000]])
    done = run_here(main, "gateway", "data", "verify", data)
    assert "unfinished uploads" in done.stdout and "1 (5000 bytes)" in done.stdout, done
    found = json.loads(run_here(main, "gateway", "data", "verify", data, "--json").stdout)
    ((path, size),) = found["unfinished_uploads"].items()
    assert (found["blobs"], size) == (1, 5000)
    assert (data / path).read_bytes() == content[:5000]
    assert blob_of(content, 9).id in path
    assert backup(data, tmp_path / "backup").unfinished_uploads == {}


def test_a_backup_leaves_the_data_its_disk(full: Path) -> None:
    """It is refused before it writes anything, and with it what would take the reserve."""
    before, room = names(full), free(full)
    with pytest.raises(CannotWriteError, match=r"reserve of \d+, found \d+ bytes free; free some"):
        backup(full / "data", full / "backup")
    assert names(full) == before and free(full) == room
    (full / "filler").unlink()
    disks.fill(full, 7 << 20)
    # It would fit, but for the tenth of the disk that stays free.
    with pytest.raises(CannotWriteError, match="reserve"):
        backup(full / "data", full / "backup")
    (full / "filler").unlink()
    assert backup(full / "data", full / "backup").blobs == 6
    assert free(full) >= min(RESERVE, 24 * (1 << 20) // 10)


def test_a_disk_that_fills_up_meanwhile(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else took the room after it was looked for."""
    monkeypatch.setattr("nobackfill.server.backup._need_room", lambda *_: None)
    before, room = names(full), free(full)
    with pytest.raises(CannotWriteError, match="free some space"):
        backup(full / "data", full / "backup")
    assert names(full) == before and free(full) == room
    (full / "filler").unlink()
    backup(full / "data", full.parent / "backup")
    disks.fill(full, 3 << 20)
    with pytest.raises(CannotWriteError):
        restore(full.parent / "backup", full / "again")
    assert names(full) == before


def test_a_restore_leaves_the_disk_its_reserve(full: Path) -> None:
    backup(full / "data", full.parent / "backup")
    before = names(full)
    with pytest.raises(CannotWriteError, match="reserve"):
        restore(full.parent / "backup", full / "again")
    (full / "empty").mkdir()
    with pytest.raises(CannotWriteError, match="reserve"):
        restore(full.parent / "backup", full / "empty")
    assert names(full) == before | {"empty"} and not names(full / "empty")


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_an_interrupted_one_leaves_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    put_blobs(data, 2)
    backup(data, tmp_path / "backup")
    before = names(tmp_path)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        if command == "backup":
            backup(data, tmp_path / "another")
        else:
            restore(tmp_path / "backup", tmp_path / "another")
    assert names(tmp_path) == before


@pytest.mark.long
def test_what_killed_backups_left_is_removed(data: Path, tmp_path: Path, one: Manifest) -> None:
    """By the next one, whatever its name; the kill came at any of its durable steps."""
    make_gallery(data, "g", one)
    put_blobs(data, 1)
    parent = tmp_path / "backups"

    def prepare() -> None:
        shutil.rmtree(parent, ignore_errors=True)
        parent.mkdir()

    ended = {"killed"}
    for _, outcome in crash.sweep("kill", lambda: backup(data, parent / "killed"), prepare):
        assert outcome.status == crash.KILLED
        finished = (parent / "killed").exists()
        backup(data, parent / "next")
        # Killed before it had a lock, it left an empty folder.
        left = names(parent) - {"next", *(ended if finished else ())}
        assert not any(names(parent / name) for name in left), left
        verify(parent / "killed" if finished else parent / "next")


@pytest.mark.long
def test_what_a_killed_restore_left_is_removed(data: Path, tmp_path: Path, one: Manifest) -> None:
    """Until it has ended a gateway does not start on it; the next restore begins anew."""
    make_gallery(data, "g", one)
    put_blobs(data, 1)
    backup(data, tmp_path / "backup")
    again = tmp_path / "again"

    def prepare() -> None:
        shutil.rmtree(again, ignore_errors=True)

    for _, outcome in crash.sweep("kill", lambda: restore(tmp_path / "backup", again), prepare):
        assert outcome.status == crash.KILLED
        if (again / "state.json").exists():
            assert verify(again).galleries == {"g": 0}
            continue
        if (again / UNFINISHED_RESTORE).exists():
            with pytest.raises(VerificationError, match="gateway data restore"):
                Storage(f"sqlite:{again}", again)
        assert restore(tmp_path / "backup", again).blobs == 1
        assert not (again / UNFINISHED_RESTORE).exists()
        assert verify(again).galleries == {"g": 0}


def test_of_three_at_once_one_is_made(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are told that it is busy, and what it made is whole."""
    put_blobs(data, 1)
    copy_bytes, others = shutil.copyfile, threading.Semaphore(0)

    def copy_when_alone(source: str, target: str, **options: bool) -> object:
        for _ in range(2):
            assert others.acquire(timeout=20), "the others are not refused"
        return copy_bytes(source, target, **options)

    monkeypatch.setattr(shutil, "copyfile", copy_when_alone)
    made: list[object] = []

    def make() -> None:
        try:
            made.append(backup(data, tmp_path / "backup"))
        except NobackfillError as error:
            made.append(type(error))
            others.release()

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[:2] == [BusyError, BusyError], made
    assert made[2] == verify(tmp_path / "backup")
    assert names(tmp_path) == {"data", "backup"}


def test_a_backup_on_a_read_only_medium(data: Path, tmp_path: Path, one: Manifest) -> None:
    """It is checked and restored as it lies there; its files can be written afterwards."""
    make_gallery(data, "g", one)
    put_blobs(data, 1)
    with disks.small_disk(tmp_path / "disk", 24) as disk:
        made = backup(data, disk / "backup")
        for path in (disk / "backup").rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        with disks.read_only(disk):
            assert verify(disk / "backup") == made
            assert restore(disk / "backup", tmp_path / "again") == made
    for path in (tmp_path / "again").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("kind", ["volume", "fresh ext4 volume", "link", "link to nothing"])
def test_where_a_restore_may_go(data: Path, tmp_path: Path, kind: str) -> None:
    """An empty volume stays mounted, a link stays a link, and nothing is left beside them."""
    backup(data, tmp_path / "backup")
    there = tmp_path / "there"
    if "link" in kind:
        if kind == "link":
            (tmp_path / "elsewhere").mkdir()
        there.symlink_to("elsewhere")
        before = names(tmp_path) | {"elsewhere"}
        restore(tmp_path / "backup", there)
        assert there.is_symlink() and names(tmp_path) == before
        assert verify(tmp_path / "elsewhere") == verify(there)
        return
    with disks.small_disk(there, 8, 1024 if "ext4" in kind else None):
        assert names(there) == ({"lost+found"} if "ext4" in kind else set())
        before = names(tmp_path)
        restore(tmp_path / "backup", there)
        assert there.is_mount() and names(tmp_path) == before
        assert StateFile(there / "state.json").current.paused == ("g",)
        verify(there)


@pytest.mark.parametrize("place", ["inside", "below", "through a link", "behind a linked folder"])
def test_no_copy_lands_in_what_it_copies(data: Path, tmp_path: Path, place: str) -> None:
    """A backup in the live folder would be part of the next one; an export, a vault likewise."""
    (data / "trust").mkdir()
    (tmp_path / "link").symlink_to(data)
    (tmp_path / "disk").mkdir()
    (data / "vault").symlink_to(tmp_path / "disk")
    target = {
        "inside": data / "copy",
        "below": data / "galleries" / "copy" / "copy",
        "through a link": tmp_path / "link" / "copy",
        "behind a linked folder": tmp_path / "disk" / "copy",
    }[place]
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    with pytest.raises(ConfigurationError, match=f"{target}: lies inside .*; name a folder out"):
        backup(data, target)
    store = f"sqlite:{data}"
    for words in (
        ("export", "g", "--from", store, "--out", str(target)),
        ("move", "--from", store, "--to", f"sqlite:{target}"),
        ("move", "--from", store, "--to", "postgresql://none", "--to-data", str(target)),
    ):
        done = run_here(main, "gateway", "data", *words)
        assert done.returncode == 78 and "lies inside" in done.stderr, done.stderr
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before
    assert not target.exists()
    # As long as it is beside the folder, its name may begin with the folder's.
    backup(data, tmp_path / "data-copy")
    with pytest.raises(ConfigurationError, match="lies inside"):
        restore(tmp_path / "data-copy", tmp_path / "data-copy" / "again")
    verify(tmp_path / "data-copy")


def test_a_restore_leaves_a_served_folder_alone(data: Path, tmp_path: Path) -> None:
    backup(data, tmp_path / "backup")
    (tmp_path / "again").mkdir()
    with durable.lock_file(tmp_path / "again" / "lock"), pytest.raises(BusyError):
        restore(tmp_path / "backup", tmp_path / "again")


DAMAGES: dict[str, Callable[[dict[str, object]], str]] = {
    "cut": lambda listing: json.dumps(listing)[:-20],
    "no files": lambda listing: json.dumps({"format": 1}),
    "a list": lambda listing: json.dumps([listing]),
    "files by number": lambda listing: json.dumps(listing | {"files": [1, 2]}),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", [verify, lambda folder: restore(folder, folder.parent / "r")])
def test_a_damaged_listing_is_named(
    data: Path, tmp_path: Path, damage: str, command: Callable[[Path], object]
) -> None:
    backup(data, tmp_path / "backup")
    listing = tmp_path / "backup" / "backup.json"
    listing.write_text(DAMAGES[damage](json.loads(listing.read_text())))
    with pytest.raises(
        VerificationError, match=r"this list of the backup's files is damaged \(.*; use"
    ):
        command(tmp_path / "backup")
    assert names(tmp_path) == {"data", "backup"}


def test_a_backup_of_a_later_format_is_refused(data: Path, tmp_path: Path) -> None:
    backup(data, tmp_path / "backup")
    listing = tmp_path / "backup" / "backup.json"
    listing.write_text(json.dumps(json.loads(listing.read_text()) | {"format": 2}))
    for writer, shown in (
        ("3.0", "nobackfill 3.0, which wrote it"),
        (None, "the newer nobackfill"),
    ):
        read = json.loads(listing.read_text())
        listing.write_text(json.dumps(read | {"written_by": writer}))
        for command in (verify, lambda folder: restore(folder, tmp_path / "again")):
            with pytest.raises(VerificationError, match=f"format 1, got format 2; use {shown}"):
                command(tmp_path / "backup")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("content", ["", "{}", '{"format": 1', "\xff"])
def test_what_a_start_reads_is_verified(data: Path, content: str) -> None:
    (data / "trust").mkdir()
    (data / "trust" / "trusted.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(VerificationError, match="this file of trusted metadata is damaged"):
        verify(data)


@pytest.mark.long
def test_verifying_beside_a_busy_gateway(stages: dict[int, Path], tmp_path: Path) -> None:
    """Galleries, items and blobs come and go, and all that is there is good."""
    pictures = images(40)
    with running(stages[1], tmp_path / "data") as gateway:
        done = threading.Event()

        def work(name: str) -> None:
            with Client(gateway.address) as client:
                while not done.is_set():
                    client.create_gallery(name)
                    client.put_images(pictures, name)
                    client.delete(name, [f"i{i}" for i in range(20)])
                    client.delete_gallery(name)

        def fill() -> None:
            vault, number = gateway.vault, 0
            while not done.is_set():
                number += 1
                content = sealed(seed=number % 256)
                vault.put("a", blob_of(content, number), 0, [content])
                vault.delete("a", blob_of(content, number).id)

        threads = [threading.Thread(target=work, args=(name,)) for name in ("g", "h", "i")]
        threads.append(threading.Thread(target=fill))
        for thread in threads:
            thread.start()
        try:
            found, end = [verify(tmp_path / "data")], time.monotonic() + 3
            while time.monotonic() < end or not any(one.galleries for one in found):
                found.append(verify(tmp_path / "data"))
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert all(set(one.galleries) <= {"g", "h", "i"} for one in found)
    assert all(count <= 40 for one in found for count in one.galleries.values())
