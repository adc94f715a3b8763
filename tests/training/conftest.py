"""One small life for the whole room: trained and published once a test process."""

from pathlib import Path

import pytest
import torch

from tests.training.life import Life, publish_life, train_runs, write_digits


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the parts train, eval, queries, gallery. Read only."""
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    return folder


@pytest.fixture(scope="session")
def runs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """embedder-1, side-1, embedder-2, side-2, upgrade-1-2. Read only."""
    folder = tmp_path_factory.mktemp("runs")
    train_runs(digits, folder)
    return folder


@pytest.fixture(scope="session")
def life(digits: Path, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """Releases 1 and 2 published. Read only; copy the folder to publish more."""
    made = Life(digits, runs, tmp_path_factory.mktemp("published") / "model_repo")
    publish_life(made)
    return made
