"""A tiny data set and an old model for it, made in memory: coloured blobs, 8 pixels, 4 classes."""

from pathlib import Path

import torch

from nobackfill.training.config import EmbedderConfig
from nobackfill.training.loop.loop import ProgressBars, train_objective
from nobackfill.training.method import Classifier, EmbedderInputs
from nobackfill.training.methods import embedder_method
from nobackfill.training.methods.compatible import CompatibleObjective
from nobackfill.training.networks.embedder import EmbedderObjective

NAMES = ("ant", "bee", "cat", "dog")
# Methods that keep an independent model, and their dimensions beside the 8 of either model.
ADAPTED = {"bt2": 16, "lambda_orthogonal": 8}


def rows(classes: int = 4, per_class: int = 24) -> dict[str, torch.Tensor]:
    """Images uint8 [n,8,8,3] whose class sets their colour and the blob's corner, and labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(classes * per_class) % classes
    images = torch.randint(60, 120, (len(labels), 8, 8, 3), generator=generator)
    for row, label in enumerate(labels.tolist()):
        y, x = 4 * (label // 2), 4 * (label % 2)
        images[row, y : y + 4, x : x + 4, label % 3] += 60
    return {"images": images.byte(), "labels": labels}


def config(run_dir: Path, **changes: object) -> EmbedderConfig:
    """An embedder of dim 8 that trains in well under a second."""
    values: dict[str, object] = {
        "kind": "embedder",
        "run_dir": run_dir,
        "images": run_dir,
        "image_size": 8,
        "width": 4,
        "embedding_dim": 8,
        "epochs": 4,
        "batch_size": 16,
        "lr": 0.05,
        "seed": 1,
        "head": "cosface",
        "margin": 0.2,
        "scale": 16,
        "log_every": 1,
    }
    return EmbedderConfig.model_validate(values | changes)


def old_model(run_dir: Path, classes: int = 2, **changes: object) -> Classifier:
    """A model trained on the first `classes` classes."""
    settings = config(run_dir, **changes)
    torch.manual_seed(settings.seed)
    objective = EmbedderObjective(settings, classes)
    train_objective(
        objective, rows(classes), settings, NAMES[:classes], progress=ProgressBars(visible=False)
    )
    encoder = objective.embedder.eval().requires_grad_(False)
    return Classifier(encoder, objective.head.eval().requires_grad_(False), NAMES[:classes])


def inputs(run_dir: Path, old: Classifier | None, **changes: object) -> EmbedderInputs:
    """Inputs of a method that learns all four classes."""
    made = rows()
    return EmbedderInputs(config(run_dir, **changes), NAMES, made["images"], made["labels"], old)


def batch() -> dict[str, torch.Tensor]:
    """16 rows, four of each class."""
    return {name: tensor[:16] for name, tensor in rows().items()}


def objective(name: str, run_dir: Path, old: Classifier, **options: object) -> CompatibleObjective:
    """What trains a method's new model from scratch."""
    made = embedder_method(name).make_objective(inputs(run_dir, old, method=name, options=options))
    assert isinstance(made, CompatibleObjective)
    return made
