"""Containers of the images that `make container` builds. Everything here is marked `scale`."""

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.containers.engine import FOUND, ROOT, Container, Engine
from tests.server.conftest import Stages, make_stages
from tests.support.postgres import Server
from tests.support.waiting import wait_until

QUESTIONS = {ROOT / "tests" / "containers" / "questions.py": "/questions.py:ro"}
JOB = "demo-upgrade-2"


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """What runs the images, in a network of their own."""
    if not FOUND.exists():
        pytest.skip("containers are not tested: `make container` builds them where it can")
    made = Engine()
    # Where a cluster's names would lead.
    made.isolate({f"{JOB}-0.{JOB}": "127.0.0.1"})
    yield made
    made.sweep()


class Asker:
    """A client beside the gateways: questions.py, in a container of its own."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def __call__(self, *question: str) -> str:
        """The answer to a question."""
        return self._container.ask("python", "/questions.py", *question)

    def searching(self, address: str, count: str) -> AbstractContextManager[dict[str, Any]]:
        """Searches go on from its begin to the end of the block; what came of them is then in the
        mapping."""
        return self._beside("load", address, count)

    def changing(self, address: str) -> AbstractContextManager[dict[str, Any]]:
        """The same, for items that are put and deleted."""
        return self._beside("change", address)

    @contextmanager
    def _beside(self, *question: str) -> Iterator[dict[str, Any]]:
        enough = f"/tmp/{uuid.uuid4().hex}"
        told: dict[str, Any] = {}
        with ThreadPoolExecutor(1) as beside:
            asking = beside.submit(self, *question, enough)
            try:
                begun = partial(self._container.status, "test", "-e", f"{enough}.begun")
                wait_until(lambda: asking.done() or begun() == 0, f"{question[0]} has begun")
                yield told
            finally:
                self._container.ask("touch", enough)
                told |= json.loads(asking.result())


@pytest.fixture(scope="session")
def asker(engine: Engine) -> Iterator[Asker]:
    """Who asks the gateways."""
    sleeping = ["--entrypoint", "sleep"]
    with engine.start("gateway", "infinity", volumes=QUESTIONS, words=sleeping) as container:
        yield Asker(container)


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """The publication after release 1, and after release 2 with an upgrade from it, for everybody
    to read."""
    made = make_stages(tmp_path_factory.mktemp("published"), 2)
    for folder in made.values():
        open_up(folder)
    return made


@pytest.fixture(scope="session")
def sockets(postgres: Server) -> Path:
    """Where PostgreSQL listens, for everybody who mounts it."""
    postgres.socket.parent.chmod(0o711)
    return postgres.socket.parent


def open_up(folder: Path) -> None:
    """Let the containers' user read it, who is nobody here."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.scale)
