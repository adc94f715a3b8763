"""A folder put into a gallery: by the gateway's own embedding, and by batches of workers."""

import json
import os
from pathlib import Path

import pytest

from nobackfill.errors import InvalidInputError, NotFoundError, UnavailableError, VerificationError
from nobackfill.release.manifest import Manifest
from nobackfill.server.bulk import (
    FillWork,
    fill,
    fill_by_ray,
    open_bulk_source,
    put_pictures,
    read_model_files,
)
from nobackfill.server.cli.main import main
from nobackfill.v1 import gallery_pb2
from tests.server.conftest import Stages
from tests.server.support import Client, images
from tests.support.blocks import png
from tests.support.commands import Ended, run_here

PICTURES = images(12)
NAMES = [f"sea/{n}.PNG" if n % 2 else f"{n}.png" for n in range(12)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve pictures, one that is none, files of other kinds, and what systems leave behind."""
    root = tmp_path / "pictures"
    (root / "sea").mkdir(parents=True)
    for name, picture in zip(NAMES, PICTURES, strict=True):
        (root / name).write_bytes(png(picture))
    (root / "sea" / "bad.jpg").write_bytes(b"no picture")
    (root / "notes.txt").write_text("none")
    (root / "pipe.png").symlink_to("/dev/zero")
    (root / "phone.heic").write_bytes(b"no picture either")
    (root / "@eaDir").mkdir()
    (root / "@eaDir" / "small.png").write_bytes(png(PICTURES[0]))
    (root / "._1.png").write_bytes(b"a resource fork")
    return root


def check(client: Client, gallery: str) -> None:
    """Each picture is there under its path, and is found by itself."""
    assert client.get_gallery(gallery).items == 12
    for name, picture in zip(NAMES, PICTURES, strict=True):
        (hit,) = client.find(picture, gallery, k=1).hits
        assert hit.id == name and hit.distance < 1e-5


def test_a_folder_by_command(shared: Client, gallery: str, folder: Path) -> None:
    def put(place: Path, code: int) -> Ended:
        server = f"--server={shared.address}"
        done = run_here(main, "gateway", "put", gallery, place, server, "--json")
        assert done.returncode == code, done.stderr
        return done

    (folder / "0.jpg").symlink_to(folder / "sea")
    done = put(folder, 65)
    told = json.loads(done.stdout)
    assert told["stored"] == 12 and set(told["refused"]) == {
        "sea/bad.jpg", "pipe.png", "notes.txt", "0.jpg", "phone.heic",
    }  # fmt: skip
    assert told["refused"]["notes.txt"].endswith("got .txt")
    assert "sea/bad.jpg: " in done.stderr and "only what is new or changed" in done.stderr
    check(shared, gallery)
    assert "no such folder" in put(folder / "sae", 66).stderr
    assert "is not a folder" in put(folder / "sea" / "bad.jpg", 66).stderr
    (folder / "empty").mkdir()
    with Client(shared.address) as client:
        assert fill(client, gallery, str(folder)).stored_count == 12
        with pytest.raises(InvalidInputError, match="found none"):
            fill(client, gallery, str(folder / "empty"))
    check(shared, gallery)


def test_a_batch_as_a_worker_puts_it(
    shared: Client, gallery: str, folder: Path, stages: Stages, one: Manifest
) -> None:
    work = FillWork(
        gallery, shared.address, gallery, folder.as_uri(), one, read_model_files(stages[1], one), {}
    )
    found = list(open_bulk_source(work.source_address).names())
    assert found == sorted([*NAMES, "sea/bad.jpg", "notes.txt", "phone.heic"])
    names = [name for name in found if name not in ("notes.txt", "phone.heic")]
    for _ in range(2):
        done = put_pictures(work, names)
        assert done.stored_count == 12 and list(done.refusals) == ["sea/bad.jpg"]
        check(shared, gallery)
    # Whole items: what an upgrade needs of them is there, too.
    other = Client(shared.address)
    assert fill(other, gallery, str(folder)).stored_count == 12
    assert [space.items for space in other.get_gallery(gallery).spaces] == [12]


def test_places_and_models_that_are_none(stages: Stages, one: Manifest, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing is there"):
        open_bulk_source((tmp_path / "no").as_uri())
    with pytest.raises(InvalidInputError, match="cannot be opened"):
        open_bulk_source("ftp://example/x")
    with pytest.raises(VerificationError, match="cannot be read"):
        read_model_files(tmp_path, one)
    name = os.fsdecode(b"\xff.png")
    (tmp_path / name).write_bytes(b"")
    with Client("127.0.0.1:1", seconds=1) as nobody, pytest.raises(UnavailableError):
        (tmp_path / "a.png").write_bytes(png(PICTURES[0]))
        fill(nobody, "g", str(tmp_path))
    (tmp_path / "a.png").unlink()
    with Client("127.0.0.1:1", seconds=1) as nobody:
        done = fill(nobody, "g", str(tmp_path))
    assert done.stored_count == 0 and list(done.refusals.values()) == [
        "the name of this file is not valid UTF-8; rename the file"
    ]


class OfGoneRelease(Client):
    """A gateway whose publication loses a gallery's release between two calls."""

    def get_gallery(self, name: str) -> gallery_pb2.Gallery:
        gallery = super().get_gallery(name)
        gallery.release = 99
        return gallery


def test_a_fill_by_ray_names_the_release_that_is_gone(
    shared: Client, gallery: str, folder: Path
) -> None:
    with (
        OfGoneRelease(shared.address) as client,
        pytest.raises(NotFoundError, match="release 99 is not published"),
    ):
        fill_by_ray(client, gallery, str(folder), folder, "auto")
