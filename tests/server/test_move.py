"""`gateway data move`: from a folder to a database and back, beside a gateway and after it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from nobackfill.errors import PreconditionError, VerificationError
from nobackfill.server.cli.main import main
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.storage import clear_moved_mark, mark_moved
from nobackfill.server.transfer import transfer_vault
from nobackfill.v1 import vault_pb2 as pb
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, images, running, settings
from tests.server.test_cli import run, run_json
from tests.support.commands import run_here
from tests.support.postgres import Server


def move_beside(source: str, target: str, *more: str) -> dict[str, Any]:
    """What `move` prints as JSON while a gateway serves `source`."""
    words = ("data", "move", "--from", source, "--to", target, *more, "--json")
    done = run_here(main, "gateway", *words)
    assert done.returncode == 75, done.stderr
    assert done.stderr.startswith("gateway: the move is not finished: a gateway still serves")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["finished"] is False
    return found


def moved(
    source: str, target: str, *more: str, beside: bool = False
) -> dict[str, tuple[int, int, int, bool]]:
    """Items, written, deleted, alike, by gallery; `beside` a gateway that serves `source`."""
    if beside:
        found = move_beside(source, target, *more)
    else:
        found = run_json("data", "move", "--from", source, "--to", target, *more)
    return {
        name: (one["items"], one["written"], one["deleted"], one["alike"])
        for name, one in found["galleries"].items()
    }


@pytest.mark.long
def test_galleries_move_to_a_database_and_back(
    repo: Path, stages: Stages, tmp_path: Path, postgres: Server
) -> None:
    files = f"sqlite:{tmp_path / 'data'}"
    with postgres.database() as url:
        with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
            client.create_gallery("g")
            client.create_gallery("empty")
            client.put_images(images(8))
            publish_stage(repo, stages[2])
            client.swap(2)
            found = moved(files, url, beside=True)
            assert found == {"empty": (0, 0, 0, True), "g": (8, 8, 0, True)}
            # What changed since, and nothing else, goes along the next time.
            client.put_images(images(10)[8:], first=8)
            client.delete("g", ["i3"])
            assert moved(files, url, beside=True)["g"] == (9, 2, 1, True)
        assert moved(files, url)["g"] == (9, 0, 0, True)
        # A gateway serves there from now on: what it holds is not written over.
        with running(repo, tmp_path / "other", store=url) as gateway:
            assert "a gateway serves" in run("data", "move", "--from", files, "--to", url, code=75)
            with Client(gateway.address) as client:
                assert client.states() == {1: "PREVIOUS", 2: "ACTIVE"}
                hit = client.find(images(1)[0]).hits[0]
                assert (hit.id, hit.origin) == ("i0", "upgraded")
                assert client.rollback(confirm=True).number == 1
                hit = client.find(images(10)[9]).hits[0]
                assert (hit.id, hit.release) == ("i9", 1)
                assert client.get_gallery("g").items == 9
        assert "name an empty store" in run("data", "move", "--from", files, "--to", url, code=73)
        back = f"sqlite:{tmp_path / 'back'}"
        said = run("data", "move", "--from", url, "--to", back, code=78)
        assert "--from-data" in said
        assert moved(url, back, "--from-data", str(tmp_path / "other")) == {
            "empty": (0, 0, 0, True),
            "g": (9, 9, 0, True),
        }
    with running(repo, tmp_path / "back") as gateway, Client(gateway.address) as client:
        assert client.find(images(1)[0]).hits[0].id == "i0"
        assert client.get_gallery("g").items == 9


def test_the_vault_goes_along_and_the_old_folder_is_not_served_again(
    repo: Path, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    sealed = [b"age-encryption.org/v1\n" + bytes([n]) * (n + 1) for n in range(4)]
    blobs = [
        pb.Blob(id=f"{n:064x}", size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for n, data in enumerate(sealed)
    ]

    with running(repo, old) as gateway, Client(gateway.address) as client:
        for blob, data in zip(blobs[:3], sealed, strict=False):
            client.put_blob(blob, [data])
        found = move_beside(f"sqlite:{old}", f"sqlite:{new}")
        assert found["vault"] == {"items": 3, "written": 3, "deleted": 0, "alike": True}
        client.delete_blob(blobs[0].id)
        client.put_blob(blobs[3], [sealed[3]])
        # Half an upload: its device begins it anew.
        client.put_blob(pb.Blob(id="f" * 64, size=99, sha256="e" * 64), [sealed[0]])
        # A database has no folder for a vault.
        said = run(
            "data", "move", "--from", f"sqlite:{old}", "--to", "postgresql://nowhere", code=78
        )
        assert f"{old / 'vault'} has 3 blobs" in said and "--to-data" in said
    found = run_json("data", "move", "--from", f"sqlite:{old}", "--to", f"sqlite:{new}")
    assert found["vault"] == {"items": 3, "written": 1, "deleted": 1, "alike": True}
    with running(repo, new) as gateway, Client(gateway.address) as client:
        assert list(client.list_blobs().blobs) == blobs[1:]
        got = [b"".join(client.get_blob(blob.id)) for blob in blobs[1:]]
        assert got == sealed[1:]
    with pytest.raises(PreconditionError, match=f"moved to sqlite:{new}.*--force"):
        GatewayServer(settings(repo, old)).start()
    clear_moved_mark(settings(repo, old))
    with running(repo, old) as gateway, Client(gateway.address) as client:
        assert len(client.list_blobs().blobs) == 3


def test_a_damaged_blob_ends_the_move(repo: Path, tmp_path: Path) -> None:
    with running(repo, tmp_path / "old"):
        pass
    blob = tmp_path / "old" / "vault" / ("a" * 32) / "bb" / f"{'b' * 64}.{'c' * 64}"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"age-encryption.org/v1\n")
    stores = ("--from", f"sqlite:{tmp_path / 'old'}", "--to", f"sqlite:{tmp_path / 'new'}")
    assert "the blob is damaged" in run("data", "move", *stores, code=65)
    assert not (tmp_path / "new" / "state.json").exists()


def test_a_wrong_source_moves_nothing(tmp_path: Path, postgres: Server) -> None:
    with postgres.database() as url:
        wrong = f"sqlite:{tmp_path / 'nothing'}"
        assert "found no state.json" in run("data", "move", "--from", wrong, "--to", url, code=66)
        # A typing error makes no folder.
        assert not (tmp_path / "nothing").exists()
        odd = f"sqllite:{tmp_path}"
        assert "expected sqlite:FOLDER" in run("data", "move", "--from", odd, "--to", url, code=78)
        assert "the same store" in run("data", "move", "--from", url, "--to", url, code=78)


def test_a_blob_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    blob = tmp_path / "old" / ("a" * 32) / "bb" / f"{'b' * 64}.{'c' * 64}"
    blob.mkdir(parents=True)
    with pytest.raises(VerificationError, match=f"{blob}: the blob cannot be read"):
        transfer_vault(tmp_path / "old", tmp_path / "new")


@pytest.mark.parametrize(
    ("to", "shown"),
    [
        (
            "postgresql://ann:secret@db.example:6432/g?sslmode=require",
            "postgresql://db.example:6432/g",
        ),
        ("postgresql:///g?host=/run/pg&user=ann&password=secret", "postgresql:///g"),
        ("sqlite:/srv/new", "sqlite:/srv/new"),
    ],
)
def test_the_mark_of_a_move_holds_no_password(to: str, shown: str, tmp_path: Path) -> None:
    mark_moved(tmp_path, to)
    (mark,) = tmp_path.iterdir()
    assert json.loads(mark.read_text()) == {"to": shown}
