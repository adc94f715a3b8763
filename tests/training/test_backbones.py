import re
from itertools import groupby

import pytest
import torch
from torch import nn
from torchvision.models import get_model_weights
from torchvision.models.mobilenetv2 import InvertedResidual

from nobackfill.errors import ConfigurationError
from nobackfill.training.networks.backbones import GeM, backbone_names, build_backbone


def build(name: str, size: int, *, pooling: str = "avg", last_nonlin: bool = False) -> nn.Module:
    return build_backbone(
        name, 24, width=8, pooling=pooling, last_nonlin=last_nonlin, image_size=size
    )


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("small", 8),
        ("small", 16),
        ("small_resnet", 32),
        ("small_mobilenet", 8),
        ("small_vit", 8),
        ("small_vit", 32),
        ("small_swin", 8),
        ("resnet18", 32),
        ("mobilenet_v2", 32),
        ("mobilenet_v3_small", 32),
        ("swin_t", 64),
        ("regnet_y_400mf", 32),
    ],
)
def test_shapes(name: str, size: int) -> None:
    network = build(name, size).eval()
    with torch.no_grad():
        assert network(torch.rand(2, 3, size, size)).shape == (2, 24)


@pytest.mark.parametrize("name", ["resnet50", "resnet101", "resnet152"])
def test_the_last_layer_of_deep_resnets_gives_the_embedding(name: str) -> None:
    with torch.device("meta"):
        network = build(name, 224)
        assert network(torch.rand(2, 3, 224, 224)).shape == (2, 24)
    last = [m for m in network.modules() if isinstance(m, nn.Linear)][-1]
    assert (last.in_features, last.out_features) == (2048, 24)


def test_the_resnet_of_fct_has_the_embedding_in_its_last_block() -> None:
    """As apple/ml-fct writes it: 2048 -> 128 channels, ReLU, average; no linear layer."""
    torch.manual_seed(0)
    network = build_backbone(
        "fct_resnet50", 128, width=8, pooling="avg", last_nonlin=True, image_size=32
    ).eval()
    maps: list[torch.Tensor] = []
    network.get_submodule("0.layer4").register_forward_hook(
        lambda module, args, output: maps.append(output)
    )
    with torch.no_grad():
        embedding = network(torch.rand(2, 3, 64, 64))
    assert maps[0].shape == (2, 128, 2, 2) and float(maps[0].min()) == 0
    torch.testing.assert_close(embedding, maps[0].mean((2, 3)))
    assert not any(isinstance(module, nn.Linear) for module in network.modules())
    # torchvision's count without its classifier, its last 1 x 1 convolution and norm, and with the
    # narrow ones: a convolution and a shortcut.
    (weights, *_) = get_model_weights("resnet50")
    wide = weights.meta["num_params"] - 2049 * 1000 - (512 * 2048 + 2 * 2048)
    narrow = (512 + 2048) * 128 + 4 * 128
    assert sum(p.numel() for p in network.parameters()) == wide + narrow


def torchvisions() -> list[str]:
    # RegNet's widths come out of tensors, which the meta device does not hold: see test_shapes.
    return [name for name in backbone_names() if not name.startswith(("small", "fct", "regnet"))]


def parameters(name: str) -> int:
    (first, *_) = get_model_weights(name)
    count: int = first.meta["num_params"]
    return count


# The next test builds the smallest of every family.
@pytest.mark.numerics
def test_every_name_but_squeezenet_is_built() -> None:
    refused = []
    for name in torchvisions():
        try:
            with torch.device("meta"):
                build(name, 224)
        except ConfigurationError as error:
            assert name in str(error)
            refused.append(name)
    assert refused == ["squeezenet1_0", "squeezenet1_1"]


