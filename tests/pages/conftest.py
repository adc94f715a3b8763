from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from nobackfill.release import trial
from tests.support import edge
from tests.support.browser import chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def near_trials() -> Iterator[None]:
    """Trials of releases in this process, as `near_gate` has them for one test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "refusal_in_child", lambda request, _: trial.refusal(request))
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> edge.World:
    return edge.World(tmp_path_factory.mktemp("world"))
