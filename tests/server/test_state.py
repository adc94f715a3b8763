"""The gateway's small state: what several threads change at once, each by what was there."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nobackfill.server.gateway import Gateway
from nobackfill.server.state import StateFile
from tests.server.support import Client, images

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


def test_deeds_are_kept_by_the_names_of_tokens(gateway: Gateway, client: Client) -> None:
    client.create_gallery("g")
    client.put_images(images(3))
    client.delete("g", ["i0", "nothing"])
    client.delete("g", ["nothing"])
    client.delete_gallery("g")
    found = [(deed.who, deed.what, deed.of_what) for deed in gateway.state.deeds()]
    assert found == [
        ("local", "delete", "1 items of gallery g"), ("local", "delete", "gallery g"),
    ]  # fmt: skip
