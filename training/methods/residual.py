"""Ours: a whitened affine map that is solved, plus a residual network that learns what it misses.

Trained with FastFill's terms and a listwise one: an upgraded embedding shall rank a queue of new
features as the true new embedding ranks them.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from training.config import UpgradeConfig
from training.losses.listwise import listwise, mean_squared_distance
from training.maps import affine, whitening
from training.method import UpgradeInputs, UpgradeMethod, UpgradeShape
from training.methods.cheap_maps import (
    InputShape,
    flat,
    input_shape,
    joined,
    set_linear,
    training_inputs,
)
from training.methods.compatible import read_options
from training.methods.fastfill import FastFillObjective, FastFillOptions, VarianceHead
from training.objective import Batch, Terms
from training.transform import Upgrade, Upgraded

# Strong on purpose: int8 has 256 steps for the largest of the inputs, and directions of little
# variance that were blown up to the size of the others would be those steps' rounding.
_WHITENING, _RIDGE = 0.1, 1e-2


class ResidualOptions(FastFillOptions):
    """FastFill's weights, the listwise term's, and its queue."""

    listwise: float = Field(1.0, ge=0)
    queue: int = Field(1024, ge=2)
    # Of distances, relative to the mean squared distance between two new embeddings.
    temperature: float = Field(0.1, gt=0)


class ResidualMap(nn.Module):
    """affine(w) + mlp(w) of whitened inputs w; normalised with `unit`.

    The network ends in a layer of zeros, so that training starts at the affine solution.
    """

    def __init__(self, reads: InputShape, dim: int, inner_dim: int, unit: bool) -> None:
        super().__init__()
        total = reads.embedding + reads.side
        self.reads, self.unit = reads, unit
        self.whiten, self.straight = nn.Linear(total, total), nn.Linear(total, dim)
        self.whiten.requires_grad_(False)
        last = nn.Linear(inner_dim, dim)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.residual = nn.Sequential(
            nn.Linear(total, inner_dim),
            nn.BatchNorm1d(inner_dim),
            nn.ReLU(inplace=True),
            nn.Linear(inner_dim, inner_dim),
            nn.BatchNorm1d(inner_dim),
            nn.ReLU(inplace=True),
            last,
        )

    def forward(self, embedding: Tensor, side: Tensor | None) -> Tensor:
        white = self.whiten(joined(embedding, side, self.reads))
        output: Tensor = self.straight(white) + self.residual(white)
        return F.normalize(output) if self.unit else output


def build_residual(config: UpgradeConfig, shape: UpgradeShape) -> Upgrade:
    """h and g of this form, and FastFill's variance."""
    read_options(config.options, ResidualOptions, config.method)
    reads = input_shape(config, shape)
    side = shape.new_side_dim
    return Upgrade(
        ResidualMap(reads, shape.new_dim, config.inner_dim, shape.unit),
        reads_side=shape.side_dim > 0,
        g=ResidualMap(reads, side, config.inner_dim, False) if side else None,
        log_variance=VarianceHead(reads, config.projection_dim),
    )


class ResidualObjective(FastFillObjective):
    """FastFill's terms and the listwise one, from the affine solution on."""

    options_model = ResidualOptions

    def __init__(self, upgrade: Upgrade, inputs: UpgradeInputs) -> None:
        super().__init__(upgrade, inputs)
        self.listwise_options = read_options(
            inputs.config.options, ResidualOptions, inputs.config.method
        )
        x = training_inputs(inputs.rows, input_shape(inputs.config, inputs.shape))
        for network, target in ((upgrade.h, "new"), (upgrade.g, "new_side")):
            if isinstance(network, ResidualMap):
                white = whitening(x, _WHITENING)
                solved = affine(white(x.double()), flat(inputs.rows, target), _RIDGE)
                set_linear(network.whiten, white)
                set_linear(network.straight, solved)
        self.register_buffer("queue", flat(inputs.rows, "new"))
        self.unit_of_distance = float(mean_squared_distance(flat(inputs.rows, "new")))

    def distance_terms(self, upgraded: Upgraded, view: Batch) -> Terms:
        terms = super().distance_terms(upgraded, view)
        options = self.listwise_options
        assert isinstance(self.queue, Tensor)
        drawn = torch.randint(len(self.queue), (options.queue,)).to(self.queue.device)
        losses = listwise(
            upgraded.embedding,
            view["new"],
            self.queue[drawn],
            options.temperature * self.unit_of_distance,
        )
        terms["listwise"] = options.listwise * losses.mean()
        return terms


RESIDUAL = UpgradeMethod(build=build_residual, objective=ResidualObjective)
