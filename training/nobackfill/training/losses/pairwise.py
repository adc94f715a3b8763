"""Terms between two embeddings of one image, and between an image and the rest of its batch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def half_squared_l2(embedding: Tensor, old: Tensor) -> Tensor:
    """1/2 |phi(x) - phi_old(x)|^2: [n, d] -> [n] (BCT Eq. 3, the l2 baseline)."""
    return 0.5 * (embedding - old.detach()).square().sum(1)


def regress(embedding: Tensor, old: Tensor) -> Tensor:
    """|phi_n(x) - phi_o(x)|^2: [n, d] -> [n] (UniBCT Eq. 11).

    The equation has a minus in front, which would drive the two apart; the text asks to minimise
    the distance, and so do we.
    """
    return (embedding - old.detach()).square().sum(1)


def cosine_regression(embedding: Tensor, target: Tensor) -> Tensor:
    """1 - cos(phi_n(x), phi_o(x)): [n, d] -> [n] (DMU Eq. 14)."""
    return 1 - F.cosine_similarity(embedding, target.detach(), dim=1)


def contrastive(embedding: Tensor, old: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """UniBCT Eq. 12: each new feature must find its image's old feature among it and the old
    features of other classes in the batch: [n, d], [n, d], [n] -> [n].

    Old features of the same class are neither positive nor negative. Both sides are unit vectors.
    """
    similarity = F.normalize(embedding) @ F.normalize(old.detach()).t() / temperature
    same_class = labels[:, None] == labels[None, :]
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    # Also right for a batch of one class: the loss is then 0.
    candidates = similarity.masked_fill(same_class & ~itself, -torch.inf)
    return candidates.logsumexp(1) - similarity.diagonal()
