import math

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import NTXentLoss, SelfSupervisedLoss
from torch import Tensor

from nobackfill.training.config import SideEncoderConfig
from nobackfill.training.side_info import SimclrObjective, nt_xent, one_sided_nt_xent
from tests.training.life import config_of


@pytest.fixture
def views() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    first = torch.randn(7, 5, generator=generator)
    return first, first + 0.5 * torch.randn(7, 5, generator=generator)


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_nt_xent_agrees_with_pytorch_metric_learning(
    views: tuple[Tensor, Tensor], temperature: float
) -> None:
    reference = SelfSupervisedLoss(NTXentLoss(temperature=temperature))(*views)
    assert float(nt_xent(*views, temperature)) == pytest.approx(float(reference), rel=1e-5)


def test_nt_xent_is_symmetric_in_the_views(views: tuple[Tensor, Tensor]) -> None:
    first, second = views
    assert torch.allclose(nt_xent(first, second, 0.2), nt_xent(second, first, 0.2))


def test_one_sided_is_a_cross_entropy_over_the_views(views: tuple[Tensor, Tensor]) -> None:
    anchor, others = (F.normalize(v) for v in views)
    losses = []
    for i in range(len(anchor)):
        logits = [float(anchor[i] @ other) / 0.3 for other in others]
        losses.append(math.log(sum(math.exp(z) for z in logits)) - logits[i])
    expected = sum(losses) / len(losses)
    assert float(one_sided_nt_xent(*views, 0.3)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("small_crops", [0, 3])
def test_one_term_a_small_crop(small_crops: int, tmp_path: object) -> None:
    config = config_of("side_encoder", "r", "i", small_crops=small_crops, image_size=16)  # type: ignore[arg-type]
    assert isinstance(config, SideEncoderConfig)
    objective = SimclrObjective(config)
    images = torch.randint(0, 256, (6, 16, 16, 3), dtype=torch.uint8)
    terms = objective({"images": images})
    assert len(terms) == 1 + small_crops
    torch.autograd.backward(torch.stack(list(terms.values())).sum())
    assert all(p.grad is not None for p in objective.parameters())


def test_what_is_stored_is_normalised_by_the_last_batchnorm() -> None:
    config = config_of("side_encoder", "r", "i")  # type: ignore[arg-type]
    assert isinstance(config, SideEncoderConfig)
    objective = SimclrObjective(config).train()
    out = objective.encoder(torch.randint(0, 256, (64, 8, 8, 3), dtype=torch.uint8))
    assert torch.allclose(out.mean(0), torch.zeros(12), atol=1e-5)
    assert torch.allclose(out.std(0, correction=0), torch.ones(12), atol=1e-2)
