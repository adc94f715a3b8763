"""SimCLR: the side-information psi that FCT found best (fct.txt section 3.4, D.4.1).

psi's output passes a last BatchNorm and is what gets stored; the contrastive loss is taken behind a
projection that is thrown away. With multi-crop, small crops are attracted to both full views.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nobackfill.training.config import SideEncoderConfig
from nobackfill.training.data.augment import Augment, small_crops
from nobackfill.training.loop.objective import Batch, Objective, Terms
from nobackfill.training.networks.embedder import build_encoder, to_pixels


def nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss over two views [n,d] of the same n images: each of the 2n rows must find the
    other view of its image among the 2n - 1 others, by cosine / temperature.
    """
    n = len(first)
    views = F.normalize(torch.cat((first, second)).float())
    # Autocast multiplies in bf16 here: cosines are right to .4 %, which no negative feels.
    similarity = views @ views.t() / temperature
    itself = torch.eye(2 * n, dtype=torch.bool, device=views.device)
    partner = torch.arange(2 * n, device=views.device).roll(n)
    return F.cross_entropy(similarity.masked_fill(itself, -torch.inf), partner)


def one_sided(anchor: Tensor, views: Tensor, temperature: float) -> Tensor:
    """Each anchor [n,d] must find its image's row among the n rows of `views` (multi-crop's
    term).
    """
    similarity = F.normalize(anchor.float()) @ F.normalize(views.float()).t() / temperature
    return F.cross_entropy(similarity, torch.arange(len(anchor), device=anchor.device))


class SimclrObjective(Objective):
    """psi under a two-layer projection. Batches hold `images` uint8 [b,H,W,3]; labels are not
    read.
    """

    def __init__(self, config: SideEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = build_encoder(config)
        dim = config.side_info_dim
        self.projection = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, config.projection_dim)
        )
        self.augment = Augment(config.augmentation)

    def forward(self, batch: Batch) -> Terms:
        pixels, temperature = to_pixels(batch["images"]), self.config.temperature
        # Both views in one pass: BatchNorm then sees one distribution.
        both = self.projection(
            self.encoder.encode(torch.cat((self.augment(pixels), self.augment(pixels))))
        )
        first, second = both.chunk(2)
        terms = {"contrastive": nt_xent(first, second, temperature)}
        for number in range(self.config.small_crops):
            crops = small_crops(pixels, self.config.augmentation, self.config.small_crop_area)
            anchor = self.projection(self.encoder.encode(crops))
            attraction = one_sided(anchor, first, temperature)
            attraction = attraction + one_sided(anchor, second, temperature)
            terms[f"small_crop_{number}"] = attraction / (2 * self.config.small_crops)
        return terms

    def trained(self) -> nn.ModuleDict:
        return nn.ModuleDict({"encoder": self.encoder, "projection": self.projection})
