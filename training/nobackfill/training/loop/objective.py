"""Objectives: the interface between the training loop and the methods.

An `Objective` is a module. Its parameters with gradients are trained, and its `trained_parts` are
the checkpoint. `train_objective` in loop.py runs it; methods subclass it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

# The rows of one batch: the tensors that `train_objective` was given, and `rows` int64 [b], their
# indices. Images are uint8 [b,H,W,3], labels int64 [b].
Batch = Mapping[str, Tensor]
Terms = dict[str, Tensor]


class Objective(nn.Module):
    """Base class of training objectives.

    Random numbers in `forward` must come from torch's default generator. The loop seeds it from
    (seed, epoch), so that a resumed run equals an unbroken one.
    """

    def __init__(self) -> None:
        super().__init__()
        # Figures that are logged with the terms, but not minimised.
        self.statistics: dict[str, float] = {}

    def forward(self, batch: Batch) -> Terms:
        """Return weighted scalar terms by name; the loop minimises their sum and logs each.

        The base class raises NotImplementedError.

        Args:
            batch: tensors of b rows by name, and `rows`, their numbers; all on one device.
        """
        raise NotImplementedError

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Prepare an epoch; the base class does nothing.

        A resumed run calls this only from its first epoch on, so the effect may depend only on the
        epoch and on the weights. It runs after torch's generator is seeded for the epoch, and after
        the modules are put in training mode.

        Args:
            epoch: the number of the epoch, from 0.
            epochs: the number of epochs of the training.
        """

    def finish(self) -> None:
        """Complete the training after the last epoch, before the last checkpoint is written.

        The base class does nothing. It may change the modules, so `trained_parts` is called again
        after it.
        """

    def trained_parts(self) -> nn.ModuleDict:
        """Return the modules that the checkpoint stores, by the name of their part.

        The base class raises NotImplementedError.
        """
        raise NotImplementedError


class FrozenModule:
    """A frozen model: in eval mode, without gradients, not part of the checkpoint.

    It is no nn.Module, so that train() and state_dict() of a parent ignore it. The constructor
    changes the given model itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Move the model to the device of `inputs`, and return its output without gradients.

        The model stays on that device. Its output is as of `model(inputs)` in eval mode.
        """
        self.model.to(inputs.device)
        with torch.no_grad():
            output: Tensor = self.model(inputs)
        return output
