"""A training that was stopped does not go on with another model at the path of the one it began
with: its checkpoint would name a model that it never met.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from nobackfill.class_folders import list_images
from nobackfill.errors import ConfigurationError
from nobackfill.training.config import Config
from nobackfill.training.loop.loop import ProgressBars, train_objective
from nobackfill.training.loop.run import CHECKPOINT, read_checkpoint, write_checkpoint
from nobackfill.training.loop.training import train
from tests.training.life import config_of, train_quietly, upgrade_config
from tests.training.test_loop import Line, StopAfter, line_config, rows


@pytest.fixture
def models(runs: Path, tmp_path: Path) -> Path:
    """Models to replace."""
    shutil.copytree(runs, tmp_path / "models")
    return tmp_path / "models"


def _refused_with_another(config: Config, model: Path, digest: str) -> None:
    """Stopped, then refused with another model and finished with the first one."""
    with pytest.raises(KeyboardInterrupt):
        train(config, StopAfter(2))
    kept, replaced = (model / CHECKPOINT).read_bytes(), read_checkpoint(model)
    for tensor in replaced.tensors.values():
        if torch.is_floating_point(tensor):
            tensor *= 1.5
    write_checkpoint(model, replaced)
    with pytest.raises(ConfigurationError, match=rf"another model.*different: {digest}\)"):
        train_quietly(config)
    assert read_checkpoint(config.run_dir).epoch == 2
    (model / CHECKPOINT).write_bytes(kept)
    done = train_quietly(config)
    assert done.is_finished
    assert digest in done.facts


KEYS: dict[str, object] = {"epochs": 4, "checkpoint_every": 1}


def test_an_upgrade_goes_on_with_its_own_models_alone(
    models: Path, digits: Path, tmp_path: Path
) -> None:
    config = upgrade_config(models, digits / "queries", tmp_path / "u", **KEYS)
    _refused_with_another(config, models / "embedder-2", "new_digest")


def test_a_compatible_embedder_goes_on_with_its_own_old_model_alone(
    models: Path, digits: Path, tmp_path: Path
) -> None:
    keys = KEYS | {"method": "bct", "old": str(models / "embedder-1")}
    config = config_of("embedder", tmp_path / "e", digits / "queries", **keys)
    _refused_with_another(config, models / "embedder-1", "old_digest")


def test_an_upgrade_goes_on_with_its_own_stored_vectors_alone(
    models: Path, digits: Path, tmp_path: Path
) -> None:
    paths = list_images(digits / "queries").paths
    vectors = np.random.default_rng(0).standard_normal((len(paths), 8)).astype(np.float32)
    np.save(tmp_path / "v.npy", vectors)
    (tmp_path / "p.txt").write_text("\n".join(paths), "utf-8")
    old = {"vectors": str(tmp_path / "v.npy"), "paths": str(tmp_path / "p.txt"), "release": 1}
    alone = {"old_side": None, "new_side": None, "side": "drops"}
    config = upgrade_config(models, digits / "queries", tmp_path / "s", old=old, **alone, **KEYS)
    with pytest.raises(KeyboardInterrupt):
        train(config, StopAfter(2))
    np.save(tmp_path / "v.npy", -vectors)
    with pytest.raises(ConfigurationError, match=r"different: old_vectors_digest\)"):
        train_quietly(config)
    np.save(tmp_path / "v.npy", vectors)
    assert train_quietly(config).is_finished


def test_a_finished_trial_of_other_models_is_none_of_ours(tmp_path: Path) -> None:
    """Those that choose values, below the folder of a training that was stopped, are read again."""
    config, quiet = line_config(tmp_path, epochs=2), ProgressBars(visible=False)
    facts: dict[str, str | int | float | bool] = {"new_digest": "a", "chosen_t": 0.1, "unit": True}
    done = train_objective(Line(), rows(), config, ("a", "b"), progress=quiet, facts=facts)
    again = train_objective(Line(), rows(), config, ("a", "b"), progress=quiet, facts=facts)
    assert again.facts == done.facts == facts
    with pytest.raises(ConfigurationError, match=r"different: chosen_t, new_digest"):
        train_objective(
            Line(),
            rows(),
            config,
            ("a", "b"),
            progress=quiet,
            facts={"new_digest": "b"} | {"unit": True},
        )
