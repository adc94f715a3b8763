"""phi and psi as modules: uint8 images in, vectors out, with normalisation in one place.

The published graph is exactly `ImageEncoder.forward`. Training calls `encode`, after augmentation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nobackfill.training.config import EmbedderConfig, SideEncoderConfig
from nobackfill.training.data.augment import Augment
from nobackfill.training.loop.objective import Batch, Objective, Terms
from nobackfill.training.loop.run import Checkpoint, load_part
from nobackfill.training.networks.backbones import build_backbone
from nobackfill.training.networks.heads import Head, build_head


class Binarise(nn.Module):
    """Maps [n,d] to -1 or 1; 0 becomes 1.

    The gradient is that of the identity for |x| <= 1, and 0 beyond (straight-through estimator), so
    that values far from the threshold stay where they are.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return signs of the same shape and dtype, -1 or 1; in eval mode they have no gradient.

        NaN becomes -1, but stays NaN in training.
        """
        signs = torch.where(x >= 0, torch.ones_like(x), -torch.ones_like(x))
        if not self.training:
            return signs
        clamped = x.clamp(-1, 1)
        return signs.detach() + clamped - clamped.detach()


# Kinds of psi with an additional BatchNorm at the end of the model (fct.txt D.4.1).
_NORMALISED = ("simclr", "binary_simclr", "vicreg", "distilled")


class ConcatenatedBackbones(nn.Module):
    """Two backbones that read the same pixels; their outputs [n,a] and [n,b] are [n,a+b]."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the output of the first, then that of the second, for each row."""
        return torch.cat((self.first(pixels), self.second(pixels)), 1)


def to_pixels(images: Tensor) -> Tensor:
    """Convert uint8 [n,H,W,3] to float32 [n,3,H,W] in 0..1, on the same device."""
    return images.permute(0, 3, 1, 2).float() / 255


