"""The wheel of this checkout, and environments that it is installed in; each made once."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.packaging.environments import Environment
from tests.support.once import filled, run_folder

ROOT = Path(__file__).parents[2]


def build(target: str, source: Path, folder: Path) -> Path:
    """The `target` (wheel or sdist) of the tree at `source`, built into `folder`."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder],
        cwd=source, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Once for all workers of a run: most of it is compiling.
    folder = filled(run_folder(tmp_path_factory) / "wheel", partial(build, "wheel", ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def environment(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Environment]:
    """`environment(*extras)`: one with the wheel, outside the checkout."""
    made: dict[tuple[str, ...], Environment] = {}

    def get(*extras: str) -> Environment:
        if extras not in made:
            made[extras] = Environment(tmp_path_factory.mktemp("venv"), wheel, *extras)
        return made[extras]

    return get


@pytest.fixture(scope="session")
def base(environment: Callable[..., Environment]) -> Environment:
    return environment()


@pytest.fixture(scope="session")
def server(environment: Callable[..., Environment]) -> Environment:
    return environment("server")


@pytest.fixture(scope="session")
def training(environment: Callable[..., Environment]) -> Environment:
    return environment("training")


@pytest.fixture(scope="session")
def adopt(environment: Callable[..., Environment]) -> Environment:
    return environment("adopt")
