"""Classification heads over an embedding: softmax, normalised softmax, CosFace, ArcFace; and fixed
classifiers, which are used and never trained.

One shape for all: `head(embedding [n,dim], labels [n]) -> scalar`, `head.logits(embedding) ->
[n,c]` without margin, `head.classifier() -> [c,dim]`, the rows that training/methods/ reuse as the
old classifier (pytorch-metric-learning keeps the transpose).

A fixed classifier is the old one, whole or extended, or is made of features. `labels_in` says which
classes of a new training set it knows: the old classifier may have fewer or other classes.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.losses.margins import arcface, cosface, cosines, linear_softmax


class Head(nn.Module):
    """`unit` says whether the head, and so the space under it, sees directions only."""

    unit: bool
    scale: float
    margin: float

    @abstractmethod
    def forward(self, embedding: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over [n,dim] and int64 [n]."""

    @abstractmethod
    def logits(self, embedding: Tensor) -> Tensor:
        """[n,dim] -> [n,classes], scaled, without margin."""

    @abstractmethod
    def classifier(self) -> Tensor:
        """Class weights [classes,dim]."""


class SoftmaxHead(Head):
    """Cross-entropy of a linear layer with bias, on the embedding as it is."""

    unit = False

    def __init__(self, classes: int, dim: int) -> None:
        super().__init__()
        self.scale, self.margin = 1.0, 0.0
        self.linear = nn.Linear(dim, classes)

    def forward(self, embedding: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(embedding), labels)

    def logits(self, embedding: Tensor) -> Tensor:
        output: Tensor = self.linear(embedding)
        return output

    def classifier(self) -> Tensor:
        return self.linear.weight


class AngularHead(Head):
    """A loss of pytorch-metric-learning on scaled cosines, in one of their forms."""

    unit = True

    def __init__(
        self, form: Literal["cosface", "arcface"], loss: nn.Module, scale: float, margin: float
    ) -> None:
        super().__init__()
        self.form, self.loss, self.scale, self.margin = form, loss, scale, margin

    def forward(self, embedding: Tensor, labels: Tensor) -> Tensor:
        # Autocast would multiply in bf16, below whose resolution a margin of a cosine vanishes.
        with torch.autocast(embedding.device.type, enabled=False):
            output: Tensor = self.loss(embedding.float(), labels)
        return output

    def logits(self, embedding: Tensor) -> Tensor:
        return self.scale * cosines(embedding, self.classifier())

    def classifier(self) -> Tensor:
        weight = self.loss.W
        assert isinstance(weight, Tensor)
        return weight.t()


# (margin, scale) as in the papers: BCT's CosFace (supplement 1), DMU's ArcFace (4.1) in radians.
_DEFAULTS = {"normalized_softmax": (0.0, 20.0), "cosface": (0.4, 32.0), "arcface": (0.3, 30.0)}
HEAD_NAMES = ("softmax", *_DEFAULTS)


def build_head(
    name: str, classes: int, dim: int, *, margin: float | None = None, scale: float | None = None
) -> Head:
    """A fresh head. `margin` is a cosine for CosFace, radians for ArcFace; None takes the default.

    Raises ConfigurationError for an unknown name, for fewer than 2 classes, or for a margin or
    scale that the head does not have.
    """
    if name not in HEAD_NAMES:
        raise ConfigurationError(f"unknown head {name!r}; known: {', '.join(HEAD_NAMES)}")
    if classes < 2:
        raise ConfigurationError(f"head {name}: expected at least 2 classes, got {classes}")
    if name == "softmax":
        if margin is not None or scale is not None:
            raise ConfigurationError("head softmax has neither margin nor scale; remove them")
        return SoftmaxHead(classes, dim)
    # Imported where used: it brings scipy's statistics, which take seconds.
    from pytorch_metric_learning.losses import ArcFaceLoss, CosFaceLoss, NormalizedSoftmaxLoss

    default_margin, default_scale = _DEFAULTS[name]
    m = default_margin if margin is None else margin
    s = default_scale if scale is None else scale
    if name == "normalized_softmax":
        if m:
            raise ConfigurationError("head normalized_softmax has no margin; remove it")
        # CosFace with margin 0.
        return AngularHead(
            "cosface", NormalizedSoftmaxLoss(classes, dim, temperature=1 / s), s, 0.0
        )
    if name == "cosface":
        return AngularHead("cosface", CosFaceLoss(classes, dim, margin=m, scale=s), s, m)
    # pytorch-metric-learning takes ArcFace's margin in degrees.
    return AngularHead("arcface", ArcFaceLoss(classes, dim, margin=math.degrees(m), scale=s), s, m)


