"""Backup, restore, verify: consistent under load, and every damage is found."""

import shutil
import threading
from pathlib import Path

import pytest

from nobackfill.errors import AlreadyExistsError, NotFoundError, VerificationError
from nobackfill.server.backup import backup, restore, verify
from tests.server.support import Client, images, running


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
