"""Residual bottleneck transformation (Wang et al. 2020) instead of FCT's network: FCT appendix J.

It reads only the old embedding, and its loss is FCT's squared L2. FCT states neither the number of
blocks nor their width, so the bottleneck here is always narrower than its input.
"""

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.config import UpgradeConfig
from nobackfill.training.method import UpgradeMethod, UpgradeShape
from nobackfill.training.methods.compatible import Options, read_options
from nobackfill.training.methods.fct import FctObjective
from nobackfill.training.networks.transform import UpgradeNetwork


class RbtOptions(Options):
    """`blocks` residual blocks with `bottleneck` values inside; None: half of the new dimension."""

    blocks: int = Field(3, ge=1)
    bottleneck: int | None = Field(None, ge=1)


class Bottleneck(nn.Module):
    """x + expand(squeeze(x)): each a linear layer with BatchNorm, with ReLU between."""

    def __init__(self, dim: int, bottleneck: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(dim, bottleneck),
            nn.BatchNorm1d(bottleneck),
            nn.ReLU(inplace=True),
            nn.Linear(bottleneck, dim),
            nn.BatchNorm1d(dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [n,dim] to [n,dim]; in training mode BatchNorm needs at least two rows, or raises
        ValueError."""
        output: Tensor = x + self.layers(x)
        return output


class ResidualBottlenecks(nn.Module):
    """A linear layer to the new dimension, then residual bottlenecks.

    With `unit_norm`, outputs are normalised.
    """

    def __init__(self, old_dim: int, new_dim: int, options: RbtOptions, unit_norm: bool) -> None:
        super().__init__()
        bottleneck = options.bottleneck or max(1, new_dim // 2)
        blocks = [Bottleneck(new_dim, bottleneck) for _ in range(options.blocks)]
        self.layers = nn.Sequential(nn.Linear(old_dim, new_dim), *blocks)
        self.unit_norm = unit_norm

    def forward(self, embedding: Tensor, side: Tensor | None) -> Tensor:
        """Map old embeddings [n,old_dim] to [n,new_dim]; `side` is ignored.

        In training mode BatchNorm needs at least two rows, or raises ValueError. With `unit_norm` a
        zero output stays zero.
        """
        output: Tensor = self.layers(embedding)
        return F.normalize(output) if self.unit_norm else output


def build_rbt(config: UpgradeConfig, shape: UpgradeShape) -> UpgradeNetwork:
    """Build h of residual bottlenecks, which ignores side-information.

    The weights are random, from torch's default generator. The default bottleneck is half of the
    new dimension, at least 1.

    Raises:
        ConfigurationError: an option is wrong, or the upgrade is configured to read only
            side-information, or to write some.
    """
    options = read_options(config.options, RbtOptions, config.method)
    if not config.reads_embedding or shape.new_side_dim:
        raise ConfigurationError(
            "method rbt maps only embeddings: expected reads_embedding: true and side: carries or "
            "drops; for side-information use method: fct"
        )
    h = ResidualBottlenecks(shape.old_dim, shape.new_dim, options, shape.unit_norm)
    return UpgradeNetwork(h, reads_side=False)


RBT = UpgradeMethod(build_network=build_rbt, make_objective=FctObjective)
