"""FastFill's predicted variance: the expected error of an upgraded embedding."""

import math

import torch
from torch import Tensor

# exp(+-20) spans every variance that float32 features can have.
_LARGEST_LOG = 20.0


def gaussian_nll(predicted: Tensor, target: Tensor, log_variance: Tensor) -> Tensor:
    """Negative log-likelihood per dimension of N(predicted, s^2 I) at `target`.

    Args:
        predicted: upgraded embeddings [n, d], d at least 1.
        target: new embeddings [n, d].
        log_variance: log s^2 [n]; values beyond -20 to 20 are clamped, and get no gradient.

    Returns:
        One value per row [n], in nats; it may be negative.

    Raises:
        RuntimeError: the shapes do not fit.

    Source: FastFill (Jaeckle et al. 2023), with one variance s^2 = exp(log_variance) per item. The
    likelihood is divided by d, so that its weight does not depend on the dimension.
    """
    squared = (predicted - target).square().mean(1)
    return attenuated_loss(squared, log_variance) + 0.5 * math.log(2 * math.pi)


def attenuated_loss(losses: Tensor, log_variance: Tensor) -> Tensor:
    """Return (l / s^2 + log s^2) / 2 with s^2 = exp(log_variance): [n], [n] -> [n].

    The minimum is at s^2 = l. Log variances beyond -20 to 20 are clamped. This is FastFill's
    objective, where l contains distance and classification. A clamped value gets no gradient.
    `losses` are expected to be at least 0; a loss of 0 drives log s^2 to -20.
    """
    log_s2 = log_variance.clamp(-_LARGEST_LOG, _LARGEST_LOG)
    return 0.5 * (losses * torch.exp(-log_s2) + log_s2)


def variance_factor(predicted: Tensor, target: Tensor, log_variance: Tensor) -> float:
    """Return the factor by which to multiply predicted variances to fit held-out residuals.

    It is the maximum-likelihood factor, the mean of |predicted - target|^2 / (d s^2) over images.
    With 1 the variances are calibrated. Without rows the result is NaN. Log variances beyond -20 to
    20 are clamped. The factor is 0 if all predictions equal their targets.

    Args:
        predicted: upgraded embeddings [n, d].
        target: new embeddings [n, d].
        log_variance: log s^2 [n].

    Raises:
        RuntimeError: the shapes do not fit.
    """
    squared = (predicted - target).square().mean(1)
    return float((squared * torch.exp(-log_variance.clamp(-_LARGEST_LOG, _LARGEST_LOG))).mean())
