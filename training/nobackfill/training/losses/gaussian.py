"""FastFill's predicted variance: how far an upgraded embedding is from the one it stands for."""

import math

import torch
from torch import Tensor

# exp(+-20) spans every variance that float32 features can have.
_LARGEST_LOG = 20.0


def gaussian_nll(predicted: Tensor, target: Tensor, log_variance: Tensor) -> Tensor:
    """Negative log-likelihood a dimension of N(predicted, s^2 I) at `target`: [n, d], [n] -> [n].

    FastFill (Jaeckle et al. 2023): one scalar variance s^2 = exp(log_variance) an item. The exact
    likelihood over d, so that d = 128 weighs like d = 2 beside other terms.
    """
    squared = (predicted - target).square().mean(1)
    return attenuated(squared, log_variance) + 0.5 * math.log(2 * math.pi)


def attenuated(losses: Tensor, log_variance: Tensor) -> Tensor:
    """(l / s^2 + log s^2) / 2, s^2 = exp(log_variance): [n], [n] -> [n]; least where s^2 = l.

    FastFill's objective, where l is an item's distance and classification together.
    """
    log_s2 = log_variance.clamp(-_LARGEST_LOG, _LARGEST_LOG)
    return 0.5 * (losses * torch.exp(-log_s2) + log_s2)


def variance_factor(predicted: Tensor, target: Tensor, log_variance: Tensor) -> float:
    """What predicted variances are to be multiplied by so that held-out residuals fit them.

    The maximum-likelihood factor: the mean over images of |predicted - target|^2 / (d s^2). 1 =
    calibrated.
    """
    squared = (predicted - target).square().mean(1)
    return float((squared * torch.exp(-log_variance.clamp(-_LARGEST_LOG, _LARGEST_LOG))).mean())
