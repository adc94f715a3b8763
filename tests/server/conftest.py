"""Publications made once a run and copied; gateways stopped by the test that starts them."""

import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from nobackfill.gallery.filters import Scalar
from nobackfill.release.manifest import Manifest
from nobackfill.release.publishing.renew import withdraw
from nobackfill.server.galleries.hosted import SearchSpeed
from nobackfill.server.gateway import GatewayServer
from tests.server.support import ACTIVATED, Client, images, running
from tests.support import trials
from tests.support.blocks import manifest, png, publish_block_release
from tests.support.once import filled, run_folder

Stages = Mapping[int, Path]
# Items of `served`.
SERVED = 40


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """The publication after releases 1, 2 (upgrade from 1) and 3 (upgrades from 1 and 2)."""
    return stages_of_run(tmp_path_factory)


def stages_of_run(factory: pytest.TempPathFactory) -> Stages:
    """What `stages` gives, to other rooms as well. Read only."""
    top = filled(run_folder(factory) / "stages", _make_activated_stages)
    stages = {number: top / f"stage{number}" for number in (1, 2, 3)}
    for number in stages:
        template = top / f"activated{number}"
        ACTIVATED[(stages[number] / "timestamp.json").read_bytes()] = template
    return stages


@trials.near()
def make_stages(top: Path, releases: int) -> Stages:
    """Publish releases one after the other in `top`/repo; a copy after each."""
    repo = top / "repo"
    kept = {}
    for number in range(1, releases + 1):
        sources = list(range(1, number))
        publish_block_release(repo, number, sources)
        kept[number] = top / f"stage{number}"
        shutil.copytree(repo, kept[number])
    return kept


@trials.near()
def _make_activated_stages(top: Path) -> None:
    """Three stages; beside each, the data folder of a gateway that has activated it."""
    for number, repo in make_stages(top, 3).items():
        with running(repo, top / f"activated{number}"):
            pass


@pytest.fixture(scope="session")
def direct_stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """What make_direct_stages makes."""
    top = filled(run_folder(tmp_path_factory) / "direct", make_direct_stages)
    return {1: top / "stage1", 2: top / "repo"}


@trials.near()
def make_direct_stages(top: Path) -> Stages:
    """Release 1, then a release 2 that searches its vectors directly and carries an upgrade."""
    repo = top / "repo"
    publish_block_release(repo, 1)
    shutil.copytree(repo, top / "stage1")
    publish_block_release(repo, 2, [1], directly=[1])
    return {1: top / "stage1", 2: repo}


@pytest.fixture(scope="session")
def withdrawn_stage(stages: Stages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Releases 1 to 3, the second of which was withdrawn."""
    top = tmp_path_factory.mktemp("withdrawn")
    original = stages[1].parent
    shutil.copytree(original / "repo", top / "repo")
    shutil.copytree(original / "repo.keys", top / "repo.keys")
    withdraw(top / "repo", 2, "mistakes cats for dogs")
    return top / "repo"


@pytest.fixture(scope="session")
def sideless_stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """Release 1 without side-information, then a release 2 without any upgrade."""
    top = tmp_path_factory.mktemp("sideless")
    repo = top / "repo"
    with trials.near():
        publish_block_release(repo, 1, side="none")
        shutil.copytree(repo, top / "stage1")
        publish_block_release(repo, 2, side="none")
    return {1: top / "stage1", 2: repo}


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
def gateway(repo: Path, tmp_path: Path) -> Iterator[GatewayServer]:
    """A gateway that serves release 1."""
    with running(repo, tmp_path / "data") as gateway:
        yield gateway


@pytest.fixture(scope="session")
def one(stages: Stages) -> Manifest:
    """Release 1."""
    return manifest(stages[1], 1)


@pytest.fixture(scope="session")
def two(stages: Stages) -> Manifest:
    """Release 2."""
    return manifest(stages[2], 2)


@pytest.fixture(scope="session")
def shared(stages: Stages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of one gateway for all tests that keep to a gallery of their own: see `gallery`."""
    folder = tmp_path_factory.mktemp("shared")
    shutil.copytree(stages[1], folder / "repo")
    with running(folder / "repo", folder / "data") as gateway, Client(gateway.address) as client:
        yield client


@pytest.fixture
def gallery(shared: Client) -> str:
    """The name of a new gallery on the shared gateway."""
    name = f"g-{uuid.uuid4().hex[:12]}"
    shared.create_gallery(name)
    return name


@pytest.fixture
def client(gateway: GatewayServer) -> Iterator[Client]:
    with Client(gateway.address) as client:
        yield client


@pytest.fixture(scope="module")
def served(stages: Stages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    """A gateway of release 1 whose gallery `g` has SERVED items with metadata."""
    with running(stages[1], tmp_path_factory.mktemp("served") / "data") as gateway:
        with Client(gateway.address) as client:
            client.create_gallery("g")
            names = [f"i{i}" * (1 + 20 * (i % 3)) for i in range(SERVED)]
            notes: list[dict[str, Scalar]] = [
                {"number": i, "colour": "red" * (i % 50), "odd": bool(i % 2)} for i in range(SERVED)
            ]
            pictures = map(png, images(SERVED))
            refused = client.put(
                "g", dict(zip(names, pictures, strict=True)), dict(zip(names, notes, strict=True))
            )
            assert not refused
        yield gateway


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search counts as slow, nor as one whose items have to be read: on a busy machine, or by
    what was asked before, a few are, and then all go to threads."""
    monkeypatch.setattr(SearchSpeed, "record_search", lambda *_: None)
    monkeypatch.setattr(SearchSpeed, "record_receiver_search", lambda *_, **__: None)
