"""Closed-form upgrades: Procrustes, affine and low-rank. They have no epochs."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.config import UpgradeConfig
from nobackfill.training.method import UpgradeInputs, UpgradeMethod, UpgradeShape
from nobackfill.training.methods.compatible import Options, read_options
from nobackfill.training.networks.maps import AffineMap, fit_affine, fit_low_rank, fit_procrustes
from nobackfill.training.networks.transform import UpgradeNetwork


class InputShape(NamedTuple):
    """Dimensions of a map's inputs; 0: not read."""

    embedding_dim: int
    side_dim: int


def input_shape(config: UpgradeConfig, shape: UpgradeShape) -> InputShape:
    """Return the input dimensions of an upgrade with this configuration.

    Both are 0 if nothing is read.
    """
    return InputShape(shape.old_dim if config.reads_embedding else 0, shape.side_dim)


def concatenate(embedding: Tensor, side: Tensor | None, reads: InputShape) -> Tensor:
    """Concatenate the inputs that are read: [n, embedding + side].

    The result is the argument itself if only one input is read.

    Args:
        embedding: [n, old_dim]; ignored if embeddings are not read.
        side: [n, side_dim]; None is allowed only if side-information is not read (else
            AssertionError).
        reads: which inputs are read.
    """
    if not reads.side_dim:
        return embedding
    assert side is not None
    return torch.cat((embedding, side), 1) if reads.embedding_dim else side


def flatten_views(rows: Mapping[str, Tensor], name: str) -> Tensor:
    """Flatten a feature's views: [n,v,d] -> [n * v,d]; views of one image are consecutive rows.

    Raises:
        KeyError: there is no feature `name`.
    """
    return rows[name].flatten(0, 1)


class LinearMap(nn.Module):
    """One linear layer over the concatenated inputs, or two with `rank` values between them.

    With `unit_norm` the output is normalised.
    """

    def __init__(
        self, reads: InputShape, dim: int, unit_norm: bool, rank: int | None = None
    ) -> None:
        super().__init__()
        self.input_shape, self.unit_norm = reads, unit_norm
        total = reads.embedding_dim + reads.side_dim
        self.down = nn.Linear(total, rank) if rank is not None else None
        self.up = nn.Linear(rank if rank is not None else total, dim)

    def forward(self, embedding: Tensor, side: Tensor | None) -> Tensor:
        """Map the inputs that are read, [n,old_dim] and [n,side_dim], to [n,dim].

        `side` may be None only if it is not read (else AssertionError). With `unit_norm` a zero
        output stays zero.
        """
        x = concatenate(embedding, side, self.input_shape)
        if self.down is not None:
            x = self.down(x)
        output: Tensor = self.up(x)
        return F.normalize(output) if self.unit_norm else output


class LowRankOptions(Options):
    """`rank` of the map, at most the smallest dimension; None: a quarter of the new dimension."""

    rank: int | None = Field(None, ge=1)


def set_linear(layer: nn.Linear, solution: AffineMap) -> None:
    """Copy a solution into a layer of the same shape, in place.

    The values are converted to the layer's dtype and device.

    Raises:
        RuntimeError: the shapes differ. A dimension of 1 in the solution is repeated instead.
    """
    with torch.no_grad():
        layer.weight.copy_(solution.weight)
        layer.bias.copy_(solution.bias)


def build_linear(config: UpgradeConfig, shape: UpgradeShape) -> UpgradeNetwork:
    """Build h, and g if new side-information is written, as one linear layer each.

    A layer has a bias and reads all inputs that the configuration names, old embedding and
    side-information. The output of h is scaled to norm 1 if the new embeddings are; that of g never
    is. The weights are random, from torch's default generator, until `solve_affine`.

    Raises:
        ConfigurationError: `options` is not empty.
    """
    read_options(config.options, Options, config.method)
    reads = input_shape(config, shape)
    return UpgradeNetwork(
        LinearMap(reads, shape.new_dim, shape.unit_norm),
        reads_side=shape.side_dim > 0,
        g=LinearMap(reads, shape.new_side_dim, False) if shape.new_side_dim else None,
    )


def solve_affine(upgrade: UpgradeNetwork, inputs: UpgradeInputs) -> None:
    """Fit the new embedding, and new side-information, by ridge regression on the inputs.

    The penalty is selected by leaving out one image at a time, with all of its views. All views of
    the training images are used, also mixed ones, in float64 on the CPU. Labels and held-out images
    are not read.

    Args:
        upgrade: the network of `build_linear`; its weights are set. Parts that another function
            built are left as they are.
        inputs: the pairs of vectors.

    Raises:
        ValueError: there are fewer than two images, or a value is NaN or infinite.
        KeyError: `inputs.training_features` lacks `old`, or a feature that is read or written.
        RuntimeError: the network was built for other dimensions.
    """
    reads = input_shape(inputs.config, inputs.shape)
    x = training_inputs(inputs.training_features, reads)
    for network, target in ((upgrade.h, "new"), (upgrade.g, "new_side")):
        if isinstance(network, LinearMap):
            y = flatten_views(inputs.training_features, target)
            set_linear(
                network.up, fit_affine(x, y, group_size=inputs.training_features["new"].shape[1])
            )


