"""Losses between two embeddings of one image, and between an image and the rest of its batch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def half_squared_l2(embedding: Tensor, old: Tensor) -> Tensor:
    """1/2 |phi(x) - phi_old(x)|^2: [n, d], [n, d] -> [n] (BCT Eq. 3, the l2 baseline).

    The old embedding gets no gradient. Neither argument is normalised here. n may be 0. Other
    shapes raise RuntimeError, except that one row is repeated.
    """
    return 0.5 * (embedding - old.detach()).square().sum(1)


def regression_loss(embedding: Tensor, old: Tensor) -> Tensor:
    """|phi_n(x) - phi_o(x)|^2: [n, d], [n, d] -> [n] (UniBCT Eq. 11).

    The printed equation has a minus sign, which would drive the two apart. The paper's text asks to
    minimise the distance, as this does. The old embedding gets no gradient. n may be 0. Other
    shapes raise RuntimeError, except that one row is repeated.
    """
    return (embedding - old.detach()).square().sum(1)


def cosine_regression_loss(embedding: Tensor, target: Tensor) -> Tensor:
    """1 - cos(phi_n(x), phi_o(x)): [n, d], [n, d] -> [n] (DMU Eq. 14).

    The target gets no gradient. Neither argument needs to be normalised. A zero vector has the
    cosine 0, so its value is 1. n may be 0. Other shapes raise RuntimeError, except that one row is
    repeated.
    """
    return 1 - F.cosine_similarity(embedding, target.detach(), dim=1)


def contrastive_loss(embedding: Tensor, old: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Let each new feature find its image's old feature among other classes' (UniBCT Eq. 12).

    Old features of the same class are neither positive nor negative.

    Args:
        embedding: new features [n, d]; normalised here; a zero vector has the cosine 0.
        old: old features of the same images [n, d]; normalised here, without gradient.
        labels: int64 [n].
        temperature: divisor of the cosines, above 0.

    Returns:
        One value per row [n]; 0 for a batch of one class; n may be 0.

    Raises:
        RuntimeError: the shapes do not fit.
    """
    similarity = F.normalize(embedding) @ F.normalize(old.detach()).t() / temperature
    same_class = labels[:, None] == labels[None, :]
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    # In a batch of one class only the positive remains, and the loss is 0.
    candidates = similarity.masked_fill(same_class & ~itself, -torch.inf)
    return candidates.logsumexp(1) - similarity.diagonal()
