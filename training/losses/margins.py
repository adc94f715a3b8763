"""Softmax losses over cosines, with a margin on the true class: one value a row."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def cosines(embedding: Tensor, weights: Tensor) -> Tensor:
    """Cosines [n, c] between embeddings [n, d] and class weights [c, d], in float32 or wider."""
    wide = torch.promote_types(embedding.dtype, torch.float32)
    return F.normalize(embedding.to(wide)) @ F.normalize(weights.to(wide)).t()


def cosface(cosine: Tensor, labels: Tensor, margin: float, scale: float) -> Tensor:
    """Cross-entropy of scale * (cos - margin on the true class): [n, c], [n] -> [n].

    BCT's cosine margin loss (bct.txt section 3.2); with margin 0 the normalised softmax.
    """
    lowered = cosine - margin * F.one_hot(labels, cosine.shape[1])
    return F.cross_entropy(scale * lowered, labels, reduction="none")


def arcface(cosine: Tensor, labels: Tensor, margin: float, scale: float) -> Tensor:
    """Cross-entropy of scale * cos(theta + margin on the true class): [n, c], [n] -> [n].

    UniBCT Eq. 4, DMU Eq. 1; `margin` in radians. cos(theta + m) is expanded, since arccos has no
    finite gradient where an embedding meets its class weight.
    """
    true = cosine.gather(1, labels[:, None])
    sine = (1 - true.square()).clamp(min=1e-12).sqrt()
    moved = true * math.cos(margin) - sine * math.sin(margin)
    return F.cross_entropy(
        scale * cosine.scatter(1, labels[:, None], moved), labels, reduction="none"
    )


def linear_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    """Plain cross-entropy (BCT Eq. 4 with SoftMax): [n, c], [n] -> [n]."""
    return F.cross_entropy(logits, labels, reduction="none")


def mean_or_zero(losses: Tensor) -> Tensor:
    """The mean of a term over the rows of a batch that it applies to; 0 where there are none."""
    return losses.mean() if losses.numel() else losses.sum()


def spread(weights: Tensor) -> Tensor:
    """max / min of weights [n]: 1 = they do nothing."""
    return weights.max() / weights.min().clamp(min=torch.finfo(weights.dtype).tiny)
