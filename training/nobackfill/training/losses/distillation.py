"""Distillation through the old classifier: BCT's supplement, LwF and focal distillation."""

import torch
import torch.nn.functional as F
from torch import Tensor


def distillation_loss(new_logits: Tensor, old_logits: Tensor) -> Tensor:
    """Cross-entropy from softmax(old_logits) to softmax(new_logits): [n, c], [n, c] -> [n].

    Source: bct-supplement.txt section 1, and LwF's soft labels (bct.txt section 3.5). Both
    arguments are responses of the *old* classifier, to the new and to the old embedding. The
    temperature 32 of the paper multiplies the cosines; a cosine head's `logits` already contain it.
    The old entropy is constant, so the gradient equals that of KL.

    The old logits get no gradient. The values are not below the entropy of softmax(old_logits). n
    may be 0. Another c raises RuntimeError; one row of logits is repeated.
    """
    soft = old_logits.detach().softmax(1)
    return -(soft * F.log_softmax(new_logits, 1)).sum(1)


def focal_weights(
    old_logits: Tensor, labels: Tensor, base: float = 1.0, focus: float = 5.0
) -> Tensor:
    """Return base + focus where the old classifier is right, else base: [n, c], [n] -> [n].

    The old classifier is right where the largest of its logits is that of the label, int64.

    Source: positive-congruent training (Yan et al. 2021), the baseline of DMU Table 8.

    If several logits are equally large, only one counts. A label that is no class, such as -1,
    gives `base`. The weights have no gradient.
    """
    return base + focus * (old_logits.argmax(1) == labels).to(old_logits.dtype)


def focal_distillation_loss(
    new_logits: Tensor, old_logits: Tensor, labels: Tensor, temperature: float = 1.0
) -> Tensor:
    """KL(softmax(old / T) || softmax(new / T)) times `focal_weights`: [n, c], [n, c], [n] -> [n].

    T is the temperature. The old logits get no gradient.

    Source: positive-congruent training (Yan et al. 2021), the baseline of DMU Table 8.

    T is above 0; the default 1 changes nothing. The weights are those of base 1 and focus 5, and
    there is no factor T^2.
    """
    target = (old_logits.detach() / temperature).log_softmax(1)
    divergence = F.kl_div(
        (new_logits / temperature).log_softmax(1), target, log_target=True, reduction="none"
    )
    return focal_weights(old_logits.detach(), labels) * divergence.sum(1)


def reversed_kl_divergence(predicted_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(softmax(predicted) || softmax(target)): [n, c], [n, c] -> [n] (FCT Table 12, reversed).

    Both arguments get a gradient. The values are at least 0, up to rounding. A logit of -inf gives
    NaN or infinity. n may be 0. Another c raises RuntimeError; one row of logits is repeated.
    """
    predicted = predicted_logits.log_softmax(1)
    return (predicted.exp() * (predicted - target_logits.log_softmax(1))).sum(1)


def forward_kl_divergence(predicted_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(softmax(target) || softmax(predicted)): [n, c], [n, c] -> [n] (FCT Table 12; section E.1).

    Both are responses of the frozen new classifier: to h's output and to the new embedding. The
    target gets no gradient. The values are at least 0, up to rounding. A logit of -inf gives NaN or
    infinity. n may be 0. Another c raises RuntimeError; one row of logits is repeated.
    """
    return reversed_kl_divergence(target_logits.detach(), predicted_logits)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of softmax(logits) in nats, 0 to log c: [n, c] -> [n].

    A logit of -inf gives NaN.
    """
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def true_class_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """Return softmax(logits) of the true class: [n, c], [n] -> [n].

    `labels` are int64, from 0 to below c; another label raises RuntimeError. The result has a
    gradient.
    """
    return torch.softmax(logits, 1).gather(1, labels[:, None])[:, 0]
