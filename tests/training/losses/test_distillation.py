"""Distillation terms against torch.distributions, scipy and loops; directions of the two KLs."""

import math

import pytest
import torch
from scipy.stats import entropy as scipy_entropy
from torch.distributions import Categorical, kl_divergence

from nobackfill.training.losses.distillation import (
    distillation_loss,
    entropy,
    focal_distillation_loss,
    focal_weights,
    forward_kl_divergence,
    reversed_kl_divergence,
    true_class_probability,
)


def logits() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return 4 * torch.randn(9, 5, dtype=torch.float64), 4 * torch.randn(9, 5, dtype=torch.float64)


def shannon(of: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of softmax(of), row by row."""
    return torch.from_numpy(scipy_entropy(of.softmax(1).numpy(), axis=1))


def test_distillation_is_the_cross_entropy_from_old_to_new() -> None:
    new, old = logits()
    expected = [
        -sum(
            math.exp(old[i, j])
            / old[i].exp().sum()
            * math.log(math.exp(new[i, j]) / new[i].exp().sum())
            for j in range(5)
        )
        for i in range(9)
    ]
    torch.testing.assert_close(
        distillation_loss(new, old), torch.tensor(expected, dtype=torch.float64)
    )
    # Least where both agree, and then the entropy of the old response.
    torch.testing.assert_close(distillation_loss(old, old), shannon(old))
    assert (distillation_loss(new, old) > distillation_loss(old, old)).all()


def test_distillation_moves_the_new_side_alone() -> None:
    new, old = logits()
    new.requires_grad_()
    old.requires_grad_()
    distillation_loss(new, old).sum().backward()  # type: ignore[no-untyped-call]
    assert old.grad is None and new.grad is not None
    torch.testing.assert_close(new.grad, (new.softmax(1) - old.softmax(1)).detach())


def test_the_two_kls_have_their_directions() -> None:
    predicted, target = logits()
    p, t = Categorical(logits=predicted), Categorical(logits=target)
    torch.testing.assert_close(forward_kl_divergence(predicted, target), kl_divergence(t, p))
    torch.testing.assert_close(reversed_kl_divergence(predicted, target), kl_divergence(p, t))
    assert not torch.allclose(
        forward_kl_divergence(predicted, target), reversed_kl_divergence(predicted, target)
    )


def test_kl_gradients_reach_the_prediction() -> None:
    predicted, target = logits()
    predicted.requires_grad_()
    for loss in (forward_kl_divergence, reversed_kl_divergence):
        (gradient,) = torch.autograd.grad(loss(predicted, target).sum(), predicted)
        stepped = predicted - 0.01 * gradient
        assert loss(stepped, target).sum() < loss(predicted, target).sum()


def test_focal_distillation_weighs_what_the_old_model_got_right() -> None:
    new, old = logits()
    labels = old.argmax(1)
    labels[:4] = (labels[:4] + 1) % 5
    weights = focal_weights(old, labels)
    assert weights.tolist() == [1] * 4 + [6] * 5
    old_t, new_t = Categorical(logits=old / 2), Categorical(logits=new / 2)
    torch.testing.assert_close(
        focal_distillation_loss(new, old, labels, 2.0), weights * kl_divergence(old_t, new_t)
    )


def test_entropy_and_confidence() -> None:
    new, _ = logits()
    torch.testing.assert_close(entropy(new), shannon(new))
    labels = torch.arange(9) % 5
    expected = torch.stack([new[i].softmax(0)[label] for i, label in enumerate(labels)])
    torch.testing.assert_close(true_class_probability(new, labels), expected)
    assert float(entropy(torch.zeros(1, 7))) == pytest.approx(math.log(7))
