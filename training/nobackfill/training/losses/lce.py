"""Learning compatible embeddings (Meng et al. 2021), as the baseline of FCT appendix J.

FCT trains only the forward transformation, with cross-entropy in place of ArcFace. These terms
follow the published idea, not the paper's code: class centres are aligned, and a boundary keeps
each class as compact as in the target space.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def centre_alignment_loss(predicted: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Return 1 - cos between the class means of both sides.

    A mean that is a zero vector has the cosine 0. NaN in one row makes every value NaN.

    Args:
        predicted: transformed features [n, d], n at least 1; without rows it raises RuntimeError.
        target: true features [n, d], without gradient.
        labels: int64 [n], at least 0; only their equality matters.

    Returns:
        One value per class that occurs in the batch, by ascending label.
    """
    classes, place = torch.unique(labels, return_inverse=True)
    one_hot = F.one_hot(place, len(classes)).to(predicted.dtype)
    counts = one_hot.sum(0)[:, None]
    ours, theirs = one_hot.t() @ predicted / counts, one_hot.t() @ target.detach() / counts
    return 1 - F.cosine_similarity(ours, theirs, dim=1)


def boundary_loss(predicted: Tensor, target: Tensor, centres: Tensor, labels: Tensor) -> Tensor:
    """Return by how many radians predictions are farther from their class centre than the targets.

    Angles nearer than 0.0014 to 0 or pi count as 0.0014 from it. A zero vector has a right angle to
    everything. The centres get a gradient if they require one.

    Args:
        predicted: transformed features [n, d].
        target: true features [n, d], without gradient.
        centres: class centres [c, d].
        labels: int64 [n], rows of `centres`.

    Returns:
        Radians [n], 0 to pi; 0 if the prediction is as near as the target, or nearer.

    Raises:
        IndexError: a label is c or more; a negative one counts from the end.
        RuntimeError: the shapes do not fit.
    """
    own = centres[labels]
    return F.relu(_angle(predicted, own) - _angle(target.detach(), own))


def _angle(a: Tensor, b: Tensor) -> Tensor:
    # arccos has no finite gradient at +-1.
    return torch.acos(F.cosine_similarity(a, b, dim=1).clamp(-1 + 1e-6, 1 - 1e-6))
