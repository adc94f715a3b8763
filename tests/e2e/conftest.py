from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo import gateway, serve
from demo.children import Children
from nobackfill.wire import Gateway
from tests.support.blocks import publish_block_release, write_pngs

ITEMS = 200


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    """Commands that end with the test; their logs lie in tmp_path/logs."""
    with Children(tmp_path / "logs") as running:
        yield running


@dataclass
class Place:
    """A running gateway over release 1, with a gallery of ITEMS block images."""

    repo: Path
    address: str
    images: list[Path]
    gateway: Gateway


@pytest.fixture
def place(children: Children, tmp_path: Path) -> Place:
    repo = tmp_path / "model_repo"
    publish_block_release(repo, 1)
    addresses = serve.free_addresses(2)
    serve.start_gateway(children, repo, tmp_path / "data", addresses)
    images = write_pngs(tmp_path / "gallery" / "images", ITEMS)
    connection = gateway.connect(addresses[0])
    gateway.create_gallery(connection, "blocks")
    gateway.put_images(connection, "blocks", tmp_path / "gallery", lambda done: None)
    return Place(repo, addresses[0], images, connection)
