import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nobackfill.errors import ConfigurationError
from nobackfill.training.networks.heads import HEAD_NAMES, Head, build_head, simplex_vertices

ANGULAR = [name for name in HEAD_NAMES if name != "softmax"]


def cross_entropy(logits: list[float], label: int) -> float:
    return math.log(sum(math.exp(z - max(logits)) for z in logits)) + max(logits) - logits[label]


def slow_loss(head: Head, embedding: Tensor, labels: Tensor, name: str) -> float:
    """The mean loss from the papers' formulas, one row and one class at a time."""
    losses = []
    weights = F.normalize(head.classifier_weights().detach())
    for row, label in zip(F.normalize(embedding), labels.tolist(), strict=True):
        logits = []
        for number, weight in enumerate(weights):
            cosine = float(row @ weight)
            if number == label and name == "cosface":
                cosine -= head.margin
            if number == label and name == "arcface":
                cosine = math.cos(math.acos(cosine) + head.margin)
            logits.append(head.scale * cosine)
        losses.append(cross_entropy(logits, label))
    return sum(losses) / len(losses)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(9, 6, generator=generator) * 3, torch.arange(9) % 4


@pytest.mark.parametrize("name", ANGULAR)
def test_angular_losses_follow_their_formulas(name: str, batch: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    head = build_head(name, 4, 6)
    assert float(head(*batch).detach()) == pytest.approx(slow_loss(head, *batch, name), rel=1e-4)


@pytest.mark.parametrize("name", ANGULAR)
def test_bf16_training_takes_margins_in_float32(name: str, batch: tuple[Tensor, Tensor]) -> None:
    head = build_head(name, 4, 6)
    loss, logits = head(*batch), head.logits(batch[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head(*batch), loss)
        assert torch.equal(head.logits(batch[0]), logits)


@pytest.mark.parametrize("name", ANGULAR)
def test_logits_are_scaled_cosines_without_margin(name: str, batch: tuple[Tensor, Tensor]) -> None:
    head = build_head(name, 4, 6)
    cosine = F.normalize(batch[0]) @ F.normalize(head.classifier_weights()).t()
    assert torch.allclose(head.logits(batch[0]), head.scale * cosine, atol=1e-4)
    assert head.unit_norm


def test_softmax_keeps_length_and_bias(batch: tuple[Tensor, Tensor]) -> None:
    head = build_head("softmax", 4, 6)
    assert not head.unit_norm
    assert not torch.allclose(head.logits(batch[0]), head.logits(F.normalize(batch[0])))
    losses = [
        cross_entropy(row.tolist(), int(label))
        for row, label in zip(head.logits(batch[0]).detach(), batch[1], strict=True)
    ]
    assert float(head(*batch).detach()) == pytest.approx(sum(losses) / 9, rel=1e-5)


def test_smoothing_spreads_a_share_of_the_target(batch: tuple[Tensor, Tensor]) -> None:
    """Cross-entropy to .9 of the label and .1 of the uniform distribution, a row at a time."""
    head = build_head("softmax", 4, 6, label_smoothing=0.1)
    logits = head.logits(batch[0]).detach()
    total = 0.0
    for row, label in zip(logits.tolist(), batch[1].tolist(), strict=True):
        total += 0.9 * cross_entropy(row, label)
        total += 0.1 * sum(cross_entropy(row, other) for other in range(4)) / 4
    assert float(head(*batch).detach()) == pytest.approx(total / 9, rel=1e-5)


@pytest.mark.parametrize("name", [n for n in HEAD_NAMES if n != "simplex"])
def test_the_classifier_has_one_row_a_class_and_is_trained(
    name: str, batch: tuple[Tensor, Tensor]
) -> None:
    head = build_head(name, 4, 6)
    assert head.classifier_weights().shape == (4, 6)
    head(*batch).backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


def test_defaults_are_the_papers() -> None:
    cosface, arcface = build_head("cosface", 3, 4), build_head("arcface", 3, 4)
    assert (cosface.margin, cosface.scale) == (0.4, 32)
    assert (arcface.margin, arcface.scale) == (0.3, 30)
    strong = build_head("arcface", 3, 4, margin=0.5, scale=64)
    assert (strong.margin, strong.scale) == (0.5, 64)


@pytest.mark.parametrize(
    ("name", "classes", "keys", "message"),
    [
        (
            "sphereface",
            4,
            {},
            "expected one of softmax, normalized_softmax, cosface, arcface, simplex",
        ),
        ("simplex", 8, {}, "7 vertices in 6 dimensions.*8 classes; set the key embedding_dim to 7"),
        ("simplex", 4, {"margin": 0.1}, "no margin"),
        ("cosface", 1, {}, "at least 2 classes"),
        ("softmax", 4, {"margin": 0.1}, "neither margin nor scale"),
        ("normalized_softmax", 4, {"margin": 0.1}, "no margin"),
    ],
)
def test_wrong_heads_are_refused(
    name: str, classes: int, keys: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_head(name, classes, 6, **keys)


@pytest.mark.parametrize("dim", [1, 2, 7, 128])
def test_a_simplex_has_equidistant_vertices_around_its_centre(dim: int) -> None:
    """Against its definition: unit rows with a sum of zero, and -1/dim between any two."""
    vertices = simplex_vertices(dim)
    assert vertices.shape == (dim + 1, dim)
    cosines = torch.full((dim + 1, dim + 1), -1 / dim).fill_diagonal_(1.0)
    torch.testing.assert_close(vertices @ vertices.t(), cosines, atol=1e-5, rtol=0)
    torch.testing.assert_close(vertices.sum(0), torch.zeros(dim), atol=1e-4, rtol=0)
    # Two trainings must get the same vertices.
    assert torch.equal(vertices, simplex_vertices(dim))


def test_a_simplex_keeps_room_for_later_classes(batch: tuple[Tensor, Tensor]) -> None:
    """The softmax has every vertex, whether a class owns it or not, and trains none."""
    two, four = build_head("simplex", 2, 6), build_head("simplex", 4, 6)
    assert torch.equal(two.classifier_weights(), four.classifier_weights()) and not list(
        two.parameters()
    )
    assert two.logits(batch[0]).shape == (9, 7)
    labels = batch[1] % 2
    torch.testing.assert_close(two(batch[0], labels), four(batch[0], labels))
