"""What a training method is: the interface between train.py, export.py and training/methods/.

An embedder method trains phi (independent, BCT, UniBCT, DMU, …); an upgrade method makes h and g
from features of frozen models (FCT, FastFill, closed-form maps, …). training/methods/__init__.py
holds the two registries, EMBEDDER_METHODS and UPGRADE_METHODS, by name.
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
    """A finished embedder with its head, frozen: eval mode, no parameter requires a gradient."""

    encoder: ImageEncoder
    head: Head
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class EmbedderInputs:
    """What an embedder method may use."""

    config: EmbedderConfig
    class_names: tuple[str, ...]
    # Of the training: uint8 [n,H,W,3], in memory or read as they are needed, and int64 [n].
    images: Images
    labels: Tensor
    # The embedder of config.old, None where there is none.
    old: Classifier | None
    # Where the training runs, and what encodes all images runs, too.
    device: torch.device = CPU


@dataclass(frozen=True)
class UpgradeShape:
    """Dimensions of an upgrade; 0 = that input is not read, or that output not written."""

    old_dim: int
    side_dim: int
    new_dim: int
    new_side_dim: int
    # Whether the new space holds unit vectors: then outputs are normalised inside the graph.
    unit: bool


@dataclass(frozen=True)
class UpgradeInputs:
    """What an upgrade method may use.

    `rows` and `held_out` hold `old` [n,v,old_dim], `side` [n,v,side_dim], `new` [n,v,new_dim],
    `new_side` [n,v,new_side_dim] (each only where its dim is not 0; v augmented views, the same
    view in each; the last `config.mixed_views` of them show two images) and `labels` int64 [n],
    indices into `class_names`.
    """

    config: UpgradeConfig
    shape: UpgradeShape
    class_names: tuple[str, ...]
    rows: Mapping[str, Tensor]
    # Images that neither phi_old, psi nor phi_new trained on; one view. May be empty.
    held_out: Mapping[str, Tensor]
    # The new model's head and the classes it knows; None for a published source.
    new_head: Head | None
    new_class_names: tuple[str, ...]
    # What `config.choose` left open, by option; and on which of the images it was chosen.
    chosen: Mapping[str, float] = field(default_factory=dict)
    chosen_on: str = ""

    @property
    def options(self) -> dict[str, object]:
        """The method's options, set and chosen."""
        return {**self.config.options, **self.chosen}


@dataclass(frozen=True)
class EmbedderMethod:
    """A way of training phi."""

    objective: Callable[[EmbedderInputs], EmbedderObjective]
    # Its queries may meet the old release's vectors as they are (BCT family, DMU).
    searches_directly: bool = False
    # DMU: the objective also trains an upgrade, kept as part `upgrade`; this rebuilds its network.
    upgrade: Callable[[EmbedderConfig, UpgradeShape], UpgradeNetwork] | None = None


@dataclass(frozen=True)
class UpgradeMethod:
    """A way of making h and g: trained by gradient (`objective`) or solved in closed form
    (`solve`). `reads_labels`: whether it does, under a configuration; views that mix two images
    have none. `choices`: options that `choose` may name, with the values tried, the usual first;
    those in `variants` a trained upgrade can still be given, as a copy.
    """

    # The untrained network; also what export.py loads the checkpoint's part `upgrade` into.
    build: Callable[[UpgradeConfig, UpgradeShape], UpgradeNetwork]
    objective: Callable[[UpgradeNetwork, UpgradeInputs], Objective] | None = None
    # Sets the weights of `upgrade` in place.
    solve: Callable[[UpgradeNetwork, UpgradeInputs], None] | None = None
    reads_labels: Callable[[UpgradeConfig], bool] = lambda config: False
    choices: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    variants: Mapping[str, Callable[[UpgradeNetwork, float], UpgradeNetwork]] = field(
        default_factory=dict
    )