class ImageEncoder(nn.Module):
    """A backbone with scaling before it and, with `unit_norm`, L2 normalisation after it.

    Pixels in 0..1 are normalised as (x - mean) / std, per colour channel.

    Args of the constructor:
        backbone: normalised pixels [n,3,image_size,image_size] -> [n,dim].
        dim: the dimension of its output.
        image_size: side of the square images in pixels.
        unit_norm: normalise the output to length 1.
        mean, std: of red, green and blue.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        dim: int,
        image_size: int,
        unit_norm: bool,
        mean: tuple[float, float, float] = (0.5, 0.5, 0.5),
        std: tuple[float, float, float] = (0.5, 0.5, 0.5),
    ) -> None:
        super().__init__()
        self.backbone, self.dim, self.image_size, self.unit_norm = (
            backbone,
            dim,
            image_size,
            unit_norm,
        )
        # Not in the checkpoint, because the configuration contains them.
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)

    def features(self, pixels: Tensor) -> Tensor:
        """Return the backbone's raw output [n,dim] for pixels float32 [n,3,H,W] in 0..1.

        H and W are `image_size`; another size is an error of the backbone, or is accepted by one
        that reads any.
        """
        output: Tensor = self.backbone((pixels - self.mean) / self.std)
        return output

    def encode(self, pixels: Tensor) -> Tensor:
        """Return vectors of the space, float32 [n,dim], for pixels float32 [n,3,H,W] in 0..1.

        With `unit_norm` their length is 1; a zero output stays zero. In training mode an encoder
        that ends with BatchNorm needs at least two images, or raises ValueError.
        """
        features = self.features(pixels).float()
        return F.normalize(features) if self.unit_norm else features

    def forward(self, images: Tensor) -> Tensor:
        """Return vectors float32 [n,dim] for images uint8 [n,H,W,3].

        H and W are `image_size`. With `unit_norm` the length of a vector is 1; a zero output stays
        zero. In training mode a single image may raise ValueError, as in `encode`.
        """
        return self.encode(to_pixels(images))


def build_encoder(config: EmbedderConfig | SideEncoderConfig) -> ImageEncoder:
    """Build the network of a configuration with random weights; key `weights` is not loaded.

    An embedder returns unit vectors unless its head is softmax. Side-information is not normalised.
    The weights come from torch's default generator. The encoder is on the CPU, in training mode.

    Raises:
        ConfigurationError: the backbone is unknown, does not fit the other keys, or its package is
            not installed.
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
    """
    if isinstance(config, EmbedderConfig):
        dim, unit = config.embedding_dim, config.head != "softmax"
    else:
        dim, unit = config.side_info_dim, False

    def build(dim: int) -> nn.Module:
        return build_backbone(
            config.backbone,
            dim,
            width=config.width,
            pooling=config.pooling,
            last_nonlin=config.last_nonlin,
            image_size=config.image_size,
        )

    if isinstance(config, SideEncoderConfig) and config.side_info == "inner_simclr":
        half = dim // 2
        simclr = nn.Sequential(build(half), nn.BatchNorm1d(half, affine=False))
        return ImageEncoder(
            ConcatenatedBackbones(build(half), simclr), dim, config.image_size, unit,
            config.pixel_mean, config.pixel_std,
        )  # fmt: skip
    backbone = build(dim)
    if isinstance(config, SideEncoderConfig) and config.side_info in _NORMALISED:
        layers = [backbone, nn.BatchNorm1d(dim, affine=False)]
        if config.side_info == "binary_simclr":
            layers.append(Binarise())
        backbone = nn.Sequential(*layers)
    return ImageEncoder(backbone, dim, config.image_size, unit, config.pixel_mean, config.pixel_std)


def bare_backbone(encoder: ImageEncoder, config: EmbedderConfig | SideEncoderConfig) -> nn.Module:
    """Return the backbone of an encoder of `build_encoder`, without the layers that it appends.

    It is the module itself, so changes of it change the encoder.

    Args:
        encoder: the encoder.
        config: the configuration that it was built from; another one may raise AssertionError.
    """
    network = encoder.backbone
    behind = config.last_nonlin + (
        isinstance(config, SideEncoderConfig) and config.side_info in _NORMALISED
    )
    for _ in range(behind):
        assert isinstance(network, nn.Sequential)
        network = network[0]
    return network


class EmbedderObjective(Objective):
    """Trains an embedder under its head: the `independent` method, and the base of the others.

    Batches contain `images` uint8 [b,H,W,3] and `labels` int64 [b]. The constructor raises the
    errors of `build_encoder` and `build_head`.
    """

    def __init__(self, config: EmbedderConfig, class_count: int) -> None:
        super().__init__()
        self.config = config
        self.embedder = build_encoder(config)
        self.head: Head = build_head(
            config.head, class_count, config.embedding_dim, margin=config.margin,
            scale=config.scale, label_smoothing=config.label_smoothing,
        )  # fmt: skip
        self.augment = Augment(config.augmentation)

    def forward(self, batch: Batch) -> Terms:
        """Return `classification`, the head's mean loss on one augmented view.

        The view is drawn from torch's default generator. Labels are rows of the head; others raise
        the head's IndexError or RuntimeError.
        """
        embedding = self.embedder.encode(self.augment(to_pixels(batch["images"])))
        return {"classification": self.head(embedding, batch["labels"])}

    def start_from(self, checkpoint: Checkpoint, class_names: tuple[str, ...]) -> None:
        """Load the embedder of another run, and its head if kind and classes are the same.

        Args:
            checkpoint: the checkpoint of the other run; one without the part encoder does not fit.
            class_names: the classes of this training; with other ones the head is not loaded.

        Raises:
            ConfigurationError: a tensor is missing, superfluous or of another shape. The part that
                does not fit is unchanged; an encoder that was loaded before it stays.
        """
        load_part(self.embedder, checkpoint, "encoder")
        before = checkpoint.config
        if (
            isinstance(before, EmbedderConfig)
            and before.head == self.config.head
            and checkpoint.class_names == class_names
        ):
            load_part(self.head, checkpoint, "head")

    def trained_parts(self) -> nn.ModuleDict:
        """Return the parts encoder and head; they are the modules themselves."""
        return nn.ModuleDict({"encoder": self.embedder, "head": self.head})
