"""Classification heads over an embedding, and fixed classifiers.

The heads are softmax, normalised softmax, CosFace, ArcFace and d-Simplex.

All heads have the same interface: `head(embedding [n,dim], labels [n]) -> scalar`,
`head.logits(embedding) -> [n,c]` without margin, and `head.classifier_weights() -> [c,dim]`.
Compatible methods reuse these rows as the old classifier (pytorch-metric-learning stores the
transpose).

A fixed classifier is never trained. It is the old one, possibly extended, or made from features.
`labels_of_new_classes` maps the classes of a new training set to its classes, which may be fewer or
different.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.losses.margins import arcface_loss, cosface_loss, cosines, softmax_loss


class Head(nn.Module):
    """A classification head over embeddings.

    Attributes:
        unit_norm: only directions matter, so the space has unit vectors.
        scale: the factor of the cosines; 1 without cosines.
        margin: a cosine (CosFace) or radians (ArcFace); 0 without one.
    """

    unit_norm: bool
    scale: float
    margin: float

    @abstractmethod
    def forward(self, embedding: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over embeddings [n,dim] and labels int64 [n], rows of the
        classifier.

        Without rows the mean is NaN.
        """

    @abstractmethod
    def logits(self, embedding: Tensor) -> Tensor:
        """Return scaled logits [n,classes], without margin, for embeddings [n,dim].

        A simplex has dim + 1 columns. n may be 0.
        """

    @abstractmethod
    def classifier_weights(self) -> Tensor:
        """Return the class weights [classes,dim], with their gradient; not a copy."""


