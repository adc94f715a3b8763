"""A listwise loss on rankings: an upgraded embedding shall see a queue of new features as the new
one does.
"""

import torch.nn.functional as F
from torch import Tensor


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Squared L2 distances [n, m] between [n, d] and [m, d], differentiable everywhere."""
    return (a.square().sum(1, keepdim=True) + b.square().sum(1)[None, :] - 2 * (a @ b.t())).clamp(
        min=0
    )


def listwise(predicted: Tensor, target: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """Cross-entropy between the two neighbour distributions over `queue`: [n, d], [n, d], [m, d] ->
    [n].

    softmax(-|. - q|^2 / temperature) over the queue's new features, from the true new embedding
    (the target) to the upgraded one: what retrieval ranks by, which a plain distance does not see.
    """
    wanted = (-squared_distances(target, queue) / temperature).softmax(1).detach()
    seen = F.log_softmax(-squared_distances(predicted, queue) / temperature, 1)
    return -(wanted * seen).sum(1)


def mean_squared_distance(features: Tensor) -> Tensor:
    """Mean squared distance between two different rows of [n, d]: the unit of a temperature."""
    n = len(features)
    return 2 * (features - features.mean(0)).square().sum() / (n - 1)
