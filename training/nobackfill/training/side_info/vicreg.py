"""VICReg (Bardes et al. 2022): two views alike, every number used, no two that say the same.

Needs no negatives, so that batches may be small. psi's output passes a last BatchNorm and is what
gets stored, as SimCLR's; the loss is taken behind an expander that is thrown away.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nobackfill.training.config import SideEncoderConfig
from nobackfill.training.data.augment import Augment
from nobackfill.training.loop.objective import Batch, Objective, Terms
from nobackfill.training.networks.embedder import build_encoder, to_pixels

# The paper's lambda, mu and nu (section 4.2).
INVARIANCE, VARIANCE, COVARIANCE = 25.0, 25.0, 1.0
# Variances below this are 0: keeps the root's gradient finite.
_EPSILON = 1e-4


def variance_hinge(z: Tensor) -> Tensor:
    """How far the numbers of z [n,d] are below a deviation of 1, their mean (Eq. 1)."""
    return F.relu(1 - (z.var(0) + _EPSILON).sqrt()).mean()


def covariance_penalty(z: Tensor) -> Tensor:
    """Squared covariances of different numbers of z [n,d], summed, over d (Eq. 3 and 4)."""
    covariance = torch.cov(z.T)
    return (covariance.square().sum() - covariance.diagonal().square().sum()) / z.shape[1]


class VicregObjective(Objective):
    """psi under an expander of two layers. Batches hold `images` uint8 [b,H,W,3]; labels are not
    read.
    """

    def __init__(self, config: SideEncoderConfig) -> None:
        super().__init__()
        self.encoder = build_encoder(config)
        width = 4 * config.projection_dim
        self.expander = nn.Sequential(
            nn.Linear(config.side_info_dim, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
        )
        self.augment = Augment(config.augmentation)

    def forward(self, batch: Batch) -> Terms:
        pixels = to_pixels(batch["images"])
        views = torch.cat((self.augment(pixels), self.augment(pixels)))
        first, second = self.expander(self.encoder.encode(views)).float().chunk(2)
        # As in the authors' code: half of the sum over both views.
        hinges = (variance_hinge(first) + variance_hinge(second)) / 2
        return {
            "invariance": INVARIANCE * F.mse_loss(first, second),
            "variance": VARIANCE * hinges,
            "covariance": COVARIANCE * (covariance_penalty(first) + covariance_penalty(second)),
        }

    def trained(self) -> nn.ModuleDict:
        return nn.ModuleDict({"encoder": self.encoder, "expander": self.expander})
