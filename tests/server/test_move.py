"""`gateway move`: galleries from a folder to a database and back, beside a gateway and after it."""

from pathlib import Path

from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, images, running
from tests.server.test_cli import run, run_json
from tests.support.postgres import Server


def moved(source: str, target: str) -> dict[str, tuple[int, int, int, bool]]:
    """Items, written, deleted, alike, by gallery."""
    found = run_json("move", "--from", source, "--to", target)
    return {
        name: (one["items"], one["written"], one["deleted"], one["alike"])
        for name, one in found["galleries"].items()
    }


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
            assert moved(files, url) == {"empty": (0, 0, 0, True), "g": (8, 8, 0, True)}
            # What changed since, and nothing else, goes along the next time.
            client.put_images(images(10)[8:], first=8)
            client.delete("g", ["i3"])
            assert moved(files, url)["g"] == (9, 2, 1, True)
        assert moved(files, url)["g"] == (9, 0, 0, True)
        # A gateway serves there from now on: what it holds is not written over.
        with running(repo, tmp_path / "other", store=url) as gateway:
            assert "another gateway" in run("move", "--from", files, "--to", url, code=75)
            with Client(gateway.address) as client:
                assert client.states() == {1: "PREVIOUS", 2: "ACTIVE"}
                hit = client.find(images(1)[0]).hits[0]
                assert (hit.id, hit.origin) == ("i0", "upgraded")
                assert client.rollback(confirm=True).number == 1
                hit = client.find(images(10)[9]).hits[0]
                assert (hit.id, hit.release) == ("i9", 1)
                assert client.get_gallery("g").items == 9
        assert "give an empty one" in run("move", "--from", files, "--to", url, code=73)
        back = f"sqlite:{tmp_path / 'back'}"
        assert moved(url, back) == {"empty": (0, 0, 0, True), "g": (9, 9, 0, True)}
    with running(repo, tmp_path / "back") as gateway, Client(gateway.address) as client:
        assert client.find(images(1)[0]).hits[0].id == "i0"
        assert client.get_gallery("g").items == 9


def test_a_wrong_source_moves_nothing(tmp_path: Path, postgres: Server) -> None:
    with postgres.database() as url:
        wrong = f"sqlite:{tmp_path / 'nothing'}"
        assert "no gateway has served" in run("move", "--from", wrong, "--to", url, code=66)
        # A typing error makes no folder.
        assert not (tmp_path / "nothing").exists()
        odd = f"sqllite:{tmp_path}"
        assert "expected sqlite:FOLDER" in run("move", "--from", odd, "--to", url, code=78)
        assert "same twice" in run("move", "--from", url, "--to", url, code=78)
