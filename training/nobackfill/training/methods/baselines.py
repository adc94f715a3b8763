"""The baselines of BCT and UniBCT: l2, LwF, regress, contrastive and focal.

None has an influence loss. All except LwF and `focal` tie an image's new embedding to its old one.
"""

from pydantic import Field
from torch import Tensor

from nobackfill.training.loop.objective import Terms
from nobackfill.training.losses.distillation import distillation_loss, focal_distillation_loss
from nobackfill.training.losses.margins import loss_share_of_batch
from nobackfill.training.losses.pairwise import contrastive_loss, half_squared_l2, regression_loss
from nobackfill.training.method import EmbedderInputs, EmbedderMethod
from nobackfill.training.methods.bct import extended_classifier
from nobackfill.training.methods.compatible import CompatibleObjective, WeightOptions, read_options


class L2Objective(CompatibleObjective):
    """BCT Eq. 3: half the squared distance to the old embedding, on T_old."""

    def __init__(self, inputs: EmbedderInputs) -> None:
        super().__init__(inputs)
        self.weight = read_options(inputs.config.options, WeightOptions, "l2").weight

    def compatibility_terms(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return the term `l2`; it is 0 for a batch without classes that the old model knows.

        The losses of images of known classes are added, and divided by the size of the whole batch.

        Raises:
            ConfigurationError: an embedding has fewer elements than an old one.
        """
        known = self.known_labels[labels] >= 0
        losses = half_squared_l2(
            self.cut_to_old_dim(embedding[known]), self.old_embedding(pixels[known])
        )
        return {"l2": self.weight * loss_share_of_batch(losses, len(labels))}


class LwfObjective(CompatibleObjective):
    """Learning without forgetting, as BCT adapts it (bct.txt section 3.5): the old model's soft
    labels on T_new minus T_old."""

    def __init__(self, inputs: EmbedderInputs) -> None:
        super().__init__(inputs)
        self.weight = read_options(inputs.config.options, WeightOptions, "lwf").weight

    def compatibility_terms(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return the term `soft_labels`; 0 for a batch of classes that the old model knows.

        The losses of images of new classes are added, and divided by the size of the whole batch.
        """
        unknown = self.known_labels[labels] < 0
        new_logits = self.old_classifier.logits(embedding[unknown])
        old_logits = self.old_classifier.logits(self.old_embedding(pixels[unknown]))
        term = loss_share_of_batch(distillation_loss(new_logits, old_logits), len(labels))
        return {"soft_labels": self.weight * term}


class RegressObjective(CompatibleObjective):
    """UniBCT Eq. 11 on all of T_new."""

    def __init__(self, inputs: EmbedderInputs) -> None:
        super().__init__(inputs)
        self.weight = read_options(inputs.config.options, WeightOptions, "regress").weight

    def compatibility_terms(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return the term `regress`, the mean over the batch; labels are not used."""
        losses = regression_loss(self.cut_to_old_dim(embedding), self.old_embedding(pixels))
        return {"regress": self.weight * losses.mean()}


class ContrastiveOptions(WeightOptions):
    """`temperature` is tau of UniBCT Eq. 12; the paper does not state its value."""

    temperature: float = Field(0.1, gt=0)


class ContrastiveObjective(CompatibleObjective):
    """UniBCT Eq. 12: find the old feature of the same image among those of other classes."""

    def __init__(self, inputs: EmbedderInputs) -> None:
        super().__init__(inputs)
        self.options = read_options(inputs.config.options, ContrastiveOptions, "contrastive")

    def compatibility_terms(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return the term `contrastive`; it is 0 for a batch of one class.

        It is the mean over the batch.

        Raises:
            ConfigurationError: an embedding has fewer elements than an old one.
        """
        losses = contrastive_loss(
            self.cut_to_old_dim(embedding),
            self.old_embedding(pixels),
            labels,
            self.options.temperature,
        )
        return {"contrastive": self.options.weight * losses.mean()}


class FocalOptions(WeightOptions):
    """`temperature` divides the classifier's logits on both sides.

    With 1 the term is too steep: on development seeds of digits, new/new fell to 85 to 100 CMC-1;
    with 4 it is 99.6."""

    temperature: float = Field(4.0, gt=0)


class FocalObjective(CompatibleObjective):
    """Focal distillation, the baseline of DMU Table 8, with synthesized rows."""

    def __init__(self, inputs: EmbedderInputs) -> None:
        super().__init__(inputs)
        self.options = read_options(inputs.config.options, FocalOptions, "focal")
        self.old_classifier, extended = extended_classifier(self, inputs)
        self.known_labels.copy_(extended)

    def compatibility_terms(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return the term `focal_distillation`, the mean over the batch, on all classes."""
        losses = focal_distillation_loss(
            self.old_classifier.logits(embedding),
            self.old_classifier.logits(self.old_embedding(pixels)),
            self.known_labels[labels],
            self.options.temperature,
        )
        return {"focal_distillation": self.options.weight * losses.mean()}


L2 = EmbedderMethod(L2Objective, searches_directly=True)
LWF = EmbedderMethod(LwfObjective, searches_directly=True)
REGRESS = EmbedderMethod(RegressObjective, searches_directly=True)
CONTRASTIVE = EmbedderMethod(ContrastiveObjective, searches_directly=True)
FOCAL = EmbedderMethod(FocalObjective, searches_directly=True)
