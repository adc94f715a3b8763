"""LCE as in FCT appendix J: the forward transformation alone, with cross-entropy."""

import torch

from nobackfill.training.loop.objective import Batch, Terms
from nobackfill.training.losses.lce import boundary_loss, centre_alignment_loss
from nobackfill.training.method import UpgradeMethod
from nobackfill.training.methods.fct import build_fct
from nobackfill.training.methods.forward import ForwardObjective
from nobackfill.training.networks.transform import UpgradeOutput


class LceObjective(ForwardObjective):
    """Classification by the frozen new classifier, class centre alignment, and a boundary.

    It is the baseline LCE of FCT appendix J (Meng et al. 2021).
    """

    def distance_terms(self, upgraded: UpgradeOutput, view: Batch) -> Terms:
        """Return classification, alignment and boundary in place of FCT's distance.

        They are `classification`, `alignment` and `boundary`, and FCT's `side_distance` if g
        exists. Rows of classes that the new classifier does not know count as 0 in the first and
        the last. Without labelled rows all three are 0. A view without rows gives NaN.

        Raises:
            ConfigurationError: an embedding has fewer elements than one of the new model.
            IndexError: a label is no class of the training.
        """
        predicted, labels = upgraded.embedding, view["labels"]
        own = self.classifier_rows(labels)
        known, labelled = own >= 0, torch.nonzero(labels >= 0)[:, 0]
        weights = self.classifier.weights
        terms = super().distance_terms(upgraded, view)
        del terms["distance"]
        alignment = predicted.new_zeros(1)
        if len(labelled):
            alignment = centre_alignment_loss(
                predicted[labelled], view["new"][labelled], labels[labelled]
            )
        return terms | {
            "classification": self.classification_loss(predicted, labels),
            "alignment": alignment.mean(),
            "boundary": boundary_loss(
                predicted[known], view["new"][known], weights, own[known]
            ).sum()
            / len(labels),
        }


LCE = UpgradeMethod(
    build_network=build_fct, make_objective=LceObjective, reads_labels=lambda config: True
)
