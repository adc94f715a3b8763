"""The gateway's small state: what several threads change at once, each by what was there."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nobackfill.errors import UnauthenticatedError
from nobackfill.server.gateway import Gateway
from nobackfill.server.state import StateFile
from tests.server.conftest import Stages, publish_stage
from tests.server.guarded import tokens_file
from tests.server.support import Client, images, refused, running
from tests.server.test_cli import run_json
from tests.support.postgres import Server

NAMES = [f"g{i}" for i in range(24)]


def test_no_pause_is_lost_beside_others(gateway: Gateway, tmp_path: Path) -> None:
    """Two that paused at once both wrote what they had read before: one was forgotten."""
    upgrading, state = gateway.upgrading, gateway.state
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(upgrading.pause, NAMES))
        assert sorted(state.now.paused) == sorted(NAMES)
        list(pool.map(upgrading.resume, NAMES[::2]))
        assert sorted(state.now.paused) == sorted(NAMES[1::2])
        list(pool.map(lambda name: upgrading.forget({name}), NAMES[1::2]))
        assert state.now.paused == ()
    upgrading.pause("g1")
    assert StateFile(tmp_path / "data" / "state.json").now == state.now


@pytest.mark.parametrize("kept", ["in files", "in a database"])
def test_deeds_are_kept_by_the_names_of_tokens(
    near_gate: None, kept: str, stages: Stages, tmp_path: Path, postgres: Server
) -> None:
    """As `gateway audit` tells beside the gateway."""
    repo, tokens = tmp_path / "repo", tokens_file(tmp_path / "tokens")
    publish_stage(repo, stages[1])
    with postgres.database() as url:
        store = f"sqlite:{tmp_path / 'data'}" if kept == "in files" else url
        with running(repo, tmp_path / "data", tokens_file=tokens, store=store) as gateway:
            with Client(gateway.address, "admin") as admin:
                admin.create_gallery("g")
                admin.put_images(images(3))
                publish_stage(repo, stages[2])
                admin.swap(2)
                admin.delete("g", ["i0", "nothing"])
                # Nothing happened.
                admin.delete("g", ["nothing"])
            with Client(gateway.address, "other") as other:
                other.rollback(confirm=True)
                other.delete_gallery("g")
            with Client(gateway.address) as nobody, refused(UnauthenticatedError):
                nobody.delete_gallery("g")
            found = run_json("audit", "--store", store)["audit"]
        assert [(deed["who"], deed["what"], deed["of_what"]) for deed in found] == [
            ("admin", "activate", "release 2"),
            ("admin", "delete", "1 items of gallery g"),
            ("other", "roll back", "to release 1, 0 items not found"),
            ("other", "delete", "gallery g"),
        ]
        times = [deed["time"] for deed in found]
        assert times == sorted(times)
