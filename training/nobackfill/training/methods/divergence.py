"""FCT Table 12: the transformation trained by the divergence of classifier outputs."""

from torch import Tensor

from nobackfill.training.loop.objective import Batch, Terms
from nobackfill.training.losses.distillation import forward_kl_divergence, reversed_kl_divergence
from nobackfill.training.method import UpgradeMethod
from nobackfill.training.methods.fct import build_fct
from nobackfill.training.methods.forward import ForwardObjective
from nobackfill.training.networks.transform import UpgradeOutput


class KlObjective(ForwardObjective):
    """KL between the frozen new classifier's responses to the new and to the upgraded embedding.

    It is the variant of FCT Table 12 and section E.1. The new classifier is that of
    `new_classifier`.
    """

    def distance_terms(self, upgraded: UpgradeOutput, view: Batch) -> Terms:
        """Return FCT's terms, with the mean divergence of logits in place of the distance.

        The term is still named `distance`. Labels are not read. Without rows the term is NaN.
        `divergence` decides whether the target gets a gradient.

        Raises:
            KeyError: the view lacks `new`, or `new_side` if g exists.
            ConfigurationError: outputs have fewer dimensions than the new model's classifier.
        """
        terms = super().distance_terms(upgraded, view)
        predicted = self.classifier.logits(upgraded.embedding)
        terms["distance"] = self.divergence(predicted, self.classifier.logits(view["new"])).mean()
        return terms

    def divergence(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Return KL(target || predicted) of logits: [n,c], [n,c] -> [n] (FCT Table 12).

        The target gets no gradient.
        """
        return forward_kl_divergence(predicted, target)


class ReversedKlObjective(KlObjective):
    """The same with the arguments of KL exchanged (FCT Table 12, reversed)."""

    def divergence(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Return KL(predicted || target) of logits: [n,c], [n,c] -> [n]; both get a gradient."""
        return reversed_kl_divergence(predicted, target)


KL = UpgradeMethod(build_network=build_fct, make_objective=KlObjective)
REVERSED_KL = UpgradeMethod(build_network=build_fct, make_objective=ReversedKlObjective)
