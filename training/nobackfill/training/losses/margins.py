"""Softmax losses over cosines with a margin on the true class; one value per row."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def cosines(embedding: Tensor, weights: Tensor) -> Tensor:
    """Return cosines [n, c] of embeddings [n, d] and class weights [c, d], in float32 or wider.

    Autocast does not apply. The cosine of a zero vector is 0. Neither argument needs to be
    normalised, and both get gradients. The result is float32, or float64 if the embedding is. The
    dtype of the weights does not matter. Other dimensions raise RuntimeError.
    """
    wide = torch.promote_types(embedding.dtype, torch.float32)
    # Autocast would multiply in bf16, which is too coarse for the margin of a cosine.
    with torch.autocast(embedding.device.type, enabled=False):
        return F.normalize(embedding.to(wide)) @ F.normalize(weights.to(wide)).t()


def cosface_loss(cosine: Tensor, labels: Tensor, margin: float, scale: float) -> Tensor:
    """Cross-entropy of scale * (cos - margin on the true class): cosines [n, c], [n] -> [n].

    Source: BCT's cosine margin loss (bct.txt section 3.2). Margin 0 gives the normalised softmax.

    `margin` is a cosine, at least 0, and `scale` above 0. A label that is not from 0 to below c
    raises RuntimeError. n may be 0.
    """
    lowered = cosine - margin * F.one_hot(labels, cosine.shape[1])
    return F.cross_entropy(scale * lowered, labels, reduction="none")


def arcface_loss(cosine: Tensor, labels: Tensor, margin: float, scale: float) -> Tensor:
    """Cross-entropy of scale * cos(theta + margin on the true class): cosines [n, c], [n] -> [n].

    Source: UniBCT Eq. 4 and DMU Eq. 1, with `margin` in radians. cos(theta + m) is expanded,
    because arccos has no finite gradient where an embedding equals its class weight.

    Beyond pi - m the moved cosine rises again; this is not corrected. `scale` is above 0. A label
    that is not from 0 to below c raises RuntimeError. n may be 0.
    """
    true = cosine.gather(1, labels[:, None])
    sine = (1 - true.square()).clamp(min=1e-12).sqrt()
    moved = true * math.cos(margin) - sine * math.sin(margin)
    return F.cross_entropy(
        scale * cosine.scatter(1, labels[:, None], moved), labels, reduction="none"
    )


def softmax_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Plain cross-entropy (BCT Eq. 4 with SoftMax): [n, c], [n] -> [n].

    A label that is not from 0 to below c raises IndexError, except -100, which gives 0. n may be 0.
    """
    return F.cross_entropy(logits, labels, reduction="none")


def loss_share_of_batch(losses: Tensor, batch_size: int) -> Tensor:
    """Add the losses [m] of a part of a batch, divided by the size of the whole batch (BCT Eq. 8).

    Eq. 4 sums over images, so a term on T_old is weighted by its share of the batch. The result is
    a scalar, and 0 without losses. `batch_size` is at least 1; with 0 and no losses it is NaN.
    """
    return losses.sum() / batch_size


def weight_spread(weights: Tensor) -> Tensor:
    """Return max / min of positive weights [n], n >= 1: a scalar, 1 if all are equal.

    A minimum of 0 counts as the smallest normal number of the dtype. Without weights it raises
    RuntimeError.
    """
    return weights.max() / weights.min().clamp(min=torch.finfo(weights.dtype).tiny)
