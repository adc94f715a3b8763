"""Images to vectors on the device, with an installed release's models."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nobackfill.gallery.store import NewVectors
from nobackfill.images import Pixels, decode
from nobackfill.release.models import open_embedder, open_side_encoder
from nobackfill.vectors import Vectors

if TYPE_CHECKING:
    from nobackfill.release.manifest import Manifest


def threads() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Encoder:
    """Embedder and side encoder of one release."""

    def __init__(self, models: Path, manifest: "Manifest", *, side: bool = True) -> None:
        """`side` False: a query needs no side-information. Raises VerificationError."""
        self.manifest = manifest
        self._embedder = open_embedder(models, manifest, threads())
        has_side = side and manifest.side_encoder is not None
        self._side = open_side_encoder(models, manifest, threads()) if has_side else None

    def pixels(self, image: bytes) -> Pixels:
        """The image at this release's size. Raises InvalidInputError."""
        return decode(image, *self.manifest.frame)

    def embed(self, pixels: Sequence[Pixels]) -> Vectors:
        """Embeddings [n, dim] of n images."""
        return self._embedder.run(np.stack(pixels))

    def vectors(self, pixels: Sequence[Pixels]) -> NewVectors:
        """Embeddings and side-information of n images, to be stored in this release's space."""
        side = None if self._side is None else self._side.run(np.stack(pixels))
        return NewVectors(self.manifest.space, self.embed(pixels), side, "native")
