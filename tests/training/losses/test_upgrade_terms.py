"""Terms of upgrades: Gaussian likelihood, listwise ranking, LCE."""

import math

import pytest
import torch
from scipy.stats import norm

from nobackfill.training.losses.gaussian import attenuated_loss, gaussian_nll, variance_factor
from nobackfill.training.losses.lce import boundary_loss, centre_alignment_loss
from nobackfill.training.losses.listwise import (
    listwise_loss,
    mean_squared_distance,
    same_class_loss,
    squared_distances,
)


def sides(n: int = 10, dim: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    target = torch.randn(n, dim, dtype=torch.float64)
    return target + 0.5 * torch.randn(n, dim, dtype=torch.float64), target


def test_gaussian_nll_is_scipys() -> None:
    predicted, target = sides()
    log_variance = torch.linspace(-2, 1, 10, dtype=torch.float64)
    density = norm.logpdf(target, predicted, (log_variance / 2).exp()[:, None])
    expected = -torch.from_numpy(density).mean(1)
    torch.testing.assert_close(gaussian_nll(predicted, target, log_variance), expected)


def test_a_loss_is_attenuated_as_a_residual_is() -> None:
    """The likelihood of one number at that distance, without its constant."""
    losses, log_variance = torch.tensor([0.0, 0.3, 4.0]), torch.tensor([-1.0, 0.5, 2.0])
    density = norm.logpdf(losses.sqrt(), 0, (log_variance / 2).exp())
    expected = -torch.from_numpy(density).float() - math.log(2 * math.pi) / 2
    torch.testing.assert_close(attenuated_loss(losses, log_variance), expected)


def test_the_best_variance_is_the_mean_squared_residual() -> None:
    predicted, target = sides()
    log_variance = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    for _ in range(2000):
        (gradient,) = torch.autograd.grad(
            gaussian_nll(predicted, target, log_variance).sum(), log_variance
        )
        log_variance = (log_variance - 0.5 * gradient).detach().requires_grad_()
    torch.testing.assert_close(
        log_variance.exp().detach(), (predicted - target).square().mean(1), rtol=1e-4, atol=1e-6
    )


def test_extreme_variances_stay_finite() -> None:
    predicted, target = sides()
    for value in (-1e4, 1e4):
        assert torch.isfinite(gaussian_nll(predicted, target, torch.full((10,), value))).all()


def test_variance_factor_calibrates() -> None:
    predicted, target = sides(2000)
    log_variance = torch.full((2000,), math.log(0.25), dtype=torch.float64)
    assert variance_factor(predicted, target, log_variance) == pytest.approx(1, abs=0.05)
    halved = variance_factor(predicted, target, log_variance - math.log(2))
    assert halved == pytest.approx(2, abs=0.1)


def test_squared_distances_are_cdists() -> None:
    a, b = sides()
    torch.testing.assert_close(squared_distances(a, b), torch.cdist(a, b).square())


def test_same_class_is_the_cross_entropy_to_the_items_of_the_class() -> None:
    predicted, _ = sides()
    torch.manual_seed(6)
    queue, queue_labels = torch.randn(15, 6, dtype=torch.float64), torch.arange(15) % 4
    # One row without a label, one of a class that the queue lacks.
    labels = torch.tensor([0, 1, 2, 3, -1, 0, 1, 2, 3, 9])
    ours = same_class_loss(predicted, labels, queue, queue_labels, 2.0)
    for i in range(10):
        near = [math.exp(-float((predicted[i] - q).square().sum()) / 2) for q in queue]
        own = [k for k in range(15) if int(queue_labels[k]) == int(labels[i])]
        expected = -sum(math.log(near[k] / sum(near)) for k in own) / max(1, len(own))
        assert float(ours[i]) == pytest.approx(expected)
    assert ours[4] == ours[9] == 0


def test_listwise_is_the_cross_entropy_of_neighbour_distributions() -> None:
    predicted, target = sides()
    torch.manual_seed(6)
    queue = torch.randn(15, 6, dtype=torch.float64)
    ours = listwise_loss(predicted, target, queue, 2.0)
    for i in range(10):
        wanted = [math.exp(-float((target[i] - q).square().sum()) / 2) for q in queue]
        seen = [math.exp(-float((predicted[i] - q).square().sum()) / 2) for q in queue]
        expected = -sum(
            w / sum(wanted) * math.log(s / sum(seen)) for w, s in zip(wanted, seen, strict=True)
        )
        assert float(ours[i]) == pytest.approx(expected)
    # Least where the prediction is the target.
    assert (listwise_loss(target, target, queue, 2.0) <= ours).all()


def test_mean_squared_distance_by_pairs() -> None:
    _, target = sides()
    pairs = [float((a - b).square().sum()) for a in target for b in target if a is not b]
    assert float(mean_squared_distance(target)) == pytest.approx(sum(pairs) / 90, rel=0.2)
    exact = torch.cdist(target, target).square().sum() / 90
    torch.testing.assert_close(mean_squared_distance(target), exact)


def test_centre_alignment_compares_class_means() -> None:
    predicted, target = sides()
    labels = torch.tensor([7, 7, 3, 3, 3, 0, 0, 7, 0, 3])
    ours = centre_alignment_loss(predicted, target, labels)
    for place, label in enumerate([0, 3, 7]):
        a, b = predicted[labels == label].mean(0), target[labels == label].mean(0)
        expected = 1 - torch.cosine_similarity(a, b, dim=0)
        torch.testing.assert_close(ours[place], expected)
    zero = centre_alignment_loss(target, target, labels)
    torch.testing.assert_close(zero, torch.zeros_like(zero), atol=1e-12, rtol=0)


def test_boundary_counts_only_what_lies_farther_out() -> None:
    """Vectors and centres of any length, every class; angles one coordinate at a time."""
    predicted, target = sides()
    torch.manual_seed(7)
    centres = 3 * torch.randn(4, 6, dtype=torch.float64)
    labels = torch.tensor([2, 0, 3, 1, 1, 2, 3, 0, 2, 1])
    ours = boundary_loss(predicted, target, centres, labels)

    def angle(a: list[float], b: list[float]) -> float:
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return math.acos(dot / math.hypot(*a) / math.hypot(*b))

    out = []
    for p, t, label in zip(predicted.tolist(), target.tolist(), labels, strict=True):
        own = centres[label].tolist()
        out.append(angle(p, own) - angle(t, own))
    assert min(out) < 0 < max(out)
    assert ours.tolist() == pytest.approx([max(0.0, value) for value in out], abs=1e-6)
