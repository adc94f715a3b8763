"""FCT Table 12: the transformation trained by divergence of classifier outputs in place of
distance.
"""

from torch import Tensor

from nobackfill.training.loop.objective import Batch, Terms
from nobackfill.training.losses.distillation import forward_kl, reversed_kl
from nobackfill.training.method import UpgradeMethod
from nobackfill.training.methods.fct import build_fct
from nobackfill.training.methods.forward import ForwardObjective
from nobackfill.training.networks.transform import UpgradeOutput


class KlObjective(ForwardObjective):
    """KL of the frozen new classifier's answers, from the new embedding's to the upgraded one's."""

    def distance_terms(self, upgraded: UpgradeOutput, view: Batch) -> Terms:
        terms = super().distance_terms(upgraded, view)
        predicted = self.classifier.logits(upgraded.embedding)
        terms["distance"] = self.divergence(predicted, self.classifier.logits(view["new"])).mean()
        return terms

    def divergence(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Between logits [n,c] -> [n]."""
        return forward_kl(predicted, target)


class ReversedKlObjective(KlObjective):
    """The same, from the upgraded embedding's answers to the new one's."""

    def divergence(self, predicted: Tensor, target: Tensor) -> Tensor:
        return reversed_kl(predicted, target)


KL = UpgradeMethod(build=build_fct, objective=KlObjective)
REVERSED_KL = UpgradeMethod(build=build_fct, objective=ReversedKlObjective)
