"""Publications made once a session and copied; gateways stopped by the test that starts them."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from server.gateway import Gateway
from tests.server.support import Client, running
from tests.support.blocks import publish_block_release

Stages = Mapping[int, Path]


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """The publication after releases 1, 2 (upgrade from 1) and 3 (upgrades from 1 and 2)."""
    top = tmp_path_factory.mktemp("published")
    repo = top / "repo"
    kept = {}
    for number, sources in ((1, []), (2, [1]), (3, [1, 2])):
        publish_block_release(repo, number, sources)
        kept[number] = top / f"stage{number}"
        shutil.copytree(repo, kept[number])
    return kept


def publish_stage(repo: Path, stage: Path) -> None:
    """Bring a publication to a later stage, as publishing does: timestamp.json last."""
    last = "timestamp.json"
    shutil.copytree(stage, repo, dirs_exist_ok=True, ignore=shutil.ignore_patterns(last))
    shutil.copy2(stage / last, repo / f".{last}")
    (repo / f".{last}").rename(repo / last)


@pytest.fixture
def repo(stages: Stages, tmp_path: Path) -> Path:
    """A publication of one's own: release 1, and whatever `publish_stage` brings."""
    repo = tmp_path / "repo"
    shutil.copytree(stages[1], repo)
    return repo


@pytest.fixture
def gateway(repo: Path, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway that serves release 1."""
    with running(repo, tmp_path / "data") as gateway:
        yield gateway


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Client]:
    with Client(gateway.address) as client:
        yield client
