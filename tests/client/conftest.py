"""Publications and galleries of the tests of the edge client."""

from pathlib import Path

import pytest

from tests.support import edge
from tests.support.once import run_folder


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> edge.World:
    return edge.World(run_folder(tmp_path_factory) / "world")


@pytest.fixture
def setting(world: edge.World, tmp_path: Path) -> edge.Setting:
    """A publication of release 1 and a gallery of 12 images that follows it."""
    return world.setting(tmp_path)
