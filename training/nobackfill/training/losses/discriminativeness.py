"""DMU's selective backward compatibility: weights of images by the old model's certainty."""

import torch
from torch import Tensor

from nobackfill.training.losses.distillation import entropy, true_class_probability


def entropy_weights(
    old_cosines: Tensor, *, entropy_scale: float = 1.0, weight_temperature: float = 1.0
) -> Tensor:
    """Return the weights of DMU Eq. 9 and 10, larger where the old classifier is more certain.

    Eq. 9 uses the cosines in a softmax without scaling. There the entropy is near log c for every
    image, so the weights differ by about a thousandth (max / min 1.001); methods log this spread.
    Eq. 10 asks for the old classifier's response to the old feature. The published pseudocode does
    so for the weights but not for the loss; training/methods/dmu.py follows the equation. The
    result has a gradient with respect to the cosines; `selective_loss` stops it.

    Args:
        old_cosines: products of unit old features and unit old classifier rows [n, c].
        entropy_scale: factor of the cosines; 1 in the paper.
        weight_temperature: divisor of the entropies, above 0; 1 in the paper.

    Returns:
        Weights [n] with the sum 1.

    Raises:
        ValueError: the batch has one row, for which Eq. 10 divides by 0.
    """
    n = len(old_cosines)
    if n < 2:
        raise ValueError(
            f"DMU's weights need a batch of at least 2 images, got {n}; set the key batch_size to "
            "at least 2"
        )
    uncertainty = entropy(entropy_scale * old_cosines)
    return (1 - torch.softmax(uncertainty / weight_temperature, 0)) / (n - 1)


def confidence_weights(
    old_cosines: Tensor,
    labels: Tensor,
    *,
    entropy_scale: float = 1.0,
    weight_temperature: float = 1.0,
) -> Tensor:
    """Return the weights of DMU Eq. 13: softmax of the true class's probability.

    The result has a gradient with respect to the cosines; `selective_loss` stops it.

    Args:
        old_cosines: products of unit old features and unit old classifier rows [n, c].
        labels: int64 [n], each from 0 to below c; another label raises RuntimeError.
        entropy_scale: factor of the cosines; 1 in the paper.
        weight_temperature: divisor of the probabilities, above 0; 1 in the paper.

    Returns:
        Weights [n] with the sum 1; a batch of one row has the weight 1, and an empty one none.
    """
    confidence = true_class_probability(entropy_scale * old_cosines, labels)
    return torch.softmax(confidence / weight_temperature, 0)


def selective_loss(losses: Tensor, weights: Tensor) -> Tensor:
    """Sum lambda(x) * l(x; phi_n, omega_o) over the batch (DMU Eq. 10): [n], [n] -> scalar.

    The weights get no gradient. The sum of an empty batch is 0.
    """
    return (weights.detach() * losses).sum()
