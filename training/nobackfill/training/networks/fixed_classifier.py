"""A classifier that is used and never trained: the old one, whole, extended, or made of features.

`labels_in` says which classes of a new training set it knows: the old classifier may have fewer
or other classes than the new one.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.losses.margins import arcface, cosface, cosines, linear_softmax
from nobackfill.training.networks.heads import HEAD_NAMES, AngularHead, Head, SoftmaxHead

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
