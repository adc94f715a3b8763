"""FastFill (Jaeckle et al. 2023): FCT's h, with the new model's classification and a variance.

The variance of an item is the third output of the upgrade; a backfill proceeds in its order.
"""

import math

import torch
from pydantic import Field
from torch import Tensor, nn

from nobackfill.training.config import UpgradeConfig
from nobackfill.training.loop.objective import Batch, Terms
from nobackfill.training.losses.gaussian import attenuated_loss, gaussian_nll, variance_factor
from nobackfill.training.method import UpgradeInputs, UpgradeMethod, UpgradeShape
from nobackfill.training.methods.cheap_maps import InputShape, concatenate, input_shape
from nobackfill.training.methods.compatible import Options, read_options
from nobackfill.training.methods.fct import build_fct
from nobackfill.training.methods.forward import ForwardObjective
from nobackfill.training.networks.transform import (
    UpgradeNetwork,
    UpgradeOutput,
    make_projection_layers,
)


class FastFillOptions(Options):
    """Weights of the terms other than the distance."""

    classification: float = Field(1.0, ge=0)
    likelihood: float = Field(1.0, ge=0)
    # Also train h by the likelihood, which then contains the classification, as published.
    joint: bool = False


class VarianceHead(nn.Module):
    """Predicts log sigma^2 of the residual per dimension: (embedding, side) -> [n].

    `offset` is set after the training, so that the variances fit held-out residuals.
    """

    offset: Tensor

    def __init__(self, reads: InputShape, width: int) -> None:
        super().__init__()
        self.input_shape = reads
        self.layers = nn.Sequential(
            make_projection_layers(reads.embedding_dim + reads.side_dim, width), nn.Linear(width, 1)
        )
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, embedding: Tensor, side: Tensor | None) -> Tensor:
        """Return log sigma^2 [n] of the inputs that are read.

        `side` may be None only if it is not read, else AssertionError. In training mode BatchNorm
        needs at least two rows, or raises ValueError.
        """
        output: Tensor = self.layers(concatenate(embedding, side, self.input_shape))
        return output[:, 0] + self.offset


def build_fastfill(config: UpgradeConfig, shape: UpgradeShape) -> UpgradeNetwork:
    """Build FCT's h and g, and a small network for the variance.

    The weights are random, from torch's default generator, and the offset of the variance is 0.
    `inner_dim` and `projection_dim` of the configuration apply.

    Raises:
        ConfigurationError: an option is unknown or of a wrong value.
    """
    read_options(config.options, FastFillOptions, config.method)
    upgrade = build_fct(config, shape)
    upgrade.log_variance = VarianceHead(input_shape(config, shape), config.projection_dim)
    return upgrade


class FastFillObjective(ForwardObjective):
    """Distance, classification, and the Gaussian likelihood of the residual.

    The likelihood trains only the variance. Through it, h would improve easy items more than hard
    ones, but an upgrade must migrate the hard ones too. With `joint` it trains h as well and
    contains the classification. Its parts are FastFill's (Jaeckle et al. 2023). The constructor
    raises ConfigurationError for a wrong option, or if keep_best has no held-out images.
    """

    options_model: type[FastFillOptions] = FastFillOptions

    def __init__(self, upgrade: UpgradeNetwork, inputs: UpgradeInputs) -> None:
        super().__init__(upgrade, inputs)
        self.options = read_options(inputs.options, self.options_model, inputs.config.method)
        self.held_out = inputs.held_out_features

    def distance_terms(self, upgraded: UpgradeOutput, view: Batch) -> Terms:
        """Return the terms of FastFill for outputs and targets of one view per row.

        With `joint` all but those of side-information are one term, `distance`. Otherwise they are
        `distance`, `likelihood` and, with a weight above 0, `classification`. Distances are divided
        by the spread of the new embeddings. Rows without a label count as 0 in the classification.
        An upgrade without a variance raises AssertionError.

        Raises:
            KeyError: the view lacks `new`, or `labels` that the classification needs.
            ConfigurationError: outputs have fewer dimensions than the new model's classifier.
            IndexError: a label is no class of the training, and the classification has a weight.
        """
        terms = super().distance_terms(upgraded, view)
        predicted, target = upgraded.embedding, view["new"]
        assert upgraded.log_variance is not None
        if self.options.joint:
            return {**terms, "distance": self._joint(predicted, view, upgraded.log_variance)}
        terms["distance"] = self.relative_distance(predicted, target).mean()
        if self.options.classification:
            terms["classification"] = self.options.classification * self.classification_loss(
                predicted, view["labels"]
            )
        likelihood = gaussian_nll(predicted.detach(), target, upgraded.log_variance)
        terms["likelihood"] = self.options.likelihood * likelihood.mean()
        return terms

    def _joint(self, predicted: Tensor, view: Batch, log_variance: Tensor) -> Tensor:
        losses = self.relative_distance(predicted, view["new"])
        if self.options.classification:
            classes = self.class_losses(predicted, view["labels"])
            losses = losses + self.options.classification * classes
        # The variance of a dimension, converted to the unit of the losses.
        return attenuated_loss(
            losses, log_variance + torch.log(predicted.shape[1] / self.spread)
        ).mean()

    def finish(self) -> None:
        """Scale the variances to the residuals of held-out images; without any, leave them.

        The factor is logged as `variance_factor`. With keep_best the weights of the best epoch are
        loaded first; then `adjust_upgrade` is called, also without held-out images. The upgrade is
        in eval mode afterwards if there are held-out images. A NaN among held-out vectors makes all
        variances NaN. Call it once.

        Raises:
            ValueError: every held-out prediction equals its target.
        """
        super().finish()
        self.adjust_upgrade()
        if not self.held_out or not len(self.held_out["old"]):
            return
        head = self.upgrade.log_variance
        assert isinstance(head, VarianceHead)
        self.upgrade.eval()
        view = {k: v[:, 0].to(head.offset.device) for k, v in self.held_out.items() if v.ndim == 3}
        with torch.no_grad():
            upgraded = self.upgrade(view["old"], view.get("side"))
            factor = variance_factor(upgraded.embedding, view["new"], upgraded.log_variance)
            head.offset += math.log(factor)
        self.statistics["variance_factor"] = factor

    def adjust_upgrade(self) -> None:
        """Change the trained network before its variances are scaled; this class does nothing.

        `finish` calls it once, after the best epoch is loaded.
        """


def uses_labels(
    config: UpgradeConfig, options_class: type[FastFillOptions] = FastFillOptions
) -> bool:
    """Return whether a training needs labels, for a classification term with a weight above 0.

    It does, too, if the key `choose` may select such a weight. Options that the key `options` lacks
    have their defaults.

    Raises:
        ConfigurationError: an option is unknown or of a wrong value.
    """
    values = read_options(config.options, options_class, config.method)
    return values.classification > 0 or CLASSIFICATION in config.choose


CLASSIFICATION = "classification"
FASTFILL = UpgradeMethod(
    build_network=build_fastfill,
    make_objective=FastFillObjective,
    reads_labels=uses_labels,
    option_values={CLASSIFICATION: (1.0, 0.0)},
)