_NATS = 8.0


class FixedClassifier(nn.Module):
    """Class weights [c, k] (buffers, no gradient) with the loss form of a head."""

    weights: Tensor
    bias: Tensor

    def __init__(
        self, weights: Tensor, *, form: str, margin: float, scale: float, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        if form not in HEAD_NAMES:
            raise ConfigurationError(f"unknown head {form!r}; known: {', '.join(HEAD_NAMES)}")
        self.form, self.margin, self.scale = form, margin, scale
        self.register_buffer("weights", weights.detach().clone())
        no_bias = torch.zeros(len(weights), dtype=weights.dtype, device=weights.device)
        self.register_buffer("bias", no_bias if bias is None else bias.detach().clone())

    @property
    def dim(self) -> int:
        """Dimension of the embeddings it was made for."""
        return self.weights.shape[1]

    def logits(self, embedding: Tensor) -> Tensor:
        """[n, K >= k] -> [n, c], scaled, without margin. Reads the first k elements."""
        first = first_elements(embedding, self.dim)
        if self.form == "softmax":
            return F.linear(first, self.weights, self.bias)
        return self.scale * cosines(first, self.weights)

    def loss(self, embedding: Tensor, labels: Tensor) -> Tensor:
        """[n, K >= k], [n] -> [n]: the head's loss against the fixed weights."""
        if self.form == "softmax":
            return linear_softmax(self.logits(embedding), labels)
        cosine = cosines(first_elements(embedding, self.dim), self.weights)
        term = arcface if self.form == "arcface" else cosface
        return term(cosine, labels, self.margin, self.scale)


def first_elements(embedding: Tensor, k: int) -> Tensor:
    """The first k elements of each embedding [n, K] (BCT section 3.6, other dimensions).

    Not renormalised here: angular losses and cosine searches do that, and a softmax has no need of
    it. Raises ConfigurationError where the embedding is the shorter one.
    """
    if embedding.shape[1] < k:
        raise ConfigurationError(
            f"the new embedding has {embedding.shape[1]} elements, the old classifier needs {k}; "
            "set embedding_dim to at least the old one"
        )
    return embedding[:, :k]


def of_head(head: Head) -> FixedClassifier:
    """The fixed copy of a trained head."""
    bias = head.linear.bias if isinstance(head, SoftmaxHead) else None
    return FixedClassifier(
        head.classifier(), form=form_of(head), margin=head.margin, scale=head.scale, bias=bias
    )


def form_of(head: Head) -> str:
    """The name of a head, as configurations say it."""
    return head.form if isinstance(head, AngularHead) else "softmax"


def gaussian_classifier(prototypes: Tensor, features: Tensor, labels: Tensor) -> FixedClassifier:
    """A softmax over squared distances to prototypes [c,d]: it ranks by L2 as the search does.

    The mean squared distance of `features` [n,d] from their own prototypes is worth _NATS. (Equal
    Gaussians of the features' own variance would be surer of themselves by a factor of d, and
    their gradients too steep to train by.)
    """
    sharpness = 2 * _NATS / (features - prototypes[labels]).square().sum(1).mean()
    return FixedClassifier(
        sharpness * prototypes,
        form="softmax",
        margin=0.0,
        scale=1.0,
        bias=-sharpness * prototypes.square().sum(1) / 2,
    )


def labels_in(class_names: Sequence[str], new_class_names: Sequence[str]) -> Tensor:
    """int64 [new classes]: each new class's label in `class_names`, -1 where it is not
    among them.
    """
    known = {name: label for label, name in enumerate(class_names)}
    return torch.tensor([known.get(name, -1) for name in new_class_names], dtype=torch.int64)
