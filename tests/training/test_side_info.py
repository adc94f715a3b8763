"""The kinds of side-information: each trains, and is what FCT says it is."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nobackfill.training.config import SideEncoderConfig
from nobackfill.training.loop.loop import ProgressBars, fit
from nobackfill.training.networks.embedder import Binarise
from nobackfill.training.side_info import (
    MOMENTUM,
    AutoencoderObjective,
    Decoder,
    DistilledObjective,
    byol_loss,
    covariance_penalty,
    mix_images,
    side_objective,
    variance_hinge,
)
from tests.training.methods import tiny

KINDS = ("simclr", "autoencoder", "alternate", "mixup", "binary_simclr", "vicreg", "distilled")


def config(run_dir: Path, kind: str) -> SideEncoderConfig:
    return SideEncoderConfig.model_validate(
        {
            "kind": "side_encoder",
            "run_dir": run_dir,
            "images": run_dir,
            "side_info": kind,
            "side_info_dim": 8,
            "projection_dim": 8,
            "image_size": 8,
            "width": 4,
            "epochs": 8,
            "batch_size": 32,
            "optimizer": "adam",
            "lr": 0.01,
            "augmentation": {"noise": 0.05, "brightness": 0.1},
        }
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_and_encodes(kind: str, tmp_path: Path) -> None:
    settings = config(tmp_path / "run", kind)
    torch.manual_seed(0)
    objective = side_objective(settings, 4)
    rows = tiny.rows()
    torch.manual_seed(1)
    before = float(torch.stack(list(objective(rows).values())).sum().detach())
    checkpoint = fit(objective, rows, settings, tiny.NAMES, progress=ProgressBars(visible=False))
    assert checkpoint.finished
    after = float(torch.stack(list(objective(rows).values())).sum().detach())
    assert after < before
    encoder = objective.trained()["encoder"].eval()
    with torch.no_grad():
        vectors = encoder(rows["images"])
    assert vectors.shape == (96, 8) and torch.isfinite(vectors).all()
    if kind == "binary_simclr":
        assert set(vectors.flatten().tolist()) == {-1.0, 1.0}


def test_a_bit_passes_the_gradient_near_its_threshold_only() -> None:
    x = torch.tensor([[-3.0, -0.5, 0.0, 0.5, 3.0]], requires_grad=True)
    bits = Binarise().train()(x)
    assert bits.tolist() == [[-1, -1, 1, 1, 1]]
    bits.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[0, 1, 1, 1, 0]]
    assert Binarise().eval()(x.detach()).tolist() == bits.detach().tolist()


def test_mixup_keeps_each_image_the_larger_part() -> None:
    torch.manual_seed(0)
    pixels = torch.zeros(50, 3, 4, 4)
    pixels[:25] = 1
    mixed = mix_images(pixels, 1.0)
    assert (mixed[:25] >= 0.5).all() and (mixed[25:] <= 0.5).all()
    assert ((mixed > 0.05) & (mixed < 0.95)).any()
    # One share an image: no pixel of it is mixed otherwise.
    assert (mixed.amax((1, 2, 3)) - mixed.amin((1, 2, 3))).max() < 1e-6


@pytest.mark.parametrize("size", [8, 16, 32, 30])
def test_the_decoder_gives_pixels_of_the_images_size(size: int) -> None:
    pixels = Decoder(8, size, 4)(torch.randn(2, 8))
    assert pixels.shape == (2, 3, size, size)
    assert float(pixels.detach().min()) >= 0 and float(pixels.detach().max()) <= 1


def test_the_autoencoders_loss_is_the_mean_squared_error_of_the_image(tmp_path: Path) -> None:
    settings = config(tmp_path, "autoencoder").model_copy(update={"augmentation": {}})
    torch.manual_seed(0)
    objective = side_objective(
        SideEncoderConfig.model_validate(settings.model_dump(exclude={"augmentation"})), 4
    )
    assert isinstance(objective, AutoencoderObjective)
    images = tiny.rows()["images"]
    pixels = images.permute(0, 3, 1, 2).float() / 255
    given = objective.decoder(objective.encoder.encode(pixels))
    expected = (given - pixels).square().sum() / pixels.numel()
    torch.testing.assert_close(objective({"images": images})["reconstruction"], expected)


def test_vicregs_terms_are_loops_over_numbers() -> None:
    z = np.random.default_rng(0).normal(size=(20, 5)) * np.array([0.1, 0.5, 1, 2, 3])
    hinges = [max(0.0, 1 - np.sqrt(z[:, j].var(ddof=1) + 1e-4)) for j in range(5)]
    assert float(variance_hinge(torch.from_numpy(z))) == pytest.approx(np.mean(hinges))
    centred = z - z.mean(0)
    total = 0.0
    for i in range(5):
        for j in range(5):
            if i != j:
                total += (centred[:, i] @ centred[:, j] / 19) ** 2
    assert float(covariance_penalty(torch.from_numpy(z))) == pytest.approx(total / 5)


def test_a_teacher_follows_its_student_and_gets_no_gradient(tmp_path: Path) -> None:
    torch.manual_seed(0)
    objective = DistilledObjective(config(tmp_path, "distilled"))
    teacher, student = (
        next(model.projection.parameters()) for model in (objective.teacher, objective.student)
    )
    before = teacher.clone()
    with torch.no_grad():
        student.add_(1)
    objective({"images": tiny.rows()["images"]})["distillation"].backward()
    assert torch.allclose(teacher - before, torch.full_like(before, 1 - MOMENTUM), atol=1e-6)
    assert all(p.grad is None for p in objective.teacher.parameters())
    # Nothing is learned by looking.
    objective.eval()(tiny.rows())
    assert torch.allclose(teacher - before, torch.full_like(before, 1 - MOMENTUM), atol=1e-6)
    assert float(byol_loss(before, 3 * before)) == pytest.approx(0, abs=1e-6)
    assert float(byol_loss(before, -before)) == pytest.approx(4)
