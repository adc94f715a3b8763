"""The control method: an upgrade that knows only class centres.

A linear classifier on old embedding and side-information mixes the new model's class averages by
its probabilities. On training classes of weak models this scores well, because mAP rewards class
centres. On unseen classes it shows how little of an image is left.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.config import UpgradeConfig
from nobackfill.training.loop.objective import Batch, Objective, Terms
from nobackfill.training.losses.prototypes import class_average, stack_by_class
from nobackfill.training.method import UpgradeInputs, UpgradeMethod, UpgradeShape
from nobackfill.training.methods.cheap_maps import InputShape, concatenate, input_shape
from nobackfill.training.methods.compatible import Options, read_options
from nobackfill.training.methods.fct import draw_view
from nobackfill.training.networks.transform import UpgradeNetwork


class SoftPrototypesOptions(Options):
    """`classes`: the number of classes of the training images; the network is built before they are
    read."""

    classes: int = Field(ge=2)


class SoftPrototypes(nn.Module):
    """softmax(linear(x)) @ prototypes [c,d]; normalised with `unit_norm`."""

    prototypes: Tensor

    def __init__(self, reads: InputShape, class_count: int, dim: int, unit_norm: bool) -> None:
        super().__init__()
        self.input_shape, self.unit_norm = reads, unit_norm
        total = reads.embedding_dim + reads.side_dim
        # Features of a softmax space can be large, and the linear layer would then learn slowly.
        self.classifier = nn.Sequential(nn.BatchNorm1d(total), nn.Linear(total, class_count))
        self.register_buffer("prototypes", torch.zeros(class_count, dim))

    def logits(self, embedding: Tensor, side: Tensor | None) -> Tensor:
        """Return the linear classifier's logits [n,c] for embeddings [n,old_dim] and their side.

        `side` may be None only if it is not read, else AssertionError. In training mode BatchNorm
        needs at least two rows, or raises ValueError.
        """
        output: Tensor = self.classifier(concatenate(embedding, side, self.input_shape))
        return output

    def forward(self, embedding: Tensor, side: Tensor | None) -> Tensor:
        """Map the inputs that are read to a mixture of prototypes [n,d].

        Before the prototypes are set it is zero. `side` may be None only if it is not read, else
        AssertionError. In training mode BatchNorm needs at least two rows, or raises ValueError.
        """
        output = self.logits(embedding, side).softmax(1) @ self.prototypes
        return F.normalize(output) if self.unit_norm else output


def build_soft_prototypes(config: UpgradeConfig, shape: UpgradeShape) -> UpgradeNetwork:
    """Build h as a mixture of class averages, which are zero until the objective is made.

    The linear classifier is random, from torch's default generator. With unit vectors in the new
    space the output is normalised.

    Raises:
        ConfigurationError: the option `classes` is missing or wrong, or the upgrade is configured
            to write side-information.
    """
    options = read_options(config.options, SoftPrototypesOptions, config.method)
    if shape.new_side_dim:
        raise ConfigurationError(
            "method soft_prototypes cannot compute new side-information (side: maps); use side: "
            "carries or drops"
        )
    reads = input_shape(config, shape)
    h = SoftPrototypes(reads, options.classes, shape.new_dim, shape.unit_norm)
    return UpgradeNetwork(h, reads_side=shape.side_dim > 0)


class SoftPrototypesObjective(Objective):
    """Cross-entropy of the linear classifier; the prototypes are the new model's class averages.

    The constructor sets the prototypes. It raises ConfigurationError if the images have another
    number of classes than the option, and ValueError if a class has no image.
    """

    def __init__(self, upgrade: UpgradeNetwork, inputs: UpgradeInputs) -> None:
        super().__init__()
        assert isinstance(upgrade.h, SoftPrototypes)
        self.upgrade, self.h = upgrade, upgrade.h
        (new, labels), classes = inputs.labelled(), len(inputs.class_names)
        self.labelled_views = inputs.labelled_views
        if classes != len(self.h.prototypes):
            raise ConfigurationError(
                f"method soft_prototypes: expected the option classes: {classes}, the number of "
                f"classes of the images, got {len(self.h.prototypes)}; set it in options"
            )
        means = stack_by_class(labels, classes, lambda rows: class_average(new[rows]))
        self.h.prototypes.copy_(means)

    def forward(self, batch: Batch) -> Terms:
        """Return `classification`, the mean cross-entropy of one view per row, 0 for mixed ones.

        The views are drawn from torch's default generator. Mixed ones stay in the denominator. In
        training mode a batch of one row raises ValueError.
        """
        view = draw_view(batch, self.labelled_views)
        logits = self.h.logits(view["old"], view.get("side"))
        # Mixed views have the label -1.
        losses = F.cross_entropy(logits, view["labels"], ignore_index=-1, reduction="none")
        return {"classification": losses.mean()}

    def trained_parts(self) -> nn.ModuleDict:
        """Return the part upgrade; the prototypes are a buffer of it."""
        return nn.ModuleDict({"upgrade": self.upgrade})


SOFT_PROTOTYPES = UpgradeMethod(
    build_network=build_soft_prototypes,
    make_objective=SoftPrototypesObjective,
    reads_labels=lambda config: True,
)
