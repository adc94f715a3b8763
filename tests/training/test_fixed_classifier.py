"""The fixed old classifier: equal to the head it came from, never trained, first elements only."""

import pytest
import torch

from nobackfill.errors import ConfigurationError
from nobackfill.training.networks.heads import (
    HEAD_NAMES,
    FixedClassifier,
    build_head,
    copy_head_as_fixed_classifier,
    first_elements,
    gaussian_classifier,
    labels_of_new_classes,
)


@pytest.mark.parametrize("form", HEAD_NAMES)
def test_it_is_the_head_it_came_from(form: str) -> None:
    torch.manual_seed(0)
    head = build_head(form, 5, 6)
    fixed = copy_head_as_fixed_classifier(head)
    embedding, labels = torch.randn(20, 6), torch.arange(20) % 5
    torch.testing.assert_close(fixed.logits(embedding), head.logits(embedding))
    mean = float(head(embedding, labels).detach())
    assert float(fixed.loss(embedding, labels).mean()) == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize("form", HEAD_NAMES)
def test_gradients_reach_the_embedding_and_not_the_classifier(form: str) -> None:
    head = build_head(form, 5, 6)
    fixed = copy_head_as_fixed_classifier(head)
    assert not list(fixed.parameters())
    embedding = torch.randn(4, 6, requires_grad=True)
    fixed.loss(embedding, torch.arange(4)).sum().backward()  # type: ignore[no-untyped-call]
    assert embedding.grad is not None and all(p.grad is None for p in head.parameters())


def test_a_longer_embedding_enters_with_its_first_elements() -> None:
    fixed = FixedClassifier(torch.eye(3), head_kind="cosface", margin=0.4, scale=32.0)
    long = torch.tensor([[0.6, 0.0, 0.0, 0.8], [0.0, 2.0, 0.0, 9.0]])
    torch.testing.assert_close(fixed.logits(long), 32 * torch.eye(3)[:2])
    assert first_elements(long, 3).shape == (2, 3)
    with pytest.raises(ConfigurationError, match="has 2 elements, the old classifier needs 3"):
        fixed.logits(long[:, :2])


def test_the_gaussian_classifier_is_a_softmax_over_squared_distances() -> None:
    torch.manual_seed(0)
    prototypes, labels = torch.randn(4, 6), torch.arange(40) % 4
    features = prototypes[labels] + 0.3 * torch.randn(40, 6)
    made = gaussian_classifier(prototypes, features, labels)
    own = (features - prototypes[labels]).square().sum(1)
    distances = torch.cdist(features, prototypes).square()
    expected = torch.softmax(-8 * distances / own.mean(), 1)
    torch.testing.assert_close(made.logits(features).softmax(1), expected)


def test_classes_meet_by_name() -> None:
    assert labels_of_new_classes(("cat", "dog", "owl"), ("owl", "ant", "cat")).tolist() == [
        2,
        -1,
        0,
    ]


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"head: expected one of softmax, .*'cosine'"):
        FixedClassifier(torch.eye(3), head_kind="cosine", margin=0.4, scale=32.0)
