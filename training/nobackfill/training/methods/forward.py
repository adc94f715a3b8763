"""The base of learned upgrades that use the new model's frozen classifier."""

import torch
from torch import Tensor

from nobackfill.training.losses.prototypes import class_average, stack_by_class
from nobackfill.training.method import UpgradeInputs
from nobackfill.training.methods.cheap_maps import flatten_views
from nobackfill.training.methods.fct import FctObjective
from nobackfill.training.networks.heads import (
    FixedClassifier,
    copy_head_as_fixed_classifier,
    gaussian_classifier,
    labels_of_new_classes,
)
from nobackfill.training.networks.transform import UpgradeNetwork

# Scale of cosines if there is no head to take it from.
_SCALE = 16.0


class ForwardObjective(FctObjective):
    """FCT's objective with the frozen new classifier; subclasses add terms.

    The constructor raises ConfigurationError if keep_best has no held-out images.
    """

    new_labels: Tensor
    spread: Tensor

    def __init__(self, upgrade: UpgradeNetwork, inputs: UpgradeInputs) -> None:
        super().__init__(upgrade, inputs)
        self.classifier, labels = new_classifier(inputs)
        # Each training class's row in the new classifier; -1 if the class is unknown there.
        self.register_buffer("new_labels", labels)
        # Mean squared distance of new embeddings from their mean, the unit of distances.
        new = flatten_views(inputs.training_features, "new")
        self.register_buffer("spread", (new - new.mean(0)).square().sum(1).mean())

    def relative_distance(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Return FCT's squared L2 divided by the new embeddings' spread: [n,d] -> [n].

        1 means no better than predicting the mean. If all new embeddings are equal, it is infinite
        or NaN.
        """
        return (predicted - target).square().sum(1) / self.spread

    def classifier_rows(self, labels: Tensor) -> Tensor:
        """Return the new classifier's row of each label, int64 [n]; -1 without one.

        Args:
            labels: int64 [n], classes of the training, or -1 for a view without a label. A number
                that is no class of the training raises IndexError.
        """
        return torch.where(labels >= 0, self.new_labels[labels.clamp(min=0)], -1)

    def classification_loss(self, predicted: Tensor, labels: Tensor) -> Tensor:
        """Return the new classifier's mean loss over rows [n,d]: a scalar.

        Rows of classes that it does not know count as 0. They stay in the denominator. Only
        `predicted` gets a gradient. Without rows the mean is NaN.

        Raises:
            ConfigurationError: d is below the new model's dimension.
        """
        return self.class_losses(predicted, labels).mean()

    def class_losses(self, predicted: Tensor, labels: Tensor) -> Tensor:
        """Return the new classifier's losses by row: [n,d], labels int64 [n] -> [n].

        A row without a label (-1), or of a class that it does not know, has the loss 0. Only
        `predicted` gets a gradient, because the classifier is fixed.

        Raises:
            ConfigurationError: d is below the new model's dimension.
            IndexError: a label is no class of the training.
        """
        own = self.classifier_rows(labels)
        known = torch.nonzero(own >= 0)[:, 0]
        losses = self.classifier.loss(predicted[known], own[known])
        return losses.new_zeros(len(labels)).index_put((known,), losses)


def new_classifier(inputs: UpgradeInputs) -> tuple[FixedClassifier, Tensor]:
    """Return the new model's classifier, and each training class's row in it (-1: unknown).

    A published model has no head. Its classifier is made from class averages of its own embeddings
    of the training images. Only labelled views count. For unit vectors the classifier made is a
    normalised softmax of scale 16, else one by squared distances to the averages. A class without
    images has no row. A head is copied, so its later changes do not count. If a class name occurs
    twice in the new model, its last row counts.

    Args:
        inputs: the inputs of the training.

    Returns:
        The classifier, and rows int64 [classes of the training].
    """
    if inputs.new_head is not None:
        return copy_head_as_fixed_classifier(inputs.new_head), labels_of_new_classes(
            inputs.new_class_names, inputs.class_names
        )
    new, labels = inputs.labelled()
    # The rows may lack classes, which were held out.
    classes = len(inputs.class_names)
    present = torch.bincount(labels, minlength=classes).nonzero()[:, 0]
    known = torch.full((classes,), -1)
    known[present] = torch.arange(len(present))
    compact = known[labels]
    means = stack_by_class(compact, len(present), lambda rows: class_average(new[rows]))
    if inputs.shape.unit_norm:
        classifier = FixedClassifier(
            means, head_kind="normalized_softmax", margin=0.0, scale=_SCALE
        )
    else:
        classifier = gaussian_classifier(means, new, compact)
    return classifier, known
