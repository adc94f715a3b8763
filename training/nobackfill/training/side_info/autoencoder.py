"""Side-information from an autoencoder with squared reconstruction error (fct.txt 5.1, D.4.2)."""

import torch.nn.functional as F
from torch import Tensor, nn

from nobackfill.training.config import SideEncoderConfig
from nobackfill.training.data.augment import Augment
from nobackfill.training.loop.objective import Batch, Objective, Terms
from nobackfill.training.networks.embedder import build_encoder, to_pixels


class Decoder(nn.Module):
    """[n,dim] -> pixels [n,3,S,S] in 0..1: a 4 x 4 map, doubled and convolved up to the size."""

    def __init__(self, dim: int, image_size: int, width: int) -> None:
        super().__init__()
        self.image_size, self.width = image_size, width
        doublings = max(1, (image_size - 1).bit_length() - 2)
        self.start = nn.Linear(dim, width * 16)
        layers: list[nn.Module] = []
        for _ in range(doublings):
            layers += [
                nn.Upsample(scale_factor=2),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1), nn.Sigmoid())

    def forward(self, code: Tensor) -> Tensor:
        maps = self.start(code).unflatten(1, (self.width, 4, 4))
        pixels: Tensor = self.layers(maps)
        size = (self.image_size, self.image_size)
        return pixels if pixels.shape[2:] == size else F.interpolate(pixels, size, mode="bilinear")


class AutoencoderObjective(Objective):
    """Mean squared error a pixel value between an augmented image and its reconstruction."""

    def __init__(self, config: SideEncoderConfig) -> None:
        super().__init__()
        self.encoder = build_encoder(config)
        self.decoder = Decoder(config.side_info_dim, config.image_size, 2 * config.width)
        self.augment = Augment(config.augmentation)

    def forward(self, batch: Batch) -> Terms:
        pixels = self.augment(to_pixels(batch["images"]))
        return {"reconstruction": F.mse_loss(self.decoder(self.encoder.encode(pixels)), pixels)}

    def trained(self) -> nn.ModuleDict:
        return nn.ModuleDict({"encoder": self.encoder, "decoder": self.decoder})
