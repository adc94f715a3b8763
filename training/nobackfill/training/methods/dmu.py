"""DMU: selective backward compatibility and a forward-adaptive head (dmu.txt section 3.3).

Where the paper's pseudocode and equations differ, this follows the equations. The loss of Eq. 10 is
that of the new embedding under the *old* classifier; the pseudocode's `sbc_loss` uses the new one.
Classes that the old classifier lacks get synthesized rows; the paper does not mention them.
"""

from itertools import pairwise
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from nobackfill.training.config import EmbedderConfig
from nobackfill.training.loop.objective import Batch, Terms
from nobackfill.training.losses.discriminativeness import (
    confidence_weights,
    entropy_weights,
    selective_loss,
)
from nobackfill.training.losses.margins import weight_spread
from nobackfill.training.losses.pairwise import cosine_regression_loss
from nobackfill.training.method import EmbedderInputs, EmbedderMethod, UpgradeShape
from nobackfill.training.methods.bct import extend_old_classifier
from nobackfill.training.methods.compatible import CompatibleObjective, WeightOptions, read_options
from nobackfill.training.networks.embedder import to_pixels
from nobackfill.training.networks.transform import UpgradeNetwork


class DmuOptions(WeightOptions):
    """DMU's options; the defaults are the paper's."""

    # entropy: Eq. 9 and 10. confidence: Eq. 13. uniform: the same weight for every image (BCT).
    measure: Literal["entropy", "confidence", "uniform"] = "entropy"
    # Use the forward-adaptive loss (Eq. 11); Table 4 measures its effect.
    forward: bool = True
    # classification: Eq. 4. regression: Eq. 14 (Table 7).
    regularizer: Literal["classification", "regression"] = "classification"
    # Factor of Eq. 9's cosines and divisor of Eq. 10's entropies; 1 in the paper.
    entropy_scale: float = Field(1.0, gt=0)
    weight_temperature: float = Field(1.0, gt=0)
    hidden_dim: int = Field(1024, ge=1)


class ForwardAdaptiveHead(nn.Module):
    """psi: three blocks of linear, BatchNorm and ReLU, then a linear layer.

    It maps old embeddings [n,old_dim] to [n,new_dim], and reads no side-information. With
    `unit_norm` its output is normalised. This is psi of DMU Eq. 11.
    """

    def __init__(self, old_dim: int, new_dim: int, hidden_dim: int, unit_norm: bool) -> None:
        super().__init__()
        dims = (old_dim, hidden_dim, hidden_dim, hidden_dim)
        blocks: list[nn.Module] = []
        for dim_in, dim_out in pairwise(dims):
            blocks += [nn.Linear(dim_in, dim_out), nn.BatchNorm1d(dim_out), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*blocks, nn.Linear(hidden_dim, new_dim))
        self.unit_norm = unit_norm

    def forward(self, embedding: Tensor, side: Tensor | None = None) -> Tensor:
        """Map old embeddings [n,old_dim] to [n,new_dim]; `side` is ignored.

        In training mode a single row raises ValueError (BatchNorm); no rows give [0,new_dim]. With
        `unit_norm` a zero output stays zero.
        """
        output: Tensor = self.layers(embedding)
        return nn.functional.normalize(output) if self.unit_norm else output


def build_forward(config: EmbedderConfig, shape: UpgradeShape) -> UpgradeNetwork:
    """Build psi as the upgrade to publish; it reads no side-information.

    The weights are random, from torch's default generator. The option `forward` is not read: the
    network is built even if it is false.

    Raises:
        ConfigurationError: an option is unknown or of a wrong value.
    """
    options = read_options(config.options, DmuOptions, config.method)
    head = ForwardAdaptiveHead(shape.old_dim, shape.new_dim, options.hidden_dim, shape.unit_norm)
    return UpgradeNetwork(head, reads_side=False)


