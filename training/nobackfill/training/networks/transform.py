"""FCT's transformation (fct.txt Figure 4, D.1): two projections and a mixer, for h and for g.

`UpgradeNetwork` is the published graph: (embedding, side) -> upgraded, upgraded_side, uncertainty,
as far as the upgrade has these.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UpgradeOutput(NamedTuple):
    """Outputs of an upgrade: embedding [n,new_dim], side [n,new_side_dim], log_variance [n]; None
    for an output that the upgrade does not have."""

    embedding: Tensor
    side: Tensor | None
    log_variance: Tensor | None


def _block(dim_in: int, dim_out: int) -> list[nn.Module]:
    return [nn.Linear(dim_in, dim_out), nn.BatchNorm1d(dim_out), nn.ReLU(inplace=True)]


def make_projection_layers(dim: int, width: int) -> nn.Sequential:
    """Make Linear-BatchNorm-ReLU twice: [n,dim] -> [n,width] (D.1: width 256).

    In training mode it needs at least two rows, or raises ValueError.
    """
    return nn.Sequential(*_block(dim, width), *_block(width, width))


class FctTransform(nn.Module):
    """FCT's network: (embedding [n,old_dim], side [n,side_dim]) -> [n,new_dim].

    A dim of 0 omits that branch. This equals FCT's zero vector, whose projection is a constant that
    the mixer's first bias contains. With `unit_norm` the output is normalised, also in training
    (D.7), or with `raw` only in eval mode. At least one of the two dims is above 0.
    """

    def __init__(
        self,
        old_dim: int,
        side_dim: int,
        new_dim: int,
        *,
        projection_dim: int,
        inner_dim: int,
        unit_norm: bool,
        raw: bool = False,
    ) -> None:
        super().__init__()
        self.unit_norm, self.raw = unit_norm, raw
        self.embedding_projection = (
            make_projection_layers(old_dim, projection_dim) if old_dim else None
        )
        self.side_projection = (
            make_projection_layers(side_dim, projection_dim) if side_dim else None
        )
        width = projection_dim * ((old_dim > 0) + (side_dim > 0))
        self.mixer = nn.Sequential(
            *_block(width, inner_dim), *_block(inner_dim, inner_dim), nn.Linear(inner_dim, new_dim)
        )

    def forward(self, embedding: Tensor, side: Tensor | None) -> Tensor:
        """Map embeddings [n,old_dim] and side-information [n,side_dim] to [n,new_dim].

        An input whose dim is 0 is ignored, and `side` may be None then; else None raises
        AssertionError. In training mode BatchNorm needs at least two rows, or raises ValueError.
        With `unit_norm` a zero output stays zero.
        """
        parts = []
        if self.embedding_projection is not None:
            parts.append(self.embedding_projection(embedding))
        if self.side_projection is not None:
            assert side is not None
            parts.append(self.side_projection(side))
        output: Tensor = self.mixer(torch.cat(parts, 1))
        if not self.unit_norm or (self.raw and self.training):
            return output
        return F.normalize(output)


class UpgradeNetwork(nn.Module):
    """h, optionally with g for side-information and a log-variance, as one graph.

    Args of the constructor:
        h: a module (embedding, side) -> [n,new_dim].
        reads_side: the graph has the input `side`.
        g: a module (embedding, side) -> [n,new_side_dim].
        log_variance: a module (embedding, side) -> [n].
    """

    def __init__(
        self,
        h: nn.Module,
        *,
        reads_side: bool,
        g: nn.Module | None = None,
        log_variance: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.h, self.g, self.log_variance = h, g, log_variance
        self.reads_side = reads_side

    def forward(self, embedding: Tensor, side: Tensor | None = None) -> UpgradeOutput:
        """Return the outputs for embeddings [n,old_dim] and their side-information [n,side_dim].

        `side` may be None only if the network does not read it; else FCT's network raises
        AssertionError. In training mode, networks with BatchNorm need at least two rows, or raise
        ValueError. Outputs that the upgrade does not have are None.
        """
        return UpgradeOutput(
            self.h(embedding, side),
            None if self.g is None else self.g(embedding, side),
            None if self.log_variance is None else self.log_variance(embedding, side),
        )
