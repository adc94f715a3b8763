"""Damaged pages: every command says so in a sentence, no search answers wrongly, rows are saved."""

import json
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nobackfill.client.cli.main import run_line
from nobackfill.client.device import Device
from nobackfill.client.vault.queue import VaultEntry, VaultQueue
from nobackfill.gallery.sqlite_file import PAGE_BYTES
from nobackfill.gallery.store import NewVectors
from tests.support import edge
from tests.support.edge import Setting

ITEMS = 1200
COMMANDS = (
    "search IMAGE --json", "search --id ITEM --json", "list", "status", "verify", "gc", "sync",
    "remove ITEM", "rollback", "push", "pull --to FOLDER/out",
)  # fmt: skip
# Copies a gallery, changes it, and is killed before the log is written back.
KILLED = """
import os, shutil, signal, sys
shutil.copy(*sys.argv[1:])
from nobackfill.gallery.sqlite_gallery import SqliteGallery
SqliteGallery.open(__import__("pathlib").Path(sys.argv[2])).update_state({"a": 1})
os.kill(os.getpid(), signal.SIGKILL)
"""
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def large(world: edge.World, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A gallery of many pages, whose vectors nobody could guess."""
    setting = world.setting(tmp_path_factory.mktemp("large"))
    with Device(setting.gallery) as device:
        spec = device.store.active().spec
        made = np.random.default_rng(7).standard_normal((ITEMS, spec.dim)).astype(np.float32)
        made /= np.linalg.norm(made, axis=1, keepdims=True)
        side = None
        if spec.side_space is not None:
            side = np.ones((ITEMS, spec.side_dim), np.float32)
        ids = [f"made-{row}" for row in range(ITEMS)]
        metadata = [{"path": f"/photos/{name}.png", "name": name} for name in ids]
        device.store.put(ids, [NewVectors(spec.space, made, side)], metadata=metadata)
    return setting


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: its exit code and its stdout."""

    def run(gallery: Path, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["edge-client", "--gallery", str(gallery), *arguments])
        with pytest.raises(SystemExit) as ended:
            run_line()
        said = capsys.readouterr()
        code = int(ended.value.code or 0)
        assert code == 0 or said.err or "damaged" in said.out, arguments
        return code, said.out

    return run


def damage(path: Path, seed: int) -> str:
    """Spoil one to three pages of a file, and say how."""
    chance = random.Random(seed)
    content = bytearray(path.read_bytes())
    pages = len(content) // PAGE_BYTES
    kind = ("noise", "zeros", "bytes", "swap", "cut")[seed % 5]
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(pages) * PAGE_BYTES
        end = start + PAGE_BYTES
        if kind == "noise":
            content[start:end] = chance.randbytes(PAGE_BYTES)
        elif kind == "zeros":
            content[start:end] = bytes(PAGE_BYTES)
        elif kind == "bytes":
            place = start + chance.randrange(PAGE_BYTES - 64)
            content[place : place + 64] = chance.randbytes(64)
        elif kind == "swap":
            other = chance.randrange(pages) * PAGE_BYTES
            content[start:end] = content[other : other + PAGE_BYTES]
    if kind == "cut":
        del content[chance.randrange(len(content)) :]
    path.write_bytes(content)
    return kind


def copied(setting: Setting, folder: Path) -> Path:
    for path in setting.gallery.parent.glob("gallery.sqlite*"):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, folder / path.name)
    return folder / "gallery.sqlite"


def hits(text: str) -> list[tuple[str, str, float]]:
    found: list[dict[str, Any]] = json.loads(text)["hits"]
    return [(hit["id"], hit["path"], round(hit["distance"], 4)) for hit in found]


def attack(setting: Setting, folder: Path, here: Run, seed: int) -> Iterator[tuple[str, int]]:
    """Every command at one damaged gallery: (command, exit code); answers are held to the truth."""
    item = f"made-{seed % ITEMS}"
    named = {"IMAGE": str(setting.images[0]), "ITEM": item, "FOLDER": str(folder)}
    damaged = copied(setting, folder)
    damage(damaged, seed)
    content = damaged.read_bytes()
    for command in COMMANDS:
        for name, value in named.items():
            command = command.replace(name, value)
        damaged.write_bytes(content)
        for end in ("-wal", "-shm"):
            damaged.with_name(damaged.name + end).unlink(missing_ok=True)
        code, said = here(damaged, *command.split())
        if command.startswith("search") and code == 0:
            _, truth = here(setting.gallery, *command.split())
            assert hits(said) == hits(truth), f"{command}, seed {seed}"
        yield command.split()[0], code
    damaged.write_bytes(content)
    saved = folder / "saved" / "gallery.sqlite"
    code, _ = here(damaged, "rescue", "--to", str(saved))
    yield "rescue", code
    assert damaged.read_bytes() == content
    if saved.exists():
        check_rescued(setting, saved)
    else:
        assert code == 65


