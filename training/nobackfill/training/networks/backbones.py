"""Backbones by name: pixels float32 [n,3,H,W] -> features float32 [n,embedding_dim].

Names that begin with `small` are for 8..64-pixel images, their width a key; every other name is a
torchvision classification model, whose last linear layer is replaced by one with `embedding_dim`
outputs (FCT D.1: the penultimate layer outputs the embedding directly), or one of timm's or
open_clip's (public_models), behind which such a layer is put.
"""

import difflib

import torch
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.networks.public_models import is_public, open_public


class GeM(nn.Module):
    """Generalised-mean pooling, (mean x^p)^(1/p), p trained from 3: [n,c,h,w] -> [n,c,1,1]."""

    def __init__(self, p: float = 3.0) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(p))

    def forward(self, maps: Tensor) -> Tensor:
        return maps.clamp(min=1e-6).pow(self.p).mean((2, 3), keepdim=True).pow(1 / self.p)


def _pool(pooling: str) -> nn.Module:
    return GeM() if pooling == "gem" else nn.AdaptiveAvgPool2d(1)


def _conv(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class _Residual(nn.Module):
    """x + conv(conv(x))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(_conv(channels, channels), _conv(channels, channels))

    def forward(self, maps: Tensor) -> Tensor:
        output: Tensor = maps + self.convs(maps)
        return output


def small(embedding_dim: int, width: int, pooling: str, image_size: int) -> nn.Module:
    """Four convolutions at two resolutions and a linear layer, for digits and their like."""
    return nn.Sequential(
        _conv(3, width),
        _conv(width, 2 * width, 2),
        _conv(2 * width, 2 * width),
        _conv(2 * width, 4 * width, 2),
        _pool(pooling),
        nn.Flatten(),
        nn.Linear(4 * width, embedding_dim),
    )


def small_resnet(embedding_dim: int, width: int, pooling: str, image_size: int) -> nn.Module:
    """Nine weight layers, two of the three stages residual: the fast ResNet for 32-pixel images."""
    return nn.Sequential(
        _conv(3, width),
        _conv(width, 2 * width, 2),
        _Residual(2 * width),
        _conv(2 * width, 4 * width, 2),
        _conv(4 * width, 8 * width, 2),
        _Residual(8 * width),
        _pool(pooling),
        nn.Flatten(),
        nn.Linear(8 * width, embedding_dim),
    )


def small_mobilenet(embedding_dim: int, width: int, pooling: str, image_size: int) -> nn.Module:
    """MobileNetV2 of four inverted residuals, an eighth of the image's side at the end."""
    from torchvision.models import MobileNetV2

    # Of each stage: expansion, channels, blocks, stride.
    stages = [[1, width, 1, 1], [4, 2 * width, 2, 2], [4, 4 * width, 1, 2]]
    network = MobileNetV2(
        embedding_dim, width / 32, inverted_residual_setting=stages, round_nearest=4, dropout=0.0
    )
    return _pooled(network, "small_mobilenet", pooling)


def small_vit(embedding_dim: int, width: int, pooling: str, image_size: int) -> nn.Module:
    """A vision transformer of four layers over 4 x 4 (8 pixels) or 8 x 8 patches."""
    from torchvision.models import VisionTransformer

    patch = max(2, image_size // 8)
    if image_size % patch:
        raise ConfigurationError(
            f"small_vit cuts {image_size} pixels into patches of {patch}; expected image_size in "
            f"whole patches, e.g. {image_size - image_size % patch}"
        )
    dim = 4 * width
    network = VisionTransformer(image_size, patch, 4, 4, dim, 2 * dim, num_classes=embedding_dim)
    # Its own begins at zero, where a cosine has no gradient.
    network.heads = nn.Linear(dim, embedding_dim)
    return _pooled(network, "small_vit", pooling)


def small_swin(embedding_dim: int, width: int, pooling: str, image_size: int) -> nn.Module:
    """A Swin transformer of two stages, two layers each, over patches of 2 x 2 pixels."""
    from torchvision.models import SwinTransformer

    window = max(2, image_size // 8)
    network = SwinTransformer(
        [2, 2],
        2 * width,
        [2, 2],
        [2, 4],
        [window, window],
        stochastic_depth_prob=0.0,
        num_classes=embedding_dim,
    )
    return _pooled(network, "small_swin", pooling)


_SMALL = {
    "small": small,
    "small_resnet": small_resnet,
    "small_mobilenet": small_mobilenet,
    "small_vit": small_vit,
    "small_swin": small_swin,
}
# Trained with a second classifier, on pixels that they scale themselves.
AUXILIARY = ("googlenet", "inception_v3")


def backbone_names() -> list[str]:
    """Every name that `build_backbone` knows."""
    # Imported where used: it takes seconds, and the small networks do without.
    import torchvision

    known: list[str] = torchvision.models.list_models(module=torchvision.models)
    return sorted(_SMALL) + known


def build_backbone(
    name: str, embedding_dim: int, *, width: int, pooling: str, last_nonlin: bool, image_size: int
) -> nn.Module:
    """A fresh network. Raises ConfigurationError for an unknown name (naming near ones), or for a
    model that has no linear layer to replace (SqueezeNet), or no pooling to one cell for GeM.
    """
    if name in _SMALL:
        network = _SMALL[name](embedding_dim, width, pooling, image_size)
    elif is_public(name):
        network = _public(name, embedding_dim, pooling, image_size)
    elif name in backbone_names():
        network = _torchvision(name, embedding_dim, pooling, image_size)
    else:
        near = difflib.get_close_matches(name, backbone_names(), 5) or ["resnet18", "resnet50"]
        raise ConfigurationError(
            f"unknown backbone {name!r}; expected {', '.join(_SMALL)} or a torchvision "
            f"classification model, e.g. {', '.join(near)}"
        )
    if last_nonlin:
        network = nn.Sequential(network, nn.ReLU())
    # Trains a sixth faster on a processor.
    return network.to(memory_format=torch.channels_last)


def _public(name: str, embedding_dim: int, pooling: str, image_size: int) -> nn.Module:
    model = open_public(name, weights=False)
    if pooling != "avg":
        raise ConfigurationError(f"backbone {name} pools by itself; train with pooling: avg")
    try:
        with torch.no_grad():
            model.network(torch.zeros(1, 3, image_size, image_size))
    except Exception as error:
        # Whatever a network of others raises for images of another size than its own.
        raise ConfigurationError(
            f"backbone {name} does not take images of {image_size} pixels; train with image_size: "
            f"{model.pixels.size[0]}, its own"
        ) from error
    return nn.Sequential(model.network, nn.Linear(model.dim, embedding_dim))


def _torchvision(name: str, embedding_dim: int, pooling: str, image_size: int) -> nn.Module:
    import torchvision

    # These two would answer with auxiliary classifiers' logits as well while they are trained.
    plain = {"aux_logits": False, "init_weights": True} if name in AUXILIARY else {}
    network: nn.Module = torchvision.models.get_model(name, weights=None, **plain)
    linear = linear_layers(network)
    if not linear:
        raise ConfigurationError(
            f"backbone {name} classifies by a convolution, so that no linear layer can give the "
            "embedding; expected another one, e.g. mobilenet_v3_small"
        )
    path, last = linear[-1]
    replace_layer(network, path, nn.Linear(last.in_features, embedding_dim))
    network = _pooled(network, name, pooling)
    if name.startswith("resnet") and image_size <= 64:
        _small_stem(network)
    return network


def _pooled(network: nn.Module, name: str, pooling: str) -> nn.Module:
    """The network with GeM in place of its last average pooling, where that is asked for."""
    if pooling == "gem":
        pools = [p for p, m in network.named_modules() if _pools_to_one_cell(m)]
        if not pools:
            raise ConfigurationError(
                f"backbone {name} has no average pooling for GeM to replace; use pooling: avg"
            )
        replace_layer(network, pools[-1], GeM())
    return network


def _pools_to_one_cell(module: nn.Module) -> bool:
    # VGG and AlexNet pool to 7 x 7 and 6 x 6 cells, which their classifiers read one by one.
    return isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1))


def _small_stem(network: nn.Module) -> None:
    # A 7x7 stride-2 stem and max pooling leave nothing of a 32-pixel image (He et al., section
    # 4.2).
    network.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    network.maxpool = nn.Identity()


def linear_layers(network: nn.Module) -> list[tuple[str, nn.Linear]]:
    """With their paths, in order. The last of a backbone gives the embedding."""
    return [(p, m) for p, m in network.named_modules() if isinstance(m, nn.Linear)]


def replace_layer(network: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` where the layer of that path stands."""
    parent, _, name = path.rpartition(".")
    setattr(network.get_submodule(parent), name, module)
