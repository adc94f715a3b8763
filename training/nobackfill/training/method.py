"""The interface of training methods, between the commands and training/methods/.

An embedder method trains phi (independent, BCT, UniBCT, DMU, …). An upgrade method makes h and g
from features of frozen models (FCT, FastFill, closed-form maps, …). training/methods/__init__.py
has the registries by name, EMBEDDER_METHODS and UPGRADE_METHODS.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nobackfill.training.config import EmbedderConfig, UpgradeConfig
from nobackfill.training.data.pictures import Images
from nobackfill.training.loop.objective import Objective
from nobackfill.training.networks.embedder import EmbedderObjective, ImageEncoder
from nobackfill.training.networks.heads import Head
from nobackfill.training.networks.transform import UpgradeNetwork

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Classifier:
    """A finished embedder with its head, in eval mode, without gradients."""

    encoder: ImageEncoder
    head: Head
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class EmbedderInputs:
    """The inputs of an embedder method."""

    config: EmbedderConfig
    class_names: tuple[str, ...]
    # The training images uint8 [n,H,W,3], in memory or read on demand, and their labels int64 [n].
    images: Images
    labels: Tensor
    # The embedder of config.old; None without one.
    old: Classifier | None
    # The device of the training, also for encoding all images.
    device: torch.device = CPU


@dataclass(frozen=True)
class UpgradeShape:
    """The dimensions of an upgrade; 0: this input is not read, or this output not written."""

    old_dim: int
    side_dim: int
    new_dim: int
    new_side_dim: int
    # The new space holds unit vectors, so the graph normalises its output.
    unit: bool


@dataclass(frozen=True)
class UpgradeInputs:
    """The inputs of an upgrade method.

    `rows` and `held_out` hold `old` [n,v,old_dim], `side` [n,v,side_dim], `new` [n,v,new_dim],
    `new_side` [n,v,new_side_dim], each only if its dim is not 0, and `labels` int64 [n], indices
    into `class_names`. v is the number of augmented views; a view is the same in every tensor. The
    last `config.mixed_views` views mix two images.
    """

    config: UpgradeConfig
    shape: UpgradeShape
    class_names: tuple[str, ...]
    rows: Mapping[str, Tensor]
    # Images that no model was trained on; one view. May be empty.
    held_out: Mapping[str, Tensor]
    # The new model's head and its classes; None for a published model.
    new_head: Head | None
    new_class_names: tuple[str, ...]
    # Option values that `config.choose` selected, and the images that they were selected on.
    chosen: Mapping[str, float] = field(default_factory=dict)
    chosen_on: str = ""

    @property
    def options(self) -> dict[str, object]:
        """The method's options, both configured and selected."""
        return {**self.config.options, **self.chosen}


@dataclass(frozen=True)
class EmbedderMethod:
    """A way to train phi."""

    objective: Callable[[EmbedderInputs], EmbedderObjective]
    # Its queries can search the old release's vectors directly (BCT family, DMU).
    searches_directly: bool = False
    # DMU: the objective also trains an upgrade, checkpoint part `upgrade`; this builds its network.
    upgrade: Callable[[EmbedderConfig, UpgradeShape], UpgradeNetwork] | None = None


@dataclass(frozen=True)
class UpgradeMethod:
    """A way to make h and g, by gradient (`objective`) or in closed form (`solve`).

    Attributes:
        build: makes the untrained network; export.py loads the checkpoint's part `upgrade` into it.
        objective: the loss to train by.
        solve: sets the weights in place.
        reads_labels: whether a configuration uses labels; mixed views have none.
        choices: options that the key `choose` may name, with candidate values, the default first.
        variants: for some of these options, a function that applies a value to a trained upgrade.
    """

    build: Callable[[UpgradeConfig, UpgradeShape], UpgradeNetwork]
    objective: Callable[[UpgradeNetwork, UpgradeInputs], Objective] | None = None
    solve: Callable[[UpgradeNetwork, UpgradeInputs], None] | None = None
    reads_labels: Callable[[UpgradeConfig], bool] = lambda config: False
    choices: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    variants: Mapping[str, Callable[[UpgradeNetwork, float], UpgradeNetwork]] = field(
        default_factory=dict
    )