def training_inputs(rows: Mapping[str, Tensor], reads: InputShape) -> Tensor:
    """Return a map's inputs for the training rows: [n * v, embedding + side].

    Raises:
        KeyError: `rows` lacks `side`, which is read, or `old`, whether it is read or not.
    """
    side = flatten_views(rows, "side") if reads.side_dim else None
    return concatenate(flatten_views(rows, "old"), side, reads)


def build_procrustes(config: UpgradeConfig, shape: UpgradeShape) -> UpgradeNetwork:
    """Build h as one linear layer of the embedding; a rotation cannot use side-information.

    The weights are random, from torch's default generator, until `solve_procrustes`. With
    `shape.unit_norm` its output is normalised.

    Raises:
        ConfigurationError: `options` is not empty, or the upgrade is configured to read only
            side-information, or to write some.
    """
    read_options(config.options, Options, config.method)
    if not config.reads_embedding or shape.new_side_dim:
        raise ConfigurationError(
            "method procrustes maps only embeddings: expected reads_embedding: true and side: "
            "carries or drops; for side-information use method: affine"
        )
    h = LinearMap(InputShape(shape.old_dim, 0), shape.new_dim, shape.unit_norm)
    return UpgradeNetwork(h, reads_side=False)


def solve_procrustes(upgrade: UpgradeNetwork, inputs: UpgradeInputs) -> None:
    """Fit an orthogonal map from old to new vectors in closed form (Procrustes).

    All views of the training images are used, in float64. The map also has a shift, the difference
    of the means.

    Args:
        upgrade: the network of `build_procrustes`, else AssertionError; its weights are set.
        inputs: the pairs of vectors. If they are not unit vectors, the map also has one factor,
            which is NaN if all old vectors are equal.

    Raises:
        ValueError: there are fewer than two rows.
        RuntimeError: a value is NaN or infinite, or the network was built for other dimensions.
        KeyError: `inputs.training_features` lacks old or new vectors.
    """
    assert isinstance(upgrade.h, LinearMap)
    x, y = (
        flatten_views(inputs.training_features, "old"),
        flatten_views(inputs.training_features, "new"),
    )
    set_linear(upgrade.h.up, fit_procrustes(x, y, scaled=not inputs.shape.unit_norm))


def build_low_rank(config: UpgradeConfig, shape: UpgradeShape) -> UpgradeNetwork:
    """Build h as two linear layers with `rank` values between them.

    With `shape.unit_norm` its output is normalised. The default rank is a quarter of the new
    dimension, at least 1. It is not lowered to the input's dimension. The weights are random, from
    torch's default generator, until `solve_low_rank`.

    Raises:
        ConfigurationError: an option is wrong, the rank or its default exceeds a dimension, or the
            upgrade is configured to write side-information.
    """
    options = read_options(config.options, LowRankOptions, config.method)
    if shape.new_side_dim:
        raise ConfigurationError(
            "method low_rank cannot compute new side-information (side: maps); use method: affine, "
            "or side: carries or drops"
        )
    reads = input_shape(config, shape)
    largest = min(reads.embedding_dim + reads.side_dim, shape.new_dim)
    rank = max(1, shape.new_dim // 4) if options.rank is None else options.rank
    if rank > largest:
        raise ConfigurationError(
            f"method low_rank: expected an option rank of 1 to {largest}, the smallest dimension, "
            f"got {rank}"
        )
    h = LinearMap(reads, shape.new_dim, shape.unit_norm, rank)
    return UpgradeNetwork(h, reads_side=shape.side_dim > 0)


def solve_low_rank(upgrade: UpgradeNetwork, inputs: UpgradeInputs) -> None:
    """Fit a reduced-rank regression of the new embedding on the inputs.

    The penalty is selected as by `solve_affine`.

    Args:
        upgrade: the network of `build_low_rank`, else AssertionError; its weights are set.
        inputs: the pairs of vectors.

    Raises:
        ValueError: there are fewer than two images, or a value is NaN or infinite.
        KeyError: `inputs.training_features` lacks `old` or `new`, or side-information that is read.
        RuntimeError: the network was built for other dimensions.
    """
    assert isinstance(upgrade.h, LinearMap) and upgrade.h.down is not None
    x = training_inputs(inputs.training_features, upgrade.h.input_shape)
    y, views = (
        flatten_views(inputs.training_features, "new"),
        inputs.training_features["new"].shape[1],
    )
    down, up = fit_low_rank(x, y, upgrade.h.down.out_features, group_size=views)
    set_linear(upgrade.h.down, down)
    set_linear(upgrade.h.up, up)


AFFINE = UpgradeMethod(build_network=build_linear, solve=solve_affine)
PROCRUSTES = UpgradeMethod(build_network=build_procrustes, solve=solve_procrustes)
LOW_RANK = UpgradeMethod(build_network=build_low_rank, solve=solve_low_rank)
