"""Models to measure with: FCT's transform at its real sizes, and embedders.

The transform's last layer is solved in closed form over its random first ones (an "extreme learning
machine"): seconds instead of a training, for a graph of exactly the published shape that really
carries the old vectors of bench.data into the new space.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bench.data import DIM, SIDE_DIM, draw_items
from nobackfill.training.export.onnx_export import export_onnx, quantise
from nobackfill.training.networks.transform import FctTransform, UpgradeNetwork
from nobackfill.vectors import Vectors

# FCT, D.1.
PROJECTION = 256
_RIDGE = 1e-3


def build_transform(inner: int) -> UpgradeNetwork:
    """h: (old [n,128], side [n,128]) -> new [n,128]."""
    pairs = draw_items(4000, seed=1)
    torch.manual_seed(inner)
    h = FctTransform(
        DIM, SIDE_DIM, DIM, projection_dim=PROJECTION, inner_dim=inner, unit_norm=True
    ).eval()
    old, side, new = (torch.from_numpy(a) for a in (pairs.old, pairs.side, pairs.new))
    with torch.no_grad():
        _set_statistics(h, old, side)
        hidden = _hidden(h, old, side).double()
        ones = torch.ones(len(hidden), 1, dtype=torch.float64)
        design = torch.cat([hidden, ones], 1)
        gram = design.T @ design
        gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
        weights = torch.linalg.solve(gram, design.T @ new.double())
        last = h.mixer[-1]
        assert isinstance(last, nn.Linear)
        last.weight.copy_(weights[:-1].T.float())
        last.bias.copy_(weights[-1].float())
    return UpgradeNetwork(h, reads_side=True).eval().requires_grad_(False)


def _set_statistics(h: FctTransform, old: Tensor, side: Tensor) -> None:
    """One pass in training mode that fills the batch normalisation's statistics."""
    for module in h.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = None
    h.train()
    h(old, side)
    h.eval()


def _hidden(h: FctTransform, old: Tensor, side: Tensor) -> Tensor:
    assert h.embedding_projection is not None and h.side_projection is not None
    parts = torch.cat([h.embedding_projection(old), h.side_projection(side)], 1)
    output: Tensor = h.mixer[:-1](parts)
    return output


def write_transform(upgrade: UpgradeNetwork, path: Path) -> Path:
    """As ONNX, with its int8 twin beside it (`int8_path`)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    example = {"embedding": torch.zeros(2, DIM), "side": torch.zeros(2, SIDE_DIM)}
    export_onnx(EmbeddingOnly(upgrade), example, ("upgraded",), path)
    quantise(path, int8_path(path))
    return path


def int8_path(path: Path) -> Path:
    """Of the int8 twin."""
    return path.with_name("model.int8.onnx")


class EmbeddingOnly(nn.Module):
    """An upgrade's embedding alone."""

    def __init__(self, upgrade: UpgradeNetwork) -> None:
        super().__init__()
        self.upgrade = upgrade

    def forward(self, embedding: Tensor, side: Tensor | None = None) -> Tensor:
        output: Tensor = self.upgrade(embedding, side).embedding
        return output


def count_multiplications(upgrade: nn.Module) -> int:
    """Multiply-accumulates an item: a weight of a linear layer does one."""
    return sum(m.weight.numel() for m in upgrade.modules() if isinstance(m, nn.Linear))


class ProjectedPixels(nn.Module):
    """A stand-in for an embedder that costs next to nothing: pixels times a random matrix.

    Where the model is not what is measured, it must not be most of the time either. Large images
    are averaged down to 32 pixels first.
    """

    def __init__(self, size: int, dim: int, seed: int, *, unit: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shrink = nn.AvgPool2d(max(1, size // 32))
        side = size // max(1, size // 32)
        self.project = nn.Linear(side * side * 3, dim)
        self.unit = unit

    def forward(self, image: Tensor) -> Tensor:
        pixels = (image.float() / 255 - 0.5).permute(0, 3, 1, 2)
        output: Tensor = self.project(self.shrink(pixels).flatten(1))
        return nn.functional.normalize(output) if self.unit else output


class TorchvisionEncoder(nn.Module):
    """A torchvision network, random weights of `seed`, a linear layer to `dim`; pixels uint8."""

    def __init__(self, name: str, dim: int, seed: int) -> None:
        super().__init__()
        import torchvision

        torch.manual_seed(seed)
        self.network = torchvision.models.get_model(name, weights=None, num_classes=dim)

    def forward(self, image: Tensor) -> Tensor:
        pixels = (image.permute(0, 3, 1, 2).float() / 255 - 0.45) / 0.225
        return nn.functional.normalize(self.network(pixels))


def write_encoder(encoder: nn.Module, size: int, output: str, path: Path) -> Path:
    """As ONNX: `image` uint8 [n,size,size,3] -> `output` [n,dim]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    example = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (2, size, size, 3), dtype=np.uint8)
    )
    export_onnx(encoder, {"image": example}, (output,), path)
    return path


def share_of_kept_neighbours(mapped: Vectors, true: Vectors, k: int = 10) -> float:
    """Share of the `k` nearest among 2,000 that are the same in both spaces."""
    lists = []
    for vectors in (mapped[:2000], true[:2000]):
        distances = -vectors @ vectors.T
        np.fill_diagonal(distances, np.inf)
        lists.append(np.argpartition(distances, k, axis=1)[:, :k])
    same = (lists[0][:, :, None] == lists[1][:, None, :]).sum()
    return float(same) / lists[0].size
