"""A network beside an affine map, trained on pairs of vectors that two models made of the same
items: what `nobackfill fit --also nobackfill.training.pairs:residual` asks for.

The upgrade method `residual`, without images, views and labels: distance and the listwise term,
from the affine map on. Epochs end where a fifth of the pairs, which it is not trained on, is
carried no better.
"""

import copy
import itertools

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from nobackfill.training.losses.listwise import listwise, mean_squared_distance
from nobackfill.training.networks.maps import whitening

Floats = NDArray[np.float32]
# As in methods/residual.py; the width is what 2,000 pairs bear in seconds.
_WIDTH, _WHITENING, _TEMPERATURE = 256, 0.1, 0.1
_EPOCHS, _PATIENCE, _BATCH, _QUEUE = 60, 4, 128, 512
_RATE, _DECAY = 1e-3, 1e-2
_UNIT_TOLERANCE = 1e-3


def residual(old: Floats, new: Floats, straight: Floats) -> list[tuple[Floats, Floats]]:
    """Layers whose output of `old` [n, a] is added to `straight` [n, b], an affine map's, to be
    nearer to `new` [n, b]: weight [out, in] and bias [out] each, ReLU between them."""
    generator = torch.Generator().manual_seed(0)
    x, target, base = (torch.from_numpy(np.array(one, np.float32)) for one in (old, new, straight))
    white = whitening(x, _WHITENING)
    inputs = white(x.double()).float()
    order = torch.randperm(len(x), generator=generator)
    held, rest = order[: len(x) // 5], order[len(x) // 5 :]
    unit = bool((target.norm(dim=1) - 1).abs().max() <= _UNIT_TOLERANCE)
    spread = mean_squared_distance(target)
    queue = target[rest[:_QUEUE]]

    def loss(network: nn.Module, rows: Tensor) -> Tensor:
        carried = base[rows] + network(inputs[rows])
        carried = F.normalize(carried) if unit else carried
        apart = (carried - target[rows]).square().sum(1) / spread
        ranked = listwise(carried, target[rows], queue, _TEMPERATURE * float(spread))
        return (apart + ranked).mean()

    network = _network(x.shape[1], target.shape[1], generator)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=_DECAY)
    best, least, waited = copy.deepcopy(network), float("inf"), 0
    for _ in range(_EPOCHS + 1):
        with torch.no_grad():
            figure = float(loss(network, held))
        if figure < least:
            best, least, waited = copy.deepcopy(network), figure, 0
        elif (waited := waited + 1) > _PATIENCE:
            break
        shuffled = rest[torch.randperm(len(rest), generator=generator)]
        for first in range(0, len(shuffled), _BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(loss(network, shuffled[first : first + _BATCH]))
            optimizer.step()
    return _layers(best, white.weight, white.bias)


def _network(a: int, b: int, generator: torch.Generator) -> nn.Sequential:
    """Ends in a layer of zeros, so that training starts at the affine map."""
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
    """With the whitening folded into the first."""
    linear = [part for part in network if isinstance(part, nn.Linear)]
    parts = [(one.weight.detach().double(), one.bias.detach().double()) for one in linear]
    first = (parts[0][0] @ weight, parts[0][0] @ bias + parts[0][1])
    return [(w.float().numpy(), shift.float().numpy()) for w, shift in [first, *parts[1:]]]
