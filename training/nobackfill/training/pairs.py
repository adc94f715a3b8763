"""Train a residual network next to an affine map, on pairs of vectors of the same items.

`nobackfill fit --also nobackfill.training.pairs:residual` uses it. It is the upgrade method
`residual` without images, views and labels: the loss is distance plus the listwise term, starting
at the affine map. Training stops when a held-out fifth of the pairs no longer improves.
"""

import copy
import itertools

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from nobackfill.training.losses.listwise import listwise_loss, mean_squared_distance
from nobackfill.training.networks.maps import fit_whitening_map

Floats = NDArray[np.float32]
# As in methods/residual.py, but with a width that trains on 2,000 pairs in seconds.
_WIDTH, _WHITENING, _TEMPERATURE = 256, 0.1, 0.1
_EPOCHS, _PATIENCE, _BATCH, _QUEUE = 60, 4, 128, 512
_RATE, _DECAY = 1e-3, 1e-2
_UNIT_TOLERANCE = 1e-3


def residual(old: Floats, new: Floats, straight: Floats) -> list[tuple[Floats, Floats]]:
    """Train layers whose output is added to an affine map's.

    The result depends only on the arguments. If all new vectors have norm 1 within 1e-3, the sum is
    normalised in training, and callers must normalise it, too. If no epoch improves on the affine
    map, the last layer is zero. It trains on the CPU, for up to 60 epochs, and stops 5 epochs after
    the best one. The arguments are not changed. torch's default generator is advanced.

    Args:
        old: float32 [n, a], vectors of the old model; not all may be equal, or the result is NaN.
            With n from 2 to 4 no pair is held out, and the last layer is zero.
        new: float32 [n, b], vectors of the new model, the targets. If all are equal, or one has a
            value of NaN, the last layer is zero.
        straight: float32 [n, b], outputs of the affine map.

    Returns:
        float32 weight [out, in] and bias [out] of each of three layers, with ReLU between layers.

    Raises:
        RuntimeError: `old` has a value of NaN or infinity, or fewer than two rows.
    """
    generator = torch.Generator().manual_seed(0)
    x, target, base = (torch.from_numpy(np.array(one, np.float32)) for one in (old, new, straight))
    white = fit_whitening_map(x, _WHITENING)
    inputs = white(x.double()).float()
    order = torch.randperm(len(x), generator=generator)
    validation, training = order[: len(x) // 5], order[len(x) // 5 :]
    unit = bool((target.norm(dim=1) - 1).abs().max() <= _UNIT_TOLERANCE)
    spread = mean_squared_distance(target)
    queue = target[training[:_QUEUE]]

    def loss(network: nn.Module, rows: Tensor) -> Tensor:
        migrated = base[rows] + network(inputs[rows])
        migrated = F.normalize(migrated) if unit else migrated
        distance = (migrated - target[rows]).square().sum(1) / spread
        ranking = listwise_loss(migrated, target[rows], queue, _TEMPERATURE * float(spread))
        return (distance + ranking).mean()

    network = _network(x.shape[1], target.shape[1], generator)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=_DECAY)
    best, least, waited = copy.deepcopy(network), float("inf"), 0
    for _ in range(_EPOCHS + 1):
        with torch.no_grad():
            figure = float(loss(network, validation))
        if figure < least:
            best, least, waited = copy.deepcopy(network), figure, 0
        elif (waited := waited + 1) > _PATIENCE:
            break
        shuffled = training[torch.randperm(len(training), generator=generator)]
        for first in range(0, len(shuffled), _BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(loss(network, shuffled[first : first + _BATCH]))
            optimizer.step()
    return _layers(best, white.weight, white.bias)


def _network(a: int, b: int, generator: torch.Generator) -> nn.Sequential:
    """Make a network whose last layer is zero, so that training starts at the affine map."""
    sizes = [a, _WIDTH, _WIDTH, b]
    linear = [nn.Linear(*ends) for ends in itertools.pairwise(sizes)]
    with torch.no_grad():
        for layer in linear:
            bound = layer.in_features**-0.5
            for part in (layer.weight, layer.bias):
                part.uniform_(-bound, bound, generator=generator)
        linear[-1].weight.zero_()
        linear[-1].bias.zero_()
    return nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2])


def _layers(network: nn.Sequential, weight: Tensor, bias: Tensor) -> list[tuple[Floats, Floats]]:
    """Return the layers with the whitening folded into the first one."""
    linear = [part for part in network if isinstance(part, nn.Linear)]
    parts = [(one.weight.detach().double(), one.bias.detach().double()) for one in linear]
    first = (parts[0][0] @ weight, parts[0][0] @ bias + parts[0][1])
    return [(w.float().numpy(), shift.float().numpy()) for w, shift in [first, *parts[1:]]]
