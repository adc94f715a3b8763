"""deploy/compose.yaml, its services started one by one: the gateway's image as it says, beside a
PostgreSQL of PyPI's, for its image is in no reach here."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.containers.conftest import Asker
from tests.containers.engine import ROOT, Container, Engine
from tests.server.conftest import Stages
from tests.support.postgres import Server
from tests.support.waiting import wait_until

ADDRESS, COUNT = "127.0.0.1:50051", "20"
# What the engine is told nothing of: it is built, waited for, given the host's network.
OTHERS = {"build", "image", "depends_on", "network_mode", "healthcheck", "stop_grace_period"}


@pytest.fixture(scope="module")
def services() -> Any:
    """By name."""
    return yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]


def words(service: Any) -> list[str]:
    """Of `run`, for what a service says beside its volumes; every key is known."""
    given = dict(service)
    made = ["--read-only"] * given.pop("read_only")
    for key, option in (
        ("cap_drop", "--cap-drop"), ("security_opt", "--security-opt"), ("tmpfs", "--tmpfs"),
    ):  # fmt: skip
        # podman 4 knows no-new-privileges without a value.
        made += [w for one in given.pop(key) for w in (option, one.removesuffix(":true"))]
    for name, value in given.pop("environment").items():
        made += ["--env", f"{name}={value}"]
    assert not set(given) - OTHERS - {"volumes"}, given
    return made


def healthy(container: Container, check: list[str]) -> bool:
    """As the engine asks."""
    return container.status(*check) == 0


def test_its_services_work_together(
    engine: Engine, asker: Asker, stages: Stages, postgres: Server, sockets: Path, services: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    database, gateway = services["postgresql"]["environment"], services["gateway"]
    user, name = database["POSTGRES_USER"], database["POSTGRES_DB"]
    # As the image's entry point does.
    postgres.sql(f"CREATE ROLE {user} LOGIN SUPERUSER")
    postgres.sql(f"CREATE DATABASE {name} OWNER {user}")
    shared = next(one for one in services["postgresql"]["volumes"] if one.startswith("socket:"))
    assert shared in gateway["volumes"]
    tmp_path.chmod(0o777)
    here = {"data": str(tmp_path), "socket": str(sockets), "PUBLICATION": str(stages[1])}
    volumes = {}
    for one in gateway["volumes"]:
        source, _, there = re.sub(r"\$\{(\w+)[^}]*\}", r"\1", one).partition(":")
        volumes[here[source]] = there
    answers = []
    for _ in range(2):
        with engine.start("gateway", volumes=volumes, confined=words(gateway)) as container:
            kind, *check = gateway["healthcheck"]["test"]
            assert kind == "CMD"
            wait_until(partial(healthy, container, check), "the gateway is healthy")
            asker("fill", ADDRESS, COUNT)
            answers.append(asker("find", ADDRESS, COUNT))
            container.signal("TERM")
            assert container.wait() == 0
    assert answers[0] == answers[1] and len(json.loads(answers[0])) == int(COUNT)
    (items,) = postgres.sql("SELECT count(*) FROM nobackfill_1.items", name)
    assert items == (int(COUNT),)
