"""Backbones by name: pixels float32 [n,3,H,W] -> features float32 [n,embedding_dim].

Names that begin with `small` are networks for 8..64-pixel images, with the key `width`.
`fct_resnet50` is the ResNet50 of FCT's authors: its last block outputs the embedding. Names with a
prefix are timm's or open_clip's models (public_models), with a linear layer after them. Every
other name is a torchvision classification model whose last linear layer is replaced by one with
`embedding_dim` outputs (FCT D.1: the penultimate layer outputs the embedding directly).
"""

import difflib

import torch
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.networks.public_models import is_public, open_public


class GeM(nn.Module):
    """Generalised-mean pooling, (mean x^p)^(1/p), with p trained from 3: [n,c,h,w] -> [n,c,1,1]."""

    def __init__(self, p: float = 3.0) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(p))

    def forward(self, maps: Tensor) -> Tensor:
        """Pool maps [n,c,h,w] to [n,c,1,1]; values below 1e-6 count as 1e-6.

        The exponent p is trained and not limited.
        """
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
    """A residual block: x + conv(conv(x))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(_conv(channels, channels), _conv(channels, channels))

    def forward(self, maps: Tensor) -> Tensor:
        output: Tensor = maps + self.convs(maps)
        return output


def small_cnn(embedding_dim: int, width: int, pooling: str, image_size: int) -> nn.Module:
    """Build four convolutions and a linear layer, for small simple images.

    `width` is the number of channels of the first one, and `pooling` avg or gem. `image_size` is
    not used, as in the other networks that take any size. Any image size works. The weights are
    random, from torch's default generator.
    """
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
    """Build a fast ResNet for 32-pixel images: nine weight layers, two residual stages.

    `width` is the number of channels of the first convolution, and `pooling` avg or gem.
    `image_size` is not used. The weights are random, from torch's default generator.
    """
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


def fct_resnet50(embedding_dim: int, width: int, pooling: str, image_size: int) -> nn.Module:
    """Build a ResNet50 whose last block outputs `embedding_dim` channels, which are pooled.

    This is the network of FCT's public code (apple/ml-fct, models/resnet.py). It has no linear
    layer. Its output passed a ReLU, so `last_nonlin` changes nothing. `pooling` is avg or gem.
    `width` and `image_size` are not used. The weights are random, from torch's default generator.
    """
    from torchvision.models import resnet50

    network = resnet50()
    last = network.layer4[-1]
    channels = last.conv1.in_channels
    last.conv3 = nn.Conv2d(last.conv3.in_channels, embedding_dim, 1, bias=False)
    last.bn3 = nn.BatchNorm2d(embedding_dim)
    last.downsample = nn.Sequential(
        nn.Conv2d(channels, embedding_dim, 1, bias=False), nn.BatchNorm2d(embedding_dim)
    )
    network.fc = nn.Identity()
    return _pooled(network, "fct_resnet50", pooling)


def small_mobilenet(embedding_dim: int, width: int, pooling: str, image_size: int) -> nn.Module:
    """Build a MobileNetV2 of four inverted residuals; its last maps have an eighth of the side.

    `width` is the number of channels of the first convolution. The stages have width²/32 channels,
    then two and four times as many, rounded to multiples of 4. `image_size` is not used. The
    weights are random, from torch's default generator.

    Raises:
        ConfigurationError: `pooling` is gem, because the network pools by a function.
    """
    from torchvision.models import MobileNetV2

    # Per stage: expansion, channels, blocks, stride. MobileNetV2 multiplies the channels by its
    # second argument again, so only width 32 gives `width` of them. It stays so: checkpoints of
    # earlier runs have these shapes.
    stages = [[1, width, 1, 1], [4, 2 * width, 2, 2], [4, 4 * width, 1, 2]]
    network = MobileNetV2(
        embedding_dim, width / 32, inverted_residual_setting=stages, round_nearest=4, dropout=0.0
    )
    return _pooled(network, "small_mobilenet", pooling)


def small_vit(embedding_dim: int, width: int, pooling: str, image_size: int) -> nn.Module:
    """Build a vision transformer of four layers, over patches of an eighth of the image's side.

    The patches have at least 2 x 2 pixels. The width of the transformer is four times `width`. The
    weights are random, from torch's default generator.

    Raises:
        ConfigurationError: the image has no whole number of patches; or `pooling` is gem, which a
            transformer does not have.
    """
    from torchvision.models import VisionTransformer

    patch = max(2, image_size // 8)
    if image_size % patch:
        raise ConfigurationError(
            f"backbone small_vit cuts images of {image_size} pixels into patches of {patch}: "
            f"expected a multiple of {patch} as image_size, e.g. {image_size - image_size % patch}"
        )
    dim = 4 * width
    network = VisionTransformer(image_size, patch, 4, 4, dim, 2 * dim, num_classes=embedding_dim)
    # The default head starts at zero, where a cosine has no gradient.
    network.heads = nn.Linear(dim, embedding_dim)
    return _pooled(network, "small_vit", pooling)


def small_swin(embedding_dim: int, width: int, pooling: str, image_size: int) -> nn.Module:
    """Build a Swin transformer of two stages with two layers each, over patches of 2 x 2 pixels.

    Its first stage has twice `width` channels. Attention windows have an eighth of the image's
    side, at least 2. `pooling` is avg or gem. The weights are random, from torch's default
    generator.
    """
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


_OWN = {
    "fct_resnet50": fct_resnet50,
    "small": small_cnn,
    "small_resnet": small_resnet,
    "small_mobilenet": small_mobilenet,
    "small_vit": small_vit,
    "small_swin": small_swin,
}
# Models with a second classifier, which scale pixels themselves.
AUXILIARY = ("googlenet", "inception_v3")


def backbone_names() -> list[str]:
    """List the names that `build_backbone` knows, without public models.

    The names of this project come first, then torchvision's. The first call imports torchvision,
    which takes seconds. Each part is in alphabetical order.
    """
    # Imported here: it takes seconds, and the small networks do not need it.
    import torchvision

    return sorted(_OWN) + list(torchvision.models.list_models(module=torchvision.models))


def build_backbone(
    name: str, embedding_dim: int, *, width: int, pooling: str, last_nonlin: bool, image_size: int
) -> nn.Module:
    """Build a network with random weights from torch's default generator.

    The network is on the CPU, in training mode. A model of torchvision is not tried with an image:
    one that cannot read the size fails at the first batch.

    Args:
        name: the backbone.
        embedding_dim: the number of outputs.
        width: the width of networks whose name begins with `small`, as each of them counts it;
            others ignore it.
        pooling: avg or gem; public models only have avg, other models take any text but gem as avg.
        last_nonlin: append a ReLU.
        image_size: side of the square images in pixels; not every network depends on it. ResNets of
            torchvision get a stem of one 3 x 3 convolution up to 64 pixels.

    Returns:
        A module: pixels float32 [n,3,image_size,image_size] -> float32 [n,embedding_dim].

    Raises:
        ConfigurationError: the name is unknown (similar names are listed); the model has no linear
            layer to replace (SqueezeNet) or no pooling to one cell for GeM; small_vit or a public
            model does not take images of this size; or a public model's package is not installed.
        NotFoundError, UnavailableError: a public model of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
    """
    if name in _OWN:
        network = _OWN[name](embedding_dim, width, pooling, image_size)
    elif is_public(name):
        network = _public(name, embedding_dim, pooling, image_size)
    elif name in backbone_names():
        network = _torchvision(name, embedding_dim, pooling, image_size)
    else:
        near = difflib.get_close_matches(name, backbone_names(), 5) or ["resnet18", "resnet50"]
        raise ConfigurationError(
            f"unknown backbone {name!r}; expected {', '.join(_OWN)}, or a classification model of "
            f"torchvision, e.g. {', '.join(near)}"
        )
    if last_nonlin:
        network = nn.Sequential(network, nn.ReLU())
    # Trains a sixth faster on a CPU.
    return network.to(memory_format=torch.channels_last)


def _public(name: str, embedding_dim: int, pooling: str, image_size: int) -> nn.Module:
    model = open_public(name, loads_weights=False)
    if pooling != "avg":
        raise ConfigurationError(
            f"backbone {name} has its own pooling, which pooling: {pooling} cannot replace; train "
            "with pooling: avg"
        )
    try:
        with torch.no_grad():
            model.network(torch.zeros(1, 3, image_size, image_size))
    except Exception as error:
        # Foreign networks raise various errors for images of an unsupported size.
        raise ConfigurationError(
            f"backbone {name} cannot read images of {image_size} pixels; train with image_size: "
            f"{model.pixels.size[0]}"
        ) from error
    return nn.Sequential(model.network, nn.Linear(model.dim, embedding_dim))


def _torchvision(name: str, embedding_dim: int, pooling: str, image_size: int) -> nn.Module:
    import torchvision

    # In training mode these two would also return the logits of auxiliary classifiers.
    plain = {"aux_logits": False, "init_weights": True} if name in AUXILIARY else {}
    network: nn.Module = torchvision.models.get_model(name, weights=None, **plain)
    linear = linear_layers(network)
    if not linear:
        raise ConfigurationError(
            f"backbone {name} classifies by a convolution, so it has no linear layer that an "
            "embedding could replace; train another one, e.g. backbone: mobilenet_v3_small"
        )
    path, last = linear[-1]
    replace_layer(network, path, nn.Linear(last.in_features, embedding_dim))
    network = _pooled(network, name, pooling)
    if name.startswith("resnet") and image_size <= 64:
        _small_stem(network)
    return network


def _pooled(network: nn.Module, name: str, pooling: str) -> nn.Module:
    """Replace the network's last average pooling by GeM, if the configuration asks for it."""
    if pooling == "gem":
        pools = [p for p, m in network.named_modules() if _pools_to_one_cell(m)]
        if not pools:
            raise ConfigurationError(
                f"backbone {name} has no average pooling to one cell that pooling: gem could "
                "replace; train with pooling: avg"
            )
        replace_layer(network, pools[-1], GeM())
    return network


def _pools_to_one_cell(module: nn.Module) -> bool:
    # VGG and AlexNet pool to 7 x 7 and 6 x 6 cells, which their classifiers read separately.
    return isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1))


def _small_stem(network: nn.Module) -> None:
    # A 7x7 stem with stride 2 and max pooling would shrink a 32-pixel image to nothing (He et al.,
    # section 4.2).
    network.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    network.maxpool = nn.Identity()


def linear_layers(network: nn.Module) -> list[tuple[str, nn.Linear]]:
    """List the linear layers with their paths, in order; a backbone's last one is the embedding.

    Without linear layers the list is empty. The order is that in which the network registers them,
    which need not be that of the computation.
    """
    return [(p, m) for p, m in network.named_modules() if isinstance(m, nn.Linear)]


def replace_layer(network: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the layer at `path` (names with dots between) by `module`, in place.

    A last name that does not exist is added.

    Raises:
        AttributeError: there is no parent of such a layer.
    """
    parent, _, name = path.rpartition(".")
    setattr(network.get_submodule(parent), name, module)
