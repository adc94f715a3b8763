"""The baselines of BCT and UniBCT: l2, LwF, regress, contrastive and focal.

None has an influence loss. All except LwF and `focal` tie an image's new embedding to its old one.
"""

from pydantic import Field
from torch import Tensor

from nobackfill.training.loop.objective import Terms
from nobackfill.training.losses.distillation import focal_distillation_loss
from nobackfill.training.losses.margins import loss_share_of_batch
from nobackfill.training.losses.pairwise import contrastive_loss, half_squared_l2, regression_loss
from nobackfill.training.method import EmbedderInputs, EmbedderMethod
from nobackfill.training.methods.bct import extend_old_classifier, new_class_distillation
from nobackfill.training.methods.compatible import CompatibleObjective, WeightOptions


class L2Objective(CompatibleObjective):
    """BCT Eq. 3: half the squared distance to the old embedding, on T_old."""

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
        return {"l2": self.options.weight * loss_share_of_batch(losses, len(labels))}


class LwfObjective(CompatibleObjective):
    """Learning without forgetting, as BCT adapts it (bct.txt section 3.5): the old model's soft
    labels on T_new minus T_old."""

    def compatibility_terms(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return the term `soft_labels`; 0 for a batch of classes that the old model knows.

        The losses of images of new classes are added, and divided by the size of the whole batch.

        Raises:
            ConfigurationError: an embedding has fewer elements than an old one.
        """
        loss = new_class_distillation(self, embedding, pixels, labels)
        return {"soft_labels": self.options.weight * loss}


class RegressObjective(CompatibleObjective):
    """UniBCT Eq. 11 on all of T_new."""

    def compatibility_terms(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return the term `regress`, the mean over the batch; labels are not used.

        Raises:
            ConfigurationError: an embedding has fewer elements than an old one.
        """
        losses = regression_loss(self.cut_to_old_dim(embedding), self.old_embedding(pixels))
        return {"regress": self.options.weight * losses.mean()}


class ContrastiveOptions(WeightOptions):
    """`temperature` is tau of UniBCT Eq. 12; the paper does not state its value."""

    temperature: float = Field(0.1, gt=0)


class ContrastiveObjective(CompatibleObjective):
    """UniBCT Eq. 12: find the old feature of the same image among those of other classes."""

    options_model = ContrastiveOptions

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

    options_model = FocalOptions

    def __init__(self, inputs: EmbedderInputs) -> None:
        super().__init__(inputs)
        extend_old_classifier(self, inputs)

    def compatibility_terms(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return the term `focal_distillation`, the mean over the batch, on all classes.

        Raises:
            ConfigurationError: an embedding has fewer elements than an old one.
        """
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
