"""Side-information from a second old model: alternate, and alternate with mixup (fct.txt section
5.1).
"""

import torch
from torch import Tensor, nn

from nobackfill.training.config import SideEncoderConfig
from nobackfill.training.data.augment import Augment
from nobackfill.training.loop.objective import Batch, Objective, Terms
from nobackfill.training.networks.embedder import build_encoder, to_pixels
from nobackfill.training.networks.heads import Head, build_head


def mix_images(pixels: Tensor, alpha: float) -> Tensor:
    """Each image [n,3,H,W] mixed with another of the batch, itself the larger part.

    Mixup on images only: labels stay one-hot (section 5.1), so the share drawn from Beta(alpha,
    alpha) is turned to the side of the image whose label is kept.
    """
    share = torch.distributions.Beta(alpha, alpha).sample((len(pixels), 1, 1, 1))
    share = torch.maximum(share, 1 - share).to(pixels)
    return share * pixels + (1 - share) * pixels[torch.randperm(len(pixels)).to(pixels.device)]


class AlternateObjective(Objective):
    """The old model's training over again where the configuration repeats the embedder's: what
    differs is the seed, and mixup where asked.

    The side-information is the backbone's own output, not normalised.
    """

    def __init__(self, config: SideEncoderConfig, classes: int) -> None:
        super().__init__()
        self.encoder = build_encoder(config)
        self.head: Head = build_head(
            config.head, classes, config.side_info_dim, margin=config.margin, scale=config.scale
        )
        self.augment = Augment(config.augmentation)
        self.alpha = config.mixup_alpha if config.side_info == "mixup" else None

    def forward(self, batch: Batch) -> Terms:
        pixels = self.augment(to_pixels(batch["images"]))
        if self.alpha is not None:
            pixels = mix_images(pixels, self.alpha)
        return {"classification": self.head(self.encoder.encode(pixels), batch["labels"])}

    def trained(self) -> nn.ModuleDict:
        return nn.ModuleDict({"encoder": self.encoder, "head": self.head})