def check_rescued(setting: Setting, saved: Path) -> None:
    """What was saved is what was written, item by item; the file itself is whole."""
    with Device(setting.gallery) as old, Device(saved) as new:
        space = old.store.active().spec.space
        truth = dict(zip(*(part.tolist() for part in old.store.load_vectors(space)), strict=True))
        items = {item.label: item for item in old.store.list_items(limit=ITEMS * 2)}
        found = new.store.list_items(limit=ITEMS * 2)
        assert [item for item in found if items[item.label].id != item.id] == []
        assert all(
            np.allclose(truth[n], v) for n, v in zip(*new.store.load_vectors(space), strict=True)
        )
        with new.store.read_snapshot() as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert not connection.execute("PRAGMA foreign_key_check").fetchall()


def run_all(setting: Setting, tmp_path: Path, here: Run, seeds: range) -> dict[str, set[int]]:
    codes: dict[str, set[int]] = {}
    counts: Counter[tuple[str, int]] = Counter()
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        for command, code in attack(setting, folder, here, seed):
            codes.setdefault(command, set()).add(code)
            counts[command, code] += 1
        shutil.rmtree(folder)
    print(sorted(counts.items()))
    return codes


@pytest.mark.long
def test_damaged_galleries(large: Setting, tmp_path: Path, here: Run) -> None:
    codes = run_all(large, tmp_path, here, range(10))
    for command in ("search", "list", "verify", "rescue"):
        assert codes[command] <= {0, 65}, codes
    # Damage was met, and not everywhere.
    assert codes["search"] == {0, 65}


@pytest.mark.faults
def test_sixty_damaged_galleries(large: Setting, tmp_path: Path, here: Run) -> None:
    codes = run_all(large, tmp_path, here, range(10, 70))
    for command, found in codes.items():
        assert found <= {0, 65, 66, 69, 73, 78}, f"{command}: {found}"
    assert codes["search"] == {0, 65}


def test_rescue_saves_all_but_the_damaged_rows(large: Setting, tmp_path: Path, here: Run) -> None:
    gallery = copied(large, tmp_path)
    with Device(gallery) as device:
        queue = VaultQueue(device.store)
        for number, item in enumerate(("made-1", "made-600")):
            name = f"{number:064x}"
            queue.insert_sealed(
                VaultEntry(name, item, "0" * 64, "0" * 64, 9, ".png", "stored", None)
            )
        space = device.store.active()
        with device.store.read_snapshot() as connection:
            query = "SELECT label FROM items WHERE id = 'made-600'"
            label = connection.execute(query).fetchone()[0]
            blob = connection.execute(
                f"SELECT embedding FROM vectors_{space.table_number} WHERE label = ?", (label,)
            ).fetchone()[0]
    content = bytearray(gallery.read_bytes())
    place = content.index(blob)
    content[place - place % PAGE_BYTES : place - place % PAGE_BYTES + PAGE_BYTES] = bytes(
        PAGE_BYTES
    )
    gallery.write_bytes(content)
    code, said = here(gallery, "verify")
    assert code == 65 and "rescue" in said
    saved = tmp_path / "new" / "saved.sqlite"
    code, said = here(gallery, "rescue", "--to", str(saved), "--json")
    report = json.loads(said)
    assert code == 65 and report["items"] == ITEMS + 12
    lost = report["lost"]
    assert 0 < lost < ITEMS // 4 and report["vectors"] == {"1": ITEMS + 12 - lost}
    assert report["unreadable"] == {f"vectors_{space.table_number}": lost}
    check_rescued(large, saved)
    with Device(saved) as device:
        assert [entry.item_id for entry in VaultQueue(device.store).entries()] == [
            "made-1", "made-600",
        ]  # fmt: skip
    assert here(saved, "search", str(large.images[0]))[0] == 0
    assert here(saved, "sync")[0] == 0
    assert here(gallery, "rescue", "--to", str(saved))[0] == 73


def test_a_whole_gallery_is_rescued_whole(large: Setting, tmp_path: Path, here: Run) -> None:
    saved = tmp_path / "saved.sqlite"
    code, said = here(large.gallery, "rescue", "--to", str(saved), "--json")
    assert code == 0 and json.loads(said)["lost"] == 0
    assert here(saved, "verify") == here(large.gallery, "verify")
    check_rescued(large, saved)


def test_no_gallery_is_made_under_the_log_of_another(
    large: Setting, tmp_path: Path, here: Run
) -> None:
    """Its vectors would answer as the new one's."""
    gallery = tmp_path / "gallery.sqlite"
    left = subprocess.run([sys.executable, "-c", KILLED, large.gallery, gallery], check=False)
    assert left.returncode == -signal.SIGKILL
    gallery.unlink()
    log = gallery.with_name("gallery.sqlite-wal")
    kept = log.read_bytes()
    assert kept
    repo = ("--from", str(large.repo), "--root", str(large.repo / "1.root.json"))
    assert here(gallery, "init", *repo)[0] == 73
    assert here(large.gallery, "rescue", "--to", str(gallery))[0] == 73
    assert log.read_bytes() == kept and not gallery.exists()
    log.unlink()
    assert here(gallery, "init", *repo)[0] == 0
