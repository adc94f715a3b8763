"""What one training step minimises: the interface between the loop and every method.

An `Objective` is a module: its parameters that require gradients are trained, its state_dict
(frozen models left out) is the checkpoint. `fit` in loop.py drives it; methods subclass it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

# Rows of the training set: what the caller of `fit` passed, indexed by the batch's rows, and
# `rows` int64 [b] themselves. Images are uint8 [b,H,W,3], labels int64 [b].
Batch = Mapping[str, Tensor]
Terms = dict[str, Tensor]


class Objective(nn.Module):
    """Base of every training objective.

    Every random draw inside `forward` must come from torch's default generator: the loop seeds it
    from (seed, epoch), which is what makes a resumed run equal to an unbroken one.
    """

    def __init__(self) -> None:
        super().__init__()
        # Figures that are logged beside the terms and not minimised.
        self.statistics: dict[str, float] = {}

    def forward(self, batch: Batch) -> Terms:
        """Named terms, scalars already weighted; the loop minimises their sum and logs each."""
        raise NotImplementedError

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Called before each epoch, `epoch` counting from 0; also the one a resumed run starts at.

        Whatever it computes must be a function of the epoch and the weights alone.
        """

    def finish(self) -> None:
        """Called once, after the last epoch and before the last checkpoint is taken."""

    def trained(self) -> nn.ModuleDict:
        """The parts that go into the checkpoint, by name; `Checkpoint` reads them back by it."""
        raise NotImplementedError


class FrozenModule:
    """A model that is used, never trained: eval mode, no gradients, absent from the checkpoint.

    Not an nn.Module, so that a parent's train() and state_dict() pass it by.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)

    def __call__(self, inputs: Tensor) -> Tensor:
        """The model's output for `inputs`, on their device, without a graph."""
        self.model.to(inputs.device)
        with torch.no_grad():
            output: Tensor = self.model(inputs)
        return output
