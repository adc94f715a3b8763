"""`python -m tests.training.two_devices RUN_DIR DEVICES [POISON]`: a straight line fitted on them.

A module of its own, since lightning-fabric starts the second process by running it again. The
network has no BatchNorm, so that halves of a batch add up to the whole.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from nobackfill.errors import NobackfillError
from nobackfill.training.config import Config, parse_config
from nobackfill.training.loop.loop import ProgressBars, train_objective
from nobackfill.training.loop.objective import Batch, Objective, Terms


class Line(Objective):
    """Fits y = a x + b. The row whose number is `poison` has a NaN loss."""

    def __init__(self, poison: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.poison = nn.Linear(3, 2), poison

    def forward(self, batch: Batch) -> Terms:
        losses = (self.line(batch["x"]) - batch["y"]).square().mean(1)
        losses = torch.where(batch["rows"] == self.poison, torch.nan, losses)
        return {"fit": losses.mean(), "weight": 0.01 * self.line.weight.square().sum()}

    def trained_parts(self) -> nn.ModuleDict:
        return nn.ModuleDict({"line": self.line})


def rows() -> dict[str, Tensor]:
    """64 points of a plane with noise."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 3, generator=generator)
    return {"x": x, "y": x[:, :2] * 3 + 0.1 * torch.randn(64, 2, generator=generator)}


def config(run_dir: Path, devices: int) -> Config:
    """Four epochs of two steps."""
    values: dict[str, object] = {
        "kind": "embedder",
        "run_dir": run_dir,
        "images": run_dir,
        "image_size": 8,
        "embedding_dim": 2,
        "epochs": 4,
        "batch_size": 32,
        "lr": 0.1,
        "threads": 1,
        "log_every": 1,
        "accelerator": "cpu",
        "devices": devices,
    }
    return parse_config(values, "two_devices.py")


def fit_line(run_dir: Path, devices: int, poison: int = -1) -> None:
    """Fit `Line` to `rows`."""
    settings = config(run_dir, devices)
    train_objective(
        Line(poison), rows(), settings, ("a", "b"), progress=ProgressBars(visible=False)
    )


if __name__ == "__main__":
    try:
        fit_line(Path(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[3:]))
    except NobackfillError as error:
        sys.exit(str(error))
