"""Listwise ranking losses: upgraded embeddings rank a queue as the new embeddings or labels do."""

import torch.nn.functional as F
from torch import Tensor


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return squared L2 distances [n, m] between [n, d] and [m, d], differentiable everywhere.

    Rounding errors below 0 become 0. Differences far below the norms are lost to rounding. Either
    argument may have no rows. Other dimensions raise RuntimeError.
    """
    return (a.square().sum(1, keepdim=True) + b.square().sum(1)[None, :] - 2 * (a @ b.t())).clamp(
        min=0
    )


def listwise_loss(predicted: Tensor, target: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """Cross-entropy between the neighbour distributions of target and prediction over a queue.

    A distribution is softmax(-|x - q|^2 / temperature) over the queue. Retrieval ranks by these
    distances, which a plain distance to the target does not measure. The values are not below the
    entropy of the target's distribution. The queue gets a gradient if it requires one.

    Args:
        predicted: upgraded embeddings [n, d].
        target: new embeddings [n, d]; it is detached here, so no gradient flows into it.
        queue: other new embeddings [m, d]; with m = 0 the values are 0.
        temperature: in units of squared distance, above 0.

    Returns:
        One value per row [n].

    Raises:
        RuntimeError: the dimensions differ.
    """
    expected = (-squared_distances(target, queue) / temperature).softmax(1).detach()
    log_predicted = F.log_softmax(-squared_distances(predicted, queue) / temperature, 1)
    return -(expected * log_predicted).sum(1)


def same_class_loss(
    predicted: Tensor, labels: Tensor, queue: Tensor, queue_labels: Tensor, temperature: float
) -> Tensor:
    """Cross-entropy of the neighbour distribution over a queue to the queue's items of one's class.

    It is `listwise_loss` with another target: equal shares for all items of the class, which mAP
    wants to be ranked first. An item of the queue that is the image itself counts as any other
    item. The queue gets a gradient if it requires one.

    Args:
        predicted: upgraded embeddings [n, d].
        labels: int64 [n]; -1: none.
        queue: new embeddings [m, d].
        queue_labels: int64 [m], without -1.
        temperature: in units of squared distance, above 0.

    Returns:
        One value per row [n]; 0 without a label or without an item of the class in the queue.

    Raises:
        RuntimeError: the dimensions differ.
    """
    positives = (labels[:, None] == queue_labels[None, :]).to(predicted.dtype)
    log_shares = F.log_softmax(-squared_distances(predicted, queue) / temperature, 1)
    return -(positives * log_shares).sum(1) / positives.sum(1).clamp(min=1)


def mean_squared_distance(features: Tensor) -> Tensor:
    """Return the mean squared distance between two different rows of [n, d], n >= 2: a scalar.

    It is 0 if all rows are equal, and NaN for fewer than 2 rows.
    """
    n = len(features)
    return 2 * (features - features.mean(0)).square().sum() / (n - 1)
