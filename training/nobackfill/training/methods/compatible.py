"""The base of backward-compatible trainings: classification, and terms that use the old space.

Each image gets one augmented view, which the new model and, if a term needs it, the old model see.
The old model is frozen: in eval mode, without gradients, not in the checkpoint.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from nobackfill.errors import ConfigurationError
from nobackfill.training.data.pictures import Images, chunks
from nobackfill.training.loop.objective import Batch, FrozenModule, Terms
from nobackfill.training.method import Classifier, EmbedderInputs
from nobackfill.training.networks.embedder import (
    EmbedderObjective,
    ImageEncoder,
    to_pixels,
)
from nobackfill.training.networks.heads import (
    FixedClassifier,
    copy_head_as_fixed_classifier,
    first_elements,
    labels_of_new_classes,
)


class Options(BaseModel):
    """Options of a method, from the key `options`; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WeightOptions(Options):
    """Options of methods with one compatibility term, or with terms of equal weight."""

    # Lambda of BCT Eq. 3 and 8, eta of UniBCT Eq. 2.
    weight: float = Field(1.0, ge=0)


AnyOptions = TypeVar("AnyOptions", bound=Options)


def read_options(options: Mapping[str, object], model: type[AnyOptions], method: str) -> AnyOptions:
    """Validate the key `options` of a configuration.

    Options that are absent get their defaults; an option with an alias is named by it. Values are
    converted as pydantic does, such as "1" to 1.

    Args:
        options: the values by option.
        model: the options of the method, with their defaults.
        method: the method's name, for error messages.

    Raises:
        ConfigurationError: an option is unknown or of a wrong value; the message lists the wrong
            and the known ones.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
        known = [field.alias or name for name, field in model.model_fields.items()]
        raise ConfigurationError(
            f"options of method {method}: {problems}; correct the key options. This method has "
            f"{'the options ' + ', '.join(known) if known else 'no options'}"
        ) from error


class CompatibleObjective(EmbedderObjective):
    """Classification on the new classes, plus the terms of `compatibility_terms`.

    The constructor raises ConfigurationError for a wrong option, without an old model, or if the
    new embedding is shorter than the old one. Batches contain `images` uint8 [b,H,W,3] and `labels`
    int64 [b].
    """

    # The options of the method; `options` has its type.
    options_model: type[Options] = WeightOptions
    options: Any
    known_labels: Tensor

    def __init__(self, inputs: EmbedderInputs) -> None:
        config = inputs.config
        super().__init__(config, len(inputs.class_names))
        self.options = read_options(config.options, self.options_model, config.method)
        self.old = old_model(inputs)
        self.old_encoder = FrozenModule(_Resized(self.old.encoder))
        self.old_classifier: FixedClassifier = copy_head_as_fixed_classifier(self.old.head)
        # Each new class's row in the old classifier; -1 if the class is unknown there.
        known = labels_of_new_classes(self.old.class_names, inputs.class_names)
        self.register_buffer("known_labels", known)

    def forward(self, batch: Batch) -> Terms:
        """Return `classification` and the terms of `compatibility_terms`, on one augmented view.

        The new model and the terms see the same view, drawn from torch's default generator. The old
        model moves to the device of the images, if a term needs it.

        Raises:
            NotImplementedError, ConfigurationError: as `compatibility_terms` of the class.
        """
        labels = batch["labels"]
        pixels = self.augment(to_pixels(batch["images"]))
        embedding = self.embedder.encode(pixels)
        terms = {"classification": self.head(embedding, labels)}
        return terms | self.compatibility_terms(embedding, pixels, labels)

    def compatibility_terms(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return weighted terms for new embeddings [b,dim] of pixels [b,3,H,W] with labels [b].

        Args:
            embedding: float [b,dim], with gradient.
            pixels: the augmented view in 0..1, float32.
            labels: int64, classes of the new training.

        Raises:
            NotImplementedError: the class has no terms, as this one.
        """
        raise NotImplementedError

    def old_embedding(self, pixels: Tensor) -> Tensor:
        """Return old embeddings float32 [b,old_dim] of pixels [b,3,H,W] in 0..1, without gradient.

        Pixels are resized to the old model's input size. The old model is moved to the device of
        the pixels. b may be 0.
        """
        return self.old_encoder(pixels).float()

    def cut_to_old_dim(self, embedding: Tensor) -> Tensor:
        """Return the first old_dim elements of new embeddings, as they are compared with old ones.

        They are renormalised if the old space holds unit vectors (BCT section 3.6). A zero vector
        stays zero.

        Raises:
            ConfigurationError: an embedding has fewer than old_dim elements.
        """
        first = first_elements(embedding, self.old.encoder.dim)
        return F.normalize(first) if self.old.encoder.unit_norm else first


class _Resized(torch.nn.Module):
    """An encoder that first resizes pixels to its own input size."""

    def __init__(self, encoder: ImageEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixels: Tensor) -> Tensor:
        size = self.encoder.image_size
        if pixels.shape[2] != size:
            pixels = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
        return self.encoder.encode(pixels)


def old_model(inputs: EmbedderInputs) -> Classifier:
    """Return the old model of a compatible training.

    Nothing is loaded: it is `inputs.old_classifier`. Equal dimensions pass.

    Raises:
        ConfigurationError: there is no old model, or the new embedding is shorter than the old one.
    """
    config = inputs.config
    if inputs.old_classifier is None:
        raise ConfigurationError(
            f"method {config.method} trains a model that is compatible with an old one: set the "
            "key old to the old model's run folder"
        )
    dim = inputs.old_classifier.encoder.dim
    if config.embedding_dim < dim:
        raise ConfigurationError(
            f"method {config.method}: expected embedding_dim of at least {dim}, the old model's, "
            f"because the first elements are compared with old vectors; got {config.embedding_dim}"
        )
    return inputs.old_classifier


def encode_images(encoder: ImageEncoder, images: Images, device: torch.device) -> Tensor:
    """Encode images uint8 [n,H,W,3] without augmentation.

    Images are resized to the encoder's input size. Pixels are computed in float32, 256 images at a
    time. If an error occurs, mode and device are not restored.

    Args:
        encoder: the encoder; its mode and device are restored afterwards.
        images: at least one image.
        device: where to compute.

    Returns:
        float32 [n,dim], on the CPU.

    Raises:
        InvalidInputError: a file among the images is missing or no image.
        NobackfillError: a process that reads images was killed.
    """
    training, before = encoder.training, next(encoder.parameters()).device
    encode = _Resized(encoder.to(device)).eval()
    with torch.no_grad():
        parts = [encode(to_pixels(part.to(device))).float().cpu() for part in chunks(images)]
    encoder.train(training).to(before)
    return torch.cat(parts)
