"""One training at a time in a run folder."""

import errno
import fcntl
from pathlib import Path

import pytest
import yaml

from nobackfill.durable import lock_file
from nobackfill.training.cli.train import app
from nobackfill.training.config import Config
from nobackfill.training.loop import training
from nobackfill.training.loop.run import CHECKPOINT, CONFIG, STATS, read_checkpoint
from tests.training.life import config_of, invoke, train_quietly
from tests.training.test_loop import StopAfter


@pytest.fixture
def config(digits: Path, tmp_path: Path) -> Config:
    keys: dict[str, object] = {"epochs": 2, "batch_size": 16, "checkpoint_every": 1, "log_every": 1}
    return config_of("embedder", tmp_path / "run", digits / "queries", **keys)


def run(config: Config, tmp_path: Path) -> tuple[int, str]:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    result = invoke(app, file)
    return result.exit_code, result.output


def files(config: Config) -> set[str]:
    return {path.name for path in config.run_dir.iterdir()}


def test_a_second_training_in_a_run_folder_is_refused(config: Config, tmp_path: Path) -> None:
    with lock_file(config.run_dir / "lock"):
        code, output = run(config, tmp_path)
        assert code == 75
        assert "another process is training in the run folder" in output
        assert "set another run_dir" in output
        assert files(config) == {"lock"}
    code, output = run(config, tmp_path)
    assert code == 0, output
    # Nothing but the run is left, and who reads it waits for nobody.
    assert files(config) == {CHECKPOINT, CONFIG, STATS}
    with lock_file(config.run_dir / "lock"):
        assert run(config, tmp_path)[0] == 0


def test_a_training_holds_its_folder_until_it_is_stopped(config: Config, tmp_path: Path) -> None:
    codes = []

    class Meanwhile(StopAfter):
        """Starts the same training again in the middle of this one, which then is stopped."""

        def bar(self, title: str, total: int, done: int = 0):  # type: ignore[no-untyped-def]
            codes.append(run(config, tmp_path)[0])
            return super().bar(title, total, done)

    with pytest.raises(KeyboardInterrupt):
        training.train(config, Meanwhile(1))
    assert codes == [75]
    assert read_checkpoint(config.run_dir).epoch == 1
    assert train_quietly(config).is_finished
    steps = (config.run_dir / STATS).read_text("utf-8").splitlines()
    assert len(steps) == read_checkpoint(config.run_dir).step


def test_a_file_system_without_locks_is_trained_on(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def none(*_: object) -> None:
        asked.append(1)
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    code, output = run(config, tmp_path)
    assert code == 0, output
    assert asked == [1]
    assert files(config) == {CHECKPOINT, CONFIG, STATS}


@pytest.mark.parametrize(
    ("numbers", "leads"),
    [
        ({}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"RANK": "8", "LOCAL_RANK": "0"}, False),
        ({"RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "3"}, True),
        ({"SLURM_PROCID": "3"}, False),
    ],
)
def test_the_first_process_of_a_training_locks_for_the_others(
    numbers: dict[str, str],
    leads: bool,
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is no first one works beside the one that holds the lock."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, number in numbers.items():
        monkeypatch.setenv(name, number)
    monkeypatch.setattr(training, "_train_network", lambda *_: read_checkpoint(config.run_dir))
    with lock_file(config.run_dir / "lock"):
        # With no network trained there is no checkpoint to tell of.
        assert run(config, tmp_path)[0] == (75 if leads else 78)