class DmuObjective(CompatibleObjective):
    """DMU Eq. 8: L_new + L_SBC + L_FA, on two augmentations of each image.

    The constructor raises ConfigurationError for a wrong option or without an old model. It encodes
    images of classes that the old classifier lacks, as `extend_old_classifier`.
    """

    options_model = DmuOptions

    def __init__(self, inputs: EmbedderInputs) -> None:
        super().__init__(inputs)
        config = inputs.config
        extend_old_classifier(self, inputs)
        shape = UpgradeShape(
            self.old.encoder.dim, 0, config.embedding_dim, 0, self.embedder.unit_norm
        )
        self.upgrade = build_forward(config, shape) if self.options.forward else None

    def forward(self, batch: Batch) -> Terms:
        """Return `classification`, `selective` and, with the option `forward`, `forward`.

        The ratio of the largest to the smallest weight is logged as `weight_spread`. The two
        augmentations are drawn independently from torch's default generator: the old model sees
        the first, the new model the second.

        Raises:
            ValueError: the batch has one row and the measure is entropy, or the option `forward` is
                set in training mode.
            ConfigurationError: the new dimension is below the old model's.
        """
        labels, images = batch["labels"], to_pixels(batch["images"])
        old = self.old_embedding(self.augment(images))
        embedding = self.embedder.encode(self.augment(images))
        terms = {"classification": self.head(embedding, labels)}
        weights = self.discriminativeness_weights(old, labels)
        self.statistics["weight_spread"] = float(weight_spread(weights))
        losses = self.old_space_losses(embedding, old, labels)
        terms["selective"] = self.options.weight * selective_loss(losses, weights)
        if self.upgrade is not None:
            terms["forward"] = self.forward_adaptive_loss(old, embedding, labels)
        return terms

    def discriminativeness_weights(self, old: Tensor, labels: Tensor) -> Tensor:
        """Return lambda(x) of Eq. 10 or 13 [b], with the sum 1, or equal weights.

        In training they have no gradient, because the old embeddings have none.

        Args:
            old: old embeddings [b,old_dim].
            labels: int64 [b]; read only with the measure confidence.

        Raises:
            ValueError: the batch has one row and the measure is entropy.
        """
        options = self.options
        sharpness = {
            "entropy_scale": options.entropy_scale,
            "weight_temperature": options.weight_temperature,
        }
        # Eq. 9 uses plain inner products: cosines, or the logits of a softmax head.
        products = self.old_classifier.logits(old) / self.old_classifier.scale
        if options.measure == "entropy":
            return entropy_weights(products, **sharpness)
        if options.measure == "confidence":
            return confidence_weights(products, self.known_labels[labels], **sharpness)
        return torch.full_like(products[:, 0], 1 / len(old))

    def old_space_losses(self, embedding: Tensor, old: Tensor, labels: Tensor) -> Tensor:
        """Return the losses [b] that Eq. 10 weights: of the old classifier, or Eq. 14.

        The old embeddings are read only by the regression. Classes that the old classifier lacks
        have synthesized rows.

        Args:
            embedding: new embeddings [b,dim].
            old: old embeddings [b,old_dim].
            labels: int64 [b].

        Raises:
            ConfigurationError: dim is below the old model's dimension.
        """
        if self.options.regularizer == "regression":
            return cosine_regression_loss(self.cut_to_old_dim(embedding), old)
        return self.old_classifier.loss(embedding, self.known_labels[labels])

    def forward_adaptive_loss(self, old: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
        """Return L_FA (Eq. 11), a scalar: psi's output under the new head; trains psi and the head.

        In the regression variant, only psi is trained, towards the new embedding. The new embedding
        is read only by the regression variant, where it gets a gradient, too.

        Args:
            old: old embeddings [b,old_dim].
            embedding: new embeddings [b,dim].
            labels: int64 [b].

        Raises:
            AssertionError: the option `forward` is false.
            ValueError: the batch has one row, in training mode.
        """
        assert self.upgrade is not None
        adapted = self.upgrade(old).embedding
        if self.options.regularizer == "regression":
            return cosine_regression_loss(adapted, embedding).mean()
        loss: Tensor = self.head(adapted, labels)
        return loss

    def trained_parts(self) -> nn.ModuleDict:
        """Return the parts encoder and head and, with the option `forward`, upgrade.

        The part upgrade is the network of `build_forward`, which a release publishes.
        """
        parts = super().trained_parts()
        if self.upgrade is not None:
            parts["upgrade"] = self.upgrade
        return parts


DMU = EmbedderMethod(DmuObjective, searches_directly=True, build_upgrade=build_forward)
