"""The kinds of side-information: each trains, and is what FCT says it is."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from nobackfill.digests import sha256_file
from nobackfill.errors import ConfigurationError
from nobackfill.training.config import Config, SideEncoderConfig
from nobackfill.training.data.pictures import ReadingOptions, chunks, open_pictures
from nobackfill.training.loop.loop import ProgressBars, train_objective
from nobackfill.training.loop.run import CHECKPOINT
from nobackfill.training.loop.training import split_images
from nobackfill.training.networks.embedder import Binarise, to_pixels
from nobackfill.training.networks.frozen import load_encoder
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
from tests.training.life import config_of, train_quietly
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
    checkpoint = train_objective(
        objective, rows, settings, tiny.NAMES, progress=ProgressBars(visible=False)
    )
    assert checkpoint.is_finished
    after = float(torch.stack(list(objective(rows).values())).sum().detach())
    assert after < before
    encoder = objective.trained_parts()["encoder"].eval()
    with torch.no_grad():
        vectors = encoder(rows["images"])
    assert vectors.shape == (96, 8) and torch.isfinite(vectors).all()
    if kind == "binary_simclr":
        assert set(vectors.flatten().tolist()) == {-1.0, 1.0}


@pytest.fixture
def embedder(digits: Path, tmp_path: Path) -> Path:
    """A run of five digits and one epoch: 32 pooled features, an embedding of 16."""
    config = config_of(
        "embedder", tmp_path / "old", digits / "queries", classes=5, epochs=1, warmup_epochs=0
    )
    train_quietly(config)
    return config.run_dir


def inner(embedder: Path, digits: Path, run_dir: Path, **keys: object) -> Config:
    keys = {"side_info": "inner", "embedder": str(embedder), "classes": 5, **keys}
    return config_of("side_encoder", run_dir, digits / "queries", **keys)


def test_inner_features_are_scikit_learns_pca_of_the_embedders_pooled_features(
    embedder: Path, digits: Path, tmp_path: Path
) -> None:
    config = inner(embedder, digits, tmp_path / "psi")
    train_quietly(config)
    encoder, checkpoint = load_encoder(tmp_path / "psi")
    trained, _ = split_images(config)
    images = torch.cat(list(chunks(open_pictures(trained, 8, ReadingOptions()))))
    # The small network: four convolutions, a pooling, and the embedding layer as the last module.
    layers = load_encoder(embedder)[0].backbone
    assert isinstance(layers, torch.nn.Sequential)
    with torch.no_grad():
        pooled = layers[:-1]((to_pixels(images) - 0.5) / 0.5)
        vectors = encoder(images)
    expected = torch.from_numpy(PCA(12).fit_transform(pooled.double().numpy())).float()
    # A direction's sign is free.
    signs = (vectors * expected).sum(0).sign()
    torch.testing.assert_close(vectors, signs * expected, atol=1e-3, rtol=1e-3)
    assert checkpoint.facts == {"embedder_digest": sha256_file(embedder / CHECKPOINT)}
    # Finished at once, and not made again.
    written = (tmp_path / "psi" / CHECKPOINT).stat().st_mtime_ns
    train_quietly(config)
    assert (tmp_path / "psi" / CHECKPOINT).stat().st_mtime_ns == written
    wrong: tuple[tuple[dict[str, object], str], ...] = (
        ({"width": 16}, "the key width: expected 8, .* got 16"),
        ({"side_info_dim": 33}, "at most 32, the number of features"),
    )
    for keys, message in wrong:
        with pytest.raises(ConfigurationError, match=message):
            train_quietly(inner(embedder, digits, tmp_path / "no", **keys))
    with pytest.raises(ConfigurationError, match="of kind side_encoder"):
        train_quietly(inner(tmp_path / "psi", digits, tmp_path / "no"))
    with pytest.raises(ConfigurationError, match="side_info: inner and embedder: RUN together"):
        inner(embedder, digits, tmp_path / "no", side_info="simclr")


def test_inner_features_beside_simclr_are_both_runs_outputs(
    embedder: Path, digits: Path, tmp_path: Path
) -> None:
    apart, simclr = inner(embedder, digits, tmp_path / "inner"), tmp_path / "simclr"
    half: dict[str, object] = {"classes": 5, "epochs": 1, "warmup_epochs": 0}
    for config in (apart, config_of("side_encoder", simclr, digits / "queries", **half)):
        train_quietly(config)
    keys: dict[str, object] = {
        "side_info": "inner_simclr",
        "simclr": str(simclr),
        "side_info_dim": 24,
    }
    train_quietly(inner(embedder, digits, tmp_path / "both", **keys))
    images = torch.randint(0, 256, (7, 8, 8, 3), dtype=torch.uint8)
    first, second, both = (
        load_encoder(tmp_path / name)[0](images) for name in ("inner", "simclr", "both")
    )
    torch.testing.assert_close(both, torch.cat((first, second), 1))
    facts = load_encoder(tmp_path / "both")[1].facts
    assert facts["simclr_digest"] == sha256_file(simclr / CHECKPOINT)
    wrong: tuple[tuple[dict[str, object], str], ...] = (
        ({"side_info_dim": 26}, "expected 24, twice that of .*simclr; got 26"),
        ({"simclr": str(tmp_path / "inner")}, "side_info: simclr, got .*inner with inner"),
        ({"last_nonlin": True}, "expected false"),
    )
    for changed, message in wrong:
        with pytest.raises(ConfigurationError, match=message):
            train_quietly(inner(embedder, digits, tmp_path / "no", **keys | changed))
    refused: tuple[tuple[dict[str, object], str], ...] = (
        ({"simclr": None}, "side_info: inner_simclr and simclr: RUN together"),
        ({"side_info_dim": 25}, "expected an even side_info_dim"),
    )
    for changed, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            inner(embedder, digits, tmp_path / "no", **keys | changed)


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
