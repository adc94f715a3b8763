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
    """A finished embedder with its head, in eval mode, without gradients.

    Attributes:
        encoder: the embedder.
        head: its classification head.
        class_names: the head's classes, in the order of its rows.
    """

    encoder: ImageEncoder
    head: Head
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class EmbedderInputs:
    """The inputs of an embedder method.

    Attributes:
        config: the configuration.
        class_names: names of the classes, by label.
        images: the training images uint8 [n,H,W,3], in memory or read on demand.
        labels: their classes, int64 [n].
        old_classifier: the embedder of config.old; None without one.
        device: the device of the training, also for encoding all images.
    """

    config: EmbedderConfig
    class_names: tuple[str, ...]
    images: Images
    labels: Tensor
    old_classifier: Classifier | None
    device: torch.device = CPU


@dataclass(frozen=True)
class UpgradeShape:
    """The dimensions of an upgrade.

    Attributes:
        old_dim: of the old embedding; 0: it is not read.
        side_dim: of the old side-information; 0: it is not read.
        new_dim: of the new embedding.
        new_side_dim: of the new side-information; 0: none is written.
        unit_norm: the new space has unit vectors, so the network normalises its output.
    """

    old_dim: int
    side_dim: int
    new_dim: int
    new_side_dim: int
    unit_norm: bool


@dataclass(frozen=True)
class UpgradeInputs:
    """The inputs of an upgrade method.

    `training_features` and `held_out_features` hold `old` [n,v,old_dim], `side` [n,v,side_dim],
    `new` [n,v,new_dim], `new_side` [n,v,new_side_dim], each only if its dim is not 0, and `labels`
    int64 [n], indices into `class_names`. v is the number of views; a view is the same in every
    tensor. The last `config.mixed_views` views mix two images, so the label is not theirs.

    Attributes:
        config: the configuration.
        shape: the dimensions of the features.
        class_names: names of the classes, by label.
        training_features: features of the training images.
        held_out_features: one view of images that no model was trained on; empty without such
            images.
        new_head: the new model's head; None for a published model.
        new_class_names: the head's classes; without a head, those of the training images.
        selected_options: option values that the key `choose` selected.
        selection_images: describes the images on which they were selected; "" without a selection.
    """

    config: UpgradeConfig
    shape: UpgradeShape
    class_names: tuple[str, ...]
    training_features: Mapping[str, Tensor]
    held_out_features: Mapping[str, Tensor]
    new_head: Head | None
    new_class_names: tuple[str, ...]
    selected_options: Mapping[str, float] = field(default_factory=dict)
    selection_images: str = ""

    @property
    def options(self) -> dict[str, object]:
        """The method's options: configured ones, and selected ones, which win; a new dict."""
        return {**self.config.options, **self.selected_options}

    @property
    def labelled_views(self) -> int:
        """The number of first views of features that show one image, and therefore have its label.

        It is at least 1, because the image itself is the first view. Without `new` among the
        training features it raises KeyError.
        """
        return self.training_features["new"].shape[1] - self.config.mixed_views

    def labelled(self) -> tuple[Tensor, Tensor]:
        """Return new embeddings [n * labelled views,new_dim] with their labels, int64.

        The labelled views of an image lie next to each other, in the order of the images.

        Raises:
            KeyError: the training features lack `new` or `labels`.
        """
        new = self.training_features["new"][:, : self.labelled_views]
        return new.flatten(0, 1), self.training_features["labels"].repeat_interleave(new.shape[1])


@dataclass(frozen=True)
class EmbedderMethod:
    """A way to train an embedder phi.

    Attributes:
        make_objective: makes the loss to train by; raises ConfigurationError for wrong options.
        searches_directly: queries of the trained model can search the old release's vectors as
            they are (BCT family, DMU).
        build_upgrade: builds the untrained network of an upgrade that the objective also trains
            (checkpoint part `upgrade`, DMU); None: the objective trains none.
    """

    make_objective: Callable[[EmbedderInputs], EmbedderObjective]
    searches_directly: bool = False
    build_upgrade: Callable[[EmbedderConfig, UpgradeShape], UpgradeNetwork] | None = None


@dataclass(frozen=True)
class UpgradeMethod:
    """A way to make h and g, by gradient (`make_objective`) or in closed form (`solve`).

    Attributes:
        build_network: makes the untrained network; export.py loads the checkpoint's part `upgrade`
            into it. It raises ConfigurationError for wrong options.
        make_objective: makes the loss to train by; None: the method is solved.
        solve: sets the weights of the network in place; None: the method is trained.
        reads_labels: whether a configuration uses labels.
        option_values: options that the key `choose` may name, with candidate values, the default
            first.
        variant_makers: for some of these options, a function that applies a value to a trained
            upgrade.
    """

    build_network: Callable[[UpgradeConfig, UpgradeShape], UpgradeNetwork]
    make_objective: Callable[[UpgradeNetwork, UpgradeInputs], Objective] | None = None
    solve: Callable[[UpgradeNetwork, UpgradeInputs], None] | None = None
    reads_labels: Callable[[UpgradeConfig], bool] = lambda config: False
    option_values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    variant_makers: Mapping[str, Callable[[UpgradeNetwork, float], UpgradeNetwork]] = field(
        default_factory=dict
    )
