"""Set before any test module imports numpy, torch or gRPC; and fixtures of many rooms."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.stores.milvus_engine import MilvusEngine
    from tests.support.postgres import Server

# Two cores are shared by the workers of one run and by the servers that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Rooms with the longest files: begun first, so that no worker is left alone with one at the end.
LONGEST = (
    "e2e", "training", "research", "faults", "packaging", "bench", "lives", "manual", "quality",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)
    if os.environ.get("NOBACKFILL_PLAIN_GRPC"):
        skip = pytest.mark.skip(reason="a plain grpc.server does not hold this")
        for item in items:
            if item.get_closest_marker("hot_path") is not None:
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Where another process runs what imports torch (`make test`), let no file import it here."""
    if "TORCH_ELSEWHERE" in os.environ and "torch" in sys.modules:
        pytest.exit("a test file imports torch: add it to TORCH in the Makefile", returncode=1)


def _rank(item: pytest.Item) -> int:
    room = item.path.relative_to(Path(__file__).parent).parts[0]
    return LONGEST.index(room) if room in LONGEST else len(LONGEST)


@pytest.fixture(scope="session", autouse=True)
def _forked_trials(request: pytest.FixtureRequest) -> Iterator[None]:
    """Trials of releases in children that have imported what they need."""
    from tests.support import trials

    quick = request.config.pluginmanager.hasplugin("tests.quick")
    with trials.near() if quick else trials.forked():
        yield


@pytest.fixture
def near_gate() -> Iterator[None]:
    """Trials of releases in this process."""
    from tests.support import trials

    with trials.near():
        yield


@pytest.fixture(scope="module")
def near_trials() -> Iterator[None]:
    """The same for a whole module."""
    from tests.support import trials

    with trials.near():
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator["Server"]:
    """A PostgreSQL with pgvector. Where it cannot start, tests say so and are skipped; they fail
    where CI is set."""
    from nobackfill.errors import NobackfillError
    from tests.support.postgres import Server, running

    try:
        manager = running()
        server: Server = manager.__enter__()
    except (NobackfillError, OSError, AssertionError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    try:
        yield server
    finally:
        manager.__exit__(None, None, None)


@pytest.fixture(scope="session")
def milvus_address() -> Iterator[str]:
    """A Milvus, for tests that are marked `scale`. Where it is not installed, or cannot start, they
    say so and are skipped."""
    pytest.importorskip("pymilvus", reason="Milvus is not tested: pymilvus is not installed")
    from nobackfill.errors import NobackfillError
    from tests.support import milvus

    try:
        manager = milvus.running(*milvus.QUICKER)
        address = manager.__enter__()
    except (NobackfillError, OSError) as error:
        pytest.skip(str(error))
    yield address
    manager.__exit__(None, None, None)


@pytest.fixture(scope="session")
def chroma_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a Chroma, for tests that are marked `scale`; skipped where `make test-scale` has
    not installed it."""
    from bench.rivals import chroma

    if not chroma.PROGRAM.exists():
        pytest.skip("Chroma is not tested: build/chroma is not there")
    with chroma.run_chroma(tmp_path_factory.mktemp("chroma")) as address:
        yield address


@pytest.fixture
def milvus_engine(
    postgres: "Server", milvus_address: str, monkeypatch: pytest.MonkeyPatch
) -> "Iterator[MilvusEngine]":
    """A database, and its collections in one Milvus."""
    from nobackfill.plugins.milvus import candidates
    from tests.stores.milvus_engine import MilvusEngine

    # The galleries of tests are small, and searched as large ones are.
    monkeypatch.setattr(candidates, "SMALL", 10)
    made = MilvusEngine(postgres, milvus_address)
    with made.closing:
        yield made
        for name in made.collections.names():
            if made.known in name:
                made.collections.drop(name)
