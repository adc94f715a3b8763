"""Features of imagined old, side and new models of one set of images, without any training."""

from pathlib import Path

import torch

from nobackfill.training.config import UpgradeConfig
from nobackfill.training.loop.objective import Objective
from nobackfill.training.method import UpgradeInputs, UpgradeShape
from nobackfill.training.methods import upgrade_method
from nobackfill.training.networks.heads import Head, build_head

NAMES = ("ant", "bee", "cat", "dog", "elk")


def rows(n: int, seed: int, views: int = 2, unit: bool = False) -> dict[str, torch.Tensor]:
    """`old` [n,v,6] sees half of what makes an image, `side` [n,v,5] the other half, `new` [n,v,7]
    is nonlinear in both, `new_side` [n,v,4] linear."""
    fixed = torch.Generator().manual_seed(99)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % len(NAMES)
    centres = torch.randn(len(NAMES), 8, generator=fixed)
    truth = centres[labels][:, None] + 0.5 * torch.randn(n, views, 8, generator=generator)
    first = truth[..., :4] @ torch.randn(4, 6, generator=fixed)
    second = truth[..., 4:] @ torch.randn(4, 5, generator=fixed)
    hidden = torch.tanh(truth @ torch.randn(8, 7, generator=fixed) / 3)
    new = hidden @ torch.randn(7, 7, generator=fixed)
    if unit:
        first, new = (torch.nn.functional.normalize(x, dim=-1) for x in (first, new))
    new_side = truth @ torch.randn(8, 4, generator=fixed)
    return {"old": first, "side": second, "new": new, "new_side": new_side, "labels": labels}


def config(run_dir: Path, **changes: object) -> UpgradeConfig:
    """An upgrade that trains in about a second."""
    values: dict[str, object] = {
        "kind": "upgrade",
        "run_dir": run_dir,
        "images": run_dir,
        "old": run_dir,
        "new": run_dir,
        "epochs": 12,
        "batch_size": 64,
        "optimizer": "adam",
        "lr": 0.005,
        "inner_dim": 32,
        "projection_dim": 16,
    }
    return UpgradeConfig.model_validate(values | changes)


def inputs(
    run_dir: Path, *, unit: bool = False, maps_side: bool = False, **changes: object
) -> UpgradeInputs:
    """Inputs of a method over 400 images, 60 held out."""
    settings = config(run_dir, **changes)
    train, held_out = rows(400, 1, unit=unit), rows(60, 2, 1, unit)
    for part in (train, held_out):
        if not maps_side:
            del part["new_side"]
        if not settings.reads_side:
            del part["side"]
    shape = UpgradeShape(6, 5 if settings.reads_side else 0, 7, 4 if maps_side else 0, unit)
    return UpgradeInputs(settings, shape, NAMES, train, held_out, head(train, unit), NAMES)


def head(train: dict[str, torch.Tensor], unit: bool) -> Head:
    """A head of the new space, solved by a few steps."""
    torch.manual_seed(3)
    made = (
        build_head("cosface", 5, 7, margin=0.1, scale=16) if unit else build_head("softmax", 5, 7)
    )
    new, labels = train["new"].flatten(0, 1), train["labels"].repeat_interleave(2)
    optimizer = torch.optim.Adam(made.parameters(), lr=0.1)
    for _ in range(100):
        loss = made(new, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made.eval().requires_grad_(False)


def objective(inputs: UpgradeInputs) -> Objective:
    """What trains the untrained upgrade of the inputs' method."""
    method = upgrade_method(inputs.config.method)
    torch.manual_seed(0)
    assert method.make_objective is not None
    return method.make_objective(method.build_network(inputs.config, inputs.shape), inputs)
