"""A linear map behind a frozen embedding layer, which ends as one plain layer."""

import torch
from torch import Tensor, nn


class AdaptedLayer(nn.Module):
    """What a frozen layer gives, with further numbers beside it, under a linear map.

    features [n,w] -> map([own(features), further(features)]) [n,dim]; `further` starts at the rows
    that `layer` has beyond the first `own_dim`, `map` is [dim,dim] and starts at `start`, without
    bias where it shall be orthogonal and stay so.
    """

    def __init__(self, layer: nn.Linear, own_dim: int, start: Tensor, *, orthogonal: bool) -> None:
        super().__init__()
        self.own = _rows(layer, slice(own_dim)).requires_grad_(False)
        more = layer.out_features > own_dim
        self.further = _rows(layer, slice(own_dim, None)) if more else None
        dim, _ = start.shape
        self.map = nn.Linear(dim, dim, bias=not orthogonal)
        with torch.no_grad():
            self.map.weight.copy_(start)
            if self.map.bias is not None:
                self.map.bias.zero_()
        if orthogonal:
            nn.utils.parametrizations.orthogonal(self.map)

    def forward(self, features: Tensor) -> Tensor:
        # Autocast would round the map itself to bf16, and nothing of that is orthogonal.
        with torch.autocast(features.device.type, enabled=False):
            output: Tensor = self.map(self._beside(features.float()))
        return output

    def _beside(self, features: Tensor) -> Tensor:
        own: Tensor = self.own(features)
        return own if self.further is None else torch.cat((own, self.further(features)), 1)

    def folded(self) -> nn.Linear:
        """One layer that computes the same."""
        with torch.no_grad():
            layer = nn.Linear(self.own.in_features, self.map.out_features)
            layer.to(self.own.weight.device)
            zeros = torch.zeros(1, layer.in_features, device=layer.weight.device)
            layer.bias.copy_(self(zeros)[0])
            # Of the layers alone, without their biases.
            rows = [one.weight for one in (self.own, self.further) if one is not None]
            layer.weight.copy_(self.map.weight @ torch.cat(rows))
        return layer


def _rows(layer: nn.Linear, rows: slice) -> nn.Linear:
    """A layer of some of the outputs."""
    weight, bias = layer.weight[rows], layer.bias[rows]
    picked = nn.Linear(layer.in_features, len(weight))
    with torch.no_grad():
        picked.weight.copy_(weight)
        picked.bias.copy_(bias)
    return picked


def completed(rows: Tensor) -> Tensor:
    """Orthonormal rows [k,n], and further ones to the whole space: [n,n]."""
    return torch.cat((rows, torch.linalg.svd(rows).Vh[len(rows) :]))
