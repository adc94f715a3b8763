"""The command itself: what it says and how it ends."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from nobackfill.training.cli import evaluate, export, train
from nobackfill.training.config import Config
from nobackfill.training.loop.run import read_finished
from tests.training.life import config_of, invoke, upgrade_config


def run(config: Config, tmp_path: Path, *arguments: str) -> tuple[int, str]:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    result = invoke(train.app, file, *arguments)
    return result.exit_code, result.output


@pytest.fixture
def images(digits: Path, tmp_path: Path) -> Path:
    """A folder of images to spoil."""
    shutil.copytree(digits / "queries", tmp_path / "images")
    return tmp_path / "images"


def small(tmp_path: Path, images: Path, **keys: object) -> Config:
    return config_of(
        "embedder", tmp_path / "run", images, **({"epochs": 2, "batch_size": 16} | keys)
    )


def test_a_training_ends_in_a_checkpoint(images: Path, tmp_path: Path) -> None:
    code, output = run(small(tmp_path, images), tmp_path)
    assert (code, "2 epochs, 10 steps" in output) == (0, True), output
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"checkpoint.safetensors", "config.yaml", "stats.jsonl"}
    # config.yaml is a configuration again.
    assert invoke(train.app, tmp_path / "run" / "config.yaml").exit_code == 0


def test_a_corrupt_image_is_named_before_the_first_step(images: Path, tmp_path: Path) -> None:
    (images / "3" / "broken.png").write_bytes(b"no image")
    code, output = run(small(tmp_path, images), tmp_path)
    assert code == 65
    assert "3/broken.png" in output
    assert not (tmp_path / "run" / "stats.jsonl").exists()
    code, output = run(small(tmp_path, images), tmp_path, "--set", "skip_corrupt=true")
    assert (code, "broken.png" in output) == (0, True)


@pytest.mark.parametrize(
    ("removed", "empty", "message"),
    [
        ("", "empty", "empty: expected images"),
        ("123456789", None, "at least 2 class"),
        ("0123456789", None, "class folders"),
    ],
)
def test_unusable_folders_end_in_65(
    removed: str, empty: str | None, message: str, images: Path, tmp_path: Path
) -> None:
    for digit in removed:
        shutil.rmtree(images / digit)
    if empty is not None:
        (images / empty).mkdir()
    code, output = run(small(tmp_path, images), tmp_path)
    assert code == 65
    assert message in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("keys", "code", "message"),
    [
        ({"classes": 11}, 65, "at least 11 class folders"),
        ({"batch_size": 4096}, 65, "expected at least batch_size"),
        ({"backbone": "resnet19"}, 78, "unknown backbone 'resnet19'"),
        ({"method": "magic"}, 78, "expected one of bct"),
        ({"init": "nowhere"}, 78, "nowhere has no checkpoint"),
        ({"method": "bct", "old": "nowhere"}, 78, "nowhere has no checkpoint"),
        ({"head": "softmax"}, 78, "neither margin nor scale"),
    ],
)
def test_wrong_configurations_end_before_the_first_step(
    keys: dict[str, object], code: int, message: str, images: Path, tmp_path: Path
) -> None:
    got, output = run(small(tmp_path, images, **keys), tmp_path)
    assert got == code, output
    assert message in output
    assert not (tmp_path / "run" / "stats.jsonl").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "magic"}, "unknown upgrade method 'magic'; expected one of .*fct"),
        ({"old": "nowhere"}, "nowhere has no checkpoint"),
        ({"old": "{runs}/side-1"}, "of kind embedder, got one of kind side_encoder"),
        ({"new": "{runs}/upgrade-1-2"}, "of kind embedder, got one of kind upgrade"),
        ({"old": {"model_repo": "nowhere", "release": 1}}, "release 1 is not published"),
        (
            {"old": {"vectors": "v.npy", "paths": "p.txt", "release": 1}},
            "vectors or paths of stored vectors",
        ),
    ],
)
def test_wrong_upgrades_end_before_the_first_step(
    keys: dict[str, object], message: str, runs: Path, digits: Path, tmp_path: Path
) -> None:
    import re

    filled = {k: v.format(runs=runs) if isinstance(v, str) else v for k, v in keys.items()}
    config = upgrade_config(runs, digits / "queries", tmp_path / "run", **filled)
    code, output = run(config, tmp_path)
    assert code == 78, output
    assert re.search(message, output)
    assert not (tmp_path / "run" / "stats.jsonl").exists()


def test_a_checkpoint_of_other_dimensions_is_refused(
    runs: Path, images: Path, tmp_path: Path
) -> None:
    wide = small(tmp_path, images, init=str(runs / "embedder-2"), embedding_dim=24)
    code, output = run(wide, tmp_path)
    assert code == 78
    assert "expected shape [24, " in output
    assert "got [16, " in output


def test_a_training_starts_from_the_weights_it_is_given(images: Path, tmp_path: Path) -> None:
    begun = small(tmp_path, images, head="cosface", margin=None, scale=None)
    assert run(begun, tmp_path)[0] == 0
    still: dict[str, object] = {"init": str(begun.run_dir), "lr": 1e-12, "weight_decay": 0.0}
    parts = {}
    for head in ("cosface", "softmax"):
        config = small(tmp_path, images, **still, head=head, margin=None, scale=None)
        config = config.model_copy(update={"run_dir": tmp_path / head})
        code, output = run(config, tmp_path)
        assert code == 0, output
        parts[head] = read_finished(tmp_path / head)
    before = read_finished(begun.run_dir)
    for name, weight in before.part_tensors("encoder").items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(parts["cosface"].part_tensors("encoder")[name], weight)
            torch.testing.assert_close(parts["softmax"].part_tensors("encoder")[name], weight)
    # The head comes along where it is of the same kind, and only there.
    ours, theirs = parts["cosface"].part_tensors("head"), before.part_tensors("head")
    assert set(ours) == set(theirs)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight)
    assert not any(
        torch.equal(weight, theirs[name])
        for name, weight in parts["softmax"].part_tensors("head").items()
        if name in theirs and weight.shape == theirs[name].shape
    )


@pytest.mark.parametrize("app", [train.app, export.app, evaluate.app])
def test_help_is_enough_to_use_it(app: object) -> None:
    result = invoke(app, "--help")  # type: ignore[arg-type]
    assert result.exit_code == 0
    assert "Exit codes" in result.output


def test_usage_errors_end_in_2() -> None:
    assert invoke(train.app).exit_code == 2
    assert invoke(evaluate.app, "--what").exit_code == 2
