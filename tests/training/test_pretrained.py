"""Pretrained weights in an encoder and its head: what is loaded, what stays as it was drawn."""

from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor

from nobackfill.errors import ConfigurationError
from nobackfill.training.config import EmbedderConfig, SideEncoderConfig
from nobackfill.training.networks.embedder import (
    EmbedderObjective,
    bare_backbone,
    build_encoder,
)
from nobackfill.training.networks.weights import Weights, load_pretrained, read_weights_file
from tests.training.life import config_of, train_quietly

CLASSES = ("ant", "bee", "cat")


def config(backbone: object = "resnet18", **changes: object) -> EmbedderConfig:
    values: dict[str, object] = {
        "kind": "embedder",
        "run_dir": "run",
        "images": "images",
        "epochs": 1,
        "lr": 0.1,
        "image_size": 96,
        "backbone": backbone,
        "embedding_dim": 12,
    }
    return EmbedderConfig.model_validate(values | changes)


def torchvisions(name: str = "resnet18", seed: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    options = {"init_weights": False} if name == "googlenet" else {}
    return dict(torchvision.models.get_model(name, weights=None, **options).state_dict())


def loaded(
    tensors: dict[str, Tensor], settings: EmbedderConfig, name: str = "file.pt", *of: str
) -> EmbedderObjective:
    torch.manual_seed(1)
    objective = EmbedderObjective(settings, len(CLASSES))
    load_pretrained(
        objective.embedder, objective.head, Weights(name, tensors, of), settings, CLASSES
    )
    return objective


@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "encoder.backbone."])
@pytest.mark.parametrize("changes", [{}, {"last_nonlin": True}, {"pooling": "gem"}])
def test_all_but_the_classifier_is_loaded(
    prefix: str, changes: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = torchvisions()
    settings = config(**changes)
    objective = loaded({prefix + key: value for key, value in tensors.items()}, settings)
    network = bare_backbone(objective.embedder, settings)
    for key, value in network.state_dict().items():
        if not key.startswith("fc.") and key != "avgpool.p":
            assert torch.equal(value, tensors[key]), key
    assert network.state_dict()["fc.weight"].shape == (12, 512)
    told = capsys.readouterr().err
    assert "fc.bias, fc.weight, the classifier of 3 of 3 classes" in told


@pytest.mark.parametrize("backbone", ["mobilenet_v3_small", "vit_b_16", "swin_t", "googlenet"])
def test_other_families(backbone: str) -> None:
    size = 224 if backbone == "vit_b_16" else 96
    tensors = torchvisions(backbone)
    objective = loaded(tensors, config(backbone, image_size=size))
    first = next(iter(objective.embedder.backbone.state_dict()))
    assert torch.equal(objective.embedder.backbone.state_dict()[first], tensors[first])


def test_an_embedding_layer_of_the_same_shape_is_kept() -> None:
    tensors = torchvisions() | {"fc.weight": torch.ones(12, 512), "fc.bias": torch.ones(12)}
    weight = loaded(tensors, config()).embedder.backbone.state_dict()["fc.weight"]
    assert torch.equal(weight, torch.ones(12, 512))
    # Of torchvision's own it is a classifier, whatever its shape.
    named = loaded(tensors, config(), "IMAGENET1K_V1").embedder.backbone.state_dict()["fc.weight"]
    assert not torch.equal(named, weight)


@pytest.mark.parametrize("head", ["softmax", "cosface", "arcface", "normalized_softmax"])
def test_classes_that_both_know_keep_their_weights(head: str) -> None:
    settings = config("small", image_size=8, head=head)
    torch.manual_seed(9)
    before = EmbedderObjective(settings, 2)
    tensors = {f"encoder.{k}": v for k, v in before.embedder.state_dict().items()}
    tensors |= {f"head.{k}": v for k, v in before.head.state_dict().items()}
    torch.manual_seed(1)
    fresh = EmbedderObjective(settings, len(CLASSES)).head.classifier_weights().detach()
    after = loaded(tensors, settings, "x.safetensors", "cat", "ant").head.classifier_weights()
    known = before.head.classifier_weights()
    assert torch.equal(after[2], known[0])
    assert torch.equal(after[0], known[1])
    assert torch.equal(after[1], fresh[1])
    # Nobody says whose these are.
    assert torch.equal(loaded(tensors, settings).head.classifier_weights(), fresh)


def test_what_does_not_fit_is_named_with_its_shape() -> None:
    tensors = torchvisions()
    with pytest.raises(
        ConfigurationError, match=r"\[64, 64, 3, 3\], got \[64, 64, 1, 1\]"
    ) as caught:
        loaded(torchvisions("resnet50"), config())
    assert "resnet18" in str(caught.value)
    del tensors["bn1.weight"]
    with pytest.raises(
        ConfigurationError, match=r"fit the backbone resnet18: bn1\.weight is missing; use weights"
    ):
        loaded(tensors, config())
    with pytest.raises(ConfigurationError, match=r"conv1\.weight: expected shape .* 3 x 3"):
        loaded(torchvisions(), config(image_size=32))
    with pytest.raises(ConfigurationError, match=r"extra \[2\] is not expected; use weights"):
        loaded(torchvisions() | {"extra": torch.ones(2)}, config())


def test_a_side_encoder_begins_with_weights_too() -> None:
    values = config().model_dump(exclude={"kind", "embedding_dim", "init", "method", "old"})
    values = {k: v for k, v in values.items() if k in SideEncoderConfig.model_fields}
    settings = SideEncoderConfig(kind="side_encoder", side_info_dim=6, **values)
    encoder = build_encoder(settings)
    tensors = torchvisions()
    load_pretrained(encoder, None, Weights("file.pt", tensors), settings, CLASSES)
    assert torch.equal(
        bare_backbone(encoder, settings).state_dict()["bn1.weight"], tensors["bn1.weight"]
    )


def test_a_training_begins_with_a_runs_own_checkpoint(
    digits: Path, runs: Path, tmp_path: Path
) -> None:
    """A finished run of five classes, as a file: the embedder and their classifier go on."""
    file = runs / "embedder-1" / "checkpoint.safetensors"
    begun = read_weights_file(file)
    assert begun.class_names == tuple("01234")
    keys: dict[str, object] = {"weights": str(file), "epochs": 1, "warmup_epochs": 0, "lr": 1e-9}
    done = train_quietly(config_of("embedder", tmp_path / "run", digits / "queries", **keys))
    for key, tensor in begun.tensors.items():
        if key.startswith("encoder.") and key.endswith("weight"):
            torch.testing.assert_close(done.tensors[key], tensor, atol=1e-6, rtol=0)
    classifier = next(key for key in done.tensors if key.startswith("head."))
    assert begun.tensors[classifier].shape != done.tensors[classifier].shape


def test_a_resumed_training_does_not_need_the_file(digits: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    settings = config_of("embedder", tmp_path / "run", digits / "queries", epochs=2)
    assert isinstance(settings, EmbedderConfig)
    file = tmp_path / "w.safetensors"
    save_file(
        {k: v.contiguous() for k, v in build_encoder(settings).backbone.state_dict().items()}, file
    )
    with_weights = settings.model_copy(update={"weights": str(file)})
    first = train_quietly(with_weights)
    file.unlink()
    assert train_quietly(with_weights).step == first.step


def test_pixels_are_normalised_as_configured() -> None:
    settings = config("small", image_size=8, pixel_mean=(0.1, 0.2, 0.3), pixel_std=(0.4, 0.5, 0.6))
    encoder = build_encoder(settings)
    seen = []
    encoder.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    pixels = torch.rand(2, 3, 8, 8)
    encoder.features(pixels)
    expected = torchvision.transforms.functional.normalize(pixels, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    torch.testing.assert_close(seen[0], expected)
    assert not any(key == "mean" or key == "std" for key in encoder.state_dict())
