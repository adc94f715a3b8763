from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support import edge
from tests.support.browser import chromium
from tests.support.once import run_folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> edge.World:
    return edge.World(run_folder(tmp_path_factory) / "world")
