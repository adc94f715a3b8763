"""Pairwise terms against loops; Eq. 11's sign; Eq. 12's candidates."""

import math

import pytest
import torch

from nobackfill.training.losses.pairwise import (
    contrastive_loss,
    cosine_regression_loss,
    half_squared_l2,
    regression_loss,
)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    new, old = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    return torch.nn.functional.normalize(new), torch.nn.functional.normalize(old)


def test_l2_terms_by_hand() -> None:
    new, old = pair()
    for i in range(8):
        squared = sum((a - b) ** 2 for a, b in zip(new[i].tolist(), old[i].tolist(), strict=True))
        assert float(regression_loss(new, old)[i]) == pytest.approx(squared)
        assert float(half_squared_l2(new, old)[i]) == pytest.approx(squared / 2)
        # Unit vectors: |a - b|^2 = 2 - 2 cos.
        assert float(cosine_regression_loss(new, old)[i]) == pytest.approx(squared / 2)


@pytest.mark.parametrize("term", [regression_loss, half_squared_l2, cosine_regression_loss])
def test_minimising_brings_the_two_together(term: object) -> None:
    assert callable(term)
    new, old = pair()
    new.requires_grad_()
    old.requires_grad_()
    (gradient,) = torch.autograd.grad(term(new, old).mean(), new)
    moved = new - 0.1 * gradient
    assert (moved - old).square().sum() < (new - old).square().sum()
    assert not term(new.detach(), old).requires_grad


def test_cosine_regression_does_not_see_lengths() -> None:
    new, old = pair()
    torch.testing.assert_close(
        cosine_regression_loss(3 * new, old), cosine_regression_loss(new, 5 * old)
    )


def test_contrastive_is_equation_12() -> None:
    new, old = pair()
    labels = torch.tensor([0, 0, 1, 1, 1, 2, 3, 0])
    ours = contrastive_loss(2 * new, 3 * old, labels, 0.1)
    for i in range(8):
        candidates = [i] + [k for k in range(8) if labels[k] != labels[i]]
        terms = {k: math.exp(float(new[i] @ old[k]) / 0.1) for k in candidates}
        assert float(ours[i]) == pytest.approx(-math.log(terms[i] / sum(terms.values())))


def test_contrastive_without_negatives_is_zero_and_finite() -> None:
    new, old = pair()
    new.requires_grad_()
    loss = contrastive_loss(new, old, torch.zeros(8, dtype=torch.int64), 0.1)
    torch.testing.assert_close(loss, torch.zeros_like(loss))
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert torch.isfinite(gradient).all()
