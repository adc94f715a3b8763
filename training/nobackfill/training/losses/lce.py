"""Learning compatible embeddings (Meng et al. 2021) in the forward direction, FCT appendix J's
rival.

FCT trains its forward transformation alone, with cross-entropy in place of ArcFace. The paper
itself is not among ours: these terms follow its published idea, class centres aligned and a
boundary that keeps a class as compact as in the space it is compared with.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def centre_alignment(predicted: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """1 - cos between the batch's class means of both sides: [n, d], [n, d], [n] ->
    [classes seen].
    """
    seen, place = torch.unique(labels, return_inverse=True)
    one_hot = F.one_hot(place, len(seen)).to(predicted.dtype)
    counts = one_hot.sum(0)[:, None]
    ours, theirs = one_hot.t() @ predicted / counts, one_hot.t() @ target.detach() / counts
    return 1 - F.cosine_similarity(ours, theirs, dim=1)


def boundary(predicted: Tensor, target: Tensor, centres: Tensor, labels: Tensor) -> Tensor:
    """How much farther (in angle, radians) a transformed feature lies from its class centre than
    the true one does, 0 where it is inside: [n, d], [n, d], [c, d], [n] -> [n].
    """
    own = centres[labels]
    return F.relu(_angle(predicted, own) - _angle(target.detach(), own))


def _angle(a: Tensor, b: Tensor) -> Tensor:
    # Clamped off +-1, where arccos has no finite gradient.
    return torch.acos(F.cosine_similarity(a, b, dim=1).clamp(-1 + 1e-6, 1 - 1e-6))
