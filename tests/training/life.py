"""A small life of two releases on some of scikit-learn's digits: images, runs, publication."""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from typer import Typer
from typer.testing import CliRunner, Result

from nobackfill.training.cli import evaluate, export
from nobackfill.training.config import Config, parse_config
from nobackfill.training.loop.loop import ProgressBars
from nobackfill.training.loop.run import Checkpoint
from nobackfill.training.loop.training import train
from tests.support.once import filled

# Images a class: enough for a small network to learn digits, and for the gate to be sure of it on
# every processor, whose rounding makes another network of the same seed.
PARTS = {"train": 40, "queries": 8, "gallery": 16, "eval": 80}
SIZE = 8


@dataclass(frozen=True)
class Life:
    """Where everything of the life is."""

    data: Path
    runs: Path
    repo: Path

    @property
    def first(self) -> Path:
        """The publication as it was with release 1 alone."""
        return self.repo.with_name("first")


def write_digits(folder: Path) -> None:
    """FOLDER/PART/DIGIT/NUMBER.png, parts disjoint."""
    digits = load_digits()
    for digit in range(10):
        rows = np.flatnonzero(digits.target == digit)
        start = 0
        for part, count in PARTS.items():
            target = folder / part / str(digit)
            target.mkdir(parents=True)
            for row in rows[start : start + count]:
                pixels = (digits.images[row] * (255 / 16)).astype(np.uint8)
                Image.fromarray(pixels).save(target / f"{row:04d}.png")
            start += count


def config_of(kind: str, run_dir: Path, images: Path, **keys: object) -> Config:
    """A small, quick configuration."""
    values: dict[str, object] = {
        "kind": kind,
        "run_dir": str(run_dir),
        "images": str(images),
        "epochs": 12,
        "warmup_epochs": 1,
        "batch_size": 32,
        "lr": 0.1,
        "threads": 1,
        "accelerator": "cpu",
    }
    if kind == "upgrade":
        values |= {"optimizer": "adam", "lr": 0.002, "projection_dim": 32, "inner_dim": 64}
    else:
        values |= {"image_size": SIZE, "width": 8}
    if kind == "embedder":
        values |= {"embedding_dim": 16, "margin": 0.2, "scale": 16.0}
    if kind == "side_encoder":
        values |= {"side_info_dim": 12, "augmentation": {"translate": 0.1, "noise": 0.05}}
    return parse_config(values | keys, "test")


def train_quietly(config: Config) -> Checkpoint:
    return train(config, ProgressBars(visible=False))


def train_runs(data: Path, runs: Path) -> None:
    """embedder-1 (digits 0-4), embedder-2 (all), their side encoders, upgrade-1-2."""
    images = data / "train"
    for number, classes in ((1, 5), (2, 10)):
        shared = {"classes": classes, "seed": number}
        train_quietly(config_of("embedder", runs / f"embedder-{number}", images, **shared))
        train_quietly(config_of("side_encoder", runs / f"side-{number}", images, **shared))
    train_quietly(upgrade_config(runs, images, epochs=40))


def upgrade_config(runs: Path, images: Path, run_dir: Path | None = None, **keys: object) -> Config:
    """The upgrade 1 -> 2 with side-information on both sides."""
    sources: dict[str, object] = {
        "old": str(runs / "embedder-1"),
        "old_side": str(runs / "side-1"),
        "new": str(runs / "embedder-2"),
        "new_side": str(runs / "side-2"),
        "side": "maps",
    }
    folder = run_dir or runs / "upgrade-1-2"
    return config_of("upgrade", folder, images, **(sources | keys))


@contextmanager
def graphs_made_once(folder: Path) -> Iterator[None]:
    """Let torch make the ONNX graph of equal models once, to the end of the block: it takes 2 s.

    Each export still strips, writes and compares its own copy. Graphs lie in `folder`, also for
    other workers of the run.
    """
    export = torch.onnx.export

    def once(module: nn.Module, examples: tuple[Tensor, ...], **options: Any) -> Any:
        digest = hashlib.sha256(repr((module, options)).encode())
        for part in module.modules():
            plain = {k: v for k, v in vars(part).items() if isinstance(v, bool | int | float | str)}
            digest.update(repr((type(part), plain)).encode())
        for name, tensor in module.state_dict().items():
            digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        digest.update(repr([(each.dtype, each.shape) for each in examples]).encode())
        graph = filled(
            folder / digest.hexdigest(), lambda top: make(top, module, examples, options)
        )
        return SimpleNamespace(model_proto=onnx.load(graph / "graph.onnx"))

    def make(top: Path, module: nn.Module, examples: tuple[Tensor, ...], options: Any) -> None:
        program = export(module, examples, **options)
        assert program is not None
        onnx.save(program.model_proto, top / "graph.onnx")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", once)
        yield


def invoke(app: Typer, *arguments: str | Path) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_export(repo: Path, release: int, *arguments: str | Path) -> Result:
    return invoke(export.app, "--model-repo", repo, "--release", str(release), *arguments)


def run_evaluate(life: Life, *arguments: str | Path) -> Result:
    folders = ("--queries", life.data / "queries", "--gallery", life.data / "gallery")
    return invoke(evaluate.app, "--model-repo", life.repo, *folders, *arguments)


def publish_life(life: Life) -> None:
    """Releases 1 and 2 with the upgrade, through the gate."""
    for number, extra in ((1, ()), (2, ("--upgrade", life.runs / "upgrade-1-2"))):
        arguments: Sequence[str | Path] = (
            *("--embedder", life.runs / f"embedder-{number}"),
            *("--side-encoder", life.runs / f"side-{number}"),
            *("--eval", life.data / "eval"),
            *extra,
        )
        result = run_export(life.repo, number, *arguments)
        assert result.exit_code == 0, result.output
        if number == 1:
            copy_publication(life.repo, life.first)


def copy_publication(repo: Path, target: Path) -> None:
    """Copy a publication with its keys."""
    shutil.copytree(repo, target)
    shutil.copytree(repo.with_name(f"{repo.name}.keys"), target.with_name(f"{target.name}.keys"))
