"""Images to vectors: decoded on the caller's thread, embedded in batches of many callers."""

from collections.abc import Sequence

import numpy as np

from release.images import Pixels, decode
from release.manifest import Manifest
from release.vectors import Vectors
from server.border.metrics import Metrics
from server.embedding.batching import Batcher
from server.embedding.models import Models

LARGEST_BATCH = 64
# While one batch is in the model server, the next is on its way.
_AT_ONCE = 2


class Embedding:
    """The embedders of all loaded releases."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        self.models = models
        self._observe = metrics.batch_size.labels("embed").observe
        self._batchers: dict[int, Batcher[Pixels, Vectors]] = {}

    def query(self, manifest: Manifest, image: bytes) -> Vectors:
        """One encoded image to float32 [1,dim]; together with what others ask at this moment.

        Raises InvalidInputError for what is no image, UnavailableError, DeadlineError.
        """
        batcher = self._batchers.get(manifest.release)
        if batcher is None:
            batcher = self._batchers.setdefault(manifest.release, self._batcher(manifest))
        return batcher(self.decode(manifest, image))

    def many(self, manifest: Manifest, images: Sequence[Pixels]) -> Vectors:
        """Decoded images to float32 [n,dim], in order. Raises UnavailableError, DeadlineError."""
        return np.concatenate(
            [self.models.embed(manifest, np.stack(chunk)) for chunk in _chunks(images)]
        )

    def sides(self, manifest: Manifest, images: Sequence[Pixels]) -> Vectors | None:
        """Side-information float32 [n,side_dim]; None where the release has none."""
        if manifest.side_encoder is None:
            return None
        parts = [self.models.side(manifest, np.stack(chunk)) for chunk in _chunks(images)]
        return np.concatenate([part for part in parts if part is not None])

    def decode(self, manifest: Manifest, image: bytes) -> Pixels:
        """One encoded image to the release's size. Raises InvalidInputError."""
        return decode(image, manifest.embedder.height, manifest.embedder.width)

    def _batcher(self, manifest: Manifest) -> Batcher[Pixels, Vectors]:
        def run(images: Sequence[Pixels]) -> Sequence[Vectors]:
            vectors = self.models.embed(manifest, np.stack(images))
            return [vectors[row : row + 1] for row in range(len(images))]

        return Batcher(run, largest=LARGEST_BATCH, at_once=_AT_ONCE, observe=self._observe)


def _chunks(images: Sequence[Pixels]) -> list[Sequence[Pixels]]:
    return [images[i : i + LARGEST_BATCH] for i in range(0, len(images), LARGEST_BATCH)]
