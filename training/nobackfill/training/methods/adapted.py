"""BT2 and lambda-orthogonality: compatible models that keep an independently trained one.

Both start from a finished independent model (`init`), whose backbone and embedding layer are
frozen. They train a linear map after it, so that the first elements match the old model's vectors
(BCT section 3.6). At the end the map is folded into the layer; the result is an ordinary embedder.

The terms towards the old space are BT2's: the influence loss with synthesized classifier weights,
and the cosine to the old embedding of the same view. (lambda-orthogonality has a contrastive term
of class labels instead of the influence loss.) The head is trained on the embedding without
influencing it.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.config import EmbedderConfig
from nobackfill.training.loop.objective import Batch, Terms
from nobackfill.training.loop.run import Checkpoint, load_part
from nobackfill.training.losses.pairwise import cosine_regression_loss
from nobackfill.training.method import EmbedderInputs, EmbedderMethod
from nobackfill.training.methods.bct import extend_old_classifier
from nobackfill.training.methods.compatible import (
    CompatibleObjective,
    WeightOptions,
    encode_images,
)
from nobackfill.training.networks.backbones import linear_layers, replace_layer
from nobackfill.training.networks.embedder import to_pixels
from nobackfill.training.networks.maps import fit_procrustes


class AdaptedLayer(nn.Module):
    """A frozen layer with additional outputs, followed by a trained linear map.

    features [n,w] -> map([own(features), further(features)]) [n,dim]. `further` is trained.

    Args of the constructor:
        layer: the embedding layer; it is copied.
        own_dim: the first outputs of `layer` that are frozen. `further` starts with its other rows.
        start: the map at the start [dim,dim].
        orthogonal: the map stays orthogonal in training and has no bias.
    """

    def __init__(self, layer: nn.Linear, own_dim: int, start: Tensor, *, orthogonal: bool) -> None:
        super().__init__()
        self.own = _rows(layer, slice(own_dim)).requires_grad_(False)
        more = layer.out_features > own_dim
        self.further = _rows(layer, slice(own_dim, None)) if more else None
        dim, _ = start.shape
        self.map = nn.Linear(dim, dim, bias=not orthogonal)
        with torch.no_grad():
            self.map.weight.copy_(start)
            if self.map.bias is not None:
                self.map.bias.zero_()
        if orthogonal:
            nn.utils.parametrizations.orthogonal(self.map)

    def forward(self, features: Tensor) -> Tensor:
        """Map features [n,w] to float32 [n,dim]; autocast does not apply.

        The values are those of `fold_into_linear()`, up to rounding.
        """
        # Autocast would round the map to bf16, and the result would not be orthogonal.
        with torch.autocast(features.device.type, enabled=False):
            output: Tensor = self.map(self._concatenate(features.float()))
        return output

    def _concatenate(self, features: Tensor) -> Tensor:
        own: Tensor = self.own(features)
        return own if self.further is None else torch.cat((own, self.further(features)), 1)

    def fold_into_linear(self) -> nn.Linear:
        """Return one new linear layer that computes the same, on the device of this one.

        The layer has a bias, and its values are copies. This one is not changed. Making it draws
        from torch's default generator.
        """
        with torch.no_grad():
            layer = nn.Linear(self.own.in_features, self.map.out_features)
            layer.to(self.own.weight.device)
            zeros = torch.zeros(1, layer.in_features, device=layer.weight.device)
            layer.bias.copy_(self(zeros)[0])
            # The product of the weights alone, without the biases.
            rows = [one.weight for one in (self.own, self.further) if one is not None]
            layer.weight.copy_(self.map.weight @ torch.cat(rows))
        return layer


def _rows(layer: nn.Linear, rows: slice) -> nn.Linear:
    """Make a layer with some of the outputs."""
    weight, bias = layer.weight[rows], layer.bias[rows]
    picked = nn.Linear(layer.in_features, len(weight))
    with torch.no_grad():
        picked.weight.copy_(weight)
        picked.bias.copy_(bias)
    return picked


def complete_basis(rows: Tensor) -> Tensor:
    """Complete orthonormal rows [k,n], k <= n, to an orthonormal basis [n,n].

    The basis begins with the given rows. The other rows are arbitrary within their space, and the
    same for the same input. With k = n the result is a copy of `rows`.

    Raises:
        RuntimeError: a value is NaN or infinite.
    """
    return torch.cat((rows, torch.linalg.svd(rows).Vh[len(rows) :]))


class AdaptedOptions(WeightOptions):
    """`weight` of the influence loss, and `cosine`, the weight of the distance to old vectors."""

    cosine: float = Field(1.0, ge=0)


class AdaptedObjective(CompatibleObjective):
    """The terms towards the old space; subclasses add the terms that preserve the new space.

    The constructor raises ConfigurationError without an old model, without `init`, with
    `last_nonlin`, or for a backbone without a linear layer. It encodes images of classes that the
    old classifier lacks, as `extend_old_classifier`.
    """

    # The map stays orthogonal.
    orthogonal: bool

    def __init__(self, inputs: EmbedderInputs) -> None:
        super().__init__(inputs)
        config = inputs.config
        if config.init is None or config.last_nonlin:
            raise ConfigurationError(
                f"method {config.method} adds a linear map after an independent new model: "
                "expected init: RUN, the run folder of that model, and last_nonlin: false, got "
                f"{'no init' if config.init is None else f'init: {config.init}'} and last_nonlin: "
                f"{str(config.last_nonlin).lower()}"
            )
        extend_old_classifier(self, inputs)
        self.images, self.device = inputs.images, inputs.device
        layers = linear_layers(self.embedder.backbone)
        if not layers:
            raise ConfigurationError(
                f"method {config.method} adds a linear map to the embedding layer, but backbone "
                f"{config.backbone} has no linear layer; train with another backbone"
            )
        self.path, _ = layers[-1]

    def start_from(self, checkpoint: Checkpoint, class_names: tuple[str, ...]) -> None:
        """Load and freeze the embedder of a finished run, and put the trained map after it.

        All training images are encoded by both models. The map starts as the rotation that brings
        the new vectors nearest to the old ones. Call it once, before the first epoch. The
        checkpoint is not changed. After an error of an image the embedder holds the run's weights.

        Args:
            checkpoint: of the run `init`, of kind embedder.
            class_names: not used; the head is trained from the start.

        Raises:
            ConfigurationError: the run has another backbone or an unsuitable dimension, or is of a
                kind other than embedder.
            InvalidInputError: a file among the images is missing or no image.
            NobackfillError: a process that reads images was killed.
            RuntimeError: a vector is NaN or infinite.
            ValueError: there are fewer than two images.
        """
        before = checkpoint.config
        own_dim = before.embedding_dim if isinstance(before, EmbedderConfig) else 0
        self.check_dimension(own_dim)
        _, layer = linear_layers(self.embedder.backbone)[-1]
        tensors = dict(checkpoint.tensors)
        for name, drawn in layer.state_dict().items():
            key = f"encoder.backbone.{self.path}.{name}"
            if key in tensors and tensors[key].shape[1:] == drawn.shape[1:]:
                tensors[key] = torch.cat((tensors[key], drawn[own_dim:]))
        load_part(self.embedder, replace(checkpoint, tensors=tensors), "encoder")
        self.embedder.requires_grad_(False)
        own = encode_images(self.embedder, self.images, self.device)
        own[:, own_dim:] = 0
        old = encode_images(self.old.encoder, self.images, self.device)
        if self.embedder.unit_norm:
            own = F.normalize(own)
        start = complete_basis(fit_procrustes(own, old, scaled=False).weight)
        adapted = AdaptedLayer(layer, own_dim, start, orthogonal=self.orthogonal)
        replace_layer(self.embedder.backbone, self.path, adapted)

    @property
    def adapted_layer(self) -> AdaptedLayer:
        """The embedding layer with its map; it exists between `start_from` and `finish`.

        At other times it raises AssertionError.
        """
        layer = self.embedder.backbone.get_submodule(self.path)
        assert isinstance(layer, AdaptedLayer)
        return layer

    def check_dimension(self, own_dim: int) -> None:
        """Raise ConfigurationError if embedding_dim does not fit the frozen layer's `own_dim`.

        `own_dim` is 0 for a run of another kind than embedder. This class raises
        NotImplementedError.
        """
        raise NotImplementedError

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Set the embedder to eval mode, so that its BatchNorm statistics stay.

        The loop has put everything in training mode before; the head stays so. The arguments are
        not used.
        """
        # BatchNorm statistics of the independent model must stay, too.
        self.embedder.eval()

    def forward(self, batch: Batch) -> Terms:
        """Return the terms of a batch; the classification trains only the head.

        They are `classification` and those of `compatibility_terms`, on one augmented view of each
        image.
        The view is drawn from torch's default generator. Before `start_from` it raises
        AssertionError.
        """
        labels = batch["labels"]
        pixels = self.augment(to_pixels(batch["images"]))
        embedding = self.embedder.encode(pixels)
        terms = {"classification": self.head(embedding.detach(), labels)}
        return terms | self.compatibility_terms(embedding, pixels, labels)

    def compatibility_terms(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return `influence` and `cosine` towards the old space, and `preservation_terms`.

        `influence` and `cosine` are means over the batch, times the options `weight` and `cosine`.
        Before `start_from` it raises AssertionError.

        Raises:
            ConfigurationError: an embedding has fewer elements than an old one.
        """
        influence = self.old_classifier.loss(embedding, self.known_labels[labels])
        distances = cosine_regression_loss(
            self.cut_to_old_dim(embedding), self.old_embedding(pixels)
        )
        # In bf16 an orthogonal map would not be orthogonal.
        with torch.autocast(embedding.device.type, enabled=False):
            preservation = self.preservation_terms(embedding)
        return {
            "influence": self.options.weight * influence.mean(),
            "cosine": self.options.cosine * distances.mean(),
            **preservation,
        }

    def preservation_terms(self, embedding: Tensor) -> Terms:
        """Return weighted terms that hold new vectors [b,dim] close to the independent model's.

        This class raises NotImplementedError.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Fold the trained map into the embedding layer, so that an ordinary embedder is left.

        Call it once, after `start_from`. A second call raises AssertionError.
        """
        replace_layer(self.embedder.backbone, self.path, self.adapted_layer.fold_into_linear())


class Bt2Options(AdaptedOptions):
    """`share` of a vector's length that is the independent model's; its square is the weight of
    that model's distances. `kept` (`share_weight`) is the weight of the term that enforces it."""

    share: float = Field(0.9, gt=0, lt=1)
    share_weight: float = Field(10.0, ge=0, alias="kept")


class Bt2Objective(AdaptedObjective):
    """BT2 (Zhou et al. 2023): the independent embedding and further dimensions under one rotation.

    Distances over all elements are mainly those of the independent model, and to a small part those
    of the additional dimensions. If all were trained jointly with a free head, this would equal row
    `bct_wide`, because a head absorbs any rotation. Here the independent part is frozen; the paper
    also trains the backbone and distils the part. Its two nested maps are one map here. The
    lengths, constants in the paper, are held by a term: a normalised part would not fold into one
    layer, and a free one would shrink, because first elements are compared by direction.
    """

    orthogonal = True
    options_model = Bt2Options

    def check_dimension(self, own_dim: int) -> None:
        """Raise ConfigurationError unless embedding_dim exceeds `own_dim`, the dimension of the run
        `init`."""
        dim = self.config.embedding_dim
        if dim <= own_dim:
            raise ConfigurationError(
                f"method bt2 adds dimensions to the {own_dim} of the run {self.config.init}: "
                f"expected embedding_dim above {own_dim}, e.g. {own_dim + self.old.encoder.dim}, "
                f"got {dim}"
            )

    def forward(self, batch: Batch) -> Terms:
        """Return the terms of a batch, with the map's matrix exponential computed once.

        They are `classification`, `influence`, `cosine` and `kept`. Before `start_from` it raises
        AssertionError.
        """
        # Two terms use the map's matrix exponential; compute it once.
        with nn.utils.parametrize.cached():
            return super().forward(batch)

    def preservation_terms(self, embedding: Tensor) -> Terms:
        """Return the term `kept`: how far the independent model's part is from `share`.

        It is the mean squared difference of lengths over the batch, times the option `kept`.
        Embeddings [b,dim] need not be normalised. Before `start_from` it raises AssertionError.
        """
        layer = self.adapted_layer
        before = F.normalize(embedding) @ layer.map.weight
        share = before[:, : layer.own.out_features].norm(dim=1)
        off = (share - self.options.share).square()
        return {"kept": self.options.share_weight * off.mean()}


class LambdaOptions(AdaptedOptions):
    """`orthogonality` (lambda) is the weight of the map's distance from an orthogonal one, the
    Frobenius norm of W'W - I, beyond `threshold`."""

    orthogonality: float = Field(1.0, ge=0)
    threshold: float = Field(1.0, ge=0)


class LambdaObjective(AdaptedObjective):
    """lambda-orthogonality (Ricci et al. 2025): an affine map of the independent embedding into the
    old space.

    The map may deviate from an orthogonal one by `threshold`; new/new changes accordingly. The
    paper's forward adapter, from the old to the adapted new space, is an upgrade (row
    `lambda_orthogonal_residual`).
    """

    orthogonal = False
    options_model = LambdaOptions

    def check_dimension(self, own_dim: int) -> None:
        """Raise ConfigurationError unless embedding_dim equals `own_dim`, the dimension of the run
        `init`."""
        dim = self.config.embedding_dim
        if dim != own_dim:
            raise ConfigurationError(
                f"method lambda_orthogonal keeps the dimension of the run {self.config.init}: "
                f"expected embedding_dim: {own_dim}, got {dim}"
            )

    def preservation_terms(self, embedding: Tensor) -> Terms:
        """Return the penalty on how far the map is from an orthogonal one, beyond `threshold`.

        The embedding has no part in it. The distance goes to the statistics as `from_orthogonal`.
        The term is `orthogonality`; it is 0 while the distance is not above `threshold`. Before
        `start_from` it raises AssertionError.
        """
        weight = self.adapted_layer.map.weight
        excess = (weight.t() @ weight - torch.eye(len(weight), device=weight.device)).norm()
        self.statistics["from_orthogonal"] = float(excess.detach())
        penalty = F.relu(excess - self.options.threshold)
        return {"orthogonality": self.options.orthogonality * penalty}


BT2 = EmbedderMethod(Bt2Objective, searches_directly=True)
LAMBDA_ORTHOGONAL = EmbedderMethod(LambdaObjective, searches_directly=True)
