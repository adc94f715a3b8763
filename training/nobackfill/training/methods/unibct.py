"""UniBCT: new embeddings are classified by pseudo prototypes of old features.

It works for any division of classes between old and new training set. Every new class gets a
prototype from the old features of its images; the old classifier is not used.
"""

from functools import cached_property
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from nobackfill.training.loop.objective import Terms
from nobackfill.training.losses.prototypes import (
    class_average,
    refined_old_average,
    stack_by_class,
    trimmed_average,
)
from nobackfill.training.method import EmbedderInputs, EmbedderMethod
from nobackfill.training.methods.compatible import (
    CompatibleObjective,
    WeightOptions,
    encode_images,
)
from nobackfill.training.networks.heads import (
    FixedClassifier,
    Head,
    fixed_form_of_head,
    gaussian_classifier,
)


class UniBctOptions(WeightOptions):
    """UniBCT's options (unibct.txt section 4.1 and Algorithm 1)."""

    prototypes: Literal["vanilla", "drop", "refined"] = "refined"
    temperature: float = Field(0.05, gt=0)
    # Lambda of Eq. 8.
    blend: float = Field(0.9, ge=0, lt=1)
    # Share of the epochs without the term (10 of 35). Prototypes are computed after it, and again
    # after each further such share, `refreshes` times in all.
    warmup_share: float = Field(10 / 35, ge=0, lt=1)
    refreshes: int = Field(2, ge=1)


class UniBctObjective(CompatibleObjective):
    """UniBCT Eq. 2 and 5: the head's loss against pseudo prototypes, after a warm-up.

    The constructor raises ConfigurationError for a wrong option or without an old model.
    """

    options_model = UniBctOptions

    def __init__(self, inputs: EmbedderInputs) -> None:
        super().__init__(inputs)
        self.images, self.labels, self.device = inputs.images, inputs.labels, inputs.device
        self.class_count = len(inputs.class_names)
        self.first_refresh_epoch, self.refreshes = refresh_epochs(
            inputs.config.epochs, self.options
        )
        # A part of the checkpoint, so that a resumed run has the prototypes of the last refresh.
        # Before the first refresh the term is off and these are not used.
        self.pseudo_classifier = FixedClassifier(
            torch.zeros(self.class_count, self.old.encoder.dim),
            head_kind=fixed_form_of_head(self.head),
            margin=self.head.margin,
            scale=self.head.scale,
        )
        self.uses_prototypes = False

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Compute prototypes before an epoch of `refreshes`; start the term after the warm-up.

        All images are encoded by the new model for refined prototypes, and once by the old one. The
        classifier is replaced in place. `epochs` is not used: `refreshes` follow the configuration.
        Between two refreshes the prototypes stay, also in a resumed run.

        Raises:
            InvalidInputError: a file among the images is missing or no image.
            NobackfillError: a process that reads images was killed.
            ValueError: a class has no image.
        """
        if epoch in self.refreshes:
            self.pseudo_classifier.load_state_dict(self._pseudo_classifier().state_dict())
        self.uses_prototypes = epoch >= self.first_refresh_epoch

    def compatibility_terms(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return the term `pseudo_prototypes`, a mean over the batch; none during the warm-up.

        Raises:
            ConfigurationError: an embedding has fewer elements than an old one.
        """
        if not self.uses_prototypes:
            return {}
        losses = self.pseudo_classifier.loss(self.cut_to_old_dim(embedding), labels)
        return {"pseudo_prototypes": self.options.weight * losses.mean()}

    def trained_parts(self) -> torch.nn.ModuleDict:
        """Return the parts encoder, head and prototypes.

        Before the first refresh the prototypes are zero.
        """
        parts = super().trained_parts()
        parts["prototypes"] = self.pseudo_classifier
        return parts

    @cached_property
    def old_features(self) -> Tensor:
        """Old features of all training images, float32 [n,old_dim]; the first use computes them.

        They are on the CPU, in the order of the images, and stay in memory.

        Raises:
            InvalidInputError: a file among the images is missing or no image.
            NobackfillError: a process that reads images was killed.
        """
        return encode_images(self.old.encoder, self.images, self.device)

    def _pseudo_classifier(self) -> FixedClassifier:
        old, options = self.old_features, self.options
        if options.prototypes == "refined":
            new = encode_images(self.embedder, self.images, self.device)
            prototypes = stack_by_class(
                self.labels,
                self.class_count,
                lambda rows: refined_old_average(
                    old[rows], new[rows], temperature=options.temperature, blend=options.blend
                ),
            )
        else:
            average = trimmed_average if options.prototypes == "drop" else class_average
            prototypes = stack_by_class(
                self.labels, self.class_count, lambda rows: average(old[rows])
            )
        return pseudo_classifier(prototypes, old, self.labels, self.head)


def refresh_epochs(epochs: int, options: UniBctOptions) -> tuple[int, set[int]]:
    """Return the first epoch with the term, and the epochs before which prototypes are computed.

    Without a warm-up (a share that rounds to no epoch), they are computed once, before epoch 0.
    Epochs count from 0. Refreshes beyond the last epoch are left out. If the warm-up's share rounds
    to all epochs, none are computed, and the term stays off.

    Args:
        epochs: the number of epochs of the training.
        options: the warm-up's share of the epochs, and the number of refreshes.
    """
    first = round(options.warmup_share * epochs)
    if not first:
        return 0, {0}
    return first, {k * first for k in range(1, options.refreshes + 1) if k * first < epochs}


def pseudo_classifier(
    prototypes: Tensor, old_features: Tensor, labels: Tensor, head: Head
) -> FixedClassifier:
    """Make a classifier of the form of `head` from pseudo prototypes.

    Angular heads use them as rows (Eq. 5). A softmax head, which the paper does not have, gets the
    classifier of squared distances to them, which ranks by L2 as a search does.

    Args:
        prototypes: one for each class [c,d].
        old_features: old features of the training images [n,d]; used only for a softmax head.
        labels: int64 [n], rows of `prototypes`, else IndexError; used only for a softmax head.
        head: gives form, margin and scale.
    """
    form = fixed_form_of_head(head)
    if form != "softmax":
        return FixedClassifier(prototypes, head_kind=form, margin=head.margin, scale=head.scale)
    return gaussian_classifier(prototypes, old_features, labels)


UNIBCT = EmbedderMethod(UniBctObjective, searches_directly=True)