@pytest.mark.long
@pytest.mark.parametrize("pooling", ["avg", "gem"])
def test_one_of_every_family_gives_an_embedding_or_is_refused(pooling: str) -> None:
    refused = set()
    for family, names in groupby(torchvisions(), lambda name: re.sub("[0-9_].*", "", name)):
        name = min(names, key=parameters)
        try:
            with torch.device("meta"):
                network = build(name, 224, pooling=pooling)
                assert network(torch.rand(2, 3, 224, 224)).shape == (2, 24), name
        except ConfigurationError:
            refused.add(family)
    # These have no pooling to one cell: theirs is to many, a function, or none.
    poolless = {"alexnet", "densenet", "mnasnet", "shufflenet", "vgg", "vit"}
    assert refused == {"squeezenet"} | (poolless if pooling == "gem" else set())


def test_small_pictures_keep_their_pixels_in_a_resnets_stem() -> None:
    with torch.device("meta"):
        small, large = build("resnet18", 32), build("resnet18", 224)
    assert small.get_submodule("conv1").get_parameter("weight").shape[2:] == (3, 3)
    assert large.get_submodule("conv1").get_parameter("weight").shape[2:] == (7, 7)
    assert isinstance(small.get_submodule("maxpool"), nn.Identity)


def test_last_nonlin_leaves_nothing_negative() -> None:
    torch.manual_seed(0)
    inputs = torch.rand(8, 3, 16, 16)
    assert build("small", 16, last_nonlin=True).eval()(inputs).min() >= 0
    assert build("small", 16).eval()(inputs).min() < 0


def test_gem_is_the_generalised_mean() -> None:
    maps = torch.rand(2, 3, 4, 5) + 0.1
    expected = torch.empty(2, 3)
    for i in range(2):
        for c in range(3):
            values = [v**3.0 for v in maps[i, c].flatten().tolist()]
            expected[i, c] = (sum(values) / len(values)) ** (1 / 3)
    assert torch.allclose(GeM()(maps).flatten(1), expected, atol=1e-6)
    assert GeM().p.requires_grad


@pytest.mark.parametrize("name", ["small", "small_resnet", "resnet18", "mobilenet_v2"])
def test_gem_replaces_the_average(name: str) -> None:
    if name == "mobilenet_v2":
        with pytest.raises(ConfigurationError, match="no average pooling"):
            build(name, 32, pooling="gem")
        return
    network = build(name, 32, pooling="gem").eval()
    assert any(isinstance(module, GeM) for module in network.modules())
    with torch.no_grad():
        assert network(torch.rand(2, 3, 32, 32)).shape == (2, 24)


def test_an_unknown_name_is_refused_with_near_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'resnet20'.*resnet") as caught:
        build("resnet20", 32)
    assert caught.value.exit_code == 78


def test_small_transformers_learn_from_the_first_step_and_refuse_what_they_cannot_cut() -> None:
    for name in ("small_vit", "small_swin"):
        vectors = build(name, 8)(torch.rand(2, 3, 8, 8))
        # Vectors of length 0 would have no direction.
        assert vectors.norm(dim=1).min() > 0, name
    with pytest.raises(ConfigurationError, match=r"28 pixels into patches of 3: .* e\.g\. 27"):
        build("small_vit", 28)
    with pytest.raises(ConfigurationError, match="small_mobilenet has no average pooling"):
        build("small_mobilenet", 8, pooling="gem")


@pytest.mark.parametrize(
    ("width", "channels"),
    [(8, [4, 4, 4, 8]), (24, [20, 36, 36, 72]), (32, [32, 64, 64, 128])],
)
def test_checkpoints_of_small_mobilenet_keep_their_shapes(width: int, channels: list[int]) -> None:
    """Its stages begin with width²/32 channels, in multiples of 4."""
    network = build_backbone(
        "small_mobilenet", 24, width=width, pooling="avg", last_nonlin=False, image_size=8
    )
    blocks = [one for one in network.modules() if isinstance(one, InvertedResidual)]
    assert [block.out_channels for block in blocks] == channels
