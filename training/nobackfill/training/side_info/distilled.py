"""Self-distillation (BYOL, Grill et al. 2020): psi predicts what its own moving average says of
another view of the image. No negatives and no labels.

psi's output passes a last BatchNorm and is what gets stored, as SimCLR's.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nobackfill.training.config import SideEncoderConfig
from nobackfill.training.data.augment import Augment
from nobackfill.training.loop.objective import Batch, Objective, Terms
from nobackfill.training.networks.embedder import ImageEncoder, build_encoder, to_pixels

# Share of the teacher that a step keeps. The paper's .996 is for a million steps.
MOMENTUM = 0.99


class Projected(nn.Module):
    """psi under its projection: what is imitated."""

    def __init__(self, encoder: ImageEncoder, projection: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projection = encoder, projection

    def forward(self, pixels: Tensor) -> Tensor:
        output: Tensor = self.projection(self.encoder.encode(pixels))
        return output


class DistilledObjective(Objective):
    """psi with a projection and a predictor, and the moving average of the first two as teacher.

    Batches hold `images` uint8 [b,H,W,3]; labels are not read.
    """

    def __init__(self, config: SideEncoderConfig) -> None:
        super().__init__()
        dim, out = config.side_info_dim, config.projection_dim
        self.student = Projected(build_encoder(config), _two_layers(dim, 4 * dim, out))
        self.predictor = _two_layers(out, 4 * dim, out)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.augment = Augment(config.augmentation)

    def forward(self, batch: Batch) -> Terms:
        pixels = to_pixels(batch["images"])
        views = torch.cat((self.augment(pixels), self.augment(pixels)))
        predicted = self.predictor(self.student(views))
        with torch.no_grad():
            if self.training:
                self._follow()
            target = self.teacher(views)
        # Each view predicts the other.
        return {"distillation": regression(predicted, target.roll(len(pixels), 0))}

    def _follow(self) -> None:
        """Move the teacher towards the student, as it was after the last step."""
        followed = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for teacher, student in followed:
            teacher.lerp_(student.detach(), 1 - MOMENTUM)

    def trained(self) -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "encoder": self.student.encoder,
                "projection": self.student.projection,
                "predictor": self.predictor,
                "teacher": self.teacher,
            }
        )


def regression(predicted: Tensor, target: Tensor) -> Tensor:
    """2 - 2 cos of [n,d] and [n,d], their mean (Eq. 2); no gradient goes to `target`."""
    return 2 - 2 * F.cosine_similarity(predicted.float(), target.detach().float(), dim=1).mean()


def _two_layers(dim: int, inner: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(dim, inner), nn.BatchNorm1d(inner), nn.ReLU(), nn.Linear(inner, out)
    )
