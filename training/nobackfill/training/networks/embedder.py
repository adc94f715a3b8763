"""phi and psi as modules: uint8 images in, vectors out, with the one point of normalisation.

The graph that is published is exactly `ImageEncoder.forward`; training enters at `encode`, behind
the augmentation.
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
    """[n,d] -> -1 or 1; 0 counts as 1.

    The gradient is that of the identity where |x| <= 1 and 0 beyond (the straight-through
    estimator), so that numbers far from their threshold stay where they are.
    """

    def forward(self, x: Tensor) -> Tensor:
        signs = torch.where(x >= 0, torch.ones_like(x), -torch.ones_like(x))
        if not self.training:
            return signs
        kept = x.clamp(-1, 1)
        return signs.detach() + kept - kept.detach()


# Kinds of psi with an extra BatchNorm at the end of the model (fct.txt D.4.1).
_NORMALISED = ("simclr", "binary_simclr", "vicreg", "distilled")


def to_pixels(images: Tensor) -> Tensor:
    """uint8 [n,H,W,3] -> float32 [n,3,H,W] in 0..1."""
    return images.permute(0, 3, 1, 2).float() / 255


class ImageEncoder(nn.Module):
    """A backbone between scaling and, with `unit`, L2 normalisation.

    Pixels of 0..1 lose `mean` and are divided by `std`: of red, green and blue.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        dim: int,
        image_size: int,
        unit: bool,
        mean: tuple[float, float, float] = (0.5, 0.5, 0.5),
        std: tuple[float, float, float] = (0.5, 0.5, 0.5),
    ) -> None:
        super().__init__()
        self.backbone, self.dim, self.image_size, self.unit = backbone, dim, image_size, unit
        # Of the configuration, not of the checkpoint.
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)

    def features(self, pixels: Tensor) -> Tensor:
        """pixels float32 [n,3,H,W] in 0..1 -> the backbone's own output [n,dim], not normalised."""
        output: Tensor = self.backbone((pixels - self.mean) / self.std)
        return output

    def encode(self, pixels: Tensor) -> Tensor:
        """pixels float32 [n,3,H,W] in 0..1 -> the space's vectors float32 [n,dim]."""
        features = self.features(pixels).float()
        return F.normalize(features) if self.unit else features

    def forward(self, images: Tensor) -> Tensor:
        """images uint8 [n,H,W,3] -> vectors float32 [n,dim]."""
        return self.encode(to_pixels(images))


def build_encoder(config: EmbedderConfig | SideEncoderConfig) -> ImageEncoder:
    """The untrained network of a configuration. Raises ConfigurationError for an unknown
    backbone.
    """
    if isinstance(config, EmbedderConfig):
        dim, unit = config.embedding_dim, config.head != "softmax"
    else:
        dim, unit = config.side_info_dim, False
    backbone = build_backbone(
        config.backbone,
        dim,
        width=config.width,
        pooling=config.pooling,
        last_nonlin=config.last_nonlin,
        image_size=config.image_size,
    )
    if isinstance(config, SideEncoderConfig) and config.side_info in _NORMALISED:
        layers = [backbone, nn.BatchNorm1d(dim, affine=False)]
        if config.side_info == "binary_simclr":
            layers.append(Binarise())
        backbone = nn.Sequential(*layers)
    return ImageEncoder(backbone, dim, config.image_size, unit, config.pixel_mean, config.pixel_std)


def bare_backbone(encoder: ImageEncoder, config: EmbedderConfig | SideEncoderConfig) -> nn.Module:
    """The backbone without what `build_encoder` puts behind it."""
    network = encoder.backbone
    behind = config.last_nonlin + (
        isinstance(config, SideEncoderConfig) and config.side_info in _NORMALISED
    )
    for _ in range(behind):
        assert isinstance(network, nn.Sequential)
        network = network[0]
    return network


class EmbedderObjective(Objective):
    """An embedder under its head, trained on its own: the `independent` method and every method's
    base.

    Batches hold `images` uint8 [b,H,W,3] and `labels` int64 [b].
    """

    def __init__(self, config: EmbedderConfig, classes: int) -> None:
        super().__init__()
        self.config = config
        self.embedder = build_encoder(config)
        self.head: Head = build_head(
            config.head, classes, config.embedding_dim, margin=config.margin, scale=config.scale
        )
        self.augment = Augment(config.augmentation)

    def forward(self, batch: Batch) -> Terms:
        embedding = self.embedder.encode(self.augment(to_pixels(batch["images"])))
        return {"classification": self.head(embedding, batch["labels"])}

    def start_from(self, begun: Checkpoint, class_names: tuple[str, ...]) -> None:
        """Take over the embedder of another run, and its head where that is of the same kind and
        the same classes. Raises ConfigurationError naming what does not fit.
        """
        load_part(self.embedder, begun, "encoder")
        before = begun.config
        if (
            isinstance(before, EmbedderConfig)
            and before.head == self.config.head
            and begun.class_names == class_names
        ):
            load_part(self.head, begun, "head")

    def trained(self) -> nn.ModuleDict:
        return nn.ModuleDict({"encoder": self.embedder, "head": self.head})
