"""DMU's weights against loops, what the published setting does, and how the pseudocode differs."""

import math

import pytest
import torch

from nobackfill.training.losses.discriminativeness import (
    confidence_weights,
    entropy_weights,
    selective_loss,
)
from nobackfill.training.losses.margins import cosines, weight_spread


def old_cosines(n: int = 64, classes: int = 50) -> torch.Tensor:
    """Cosines of features near their class, some clearer than others: [n, classes]."""
    torch.manual_seed(2)
    weights = torch.randn(classes, 32, dtype=torch.float64)
    noise = torch.linspace(0.1, 4, n, dtype=torch.float64)[:, None]
    features = weights[torch.arange(n) % classes] + noise * torch.randn(n, 32, dtype=torch.float64)
    return cosines(features, weights)


def by_hand(cosine: torch.Tensor) -> list[float]:
    """Eq. 9 and 10 one element at a time."""
    uncertainty = []
    for row in cosine.tolist():
        total = sum(math.exp(c) for c in row)
        p = [math.exp(c) / total for c in row]
        uncertainty.append(sum(-q * math.log(q) for q in p))
    total = sum(math.exp(u) for u in uncertainty)
    return [(1 - math.exp(u) / total) / (len(uncertainty) - 1) for u in uncertainty]


def test_entropy_weights_are_equations_9_and_10() -> None:
    cosine = old_cosines()
    ours = entropy_weights(cosine)
    torch.testing.assert_close(ours, torch.tensor(by_hand(cosine), dtype=torch.float64))
    assert float(ours.sum()) == pytest.approx(1)


def test_surer_old_features_weigh_more() -> None:
    cosine = torch.tensor([[1.0, -1.0, -1.0], [0.1, 0.0, 0.0]], dtype=torch.float64)
    weights = entropy_weights(cosine)
    assert weights[0] > weights[1]
    confidence = confidence_weights(cosine, torch.tensor([0, 0]))
    assert confidence[0] > confidence[1]
    assert float(confidence.sum()) == pytest.approx(1)


def test_the_papers_weights_are_almost_uniform_and_the_scale_changes_that() -> None:
    cosine = old_cosines()
    assert 1 < float(weight_spread(entropy_weights(cosine))) < 1.01
    sharp = entropy_weights(cosine, entropy_scale=30.0, weight_temperature=0.1)
    assert float(weight_spread(sharp)) > 1.1
    assert float(sharp.sum()) == pytest.approx(1)


def test_confidence_weights_are_equation_13() -> None:
    cosine = old_cosines(12, 5)
    labels = torch.arange(12) % 5
    p = torch.stack([row.softmax(0)[label] for row, label in zip(cosine, labels, strict=True)])
    torch.testing.assert_close(confidence_weights(cosine, labels), p.exp() / p.exp().sum())


def test_selective_loss_is_a_weighted_sum_and_trains_only_the_losses() -> None:
    losses = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    weights = torch.tensor([0.5, 0.25, 0.25], requires_grad=True)
    value = selective_loss(losses, weights)
    assert float(value.detach()) == 2
    value.backward()  # type: ignore[no-untyped-call]
    assert weights.grad is None and losses.grad is not None
    assert losses.grad.tolist() == [0.5, 0.25, 0.25]
    # Uniform weights make it the mean: BCT.
    uniform = entropy_weights(torch.zeros(3, 4))
    assert float(selective_loss(losses.detach(), uniform)) == pytest.approx(7 / 3)


def test_a_batch_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 images, got 1"):
        entropy_weights(torch.zeros(1, 4))
