"""Side-information of one bit a number (fct.txt appendix G): signs, with a gradient that passes
through.
"""

import torch
from torch import Tensor, nn


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
