"""One small life for all that tests training: trained and published once a run."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.once import filled, run_folder
from tests.training.life import Life, graphs_made_once, publish_life, train_runs, write_digits


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _graphs_made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with graphs_made_once(run_folder(tmp_path_factory) / "graphs"):
        yield


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the parts train, eval, queries, gallery. Read only."""
    return filled(run_folder(tmp_path_factory) / "digits", write_digits)


@pytest.fixture(scope="session")
def runs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """embedder-1, side-1, embedder-2, side-2, upgrade-1-2. Read only."""
    return filled(run_folder(tmp_path_factory) / "runs", partial(train_runs, digits))


@pytest.fixture(scope="session")
def life(digits: Path, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """Releases 1 and 2 published. Read only; copy the folder to publish more."""
    folder = run_folder(tmp_path_factory) / "life"
    made = Life(digits, runs, folder / "model_repo")
    filled(folder, lambda _: publish_life(made))
    return made
