"""A disk without room: what only reads goes on, the rest says to free space, gc makes some."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nobackfill.client import gallery_file
from nobackfill.client.cli.main import run_line
from nobackfill.client.device import Device
from tests.support import blocks, disks, edge
from tests.support.edge import Setting

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: its exit code and what it said on stderr."""

    def run(gallery: Path, *arguments: str | Path) -> tuple[int, str]:
        words = ["edge-client", "--gallery", str(gallery), *map(str, arguments)]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            run_line()
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


@pytest.fixture(params=[None, 1024], ids=["memory", "ext4 of 1 KB blocks"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with disks.small_disk(tmp_path / "disk", 24, request.param) as folder:
        yield folder


@pytest.mark.parametrize("free", [0, 20_000, 100_000])
def test_a_full_disk(setting: Setting, tmp_path: Path, disk: Path, here: Run, free: int) -> None:
    for path in setting.gallery.parent.glob("gallery.sqlite*"):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, disk / path.name)
    gallery = disk / "gallery.sqlite"
    with Device(gallery) as device:
        item = device.store.list_items()[0].id
    new = blocks.write_pngs(tmp_path / "new", 60, seed=5)
    disks.fill(disk, free)
    for command in (
        ["search", setting.images[0]], ["search", "--id", item], ["list"], ["status"], ["verify"],
        ["gc"],
    ):  # fmt: skip
        assert here(gallery, *command) == (0, ""), command
    code, said = here(gallery, "add", *new)
    assert code == 0 or (code == 73 and "free some space" in said), said
    assert code == 73 or free
    assert here(gallery, "search", setting.images[0]) == (0, "")
    (disk / "filler").unlink()
    assert here(gallery, "add", *new)[0] == 0
    assert here(gallery, "verify")[0] == 0


def test_gc_on_a_full_disk(setting: Setting, world: edge.World, disk: Path, here: Run) -> None:
    """It gives back what was held for it, and drops the space that only a rollback needs."""
    world.publish(setting.repo, 2)
    edge.follow(setting.gallery)
    for path in setting.gallery.parent.glob("gallery.sqlite*"):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, disk / path.name)
    gallery = disk / "gallery.sqlite"
    gallery_file.create_reserve(gallery)
    held = disk / "gallery.sqlite.reserve"
    assert held.stat().st_blocks * 512 >= gallery_file.RESERVE_BYTES
    disks.fill(disk, 0)
    assert here(gallery, "gc") == (0, "")
    assert not held.exists() and edge.spaces(gallery) == {2: "active"}
    (disk / "filler").unlink()
    assert here(gallery, "gc") == (0, "") and held.exists()


@pytest.mark.parametrize("free", [900_000, 0])
def test_init_without_room(setting: Setting, disk: Path, here: Run, free: int) -> None:
    disks.fill(disk, free)
    arguments = ("init", "--from", setting.repo, "--root", setting.repo / "1.root.json")
    code, said = here(disk / "g.sqlite", *arguments)
    assert code == 0 or (code == 73 and "free some space" in said), said
    assert code == 73 or free
    (disk / "filler").unlink()
    assert here(disk / "g.sqlite", *arguments)[0] == (0 if code else 73)
