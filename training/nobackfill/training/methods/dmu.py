"""DMU: selective backward compatibility and a forward-adaptive head (dmu.txt section 3.3).

Where the paper's pseudocode and its equations differ, the equations hold: Eq. 10's loss is that of
the new embedding under the *old* classifier, while the pseudocode's `sbc_loss` takes the new one.
Classes that the old classifier does not know get synthesized rows; the paper is silent on them.
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
from nobackfill.training.losses.margins import spread
from nobackfill.training.losses.pairwise import cosine_regression
from nobackfill.training.method import EmbedderInputs, EmbedderMethod, UpgradeShape
from nobackfill.training.methods.bct import extended_classifier
from nobackfill.training.methods.compatible import CompatibleObjective, WeightOptions, read_options
from nobackfill.training.networks.embedder import to_pixels
from nobackfill.training.networks.transform import UpgradeNetwork


class DmuOptions(WeightOptions):
    """DMU's settings; the defaults are the paper's."""

    # Eq. 9 and 10, Eq. 13, or the same weight for every image (BCT).
    measure: Literal["entropy", "confidence", "uniform"] = "entropy"
    # The forward-adaptive loss (Eq. 11) on or off: Table 4's ablation.
    forward: bool = True
    # Eq. 4's classification form, or Eq. 14's regression (Table 7).
    regularizer: Literal["classification", "regression"] = "classification"
    # Multiplies Eq. 9's cosines, divides Eq. 10's entropies: both off in the paper.
    entropy_scale: float = Field(1.0, gt=0)
    weight_temperature: float = Field(1.0, gt=0)
    hidden_dim: int = Field(1024, ge=1)


class ForwardAdaptiveHead(nn.Module):
    """psi: three of [fc-bn-relu] and an fc: old embedding [n,old_dim] -> [n,new_dim].

    Of an upgrade's inputs it reads the embedding alone; with `unit` its output is normalised.
    """

    def __init__(self, old_dim: int, new_dim: int, hidden_dim: int, unit: bool) -> None:
        super().__init__()
        dims = (old_dim, hidden_dim, hidden_dim, hidden_dim)
        blocks: list[nn.Module] = []
        for dim_in, dim_out in pairwise(dims):
            blocks += [nn.Linear(dim_in, dim_out), nn.BatchNorm1d(dim_out), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*blocks, nn.Linear(hidden_dim, new_dim))
        self.unit = unit

    def forward(self, embedding: Tensor, side: Tensor | None = None) -> Tensor:
        output: Tensor = self.layers(embedding)
        return nn.functional.normalize(output) if self.unit else output


def build_forward(config: EmbedderConfig, shape: UpgradeShape) -> UpgradeNetwork:
    """psi as the upgrade that is published."""
    options = read_options(config.options, DmuOptions, config.method)
    head = ForwardAdaptiveHead(shape.old_dim, shape.new_dim, options.hidden_dim, shape.unit)
    return UpgradeNetwork(head, reads_side=False)


class DmuObjective(CompatibleObjective):
    """DMU Eq. 8: L_new + L_SBC + L_FA, on two augmentations of each image."""

    def __init__(self, inputs: EmbedderInputs) -> None:
        super().__init__(inputs)
        config = inputs.config
        self.options = read_options(config.options, DmuOptions, config.method)
        self.old_classifier, extended = extended_classifier(self, inputs)
        self.known_labels.copy_(extended)
        shape = UpgradeShape(self.old.encoder.dim, 0, config.embedding_dim, 0, self.embedder.unit)
        self.upgrade = build_forward(config, shape) if self.options.forward else None

    def forward(self, batch: Batch) -> Terms:
        labels, images = batch["labels"], to_pixels(batch["images"])
        old = self.old_embedding(self.augment(images))
        embedding = self.embedder.encode(self.augment(images))
        terms = {"classification": self.head(embedding, labels)}
        weights = self.weights(old, labels)
        self.statistics["weight_spread"] = float(spread(weights))
        losses = self.inherited(embedding, old, labels)
        terms["selective"] = self.options.weight * selective_loss(losses, weights)
        if self.upgrade is not None:
            terms["forward"] = self.forward_adaptive(old, embedding, labels)
        return terms

    def weights(self, old: Tensor, labels: Tensor) -> Tensor:
        """lambda(x) of Eq. 10 or 13 [b], summing to 1."""
        options = self.options
        sharpness = {
            "entropy_scale": options.entropy_scale,
            "weight_temperature": options.weight_temperature,
        }
        # Eq. 9 has plain inner products: cosines, or a softmax head's logits.
        products = self.old_classifier.logits(old) / self.old_classifier.scale
        if options.measure == "entropy":
            return entropy_weights(products, **sharpness)
        if options.measure == "confidence":
            return confidence_weights(products, self.known_labels[labels], **sharpness)
        return torch.full_like(products[:, 0], 1 / len(old))

    def inherited(self, embedding: Tensor, old: Tensor, labels: Tensor) -> Tensor:
        """The loss that Eq. 10 weighs [b]: through the old classifier, or Eq. 14."""
        if self.options.regularizer == "regression":
            return cosine_regression(self.as_old(embedding), old)
        return self.old_classifier.loss(embedding, self.known_labels[labels])

    def forward_adaptive(self, old: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
        """L_FA, Eq. 11: psi's output under the new head; gradients reach psi and the head.

        In the regression variant psi alone follows the new embedding.
        """
        assert self.upgrade is not None
        adapted = self.upgrade(old).embedding
        if self.options.regularizer == "regression":
            return cosine_regression(adapted, embedding).mean()
        loss: Tensor = self.head(adapted, labels)
        return loss

    def trained(self) -> nn.ModuleDict:
        parts = super().trained()
        if self.upgrade is not None:
            parts["upgrade"] = self.upgrade
        return parts


DMU = EmbedderMethod(DmuObjective, searches_directly=True, upgrade=build_forward)
