"""Prototype refinement against iterating Eq. 8 and loops; what the published pseudocode
computes.
"""

import math

import pytest
import torch

from nobackfill.training.losses.prototypes import (
    class_average,
    refined_features,
    refined_old_average,
    stack_by_class,
    transition_matrix,
    trimmed_average,
)


def features(m: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Old [m, 4] and new [m, 6] features of one class; the last old one is an outlier in both."""
    torch.manual_seed(4)
    old = torch.ones(m, 4, dtype=torch.float64) + 0.3 * torch.randn(m, 4, dtype=torch.float64)
    new = torch.ones(m, 6, dtype=torch.float64) + 0.3 * torch.randn(m, 6, dtype=torch.float64)
    old[-1] = torch.tensor([-5.0, 4, -3, 0])
    new[-1] = torch.tensor([-1.0, 2, -1, 1, -2, 0])
    return old, new


def test_transition_is_equation_6() -> None:
    _, new = features(5)
    ours = transition_matrix(new, 0.05)
    for i in range(5):
        weights = [
            0.0
            if j == i
            else math.exp(float(torch.cosine_similarity(new[i], new[j], dim=0)) / 0.05)
            for j in range(5)
        ]
        expected = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        torch.testing.assert_close(ours[i], expected)
    torch.testing.assert_close(ours.sum(1), torch.ones(5, dtype=torch.float64))


def test_refined_features_are_the_limit_of_equation_8() -> None:
    old, new = features()
    walked = old
    for _ in range(2000):
        walked = 0.9 * transition_matrix(new, 0.05) @ walked + 0.1 * old
    torch.testing.assert_close(refined_features(old, new), walked)
    torch.testing.assert_close(refined_old_average(old, new), walked.mean(0))


def test_refinement_holds_an_outlier_down() -> None:
    old, new = features()
    clean = old[:-1].mean(0)
    vanilla, refined = class_average(old), refined_old_average(old, new)
    assert (refined - clean).norm() < 0.5 * (vanilla - clean).norm()
    assert (trimmed_average(old) - clean).norm() < 1e-12


def test_the_published_pseudocode_refines_nothing() -> None:
    """Softmax over dim 0 without temperature: columns sum to one, so Eq. 10 is the vanilla
    average.
    """
    old, new = features()
    edges = new @ new.t()
    edges.fill_diagonal_(-1e9)
    edges = edges.softmax(0)
    walked = 0.1 * torch.inverse(torch.eye(11, dtype=torch.float64) - 0.9 * edges) @ old
    torch.testing.assert_close(walked.mean(0), class_average(old))
    assert not torch.allclose(refined_old_average(old, new), class_average(old), atol=1e-2)


def test_a_class_of_one_image_keeps_it() -> None:
    old, new = features(1)
    assert torch.equal(refined_old_average(old, new), old[0])
    with pytest.raises(ValueError, match="at least 2 images"):
        transition_matrix(new, 0.05)


def test_drop_average_drops_the_farthest_tenth() -> None:
    old, _ = features(25)
    distance = [float((row - old.mean(0)).norm()) for row in old]
    kept = sorted(range(25), key=lambda i: distance[i])[:23]
    torch.testing.assert_close(trimmed_average(old), old[sorted(kept)].mean(0))
    torch.testing.assert_close(trimmed_average(old[:9]), old[:9].mean(0))


def test_by_class_gathers_rows_of_each_class() -> None:
    labels = torch.tensor([2, 0, 2, 1, 0])
    values = torch.arange(5.0)[:, None]
    made = stack_by_class(labels, 3, lambda rows: values[rows].sum(0))
    assert made.tolist() == [[5.0], [3.0], [2.0]]
    with pytest.raises(ValueError, match=r"class number 3 of .* has no training image"):
        stack_by_class(labels, 4, lambda rows: values[rows].sum(0))