class SoftmaxHead(Head):
    """Cross-entropy of a linear layer with bias, on embeddings that are not normalised."""

    unit_norm = False

    def __init__(self, class_count: int, dim: int, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.scale, self.margin = 1.0, 0.0
        self.label_smoothing = label_smoothing
        self.linear = nn.Linear(dim, class_count)

    def forward(self, embedding: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over embeddings [n,dim] and labels int64 [n].

        A label that is not a row of the classifier raises IndexError. Without rows the mean is NaN.
        """
        logits = self.logits(embedding)
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def logits(self, embedding: Tensor) -> Tensor:
        """Return logits [n,classes] of embeddings [n,dim], which are not normalised."""
        output: Tensor = self.linear(embedding)
        return output

    def classifier_weights(self) -> Tensor:
        """Return the weights [classes,dim], without the bias; they are the parameter itself."""
        return self.linear.weight


class AngularHead(Head):
    """A loss of pytorch-metric-learning on scaled cosines: CosFace or ArcFace."""

    unit_norm = True

    def __init__(
        self, head_kind: Literal["cosface", "arcface"], loss: nn.Module, scale: float, margin: float
    ) -> None:
        super().__init__()
        self.head_kind, self.loss, self.scale, self.margin = head_kind, loss, scale, margin

    def forward(self, embedding: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over embeddings [n,dim] and labels int64 [n], in float32.

        Embeddings need not be normalised. A label that is not a class raises IndexError. Without
        rows the mean is NaN. Autocast does not apply.
        """
        # Autocast would multiply in bf16, which is too coarse for the margin of a cosine.
        with torch.autocast(embedding.device.type, enabled=False):
            output: Tensor = self.loss(embedding.float(), labels)
        return output

    def logits(self, embedding: Tensor) -> Tensor:
        """Return scaled cosines [n,classes] of embeddings [n,dim], without margin.

        The result is float32 or wider, also under autocast. The cosine of a zero vector is 0.
        """
        return self.scale * cosines(embedding, self.classifier_weights())

    def classifier_weights(self) -> Tensor:
        """Return the class weights [classes,dim], not normalised; a view of the parameter."""
        weight = self.loss.W
        assert isinstance(weight, Tensor)
        return weight.t()


# (margin, scale) as in the papers: BCT's CosFace (supplement 1), DMU's ArcFace (4.1) in radians.
_DEFAULTS = {
    "normalized_softmax": (0.0, 20.0),
    "cosface": (0.4, 32.0),
    "arcface": (0.3, 30.0),
    "simplex": (0.0, 20.0),
}
HEAD_NAMES = ("softmax", *_DEFAULTS)


def _require_head_name(name: str) -> None:
    if name not in HEAD_NAMES:
        raise ConfigurationError(
            f"the key head: expected one of {', '.join(HEAD_NAMES)}, got {name!r}"
        )


def build_head(
    name: str,
    class_count: int,
    dim: int,
    *,
    margin: float | None = None,
    scale: float | None = None,
    label_smoothing: float = 0.0,
) -> Head:
    """Build an untrained head.

    The weights come from torch's default generator; a simplex draws none.

    Args:
        name: softmax, normalized_softmax, cosface, arcface or simplex.
        class_count: the number of classes, at least 2; for simplex at most dim + 1.
        dim: the dimension of the embedding.
        margin: a cosine for CosFace, radians for ArcFace; None: the default, .4 and .3. Other heads
            have none: 0 is accepted except by softmax.
        scale: the factor of the cosines; None: the default, 32 for CosFace, 30 for ArcFace, else
            20. It must be above 0, which is not checked. softmax has none.
        label_smoothing: the share of softmax's target that is spread over all classes, 0 to 1;
            other heads ignore it.

    Raises:
        ConfigurationError: the name is unknown, there are fewer than 2 classes or more than a
            simplex has vertices, or the head has no such margin or scale.
    """
    _require_head_name(name)
    if class_count < 2:
        raise ConfigurationError(
            f"head {name}: expected at least 2 classes, got {class_count}; add class folders"
        )
    if name == "softmax":
        if margin is not None or scale is not None:
            raise ConfigurationError(
                "head softmax has neither margin nor scale; remove the keys margin and scale"
            )
        return SoftmaxHead(class_count, dim, label_smoothing)
    default_margin, default_scale = _DEFAULTS[name]
    m = default_margin if margin is None else margin
    s = default_scale if scale is None else scale
    if name in ("normalized_softmax", "simplex") and m:
        raise ConfigurationError(f"head {name} has no margin; remove the key margin")
    if name == "simplex":
        return SimplexHead(class_count, dim, s)
    # Imported here: it imports scipy's statistics, which take seconds.
    from pytorch_metric_learning.losses import ArcFaceLoss, CosFaceLoss, NormalizedSoftmaxLoss

    if name == "normalized_softmax":
        # CosFace with margin 0.
        return AngularHead(
            "cosface", NormalizedSoftmaxLoss(class_count, dim, temperature=1 / s), s, 0.0
        )
    if name == "cosface":
        return AngularHead("cosface", CosFaceLoss(class_count, dim, margin=m, scale=s), s, m)
    # pytorch-metric-learning takes ArcFace's margin in degrees.
    return AngularHead(
        "arcface", ArcFaceLoss(class_count, dim, margin=math.degrees(m), scale=s), s, m
    )


_NATS = 8.0


class FixedClassifier(nn.Module):
    """Class weights [c, k] as buffers without gradient, with the loss of a head.

    Args of the constructor:
        weights: [c, k]; copied.
        head_kind: the name of the head: softmax, normalized_softmax, cosface or arcface.
        margin, scale: of the head's loss.
        bias: [c], used by the form softmax; None: zeros.

    The constructor raises ConfigurationError for an unknown form. The form simplex counts as
    cosface.
    """

    weights: Tensor
    bias: Tensor

    def __init__(
        self,
        weights: Tensor,
        *,
        head_kind: str,
        margin: float,
        scale: float,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        _require_head_name(head_kind)
        self.head_kind, self.margin, self.scale = head_kind, margin, scale
        self.register_buffer("weights", weights.detach().clone())
        no_bias = torch.zeros(len(weights), dtype=weights.dtype, device=weights.device)
        self.register_buffer("bias", no_bias if bias is None else bias.detach().clone())

    @property
    def dim(self) -> int:
        """Dimension k of the class weights, which may be below that of the embeddings."""
        return self.weights.shape[1]

    def logits(self, embedding: Tensor) -> Tensor:
        """Return scaled logits [n, c], without margin, from the first k elements of [n, K].

        Forms other than softmax return float32 or wider. Only the embedding gets a gradient. n may
        be 0.

        Raises:
            ConfigurationError: K is below k.
        """
        first = first_elements(embedding, self.dim)
        if self.head_kind == "softmax":
            return F.linear(first, self.weights, self.bias)
        return self.scale * cosines(first, self.weights)

    def loss(self, embedding: Tensor, labels: Tensor) -> Tensor:
        """Return the head's loss per row [n], from the first k elements of embeddings [n, K].

        Only the embedding gets a gradient.

        Args:
            embedding: [n, K]; n may be 0.
            labels: int64 [n], rows of the weights; another label, such as -1, raises RuntimeError
                or IndexError. With the form softmax, -100 gives 0.

        Raises:
            ConfigurationError: K is below k.
        """
        if self.head_kind == "softmax":
            return softmax_loss(self.logits(embedding), labels)
        cosine = cosines(first_elements(embedding, self.dim), self.weights)
        term = arcface_loss if self.head_kind == "arcface" else cosface_loss
        return term(cosine, labels, self.margin, self.scale)


class SimplexHead(Head):
    """Cross-entropy over scaled cosines to the vertices of a regular simplex, which never change.

    Class number i has vertex i in every training, so models of one dimension are compatible without
    an old model at hand. All dim + 1 vertices take part in the softmax: those without a class keep
    room for later classes (d-Simplex, Biondi et al., CVPR 2024 and TPAMI 2026). The paper's
    features have a free length; here they have length 1, as a search by cosine compares them.

    The constructor raises ConfigurationError for more than dim + 1 classes.
    """

    unit_norm = True

    def __init__(self, class_count: int, dim: int, scale: float) -> None:
        super().__init__()
        if class_count > dim + 1:
            raise ConfigurationError(
                f"head simplex has {dim + 1} vertices in {dim} dimensions, one for each class, "
                f"but there are {class_count} classes; set the key embedding_dim to "
                f"{class_count - 1} or more"
            )
        self.scale, self.margin = scale, 0.0
        self.fixed = FixedClassifier(
            simplex_vertices(dim), head_kind="cosface", margin=0.0, scale=scale
        )

    def forward(self, embedding: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over embeddings [n,dim] and labels int64 [n].

        Labels are numbers of classes; those of vertices without a class are accepted. Others raise
        RuntimeError. Embeddings need not be normalised. Only they get a gradient. Without rows the
        mean is NaN.

        Raises:
            ConfigurationError: the embeddings have fewer than dim elements.
        """
        # Autocast would multiply in bf16, which is too coarse for cosines.
        with torch.autocast(embedding.device.type, enabled=False):
            return self.fixed.loss(embedding.float(), labels).mean()

    def logits(self, embedding: Tensor) -> Tensor:
        """Return scaled cosines [n,dim + 1] of embeddings [n,dim] to the vertices, also to those
        without a class.

        Raises:
            ConfigurationError: the embeddings have fewer than dim elements.
        """
        return self.fixed.logits(embedding)

    def classifier_weights(self) -> Tensor:
        """Return all vertices [dim + 1,dim], without gradient; the first rows belong to the
        classes."""
        return self.fixed.weights


def simplex_vertices(dim: int) -> Tensor:
    """Return the vertices [dim + 1,dim] of a regular simplex: unit rows with cosines of -1/dim.

    The rows are float32 on the CPU, the same on every call. `dim` is at least 1.
    """
    last = torch.full((1, dim), (1 - math.sqrt(1 + dim)) / dim, dtype=torch.float64)
    vertices = torch.cat((torch.eye(dim, dtype=torch.float64), last))
    return F.normalize(vertices - vertices.mean(0)).float()


def first_elements(embedding: Tensor, k: int) -> Tensor:
    """Return the first k elements of each embedding [n, K] (BCT section 3.6, other dimensions).

    They are not renormalised, because angular losses and cosine searches do that themselves. The
    result is a view. Further elements are dropped, and n may be 0.

    Raises:
        ConfigurationError: the embedding has fewer than k elements.
    """
    if embedding.shape[1] < k:
        raise ConfigurationError(
            f"the new embedding has {embedding.shape[1]} elements, the old classifier needs {k}; "
            f"set the key embedding_dim to at least {k}"
        )
    return embedding[:, :k]


def copy_head_as_fixed_classifier(head: Head) -> FixedClassifier:
    """Make a fixed copy of a head; later changes of the head do not affect it.

    The copy is on the head's device. The copy of a simplex has all dim + 1 vertices.
    """
    bias = head.linear.bias if isinstance(head, SoftmaxHead) else None
    return FixedClassifier(
        head.classifier_weights(),
        head_kind=fixed_form_of_head(head),
        margin=head.margin,
        scale=head.scale,
        bias=bias,
    )


def fixed_form_of_head(head: Head) -> str:
    """Return the form of a head as FixedClassifier takes it: softmax, cosface or arcface.

    A normalised softmax and a simplex are cosface with margin 0. The form does not tell these apart
    from a trained CosFace.
    """
    if isinstance(head, SimplexHead):
        return head.fixed.head_kind
    return head.head_kind if isinstance(head, AngularHead) else "softmax"


def gaussian_classifier(prototypes: Tensor, features: Tensor, labels: Tensor) -> FixedClassifier:
    """Make a softmax over squared distances to prototypes, which ranks by L2 as a search does.

    The sharpness is set so that the mean squared distance of features from their own prototypes
    equals _NATS. (Equal Gaussians with the features' own variance would be sharper by a factor of
    d, and too steep to train by.)

    Args:
        prototypes: [c,d].
        features: [n,d], n at least 1; without rows the weights are NaN.
        labels: int64 [n], rows of `prototypes`; negative ones count from the end, others raise
            IndexError.

    Returns:
        A classifier of the form softmax. If all features equal their prototypes, its weights are
        infinite.
    """
    sharpness = 2 * _NATS / (features - prototypes[labels]).square().sum(1).mean()
    return FixedClassifier(
        sharpness * prototypes,
        head_kind="softmax",
        margin=0.0,
        scale=1.0,
        bias=-sharpness * prototypes.square().sum(1) / 2,
    )


def labels_of_new_classes(class_names: Sequence[str], new_class_names: Sequence[str]) -> Tensor:
    """Return each new class's label in `class_names`, -1 without one: int64 [new classes].

    If a name occurs twice in `class_names`, its last place counts.
    """
    known = {name: label for label, name in enumerate(class_names)}
    return torch.tensor([known.get(name, -1) for name in new_class_names], dtype=torch.int64)
