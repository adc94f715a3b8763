"""BCT: an influence loss by the fixed old classifier (bct.txt sections 2.4 and 2.5).

`bct` applies it to images of classes that the old classifier knows (T_old). `bct_sys` applies it to
all images, with synthesized rows for new classes. `bct_kd` uses T_old, and distillation elsewhere.
"""

import torch
from torch import Tensor

from nobackfill.training.loop.objective import Terms
from nobackfill.training.losses.distillation import distillation_loss
from nobackfill.training.losses.margins import loss_share_of_batch
from nobackfill.training.losses.prototypes import class_average, stack_by_class
from nobackfill.training.method import EmbedderInputs, EmbedderMethod
from nobackfill.training.methods.compatible import CompatibleObjective, encode_images
from nobackfill.training.networks.heads import FixedClassifier


class BctObjective(CompatibleObjective):
    """BCT Eq. 8 with T_BCT = T_old."""

    def compatibility_terms(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return the term `influence`, the second term of Eq. 8 times the option `weight`.

        Raises:
            ConfigurationError: an embedding has fewer elements than an old one.
        """
        return {"influence": self.options.weight * self.influence_loss(embedding, labels)}

    def influence_loss(self, embedding: Tensor, labels: Tensor) -> Tensor:
        """Return the second term of Eq. 8: the old classifier's loss on new embeddings of T_old.

        The sum over images of classes that it knows is divided by the size of the batch. The old
        classifier reads the first elements of a longer embedding. Under synthesized weights it
        knows every class.

        Args:
            embedding: new embeddings [b,dim].
            labels: int64 [b].

        Returns:
            A scalar; 0 if it knows no class of the batch.

        Raises:
            ConfigurationError: dim is below the old model's dimension.
        """
        old_labels = self.known_labels[labels]
        known = old_labels >= 0
        losses = self.old_classifier.loss(embedding[known], old_labels[known])
        return loss_share_of_batch(losses, len(labels))


class BctDistillationObjective(BctObjective):
    """BCT with distillation on T_new minus T_old (bct-supplement.txt section 1)."""

    def compatibility_terms(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return `influence`, and `distillation` on images of classes new to the old model.

        Both are sums divided by the size of the whole batch, and have the option `weight`. A term
        without images is 0.

        Raises:
            ConfigurationError: dim is below the old model's dimension.
        """
        loss = new_class_distillation(self, embedding, pixels, labels)
        return super().compatibility_terms(embedding, pixels, labels) | {
            "distillation": self.options.weight * loss
        }


class BctSynthesizedObjective(BctObjective):
    """BCT on T_new, with synthesized classifier weights (bct.txt section 2.5)."""

    def __init__(self, inputs: EmbedderInputs) -> None:
        super().__init__(inputs)
        extend_old_classifier(self, inputs)


def new_class_distillation(
    objective: CompatibleObjective, embedding: Tensor, pixels: Tensor, labels: Tensor
) -> Tensor:
    """Return the distillation loss on images of classes that the old classifier lacks.

    Args:
        objective: the objective with the old model and classifier.
        embedding, pixels, labels: as of `CompatibleObjective.compatibility_terms`.

    Returns:
        The sum of their losses divided by the size of the batch, a scalar; 0 without such images.

    Raises:
        ConfigurationError: an embedding has fewer elements than an old one.
    """
    unknown = objective.known_labels[labels] < 0
    new_logits = objective.old_classifier.logits(embedding[unknown])
    old_logits = objective.old_classifier.logits(objective.old_embedding(pixels[unknown]))
    return loss_share_of_batch(distillation_loss(new_logits, old_logits), len(labels))


def extend_old_classifier(objective: CompatibleObjective, inputs: EmbedderInputs) -> None:
    """Give an objective's old classifier a row for each new class that it lacks.

    A synthesized row is the average old feature of the class. A softmax head's rows also have a
    length and a bias; a synthesized row gets the mean of both over the old rows. (The paper
    synthesizes only under a cosine head, where neither matters.)

    All images of such classes are encoded by the old model.

    Args:
        objective: the objective, whose `old_classifier` and `known_labels` are replaced.
        inputs: the images with their labels; each class that is missing needs an image.

    Raises:
        InvalidInputError: a file among the images is missing or no image.
        ValueError: a missing class has no image.
        NobackfillError: a process that reads images was killed.
    """
    known, old = objective.known_labels, objective.old_classifier
    missing = (known < 0).nonzero()[:, 0]
    if not len(missing):
        return
    labels = inputs.labels
    needed = torch.isin(labels, missing)
    features = encode_images(objective.old.encoder, inputs.images[needed], inputs.device)
    place = torch.searchsorted(missing, labels[needed])
    means = stack_by_class(place, len(missing), lambda picked: class_average(features[picked]))
    bias = None
    if old.head_kind == "softmax":
        means = means / means.norm(dim=1, keepdim=True) * old.weights.norm(dim=1).mean()
        bias = torch.cat((old.bias, old.bias.mean().expand(len(missing))))
    known[missing] = len(old.weights) + torch.arange(len(missing))
    objective.old_classifier = FixedClassifier(
        torch.cat((old.weights, means)),
        head_kind=old.head_kind,
        margin=old.margin,
        scale=old.scale,
        bias=bias,
    )


BCT = EmbedderMethod(BctObjective, searches_directly=True)
BCT_SYS = EmbedderMethod(BctSynthesizedObjective, searches_directly=True)
BCT_KD = EmbedderMethod(BctDistillationObjective, searches_directly=True)
