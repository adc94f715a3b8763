"""Classification heads over an embedding: softmax, normalised softmax, CosFace, ArcFace.

One shape for all: `head(embedding [n,dim], labels [n]) -> scalar`, `head.logits(embedding) ->
[n,c]` without margin, `head.classifier() -> [c,dim]`, the rows that training/methods/ reuse as the
old classifier (pytorch-metric-learning keeps the transpose).
"""

import math
from abc import abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.losses.margins import cosines


class Head(nn.Module):
    """`unit` says whether the head, and so the space under it, sees directions only."""

    unit: bool
    scale: float
    margin: float

    @abstractmethod
    def forward(self, embedding: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over [n,dim] and int64 [n]."""

    @abstractmethod
    def logits(self, embedding: Tensor) -> Tensor:
        """[n,dim] -> [n,classes], scaled, without margin."""

    @abstractmethod
    def classifier(self) -> Tensor:
        """Class weights [classes,dim]."""


class SoftmaxHead(Head):
    """Cross-entropy of a linear layer with bias, on the embedding as it is."""

    unit = False

    def __init__(self, classes: int, dim: int) -> None:
        super().__init__()
        self.scale, self.margin = 1.0, 0.0
        self.linear = nn.Linear(dim, classes)

    def forward(self, embedding: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(embedding), labels)

    def logits(self, embedding: Tensor) -> Tensor:
        output: Tensor = self.linear(embedding)
        return output

    def classifier(self) -> Tensor:
        return self.linear.weight


class AngularHead(Head):
    """A loss of pytorch-metric-learning on scaled cosines, in one of their forms."""

    unit = True

    def __init__(
        self, form: Literal["cosface", "arcface"], loss: nn.Module, scale: float, margin: float
    ) -> None:
        super().__init__()
        self.form, self.loss, self.scale, self.margin = form, loss, scale, margin

    def forward(self, embedding: Tensor, labels: Tensor) -> Tensor:
        # Autocast would multiply in bf16, below whose resolution a margin of a cosine vanishes.
        with torch.autocast(embedding.device.type, enabled=False):
            output: Tensor = self.loss(embedding.float(), labels)
        return output

    def logits(self, embedding: Tensor) -> Tensor:
        return self.scale * cosines(embedding, self.classifier())

    def classifier(self) -> Tensor:
        weight = self.loss.W
        assert isinstance(weight, Tensor)
        return weight.t()


# (margin, scale) as in the papers: BCT's CosFace (supplement 1), DMU's ArcFace (4.1) in radians.
_DEFAULTS = {"normalized_softmax": (0.0, 20.0), "cosface": (0.4, 32.0), "arcface": (0.3, 30.0)}
HEAD_NAMES = ("softmax", *_DEFAULTS)


def build_head(
    name: str, classes: int, dim: int, *, margin: float | None = None, scale: float | None = None
) -> Head:
    """A fresh head. `margin` is a cosine for CosFace, radians for ArcFace; None takes the default.

    Raises ConfigurationError for an unknown name, for fewer than 2 classes, or for a margin or
    scale that the head does not have.
    """
    if name not in HEAD_NAMES:
        raise ConfigurationError(f"unknown head {name!r}; known: {', '.join(HEAD_NAMES)}")
    if classes < 2:
        raise ConfigurationError(f"head {name}: expected at least 2 classes, got {classes}")
    if name == "softmax":
        if margin is not None or scale is not None:
            raise ConfigurationError("head softmax has neither margin nor scale; remove them")
        return SoftmaxHead(classes, dim)
    # Imported where used: it brings scipy's statistics, which take seconds.
    from pytorch_metric_learning.losses import ArcFaceLoss, CosFaceLoss, NormalizedSoftmaxLoss

    default_margin, default_scale = _DEFAULTS[name]
    m = default_margin if margin is None else margin
    s = default_scale if scale is None else scale
    if name == "normalized_softmax":
        if m:
            raise ConfigurationError("head normalized_softmax has no margin; remove it")
        # CosFace with margin 0.
        return AngularHead(
            "cosface", NormalizedSoftmaxLoss(classes, dim, temperature=1 / s), s, 0.0
        )
    if name == "cosface":
        return AngularHead("cosface", CosFaceLoss(classes, dim, margin=m, scale=s), s, m)
    # pytorch-metric-learning takes ArcFace's margin in degrees.
    return AngularHead("arcface", ArcFaceLoss(classes, dim, margin=math.degrees(m), scale=s), s, m)
