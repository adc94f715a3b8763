"""Where nothing can be written: what only reads goes on, the rest says what is not writable."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nobackfill.client.cli.main import run_line
from nobackfill.client.device import Device
from nobackfill.errors import BusyError, CannotWriteError
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from tests.gallery.making import filled, put
from tests.support import blocks, disks
from tests.support.edge import Setting

READS = ("search IMAGE", "search --id ITEM", "list", "status", "verify")
WRITES = (
    "init --from REPO --root ROOT", "add NEW", "sync", "rollback", "remove ITEM", "push",
    "pull --to FOLDER/out", "gc",
)  # fmt: skip


def words(command: str, setting: Setting, item: str) -> list[str]:
    """A command with what it names; init makes a second gallery beside the first."""
    named = {
        "IMAGE": setting.images[0], "NEW": setting.images[-1], "ITEM": item, "REPO": setting.repo,
        "ROOT": setting.repo / "1.root.json", "FOLDER": setting.gallery.parent,
    }  # fmt: skip
    for name, value in named.items():
        command = command.replace(name, str(value))
    second = setting.gallery.with_name("second.sqlite")
    gallery = second if command.startswith("init") else setting.gallery
    return ["--gallery", str(gallery), *command.split()]


def prepared(setting: Setting, folder: Path) -> tuple[Setting, str]:
    """The same with images of its own, the last one new to the gallery; and the first item."""
    images = [Path(shutil.copy(setting.images[0], folder)), *blocks.write_pngs(folder / "new", 13)]
    with Device(setting.gallery) as device:
        return Setting(setting.repo, setting.gallery, images), device.store.list_items()[0].id


def moved(setting: Setting, folder: Path) -> Setting:
    """The gallery and what lies beside it, copied into `folder`."""
    for path in setting.gallery.parent.glob("gallery.sqlite*"):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, folder / path.name)
    return Setting(setting.repo, folder / "gallery.sqlite", setting.images)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs a command in this process: its exit code, and what it said on stderr."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["edge-client", *arguments])
        with pytest.raises(SystemExit) as ended:
            run_line()
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


@pytest.mark.parametrize("left", ["closed", "killed"])
def test_a_read_only_file_system(
    setting: Setting, tmp_path: Path, here: Callable[..., tuple[int, str]], left: str
) -> None:
    setting, item = prepared(setting, tmp_path)
    with disks.small_disk(tmp_path / "disk", 40) as disk:
        if left == "closed":
            there = moved(setting, disk)
        else:
            # Copied while open: the log holds the last change, as after a kill.
            with SqliteGallery.open(setting.gallery) as store:
                store.update_state({"last": 1})
                there = moved(setting, disk)
        with disks.read_only(disk):
            before = snapshot(disk)
            for command in READS:
                assert here(*words(command, there, item)) == (0, ""), command
            with SqliteGallery.open(there.gallery) as store:
                assert store.read_state_value("last") == (1 if left == "killed" else None)
            for command in WRITES:
                code, said = here(*words(command, there, item))
                assert code == 73 and "read-only" in said.lower(), f"{command}: {code} {said}"
            assert snapshot(disk) == before
        assert here(*words("add NEW", there, item))[0] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_gallery_of_another_user(
    setting: Setting, tmp_path: Path, here: Callable[..., tuple[int, str]]
) -> None:
    setting, item = prepared(setting, tmp_path)
    for path in [tmp_path, *tmp_path.parents, *tmp_path.rglob("*")]:
        if path.stat().st_uid == 0 and path != Path("/"):
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))

    def run(command: str) -> tuple[int, str]:
        # In this process: the interpreter itself may lie where others may not look.
        os.setegid(65534)
        os.seteuid(65534)
        try:
            return here(*words(command, setting, item))
        finally:
            os.seteuid(0)
            os.setegid(0)

    # Modules that a command imports late are read while that is allowed.
    for command in (*READS, "add IMAGE"):
        here(*words(command, setting, item))
    before = snapshot(tmp_path)
    for command in ("search IMAGE", "list"):
        assert run(command) == (0, ""), command
    for command in ("add NEW", "remove ITEM", "sync", "rollback"):
        code, said = run(command)
        assert code == 73 and ("cannot" in said or "no permission" in said), (
            f"{command}: {code} {said}"
        )
    # A folder that all may write: nothing is made there that would be in its owner's way.
    tmp_path.chmod(0o777)
    assert run("search --id ITEM") == (0, "")
    assert run("gc")[0] == 73
    assert snapshot(tmp_path) == before
    setting.gallery.chmod(0o600)
    code, said = run("status")
    assert code == 73 and "owner" in said


def test_a_file_read_without_locks_is_not_read_while_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "g.sqlite"
    filled(path, 10).close()
    monkeypatch.setattr("nobackfill.gallery.sqlite_file.explain_unwritable", lambda _: "not here")
    reader = SqliteGallery.open(path)
    monkeypatch.undo()
    assert reader.count() == 10
    with pytest.raises(CannotWriteError, match="not here"):
        put(reader, ["new"], seed=1)
    with SqliteGallery.open(path) as owner:
        put(owner, ["new"], seed=1)
    monkeypatch.setattr("nobackfill.gallery.sqlite_file.explain_unwritable", lambda _: "not here")
    with pytest.raises(BusyError, match="try again"):
        reader.count()
    # As the error says; every later call failed in the same way.
    assert reader.count() == 11
    reader.close()
