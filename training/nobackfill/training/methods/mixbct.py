"""MixBCT (Liang et al. 2023): one classifier learns from new embeddings and from old ones.

Each step replaces a share of the batch's new embeddings by old ones of the same pixels. The
classifier's rows therefore lie where both models' embeddings of a class are, and the new ones are
drawn there. There is no second term.
"""

import torch
from pydantic import Field
from torch import Tensor

from nobackfill.errors import ConfigurationError
from nobackfill.training.loop.objective import Batch, Terms
from nobackfill.training.losses.prototypes import select_nearest_to_mean
from nobackfill.training.method import EmbedderInputs, EmbedderMethod
from nobackfill.training.methods.compatible import (
    CompatibleObjective,
    Options,
    encode_images,
)
from nobackfill.training.networks.embedder import to_pixels


class MixBctOptions(Options):
    """`share` of a batch that is replaced by old embeddings. `kept` (`trusted_share`) of a class's
    images, those nearest to its old mean, may be replaced (the paper's denoising)."""

    share: float = Field(0.3, gt=0, lt=1)
    trusted_share: float = Field(0.9, gt=0, le=1, alias="kept")


class MixBctObjective(CompatibleObjective):
    """The head's loss on a batch of new and old embeddings.

    The constructor encodes all images by the old model. It raises ConfigurationError for a wrong
    option, without an old model, or if embedding_dim is not the old model's.
    """

    options_model = MixBctOptions
    trusted: Tensor

    def __init__(self, inputs: EmbedderInputs) -> None:
        super().__init__(inputs)
        if inputs.config.embedding_dim != self.old.encoder.dim:
            raise ConfigurationError(
                "method mixbct trains one classifier on old and new embeddings: expected "
                f"embedding_dim: {self.old.encoder.dim}, the old model's, got "
                f"{inputs.config.embedding_dim}"
            )
        old = encode_images(self.old.encoder, inputs.images, inputs.device)
        classes, share = len(inputs.class_names), self.options.trusted_share
        trusted = select_nearest_to_mean(old, inputs.labels, classes, share)
        # Images that may be replaced, bool [n].
        self.register_buffer("trusted", trusted)

    def forward(self, batch: Batch) -> Terms:
        """Return `classification`, the head's loss on new embeddings, some replaced by old ones.

        Each image is replaced with the chance `share`, if it is one of the trusted ones. The batch
        also contains `rows`, the numbers of the images in the training set, else KeyError. Random
        numbers come from torch's default generator. Both models see the same view.
        """
        pixels = self.augment(to_pixels(batch["images"]))
        embedding = self.embedder.encode(pixels)
        drawn = torch.rand(len(pixels)).to(pixels.device) < self.options.share
        replaced = drawn & self.trusted[batch["rows"]]
        mixed = torch.where(replaced[:, None], self.old_embedding(pixels), embedding.float())
        return {"classification": self.head(mixed, batch["labels"])}


MIXBCT = EmbedderMethod(MixBctObjective, searches_directly=True)
