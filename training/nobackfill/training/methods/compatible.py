"""The base of backward-compatible trainings: classification, and terms that use the old space.

Each image gets one augmented view, which the new model and, if a term needs it, the old model see.
The old model is frozen: in eval mode, without gradients, not in the checkpoint.
"""

from collections.abc import Mapping
from typing import TypeVar

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
    first_elements,
    labels_in,
    of_head,
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
    """Validate `options`. Raises ConfigurationError, which lists the wrong and the known ones."""
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
        raise ConfigurationError(
            f"method {method}: {problems}; options: {', '.join(model.model_fields)}"
        ) from error


class CompatibleObjective(EmbedderObjective):
    """Classification on the new classes, plus the terms of `compatibility`."""

    known_labels: Tensor

    def __init__(self, inputs: EmbedderInputs) -> None:
        super().__init__(inputs.config, len(inputs.class_names))
        self.old = old_model(inputs)
        self.old_encoder = FrozenModule(_Resized(self.old.encoder))
        self.old_classifier: FixedClassifier = of_head(self.old.head)
        # Each new class's row in the old classifier; -1 if the class is unknown there.
        known = labels_in(self.old.class_names, inputs.class_names)
        self.register_buffer("known_labels", known)

    def forward(self, batch: Batch) -> Terms:
        labels = batch["labels"]
        pixels = self.augment(to_pixels(batch["images"]))
        embedding = self.embedder.encode(pixels)
        terms = {"classification": self.head(embedding, labels)}
        return terms | self.compatibility(embedding, pixels, labels)

    def compatibility(self, embedding: Tensor, pixels: Tensor, labels: Tensor) -> Terms:
        """Return weighted terms for new embeddings [b,dim] of pixels [b,3,H,W] with labels [b]."""
        raise NotImplementedError

    def old_embedding(self, pixels: Tensor) -> Tensor:
        """Return old embeddings [b,old_dim] of pixels [b,3,H,W], without gradient."""
        return self.old_encoder(pixels).float()

    def as_old(self, embedding: Tensor) -> Tensor:
        """Return the first old_dim elements of new embeddings, as they are compared with old ones.

        They are renormalised if the old space holds unit vectors (BCT section 3.6)."""
        first = first_elements(embedding, self.old.encoder.dim)
        return F.normalize(first) if self.old.encoder.unit else first


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
    """Return the old model. Raises ConfigurationError without one, or if the new embedding is
    shorter."""
    config = inputs.config
    if inputs.old is None:
        raise ConfigurationError(
            f"method {config.method} needs the old model's run folder: set old: RUN"
        )
    dim = inputs.old.encoder.dim
    if config.embedding_dim < dim:
        raise ConfigurationError(
            f"method {config.method}: embedding_dim is {config.embedding_dim}, below the old "
            f"model's {dim}; a compatible embedding needs at least as many elements"
        )
    return inputs.old


def encode_all(encoder: ImageEncoder, images: Images, device: torch.device) -> Tensor:
    """Encode images uint8 [n,H,W,3] without augmentation.

    Mode and device of `encoder` are restored afterwards.

    Returns:
        float32 [n,dim], on the CPU.
    """
    training, before = encoder.training, next(encoder.parameters()).device
    encode = _Resized(encoder.to(device)).eval()
    with torch.no_grad():
        parts = [encode(to_pixels(part.to(device))).float().cpu() for part in chunks(images)]
    encoder.train(training).to(before)
    return torch.cat(parts)
