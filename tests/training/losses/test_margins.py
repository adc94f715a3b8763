"""Margin losses against pytorch-metric-learning and plain loops."""

import math

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import ArcFaceLoss, CosFaceLoss

from nobackfill.training.losses.margins import (
    arcface_loss,
    cosface_loss,
    cosines,
    loss_share_of_batch,
    weight_spread,
)


def setting(n: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings [n, 6] and weights [5, 6], of any length, and labels."""
    torch.manual_seed(0)
    embedding = 3 * torch.randn(n, 6, dtype=torch.float64)
    return embedding, 2 * torch.randn(5, 6, dtype=torch.float64), torch.arange(n) % 5


@pytest.mark.parametrize(("margin", "scale"), [(0.4, 32.0), (0.0, 20.0)])
def test_cosface_is_pytorch_metric_learnings(margin: float, scale: float) -> None:
    embedding, weights, labels = setting()
    reference = CosFaceLoss(5, 6, margin=margin, scale=scale)
    reference.W.data = weights.t().float()
    ours = cosface_loss(cosines(embedding, weights), labels, margin, scale)
    assert ours.shape == (12,)
    assert float(ours.mean()) == pytest.approx(
        float(reference(embedding.float(), labels).detach()), rel=1e-5
    )


@pytest.mark.parametrize(("margin", "scale"), [(0.3, 30.0), (0.5, 64.0), (0.0, 30.0)])
def test_arcface_is_pytorch_metric_learnings(margin: float, scale: float) -> None:
    embedding, weights, labels = setting()
    reference = ArcFaceLoss(5, 6, margin=math.degrees(margin), scale=scale)
    reference.W.data = weights.t().float()
    ours = arcface_loss(cosines(embedding, weights), labels, margin, scale)
    assert float(ours.mean()) == pytest.approx(
        float(reference(embedding.float(), labels).detach()), rel=1e-4
    )


def test_arcface_is_dmu_equation_1_row_by_row() -> None:
    embedding, weights, labels = setting()
    ours = arcface_loss(cosines(embedding, weights), labels, 0.3, 30.0)
    for row, label in enumerate(labels.tolist()):
        terms = []
        for j in range(5):
            cosine = float(F.cosine_similarity(embedding[row], weights[j], dim=0))
            moved = math.cos(math.acos(cosine) + (0.3 if j == label else 0.0))
            terms.append(math.exp(30 * moved))
        assert float(ours[row]) == pytest.approx(-math.log(terms[label] / sum(terms)), rel=1e-6)


def test_margins_have_gradients_where_an_embedding_meets_its_weight() -> None:
    weights = torch.eye(3)
    embedding = torch.eye(3).requires_grad_()
    for loss in (
        arcface_loss(cosines(embedding, weights), torch.arange(3), 0.5, 64.0),
        cosface_loss(cosines(embedding, weights), torch.arange(3), 0.4, 32.0),
    ):
        (gradient,) = torch.autograd.grad(loss.sum(), embedding)
        assert torch.isfinite(gradient).all()


def test_a_margin_makes_the_loss_larger_and_pulls_towards_the_true_class() -> None:
    embedding, weights, labels = setting()
    embedding.requires_grad_()
    cosine = cosines(embedding, weights)
    assert (cosface_loss(cosine, labels, 0.4, 8.0) > cosface_loss(cosine, labels, 0.0, 8.0)).all()
    loss = cosface_loss(cosine, labels, 0.4, 8.0).mean()
    (gradient,) = torch.autograd.grad(loss, embedding)
    moved = cosines(embedding - 0.01 * gradient, weights)
    assert cosface_loss(moved, labels, 0.4, 8.0).mean() < loss


def test_half_precision_embeddings_are_widened() -> None:
    embedding, weights, _ = setting()
    low = cosines(embedding.bfloat16(), weights.bfloat16())
    assert low.dtype == torch.float32
    plain = cosines(embedding.float(), weights.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cosines(embedding.float(), weights.float()), plain)


def test_share_of_batch_and_spread() -> None:
    empty = torch.zeros(3, requires_grad=True)[:0]
    loss_share_of_batch(empty, 3).backward()  # type: ignore[no-untyped-call]
    assert float(loss_share_of_batch(empty.detach(), 3)) == 0
    assert float(loss_share_of_batch(torch.tensor([1.0, 3.0]), 8)) == 0.5
    assert float(weight_spread(torch.tensor([0.1, 0.4]))) == pytest.approx(4)
