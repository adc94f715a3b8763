"""The best epoch of a training: its weights by a figure of held-out images, kept through a kill."""

import copy

import torch
from torch import Tensor, nn


class BestEpoch(nn.Module):
    """The weights that had the least figure so far, and that figure.

    A part of the checkpoint while the training runs, so that a resumed run knows the best epoch
    before its kill.
    """

    least: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.kept = copy.deepcopy(network).requires_grad_(False)
        # Not infinity: a checkpoint holds finite numbers.
        self.register_buffer("least", torch.tensor(torch.finfo(torch.float32).max))

    def offer(self, network: nn.Module, figure: float) -> None:
        """Keep the weights of `network` if `figure` is less than that of any before."""
        if figure < float(self.least):
            self.kept.load_state_dict(network.state_dict())
            self.least.fill_(figure)

    def restore(self, network: nn.Module) -> None:
        """Give `network` the kept weights."""
        network.load_state_dict(self.kept.state_dict())
