"""Upgrades of few images, or whose choice holds classes out; accelerators that are not there."""

import shutil
from pathlib import Path

import pytest

from nobackfill.errors import ConfigurationError, InvalidInputError
from tests.training.life import Life, config_of, train_quietly

QUICK: dict[str, object] = {"epochs": 2, "batch_size": 16}


@pytest.mark.parametrize(
    ("method", "choose"), [("residual", "share"), ("fastfill", "classification")]
)
def test_a_weight_is_chosen_for_a_published_new_model(
    method: str, choose: str, life: Life, tmp_path: Path
) -> None:
    """On classes that the choice holds out; its classifier is made of the others."""
    published = {"model_repo": str(life.repo), "release": 2}
    old, keys = str(life.runs / "embedder-1"), {**QUICK, "method": method, "choose": [choose]}
    done = train_quietly(
        config_of("upgrade", tmp_path / "run", life.data / "train", old=old, new=published, **keys)
    )
    assert done.is_finished and f"chosen_{choose}" in done.facts


def test_an_upgrade_on_one_image_is_refused(life: Life, tmp_path: Path) -> None:
    image = next((life.data / "train" / "0").iterdir())
    (tmp_path / "images" / "0").mkdir(parents=True)
    shutil.copy(image, tmp_path / "images" / "0")
    models = {"old": str(life.runs / "embedder-1"), "new": str(life.runs / "embedder-2")}
    for method in ("affine", "fct", "residual"):
        config = config_of(
            "upgrade", tmp_path / method, tmp_path / "images", method=method, **models, **QUICK
        )
        with pytest.raises(InvalidInputError, match="at least two images to train an upgrade"):
            train_quietly(config)


def test_an_accelerator_that_is_not_here_is_told_in_a_sentence(life: Life, tmp_path: Path) -> None:
    keys: dict[str, object] = {**QUICK, "accelerator": "mps"}
    with pytest.raises(ConfigurationError, match="accelerator: mps"):
        train_quietly(config_of("embedder", tmp_path / "run", life.data / "train", **keys))
