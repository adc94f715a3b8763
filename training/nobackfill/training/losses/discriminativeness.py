"""DMU's selective backward compatibility: how much of the old model's view of an image to
inherit.
"""

import torch
from torch import Tensor

from nobackfill.training.losses.distillation import entropy, true_class_probability


def entropy_weights(
    old_cosines: Tensor, *, entropy_scale: float = 1.0, weight_temperature: float = 1.0
) -> Tensor:
    """DMU Eq. 9 and 10: weights [n], summing to 1, larger where the old classifier is surer.

    `old_cosines` [n, c] are products of unit old features and unit old classifier rows. Eq. 9 puts
    them into a softmax unscaled, where the entropy is near log c whatever the image: the weights
    then differ by about a thousandth (max / min 1.001), which is why methods log their spread.
    `entropy_scale` multiplies the cosines, `weight_temperature` divides the entropies; both are 1
    in the paper.

    Eq. 10 asks for the old classifier's response to the old feature; the published pseudocode's
    weights do so too, but its loss then uses the new logits; training/methods/dmu.py follows the
    equation. A batch of one has no meaning here (division by 0): raises ValueError.
    """
    n = len(old_cosines)
    if n < 2:
        raise ValueError(f"DMU's weights need a batch of at least 2 rows, got {n}")
    uncertainty = entropy(entropy_scale * old_cosines)
    return (1 - torch.softmax(uncertainty / weight_temperature, 0)) / (n - 1)


def confidence_weights(
    old_cosines: Tensor,
    labels: Tensor,
    *,
    entropy_scale: float = 1.0,
    weight_temperature: float = 1.0,
) -> Tensor:
    """DMU Eq. 13, "least confidence": softmax over the batch of the true class's
    probability: [n].
    """
    confidence = true_class_probability(entropy_scale * old_cosines, labels)
    return torch.softmax(confidence / weight_temperature, 0)


def selective_loss(losses: Tensor, weights: Tensor) -> Tensor:
    """DMU Eq. 10: sum over the batch of lambda(x) * l(x; phi_n, omega_o); [n], [n] -> scalar."""
    return (weights.detach() * losses).sum()
