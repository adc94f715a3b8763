"""Canaries: images and vectors are found where they belong, and nowhere else.

An image is on no disk but in its own file; its vectors are in the gallery file until the image is
removed, and then in no file, log or free page. Nothing private is printed.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nobackfill.client.device import Device
from nobackfill.gallery.sqlite_file import vector_table_name
from tests.support import edge, graphs
from tests.support.edge import Setting

COMMAND = Path(sys.executable).with_name("edge-client")


class Scene:
    """A gallery with one canary, everything it writes in folders that can be searched."""

    def __init__(self, setting: Setting, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.setting = setting
        self.top = setting.gallery.parent
        self.said = b""
        pixels = np.random.default_rng(77).integers(0, 256, (graphs.SIZE, graphs.SIZE, 3), np.uint8)
        self.file = top / "elsewhere" / "canary.png"
        self.file.parent.mkdir()
        exif = Image.Exif()
        exif[0x010E] = "EXIF-CANARY"
        Image.fromarray(pixels).save(self.file, exif=exif)
        self.images = {
            "file": self.file.read_bytes()[40:80],
            "pixels": pixels.tobytes()[:48],
            "exif": b"EXIF-CANARY",
        }
        (self.top / "tmp").mkdir()
        monkeypatch.setenv("TMPDIR", str(self.top / "tmp"))

    def run(self, *arguments: str | Path) -> None:
        done = subprocess.run(
            [COMMAND, "--gallery", self.setting.gallery, *arguments],
            capture_output=True,
            check=False,
            env=os.environ,
        )
        self.said += done.stdout + done.stderr

    def vectors(self) -> dict[str, bytes]:
        """Bytes of the canary's embeddings and side-information, by space."""
        with Device(self.setting.gallery) as device, device.store.read_snapshot() as connection:
            label = connection.execute(
                "SELECT label FROM items WHERE metadata LIKE '%canary.png%'"
            ).fetchone()[0]
            found = {}
            for space in device.store.spaces():
                embedding, side = connection.execute(
                    f"SELECT embedding, side FROM {vector_table_name(space.table_number)} "
                    "WHERE label = ?",
                    (label,),
                ).fetchone()
                found[f"embedding {space.spec.release}"] = _telling(embedding)
                found[f"side {space.spec.release}"] = _telling(side)
        return found

    def holders(self, canary: bytes) -> set[str]:
        """Names of the files below the gallery's folder that hold the canary, publication apart."""
        return {
            path.name
            for path in self.top.rglob("*")
            if path.is_file() and "pub" not in path.parts and canary in path.read_bytes()
        }


def _telling(blob: bytes) -> bytes:
    """The part of an orthogonal-block vector that is not zero."""
    values = np.frombuffer(blob, "<f4")
    used = np.flatnonzero(values)
    return values[used[0] : used[-1] + 1].tobytes()


@pytest.mark.long
def test_canaries(
    setting: Setting, world: edge.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(setting, _outside(tmp_path), monkeypatch)
    scene.run("add", scene.file)
    world.publish(setting.repo, 2)
    scene.run("sync")
    scene.run("search", scene.file, "--json")
    scene.run("list", "--json")
    scene.run("status", "--json")
    vectors = scene.vectors()
    assert set(vectors) == {"embedding 1", "side 1", "embedding 2", "side 2"}
    for name, canary in vectors.items():
        assert scene.holders(canary) <= {"gallery.sqlite", "gallery.sqlite-wal"}, name
        assert scene.holders(canary), f"{name}: the canary itself must be there to be looked for"
    scene.run("remove", scene.file)
    for name, canary in {**vectors, **scene.images}.items():
        assert scene.holders(canary) == set(), name
        assert canary not in scene.said, f"{name} was printed"
    assert b"canary.png" in scene.said


def _outside(tmp_path: Path) -> Path:
    """A folder beside the test's own, for what a person has and we must not copy."""
    folder = tmp_path.with_name(f"{tmp_path.name}-person")
    folder.mkdir()
    return folder


def test_files_are_private(setting: Setting) -> None:
    for path in setting.gallery.parent.glob("gallery.sqlite*"):
        assert path.is_dir() or path.stat().st_mode & 0o077 == 0, path


def test_errors_carry_no_vectors(setting: Setting) -> None:
    with Device(setting.gallery) as device:
        table = vector_table_name(device.store.active().table_number)
        with device.store.transaction() as connection:
            damage = f"UPDATE {table} SET embedding = ? WHERE label = 1"
            connection.execute(damage, (b"\x7f" * 4 * graphs.DIM,))
    done = subprocess.run(
        [COMMAND, "--gallery", setting.gallery, "verify"], capture_output=True, check=False
    )
    assert done.returncode == 65
    assert b"1 vectors of release 1 are not finite" in done.stdout
    assert b"3.39" not in done.stdout + done.stderr
